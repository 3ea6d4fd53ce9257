"""Charts over rows: what is drawn for which group, what the legend and the title say."""

import plotly.graph_objects as go

from twell_lab.course import charts

ROWS = [
    {"tokens": tokens, "ms": ms, "path": path, "where": "recorded on a GPU, 2026-01-02"}
    for path, times in (("dense", (1.0, 4.0)), ("twell", (0.5, 8.0)))
    for tokens, ms in zip((1, 16384), times)
]


def test_a_group_is_a_line_with_its_own_look_and_texts():
    looks = {"twell": {"colour": "red", "dash": "dot", "mode": "lines"}}
    said = lambda row: f"{row['path']}: {row['ms']:g} ms"
    figure = charts.lines(go.Figure(), ROWS, "tokens", lambda row: 2 * row["ms"], "path", hover=said, looks=looks)
    dense, twell = figure.data
    assert (dense.name, dense.x, dense.y, dense.hovertext[1]) == ("dense", (1, 16384), (2.0, 8.0), "dense: 4 ms")
    assert (twell.line.color, twell.line.dash, twell.mode, dense.mode) == ("red", "dot", "lines", "lines+markers")
    assert looks["twell"]["colour"] == "red"  # what was given is not changed


def test_a_finished_chart_says_where_its_numbers_are_from():
    figure = charts.lines(go.Figure(), ROWS, "tokens", "ms", "path")
    figure = charts.finish(figure, "Times", ROWS, x="tokens", y="ms", log_x=(16384, 1), also=["and more"])
    assert figure.layout.title.text == "Times<br><sub>recorded on a GPU, 2026-01-02<br>and more</sub>"
    assert figure.layout.xaxis.ticktext == ("1", "16,384") and figure.layout.xaxis.title.text == "tokens (log scale)"
    nothing = charts.finish(charts.bars(go.Figure(), [], "tokens", "ms", "path"), "Times")
    assert "nothing is recorded" in nothing.layout.annotations[0].text
