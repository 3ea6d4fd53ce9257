"""Charts of the tour's page: lines as SVG, each with its numbers in a table below it, and bars inside a table's cells.

They are markup alone, no script: text stays text for a screen reader, a drawing is small enough for a phone's screen
without shrinking its letters away, and colours are the page's own CSS variables, which dark mode changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ..core import InputError

# In units of the SVG, which are pixels where the page shows it 400 wide.
_WIDTH, _HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 374, 26, 210
_LETTER = 7.5  # width of a digit
_DOTS = 12  # a line of more points is drawn without marks
_TABLE = 20  # rows of the table below a chart

# One for each colour, around (0, 0): without colours the lines still differ.
_MARKS = ("M-4-4h8v8h-8z", "M0-5.5L5 4H-5z", "M0-5.5L5.5 0 0 5.5-5.5 0z", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z")
COLOURS = 6  # the style has --c0 to --c5


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, its points (x, y), and the number of the line that it stands behind, paler."""

    name: str
    points: Sequence[tuple[float, float]]
    behind: int | None = None

    def style(self, number: int) -> str:
        """The class of its colour, as the chart's line of this number."""
        return f"c{number % COLOURS}" if self.behind is None else f"c{self.behind % COLOURS} faint"


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit. ticks: where its figures may stand; chosen if there are none."""

    title: str
    log: bool = False
    ticks: Sequence[float] = ()
    end: float | None = None  # where it ends; by default where the points do
    show: Callable[[float], str] = "{:,g}".format


def lines(title: str, drawn: Sequence[Line], x: Axis, y: Axis, *, level: float | None = None) -> Markup:
    """Lines over one pair of axes, with a legend and a table of what is drawn.

    Args:
        title: of the chart; a screen reader says it, and then where each line begins and ends.
        drawn: the lines. Colours repeat after six.
        x, y: the axes. A linear y axis begins at 0 if its values come near it.
        level: a horizontal line at this y.

    Raises:
        InputError: for no points, for values that are not finite, or, on a log axis, not positive.
    """
    points = [point for line in drawn for point in line.points]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise InputError(f"{title}: {len(points)} points; accepted: one or more, all finite")
    levels = [] if level is None else [level]
    across = _Scale(x, [point[0] for point in points], _LEFT, _RIGHT)
    up = _Scale(y, [point[1] for point in points] + levels, _BOTTOM, _TOP)
    parts = _grid(x, y, across, up)
    parts += [Markup("<path class='level' d='M{} {:.1f}H{}'/>").format(_LEFT, up.at(value), _RIGHT) for value in levels]
    parts += [_line(line, i, across, up) for i, line in enumerate(drawn)]
    ends = "; ".join(
        f"{line.name}: {y.show(line.points[0][1])} at {x.show(line.points[0][0])}"
        + (f", {y.show(line.points[-1][1])} at {x.show(line.points[-1][0])}" if len(line.points) > 1 else "")
        for line in drawn
        if line.points and line.behind is None
    )
    svg = Markup("<svg class='chart' viewBox='0 0 {} {}' role='img' aria-label='{}'>{}</svg>\n").format(
        _WIDTH, _HEIGHT, f"{title}. {y.title}, over {x.title}. {ends}.", Markup("").join(parts)
    )
    return Markup("<p class='title'>{}</p>\n").format(title) + svg + _legend(drawn) + _numbers(title, drawn, x, y)


def bar(value: float, full: float, colour: int = 0) -> Markup:
    """A bar inside a table's cell, `value / full` of the cell wide. The table says the figure, so nobody reads this."""
    part = min(1.0, max(0.0, value / full)) if full else 0.0
    return Markup("<span class='bar c{}' style='width:{}%' aria-hidden='true'></span>").format(
        colour % COLOURS, f"{100 * part:.2f}"
    )


