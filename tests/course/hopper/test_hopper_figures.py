"""The plots of what is recorded show the numbers they were given, and say so where there are none."""

from tests.course.recorded_rows import WHERE, compared, everything
from twell_lab.course.hopper import data as hopper
from twell_lab.course.hopper import figures


def test_the_parts_are_drawn_with_their_factors_and_the_readers_times():
    own = hopper.parts([each | {"where": "yours, now, on My GPU"} for each in compared(28, twell=0.9)])
    figure = figures.parts(hopper.parts(everything()), own)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    points = [trace for trace in figure.data if trace.type == "scatter"]
    assert [trace.name for trace in bars] == [
        "torch's dense layer",
        "fused dense layer, and what fusing gives",
        "planned, and what sparsity adds",
    ]
    assert list(bars[0].x) == ["8", "29", "120"] and list(bars[2].y) == [1.0, 1.2, 1.8]
    assert bars[1].text[0] == "1.05x" and bars[2].text[0] == "1.90x" and not any(bars[0].text)
    assert [list(trace.x) for trace in points] == [["29"]] * 3 and points[2].y == (0.9,)
    assert WHERE in figure.layout.title.text and "yours, now, on My GPU" in figure.layout.title.text
    assert not [trace for trace in figures.parts(hopper.parts(everything())).data if trace.type == "scatter"]


def test_times_stand_beside_floor_and_estimate():
    figure = figures.against_nnz(everything())
    floor, estimate, *lines = figure.data
    assert floor.y[0] == floor.y[-1] == hopper.estimate(8)[0] and estimate.y[0] == hopper.estimate(8)[1]
    assert {line.name: list(line.y) for line in lines}["TwELL"] == [1.0, 1.2, 3.0]
    assert len({line.marker.symbol for line in lines}) == len(lines) == 4


def test_the_map_holds_every_cell():
    cells = hopper.cells(everything())
    figure = figures.loss_map(cells)
    shown = [text for panel in figure.data for line in panel.text for text in line if text]
    assert sorted(shown) == sorted(f"{cell['x']:.2f}" for cell in cells)
    assert [note.text for note in figure.layout.annotations] == ["1", "4", "16", "64", "16,384", "tokens"]
    assert list(figure.layout.xaxis.ticktext) == ["28", "27", "27", "27", "8", "29", "120"]
    assert f"{WHERE}<br>" in figure.layout.title.text  # a line of its own: two do not fit beside each other
