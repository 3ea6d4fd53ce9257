"""The figures of what is recorded show the numbers they were given, and say so where there are none."""

import pytest

from tests.course.recorded_rows import RATES, WHERE, compared, everything
from twell_lab.course.hopper import data as hopper
from twell_lab.course.hopper import figures


def test_speedups_are_named_by_where_they_are_from():
    own = [cell | {"where": "yours, now, on My GPU"} for cell in hopper.cells(compared(8, twell=1.0))]
    figure = figures.speedups(hopper.cells(everything()), own, 16384)
    names = [trace.name for trace in figure.data]
    assert names[0] == f"planned, {WHERE}" and names[-1] == "TwELL, forced, yours, now, on My GPU"
    assert list(figure.data[0].x) == [8, 29.1, 120] and figure.data[0].y[0] == 2.0
    assert [trace.line.dash for trace in figure.data[:3]] == ["dot"] * 3


def test_the_map_holds_every_cell():
    cells = hopper.cells(everything())
    figure = figures.loss_map(cells)
    shown = [text for panel in figure.data for line in panel.text for text in line if text]
    assert sorted(shown) == sorted(f"{cell['x']:.2f}" for cell in cells)
    assert [note.text for note in figure.layout.annotations] == ["1", "4", "16", "64", "16,384", "tokens"]
    assert (
        list(figure.layout.xaxis.ticktext) == ["28", "27", "27", "27", "8", "29", "120"]
        and len(figure.layout.xaxis.tickvals) == 7
    )
    assert WHERE in figure.layout.title.text


def test_drawn_workloads_that_nearly_meet_share_a_column():
    assert figures._columns([{"nnz": 30.1}, {"nnz": 29.0}, {"nnz": 8.0}]) == [(8.0, 8.0), (29.0, 30.1)]


def test_predictions_trained_layers_and_decode():
    rows = everything()
    figure = figures.predicted_against_measured(hopper.plan_points(rows))
    assert {trace.name for trace in figure.data if trace.name} == {"twell, chosen", "hot_cold"}
    assert sum(len(trace.x) for trace in figure.data if trace.name) == len(hopper.plan_points(rows))
    figure = figures.trained_layers(hopper.trained(rows))
    assert [trace.name for trace in figure.data] == ["planned", "TwELL, forced", "hot/cold, forced", "dense, forced"]
    assert list(figure.data[0].y) == [2.0, 2.0]
    figure = figures.decode(hopper.decode(rows, RATES), WHERE)
    assert list(figure.data[0].y) == pytest.approx([20] * 4) and list(figure.data[2].y) == pytest.approx([10] * 4)


@pytest.mark.parametrize(
    "figure",
    [
        lambda: figures.speedups([], [], 16384),
        lambda: figures.loss_map([]),
        lambda: figures.predicted_against_measured([]),
        lambda: figures.trained_layers([]),
        lambda: figures.decode([], ""),
    ],
)
def test_a_figure_without_a_record_says_so(figure):
    assert "nothing is recorded" in figure().layout.annotations[0].text
