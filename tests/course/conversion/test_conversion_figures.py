"""The figures of notebook 05, on made-up points."""

from twell_lab.course.conversion import figures
from twell_lab.course.conversion.data import HERE


def point(way, model, density, change, where=HERE):
    interval = (change - 1, change + 1) if where == HERE else (None, None)
    made = {"way": way, "model": model, "what": "w", "density": density, "change": change, "steps": 0, "where": where}
    return made | dict(zip(("low", "high"), interval))


POINTS = [
    point("cut", "a", 0.1, 1.0),
    point("cut", "a", 0.01, 20.0),
    point("convert", "b", 0.2, 2.0),
    point("train", "a", 0.02, 0.5, "recorded on G, 2026-01-01"),
]


def test_the_picture_has_a_line_a_way_a_model_and_a_source():
    figure = figures.picture(POINTS)
    cut, convert, train = figure.data
    assert [trace.name for trace in figure.data] == ["cut: a", "convert: b", "train with L1: twin of a, recorded"]
    assert list(cut.x) == [1.0, 10.0] and list(cut.y) == [20.0, 1.0] and list(cut.error_y.array) == [1.0, 1.0]
    assert train.marker.symbol == "diamond-open" and train.error_y.array is None
    assert cut.line.dash != convert.line.dash and cut.line.dash == train.line.dash  # a dash a model
    assert len({trace.line.color for trace in figure.data}) == 3
