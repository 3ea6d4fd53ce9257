"""What the figures share: colours without blending, and texts that can be read."""

import operator

import pytest
from plotly.colors import unlabel_rgb

from twell_lab.course import drawing
from twell_lab.course.first_kernels.figures import LANE_COLOURS


def test_a_flat_scale_changes_its_colour_at_once():
    assert drawing.flat(["red", "blue"]) == [[0, "red"], [0.5, "red"], [0.5, "blue"], [1, "blue"]]
    assert drawing.flat(f"#00000{i}" for i in range(3))[-1] == [1, "#000002"]


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
