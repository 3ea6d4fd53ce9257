"""Charts of the tour's page: lines over a pair of axes, as places and texts that page.html.jinja writes as SVG, with
their numbers in a table. No script is needed, and text stays text for a screen reader."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core import InputError

# In units of the SVG, which are pixels where the page shows it 400 wide.
WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 374, 26, 210
LETTER = 7.5  # width of a digit
DOTS = 12  # a line of more points is drawn without marks
TABLE = 20  # rows of the table below a chart
# One for each colour, around (0, 0): without colours the lines still differ.
_MARKS = ("M-4-4h8v8h-8z", "M0-5.5L5 4H-5z", "M0-5.5L5.5 0 0 5.5-5.5 0z", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z")
COLOURS = 6  # the style has --c0 to --c5


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name, its points (x, y), and the number of the line that it stands behind, paler."""

    name: str
    points: Sequence[tuple[float, float]]
    behind: int | None = None


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit. ticks: where its figures may stand; chosen if there are none. end: where it
    ends; by default where the points do."""

    title: str
    log: bool = False
    ticks: Sequence[float] = ()
    end: float | None = None
    show: Callable[[float], str] = "{:,g}".format


def chart(title: str, drawn: Sequence[Line], x: Axis, y: Axis, *, level: float | None = None) -> dict:
    """Return what the template draws of lines over one pair of axes, and lists in a table.

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
    across = _Scale(x, [place for place, _ in points], LEFT, RIGHT)
    up = _Scale(y, [value for _, value in points] + ([] if level is None else [level]), BOTTOM, TOP)
    ends = [
        f"{line.name}: "
        + ", ".join(f"{y.show(b)} at {x.show(a)}" for a, b in dict.fromkeys(line.points[:: len(line.points) - 1 or 1]))
        for line in drawn
        if line.points and line.behind is None
    ]
    values = [dict(line.points) for line in drawn]
    places = sorted({place for line in values for place in line})
    shown = _spread(places, TABLE)
    return {
        "title": title,
        "label": f"{title}. {y.title}, over {x.title}. {'; '.join(ends)}.",
        "level": None if level is None else f"{up.at(level):.1f}",
        "x": x.title,
        "y": y.title,
        # Figures at the right end stay inside.
        "across": [
            (
                f"{across.at(tick):.1f}",
                f"{min(across.at(tick), WIDTH - LETTER * len(x.show(tick)) / 2):.1f}",
                x.show(tick),
            )
            for tick in across.ticks
        ],
        "up": [(f"{up.at(tick):.1f}", y.show(tick)) for tick in up.ticks],
        "lines": [_drawn(line, i, across, up) for i, line in enumerate(drawn)],
        "rows": [(x.show(place), [y.show(line[place]) if place in line else "" for line in values]) for place in shown],
        "left_out": f"; {TABLE} of {len(places):,} places" if len(places) > TABLE else "",
    }


def _drawn(line: Line, number: int, across: _Scale, up: _Scale) -> dict:
    """A line's name, the class of its colour, its path, its mark, and where that stands on it."""
    # No more points than the drawing has pixels for.
    places = [(f"{across.at(x):.1f}", f"{up.at(y):.1f}") for x, y in _spread(line.points, 200)]
    colour = f"c{(number if line.behind is None else line.behind) % COLOURS}"
    return {
        "name": line.name,
        "style": colour if line.behind is None else f"{colour} faint",
        "path": "M" + "L".join(f"{x} {y}" for x, y in places),
        "mark": _MARKS[number % len(_MARKS)] if len(line.points) <= DOTS else "",
        "marked": places if len(places) <= DOTS and line.behind is None else [],
    }


class _Scale:
    """Values to places along one axis, and the ticks that fit there."""

    def __init__(self, axis: Axis, values: list[float], begin: float, end: float) -> None:
        if axis.log and min(values) <= 0:
            raise InputError(f"{axis.title}: {min(values):g} on a log axis; accepted: more than 0")
        low, high = min(values), max(values) if axis.end is None else axis.end
        self.log, self.begin, self.end = axis.log, begin, end
        upright = begin > end
        if not axis.log and upright and 0 < low < 0.7 * high:
            low = 0.0
        low, high = (math.log(low), math.log(high)) if axis.log else (low, high)
        margin = 0.04 * (high - low) or 0.5
        # The upright axis alone has a margin at its ends.
        self.low, self.high = (low - margin * (low != 0), high + margin) if upright or low == high else (low, high)
        self.ticks: list[float] = []
        ticks = sorted(axis.ticks) or (_powers if axis.log else _round)(self.low, self.high)
        for tick in ticks if upright else reversed(ticks):  # of the horizontal axis the last one always stands
            if axis.log and tick <= 0 or not min(begin, end) - 0.5 <= self.at(tick) <= max(begin, end) + 0.5:
                continue
            letters = sum(len(axis.show(each)) for each in (tick, *self.ticks[-1:])) / 2 + 1
            apart = 16 if upright else LETTER * letters
            if not self.ticks or abs(self.at(tick) - self.at(self.ticks[-1])) >= apart:
                self.ticks.append(tick)

    def at(self, value: float) -> float:
        share = ((math.log(value) if self.log else value) - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten between two natural logarithms."""
    tens = math.log(10)
    return [10.0**power for power in range(math.ceil(low / tens), math.floor(high / tens) + 1)]


def _round(low: float, high: float) -> list[float]:
    """Four to eight round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next(many for many in (5, 2, 1) if (high - low) / (step * many) >= 4 or many == 1)
    return [round(step * i, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _spread(items: Sequence, most: int) -> list:
    """At most so many of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
