"""Charts of the tour's page: places, ticks, tables and what they refuse."""

import pytest

from twell_lab.app.charts import Axis, Line, chart
from twell_lab.core import InputError

X, Y = Axis("step"), Axis("loss, bits")


def places(drawn: dict) -> list[tuple[float, float]]:
    (line,) = drawn["lines"]
    return [tuple(map(float, place.split())) for place in line["path"].removeprefix("M").split("L")]


def test_a_line_goes_through_its_points():
    (left, low), (middle, top), (right, half) = places(chart("t", [Line("a", [(0, 0), (5, 10), (10, 5)])], X, Y))
    assert left < middle < right and middle == pytest.approx((left + right) / 2, abs=0.1)
    assert top < half < low and half == pytest.approx((low + top) / 2, abs=0.1)  # an SVG counts downwards


def test_a_log_axis_has_equal_steps_for_equal_ratios():
    points = [(1, 1), (8, 10), (64, 100)]
    drawn = chart("t", [Line("a", points)], Axis("tokens", log=True), Axis("ms", log=True))
    (a, low), (b, middle), (c, high) = places(drawn)
    assert b - a == pytest.approx(c - b, abs=0.2) and low - middle == pytest.approx(middle - high, abs=0.2)


def test_one_point_alone_has_a_place_and_a_mark():
    drawn = chart("t", [Line("a", [(3, 7)])], X, Y)
    assert len(places(drawn)) == len(drawn["lines"][0]["marked"]) == 1 and "nan" not in str(drawn)


def test_figures_at_the_ticks_never_touch():
    tokens = Axis("tokens", log=True, ticks=tuple(2**i for i in range(18)))
    found = chart("t", [Line("a", [(1, 1), (131072, 2)])], tokens, Y)["across"]
    assert found[0][2] == "131,072"
    for (_, right, later), (_, left, former) in zip(found, found[1:], strict=False):
        assert float(right) - float(left) > 3.5 * (len(later) + len(former))


def test_the_table_has_every_value_and_the_label_says_the_ends():
    drawn = chart("title", [Line("a", [(1, 2.5), (2, 3.5)]), Line("b", [(2, 4.5)])], X, Y)
    assert drawn["rows"] == [("1", ["2.5", ""]), ("2", ["3.5", "4.5"])]
    assert drawn["label"].endswith("a: 2.5 at 1, 3.5 at 2; b: 4.5 at 2.")


def test_long_lines_are_thinned_and_the_table_says_so():
    drawn = chart("t", [Line("a", [(i, i % 7 + 1) for i in range(5000)])], X, Y)
    assert len(places(drawn)) == 200 and drawn["left_out"] == "; 20 of 5,000 places"
    assert (drawn["rows"][0][0], drawn["rows"][-1][0]) == ("0", "4,999")


@pytest.mark.parametrize("points", [[], [(1, float("nan"))], [(float("inf"), 1)], [(0, 1), (1, 1)]])
def test_what_has_no_place_is_refused(points):
    with pytest.raises(InputError, match="accepted"):
        chart("t", [Line("a", points)], Axis("tokens", log=True), Y)
