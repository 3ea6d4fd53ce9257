"""Charts of the tour's page: places, ticks, tables and what they refuse."""

import re

import pytest

from twell_lab.app import charts
from twell_lab.core import InputError

X, Y = charts.Axis("step"), charts.Axis("loss, bits")


def places(markup: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r"<path class='line' d='M([^']*)'/>", markup)
    return [tuple(map(float, place.split())) for place in path.split("L")]


def test_a_line_goes_through_its_points():
    drawn = places(charts.lines("t", [charts.Line("a", [(0, 0), (5, 10), (10, 5)])], X, Y))
    (left, low), (middle, top), (right, half) = drawn
    assert left < middle < right and middle == pytest.approx((left + right) / 2, abs=0.1)
    assert top < half < low and half == pytest.approx((low + top) / 2, abs=0.1)  # an SVG counts downwards


def test_a_log_axis_has_equal_steps_for_equal_ratios():
    log = charts.Axis("tokens", log=True)
    (a, low), (b, middle), (c, high) = places(
        charts.lines("t", [charts.Line("a", [(1, 1), (8, 10), (64, 100)])], log, charts.Axis("ms", log=True))
    )
    assert b - a == pytest.approx(c - b, abs=0.2) and low - middle == pytest.approx(middle - high, abs=0.2)


def test_one_point_alone_has_a_place_and_a_mark():
    markup = charts.lines("t", [charts.Line("a", [(3, 7)])], X, Y)
    assert len(places(markup)) == 1 and "translate(" in markup and "nan" not in markup


def test_figures_at_the_ticks_never_touch():
    ticks = tuple(2**i for i in range(18))
    markup = charts.lines(
        "t", [charts.Line("a", [(1, 1), (131072, 2)])], charts.Axis("tokens", log=True, ticks=ticks), Y
    )
    found = [(float(x), text) for x, text in re.findall(r"x='([\d.]+)' y='227' text-anchor='middle'>([\d,]+)<", markup)]
    assert found and found[0][1] == "131,072"
    for (right, later), (left, former) in zip(found, found[1:], strict=False):
        assert right - left > 3.5 * (len(later) + len(former))


def test_the_table_has_every_value_and_the_label_says_the_ends():
    markup = charts.lines("title", [charts.Line("a", [(1, 2.5), (2, 3.5)]), charts.Line("b<", [(2, 4.5)])], X, Y)
    assert "<th scope='row'>1</th><td>2.5</td><td></td>" in markup
    assert "<th scope='row'>2</th><td>3.5</td><td>4.5</td>" in markup
    assert "a: 2.5 at 1, 3.5 at 2; b&lt;: 4.5 at 2." in markup and "b<" not in markup


def test_long_lines_are_thinned_and_the_table_says_so():
    markup = charts.lines("t", [charts.Line("a", [(i, i % 7 + 1) for i in range(5000)])], X, Y)
    assert len(markup) < 10_000 and "20 of 5,000 places" in markup
    assert "<th scope='row'>0</th>" in markup and "<th scope='row'>4,999</th>" in markup


@pytest.mark.parametrize("points", [[], [(1, float("nan"))], [(float("inf"), 1)]])
def test_what_has_no_place_is_refused(points):
    with pytest.raises(InputError, match="accepted"):
        charts.lines("t", [charts.Line("a", points)], X, Y)


def test_nothing_below_or_at_zero_goes_on_a_log_axis():
    with pytest.raises(InputError, match="more than 0"):
        charts.lines("t", [charts.Line("a", [(0, 1), (1, 1)])], charts.Axis("tokens", log=True), Y)


def test_a_bar_fills_its_share_of_the_cell():
    assert (
        "width:25.00%" in charts.bar(1, 4) and "width:100.00%" in charts.bar(9, 4) and "width:0.00%" in charts.bar(1, 0)
    )