class _Scale:
    """Values to places along one axis, and the ticks that fit there."""

    def __init__(self, axis: Axis, values: list[float], begin: float, end: float) -> None:
        if axis.log and min(values) <= 0:
            raise InputError(f"{axis.title}: {min(values):g} on a log axis; accepted: more than 0")
        low, high = min(values), max(values) if axis.end is None else axis.end
        self.log, self.begin, self.end = axis.log, begin, end
        if not axis.log and begin > end and 0 < low < 0.7 * high:
            low = 0.0
        low, high = (math.log(low), math.log(high)) if axis.log else (low, high)
        room = 0.04 * (high - low) or 0.5
        # The upright axis alone has room at its ends.
        self.low, self.high = (low - room * (low != 0), high + room) if begin > end or low == high else (low, high)
        ticks = sorted(axis.ticks) or (_powers(self.low, self.high) if axis.log else _round(self.low, self.high))
        self.ticks: list[float] = []
        for tick in ticks if begin > end else reversed(ticks):  # of the horizontal axis the last one always stands
            if not (axis.log and tick <= 0) and self._is_inside(tick) and not self._is_close(tick, axis):
                self.ticks.append(tick)

    def at(self, value: float) -> float:
        share = ((math.log(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def _is_inside(self, tick: float) -> bool:
        place, (first, last) = self.at(tick), sorted((self.begin, self.end))
        return first - 0.5 <= place <= last + 0.5

    def _is_close(self, tick: float, axis: Axis) -> bool:
        if not self.ticks:
            return False
        upright = self.begin > self.end
        letters = (len(axis.show(tick)) + len(axis.show(self.ticks[-1]))) / 2 + 1
        return abs(self.at(tick) - self.at(self.ticks[-1])) < (16 if upright else _LETTER * letters)


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten between two natural logarithms."""
    tens = math.log(10)
    return [10.0**power for power in range(math.ceil(low / tens), math.floor(high / tens) + 1)]


def _round(low: float, high: float) -> list[float]:
    """Four to eight round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(many for many in (5, 2, 1) if (high - low) / (step * many) >= 4 or many == 1)
    return [round(step * i, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(x: Axis, y: Axis, across: _Scale, up: _Scale) -> list[Markup]:
    parts = [Markup("<text class='of' x='4' y='14'>{}</text>").format(y.title)]
    for tick in up.ticks:
        height = f"{up.at(tick):.1f}"
        parts.append(Markup("<path class='grid' d='M{} {}H{}'/>").format(_LEFT, height, _RIGHT))
        parts.append(
            Markup("<text x='{}' y='{}' dy='.35em' text-anchor='end'>{}</text>").format(_LEFT - 6, height, y.show(tick))
        )
    for tick in across.ticks:
        place = across.at(tick)
        shown = x.show(tick)
        # Figures at the right end stay inside.
        middle = min(place, _WIDTH - _LETTER * len(shown) / 2)
        parts.append(Markup("<path class='grid' d='M{:.1f} {}v4'/>").format(place, _BOTTOM))
        parts.append(
            Markup("<text x='{:.1f}' y='{}' text-anchor='middle'>{}</text>").format(middle, _BOTTOM + 17, shown)
        )
    parts.append(
        Markup("<text class='of' x='{}' y='{}' text-anchor='end'>{}</text>").format(_RIGHT, _HEIGHT - 4, x.title)
    )
    return parts


def _line(line: Line, number: int, across: _Scale, up: _Scale) -> Markup:
    # No more points than the drawing has pixels for.
    places = [(across.at(x), up.at(y)) for x, y in _spread(line.points, 200)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [Markup("<path class='line' d='{}'/>").format(path)]
    if len(places) <= _DOTS and line.behind is None:
        mark = _MARKS[number % len(_MARKS)]
        parts += [Markup("<path d='{}' transform='translate({:.1f} {:.1f})'/>").format(mark, x, y) for x, y in places]
    return Markup("<g class='{}'>{}</g>").format(line.style(number), Markup("").join(parts))


def _legend(drawn: Sequence[Line]) -> Markup:
    if len(drawn) < 2:
        return Markup("")
    items = Markup("").join(
        Markup(
            "<li><svg viewBox='-14 -7 28 14' aria-hidden='true'><g class='{}'><path class='line' d='M-14 0H14'/>{}"
            "</g></svg>{}</li>"
        ).format(
            line.style(i),
            Markup("<path d='{}'/>").format(_MARKS[i % len(_MARKS)]) if len(line.points) <= _DOTS else "",
            line.name,
        )
        for i, line in enumerate(drawn)
    )
    return Markup("<ul class='legend'>{}</ul>\n").format(items)


def _numbers(title: str, drawn: Sequence[Line], x: Axis, y: Axis) -> Markup:
    """A folded table: a row for each x, evenly thinned where there are many."""
    held = [dict(line.points) for line in drawn]
    places = sorted({place for points in held for place in points})
    heads = Markup("").join(
        Markup("<th scope='col'>{}</th>").format(text) for text in (x.title, *(d.name for d in drawn))
    )
    rows = Markup("").join(
        Markup("<tr><th scope='row'>{}</th>{}</tr>\n").format(
            x.show(place),
            Markup("").join(
                Markup("<td>{}</td>").format(y.show(points[place]) if place in points else "") for points in held
            ),
        )
        for place in _spread(places, _TABLE)
    )
    some = f"; {_TABLE} of {len(places):,} places" if len(places) > _TABLE else ""
    return Markup(
        "<details><summary>Numbers<span class='unseen'> of {}</span></summary><div class='scroll'><table>\n"
        "<caption>{}{}</caption>\n<tr>{}</tr>\n{}</table></div></details>\n"
    ).format(title, y.title, some, heads, rows)


def _spread(items: Sequence, most: int) -> list:
    """At most so many of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
