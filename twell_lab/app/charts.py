"""Charts of the tour's page: lines over a pair of axes, as places and texts that page.html.jinja writes as SVG. No
script is needed, and text stays text for a screen reader."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Points = Sequence[tuple[float, float]]
# In units of the SVG, which are pixels where the page shows it 400 wide.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 400, 52, 374, 26, 210
LETTER = 7.5  # width of a digit
DOTS = 12  # a line of more points is drawn without marks
COLOURS = 6  # the style has --c0 to --c5
# One for each colour, around (0, 0): without colours the lines still differ.
_MARKS = ("M-4-4h8v8h-8z", "M0-5.5L5 4H-5z", "M0-5.5L5.5 0 0 5.5-5.5 0z", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z")


class Axis(NamedTuple):
    """What an axis shows, with its unit. ticks: where its figures may stand; round numbers if there are none."""

    title: str
    log: bool = False
    ticks: Sequence[float] = ()
    show: Callable[[float], str] = "{:,g}".format


def chart(title: str, drawn: Mapping[str, Points], x: Axis, y: Axis, level: float | None = None) -> dict:
    """Return what the template draws of lines by name over one pair of axes, and `label`, which a screen reader says:
    where each line begins and ends. level: a horizontal line at this y."""
    points = [point for line in drawn.values() for point in line]
    across, ticks = _scale(x, [place for place, _ in points], LEFT, RIGHT)
    up, marks = _scale(y, [height for _, height in points] + ([] if level is None else [level]), BOTTOM, TOP)
    lines, said = [], []
    for number, (name, line) in enumerate(drawn.items()):
        places = [(f"{across(a):.1f}", f"{up(b):.1f}") for a, b in line]
        few, path = len(places) <= DOTS, "M" + "L".join(" ".join(place) for place in places)
        looks = {"style": f"c{number % COLOURS}", "mark": _MARKS[number % len(_MARKS)] if few else ""}
        lines.append({"name": name, "path": path, "marked": places * few, **looks})
        said.append(f"{name}: {', '.join(f'{y.show(b)} at {x.show(a)}' for a, b in (line[0], line[-1]))}")
    most = {at: WIDTH - LETTER * len(x.show(at)) / 2 for at in ticks}  # a figure stays inside at the right end
    return {
        "title": title,
        "label": f"{title}. {y.title}, over {x.title}. {'; '.join(said)}.",
        "level": None if level is None else f"{up(level):.1f}",
        "x": x.title,
        "y": y.title,
        "across": [(f"{across(at):.1f}", f"{min(across(at), most[at]):.1f}", x.show(at)) for at in ticks],
        "up": [(f"{up(at):.1f}", y.show(at)) for at in marks],
        "lines": lines,
    }


def _scale(axis: Axis, values: list[float], begin: float, end: float) -> tuple[Callable[[float], float], list[float]]:
    """Return what gives values their places along an axis, and at most six ticks. An axis has a margin at its ends; it
    begins at 0 if its values come near that."""
    low, high = min(values), max(values)
    if not axis.log and 0 < low < 0.7 * high:
        low = 0.0
    turned: Callable[[float], float] = math.log10 if axis.log else float
    first, last = turned(low), turned(high)
    margin = 0.04 * (last - first) or 0.5
    first, last = first - margin * (axis.log or low != 0), last + margin

    def place(value: float) -> float:
        return begin + (turned(value) - first) / (last - first) * (end - begin)

    step = 10 ** math.floor(math.log10((last - first) / 4))
    step *= max((many for many in (2, 5) if (last - first) / (step * many) >= 4), default=1)
    even = [round(step * i, 12) for i in range(math.ceil(first / step), math.floor(last / step) + 1)]
    round_ones = axis.ticks or ([10.0**n for n in range(-9, 10)] if axis.log else even)
    ticks = [tick for tick in round_ones if first <= turned(tick) <= last]
    return place, ticks[:: -max(1, math.ceil(len(ticks) / 6))]
