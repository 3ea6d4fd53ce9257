"""The figure of a sparsity shows the numbers of its view, and keeps up with another."""

from twell_lab import plots
from twell_lab.course.thresholds import figures

VIEW = {
    "what": "made-up numbers",
    "method": "cats",
    "greedy": False,
    "gpu": "L4",
    "tokens": 64,
    "sparsity": 0.5,
    "layers": ["layer 0", "layer 1"],
    "density": {"activation": [0.5, 0.25]},
    "error": [0.125, 0.0625],
    "overflow": [1.0, 0.5],
    "path": ["dense", "twell"],
    "us": [20.0, 8.0],
    "dense_us": [20.0, 21.0],
    "plain_us": [20.0, 15.0],
    "loss": 0.02,
    "measured": False,
    "points": [(0.0, 0.0, 0.0, 0.0), (0.75, 0.03, 0.01, 0.06)],
    "step": None,
    "steps": [],
}
OTHER = VIEW | {
    "sparsity": 0.75,
    "density": {"activation": [0.2, 0.1]},
    "path": ["hot_cold", "twell"],
    "us": [9.0, 7.0],
    "loss": 0.03,
    "measured": True,
    "step": {"what": "decoding a token", "device": "CPU", "path": "twell", "ms": 2.5, "dense_ms": 2.25},
    "steps": [(0.5, 3.0, 2.5, 4.0, 2.0), (0.75, 2.5, 2.375, 2.75, 2.25)],
}


def traces(figure) -> dict:
    return {trace.name: trace for trace in figure.data}


def test_each_panel_shows_its_numbers():
    figure = figures.picture(VIEW)
    found = traces(figure)
    assert list(found["kept behind the gate"].y) == [50, 25] and list(found["error"].y) == [12.5, 6.25]
    assert list(found["overflow"].y) == [100, 50] and list(found["the dense layer"].y) == [20, 21]
    assert [list(found[path].y) for path in ("dense", "twell", "hot/cold")] == [[20, None], [None, 8], [None, None]]
    legend = [found[path].showlegend for path in ("dense", "twell", "hot/cold")]
    assert legend == [True, True, False]  # only what is drawn
    assert {found[path].marker.color for path in ("dense", "twell")} == {plots.GREY, plots.BLUE}
    points = found["measured"]
    assert list(points.x) == [0, 75] and list(points.y) == [0, 0.03] and "markers" in points.mode
    assert list(points.error_y.array) == [0, 0.03] and list(points.error_y.arrayminus) == [0, 0.03 - 0.01]
    assert list(found["here"].x) == [50] and list(found["here"].y) == [0.02]
    title = figure.layout.title.text
    assert "made-up numbers, CATS, sparsity 50% (lossy)<br>" in title and "between measured points" in title
    assert any("predicted us of a layer, L4, 64 tokens" in note.text for note in figure.layout.annotations)
