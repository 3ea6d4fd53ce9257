"""What the figures share: colours without blending, rows by number, and figures that have nothing to show."""

import operator

import plotly.graph_objects as go
import pytest
from plotly.colors import unlabel_rgb

from twell_lab.core import InputError
from twell_lab.course import drawing
from twell_lab.course.first_kernels.figures import LANE_COLOURS


def test_a_flat_scale_changes_its_colour_at_once():
    assert drawing.flat(["red", "blue"]) == [[0, "red"], [0.5, "red"], [0.5, "blue"], [1, "blue"]]
    assert drawing.flat(f"#00000{i}" for i in range(3))[-1] == [1, "#000002"]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_row_that_is_not_there_is_refused_by_name(index):
    assert drawing.row_at("abc", 2) == "c"
    with pytest.raises(InputError, match=f"index is {index}; there are cuts 0 to 2"):
        drawing.row_at("abc", index, "cuts")


def test_an_empty_figure_says_so():
    figure = drawing.nothing("a title")
    assert figure.layout.annotations[0].text.startswith("nothing is recorded") and figure.layout.title.text == "a title"


def test_a_drawing_is_boxes_texts_and_arrows_on_a_sheet():
    figure = go.Figure()
    drawing.box(figure, 1, 2, 4, 6, "red", "in it", size=9)
    drawing.say(figure, 0, 0, "beside", "left")
    drawing.arrow(figure, (1, 2), (3, 4), "blue")
    drawing.sheet(figure, "a title", 10, 20, 300)
    (box,), (text, beside, arrow) = figure.layout.shapes, figure.layout.annotations
    assert (box.x0, box.x1, box.y0, box.y1) == (1, 5, 2, 8) and (text.x, text.y, text.font.size) == (3, 5, 9)
    assert beside.xanchor == "left" and (arrow.ax, arrow.ay, arrow.x, arrow.y) == (1, 2, 3, 4)
    assert figure.layout.xaxis.range == (0, 10) and figure.layout.yaxis.range == (0, 20) and figure.layout.height == 300


def test_numbers_of_lanes_can_be_read():
    assert drawing.contrast("#FFFFFF", "rgb(0, 0, 0)") == pytest.approx(21)
    assert drawing.contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.005)
    found = [drawing.text_on(colour) for colour in LANE_COLOURS]
    assert found == sorted(found, reverse=True) and len(set(found)) == 2  # white on the first lanes, then ink
    # Plotly writes white on what it finds dark, else #444444. 4.5 is what WCAG 2 asks of small texts.
    written = ["#FFFFFF" if text == "#FFFFFF" else "#444444" for text in found]
    assert found[:16] == ["#FFFFFF"] * 16 and min(map(drawing.contrast, written, LANE_COLOURS)) >= 4.5
    weights = (0.299, 0.587, 0.114)
    bright = [sum(map(operator.mul, weights, unlabel_rgb(colour))) for colour in LANE_COLOURS]
    assert max(bright[:16]) < 128 <= min(bright[16:])  # where plotly changes from the one to the other
