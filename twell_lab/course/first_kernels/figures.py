"""Figures of what the simulator recorded, in the style of `plots`. Colour is never the only sign: cells name their
threads, written elements have a frame, and bars are hatched, for grey print and colour-blind readers."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from ... import plots
from ...core import InputError
from ...plots import decode
from ...simulator.symbols import Line
from ...simulator.trace import Step, Trace
from ..charts import bars, finish, lines, squares

ACROSS = 32  # cells on a line: the lanes of a warp
ACROSS_WIDE = 16  # where a cell holds several elements, and names several threads
CELLS = 256  # of one array, at most
MOST_CODE = 100  # characters of a source line
UNTOUCHED, PALE_READ, PALE_WRITTEN = "#F2F2F2", "#CFE4F3", "#FBE0BD"
# All that step_view colours with: the scale of its squares, the same at each step, so that a move need not change it.
STEP_COLOURS = (UNTOUCHED, PALE_READ, PALE_WRITTEN, plots.BLUE, plots.ORANGE, plots.GREY, plots.RED)
SHARED_BY_MANY = "#BDBDBD"
# From dark to light in grey too, one half-warp dark and one light: on a middle grey, plotly's white and its ink #444444
# are hard to read.
_HALVES = [end * lane / 15 + start for start, end in ((0, 0.46), (0.77, 0.23)) for lane in range(16)]
LANE_COLOURS = sample_colorscale("Cividis", _HALVES)
KIND_OF = {"read": "read", "written": "write", "updated": "atomic"}
TOUCHED = "number: the thread; ×n: n of them; all: the whole block; framed: written or updated"
STEPPED = "blue: read, orange: written; strong: in this step, pale: before; framed: written so far"
Text = Callable[[int, object], str]  # of an element and its value: what stands in its cell


def who_touches_what(
    trace: Trace,
    arrays: Iterable[str] | None = None,
    *,
    steps: Iterable[int] | None = None,
    cells: int | None = None,
    per_cell: int = 1,
) -> go.Figure:
    """The elements of each array in the colour of the threads that read them or, with a frame, that wrote them.

    arrays: names (None: all touched). steps: indices of the steps to draw (None: all). cells: the most cells drawn of
    an array (256, or 512 if cells hold several elements). per_cell: elements in a cell; 16 bfloat16 are a sector."""
    chosen = trace.steps if steps is None else [trace[index] for index in steps]
    most = cells or (CELLS if per_cell == 1 else 2 * CELLS)
    panels = [
        _touched(trace, name, way, touches, per_cell, most)
        for name in (_names(trace) if arrays is None else arrays)
        for way in KIND_OF
        if trace.touching(name) and (touches := _touches(chosen, name, way, per_cell))
    ]
    if not panels:
        raise InputError("no array was touched in these steps; steps that read or write are accepted")
    title = f"Who touches what, in a block of {math.prod(trace.block_shape)} threads"
    if steps is not None and len(chosen) == 1:
        title = f"One step: {_escaped(chosen[0].describe())}"
    colours = dict.fromkeys(cell.colour for panel in panels for cell in panel.cells)
    return _stacked(panels, colours, f"{title}<br><sup>{TOUCHED}</sup>", 84)


def step_view(trace: Trace, step: int, *, page: int = CELLS, text: Mapping[str, Text] | None = None) -> go.Figure:
    """The arrays after one step: blue is read, orange written, strong what the lanes touch now, pale what was touched
    before, red the place of a fault; a frame marks what has been written. Above them each lane of the warp: whether it
    takes part, its value and the watched expressions.

    page: how many elements of an array are drawn, of those touched last. text: array -> a function of (element, value)
    that gives a cell's text, such as `packed_text`: most of what a browser draws anew at a move."""
    panels = _step_panels(trace, step, page, text or {})
    return _stacked(panels, STEP_COLOURS, _step_title(trace, trace[step], text or {}), 102)


def move_step_view(figure: go.Figure, trace: Trace, step: int, page: int = CELLS, text=None) -> None:
    """Show another step in a figure that `step_view` made with the same options (a FigureWidget of it too). Only what
    stands in the cells is set: a tenth of the work of drawing it anew."""
    _fill(figure, _step_panels(trace, step, page, text or {}), STEP_COLOURS)
    figure.layout.title.text = _step_title(trace, trace[step], text or {})


def packed_text(words: int) -> Text:
    """The text of a cell for step_view, for a packed array of `words` words a tile: column above value."""

    def shown(element: int, word) -> str:
        if element % words == 0:
            return f"<b>{int(word)}</b>"
        value, column = decode(int(word) % 2**32, "bfloat16")
        return f"{column}<br>{_short(value)}" if word else ""

    return shown


def predicted_against_measured(rows: list[dict]) -> go.Figure:
    """The time that each part of the GPU would need by itself, beside the measured time. rows: of data.against_time;
    the reader's own times are points."""
    parts = [(row["version"], bound, ms) for row in rows for bound, ms in row["predicted_ms"].items()]
    shown = [{"version": version, "of": f"predicted for an H100: {bound}", "ms": ms} for version, bound, ms in parts]
    shown += [row | {"of": "measured", "ms": row["measured_ms"]} for row in rows if row["measured_ms"]]
    own = [row | {"of": row["yours"], "ms": row["yours_ms"]} for row in rows if row["yours_ms"] is not None]
    text = lambda row: f"{row['ms']:.2g}" if row["ms"] < 0.1 else f"{row['ms']:.3g}"
    said = lambda row: f"{row['of']}: {row['ms']:.4f} ms"
    patterns = zip(dict.fromkeys(row["of"] for row in shown), ("/", "x", ".", "-"))
    looks = {name: {"pattern": {"shape": shape}} for name, shape in patterns} | {"measured": {"colour": plots.INK}}
    figure = bars(go.Figure(), shown, "version", "ms", "of", hover=said, text=text, looks=looks)
    lines(figure, own, "version", "ms", "of", hover=said, mode="markers")
    recorded = [row for row in rows if row["measured_ms"]]
    figure = finish(figure, "Predicted from counts (the longest is the limit), and measured", recorded, 270, y="ms")
    return figure.update_yaxes(range=[0, 1.12 * max(row["ms"] for row in shown + own)])


# ---- panels of cells ----


class _Cell(NamedTuple):
    colour: str
    text: str
    hover: str
    framed: bool = False


class _Panel(NamedTuple):
    """An array as lines of `across` cells. labels: what stands left of each line. height: of a line, in pixels."""

    caption: str
    cells: list[_Cell]
    across: int
    labels: list[str]
    height: int
    font: int = 10
    width: int = ACROSS  # in cells: those of a shorter line keep their size


def _touched(trace: Trace, name: str, way: str, touches: dict, size: int, most: int) -> _Panel:
    array, everyone = trace.arrays[name], math.prod(trace.block_shape)
    across = _across(array) if size == 1 else ACROSS_WIDE
    start, end = min(touches) // across * across, max(touches) + 1
    shown = min(most, -(-math.prod(array.shape) // size) - start, -(-(end - start) // across) * across)
    caption, more = f"<b>{name}</b>, {_kind(array)}: {way} by thread", ""
    if size > 1:
        caption += f"; {size} elements ({size * array.itemsize} bytes) a cell, {len(touches)} cells touched"
        more = f" and {size - 1} more"
    if start + shown < end:
        caption += f"; the first {shown} of {end - start:,} cells"
    cells = []
    for place in range(start, start + shown):
        where = f"{name}[{_coordinates(array, place * size)}]{more}"
        if place not in touches:
            cells.append(_Cell(UNTOUCHED, "", f"{where}: not {way}"))
            continue
        who, line, value = touches[place]
        threads = f"{min(who)}" if len(who) == 1 else f"{min(who)} to {max(who)}, {len(who)} of them"
        said = f"{where}: {way} by thread {threads}<br>{_source(line)}<br>value {value}"
        text = "all" if len(who) == everyone > 1 else _numbers(who, 3 if size == 1 else 5)
        cells.append(_Cell(_colour(who), text, said, framed=way != "read"))
    labels = [_coordinates(array, first * size) for first in range(start, start + shown, across)]
    height, width = (24, ACROSS) if size == 1 else (19, ACROSS_WIDE)
    return _Panel(caption, cells, across, labels, height, width=width)


def _lanes(trace: Trace, index: int, text: Mapping[str, Text]) -> _Panel:
    step, watched = trace[index], trace.at(index).watched
    names = [*dict.fromkeys(watch.name for watch in trace.watches)]
    does = {"read": "reads", "write": "writes", "atomic": "leaves", "warp": "gets", "watch": "is"}
    now = dict(zip(step.threads, step.values if step.kind != "barrier" else [None] * len(step.threads), strict=True))
    shows = dict(zip(step.threads, step.elements, strict=True)) if step.array in text and step.count == 1 else {}
    first = ACROSS * step.warp
    threads = range(first, min(first + ACROSS, math.prod(trace.block_shape)))
    gaps = [_Cell(UNTOUCHED, "", "")] * (ACROSS - len(threads))
    cells = [
        _Cell(_now(step) if thread in now else UNTOUCHED, f"{thread - first}", f"thread {thread}") for thread in threads
    ]
    cells += gaps
    for thread in threads:
        value = now.get(thread)
        shown = text[step.array](shows[thread], value) if thread in shows else _short(value)
        cells.append(_Cell(UNTOUCHED, shown, f"thread {thread}: {'nothing' if value is None else _long(value)}"))
    cells += gaps
    for name in names:
        for thread in threads:
            last = watched.get(name, {}).get(thread)
            said = f"{_escaped(name)} in thread {thread}: {'not yet seen' if last is None else _long(last)}"
            cells.append(_Cell(UNTOUCHED, _short(last), said))
        cells += gaps
    caption = f"the lanes of warp {step.warp}; strong: take part in this step"
    labels = ["lane", does.get(step.kind, ""), *map(_escaped, names)]
    return _Panel(caption, cells, ACROSS, labels, 28 if text else 22, 9 if text else 10)


def _state(trace: Trace, index: int, name: str, size: int, text: Text | None) -> _Panel:
    array, step, total, across = trace.arrays[name], trace[index], trace.size(name), _across(trace.arrays[name])
    start, shown = _page(trace, index, name, size, across)
    here = range(start, min(start + shown, total))
    values, last = trace.at(index).part(name, start, len(here)), trace.at(index).last(name, start, len(here))
    output = all(each.kind == "write" for each in trace.touching(name))  # its cells stay empty until then
    now = set(step.covered) if step.array == name else set()
    if step.kind == "fault" and trace.fault.array == name:
        now = {trace.fault.element}
    cells = []
    for place, element in enumerate(here):
        value, known, when = values.data[place].item(), not values.mask[place], last.step[place]
        empty = not known or (output and when < 0)
        shows = "" if empty else text(element, value) if text else _short(value)
        colour, past = UNTOUCHED, "not touched yet"
        if when >= 0:
            colour = PALE_WRITTEN if last.wrote[place] else PALE_READ
            past = f"{'written' if last.wrote[place] else 'read'} by thread {last.thread[place]} in step {when}"
        said = f"{name}[{_coordinates(array, element)}] = {_long(value) if known else 'never written'}<br>{past}"
        cells.append(_Cell(_now(step) if element in now else colour, shows, said, bool(last.written[place])))
    caption = f"<b>{name}</b>, {_kind(array)}"
    if shown < total:
        caption += f": elements {here[0]:,} to {here[-1]:,} of {total:,}"
    labels = [_coordinates(array, first) for first in here[::across]]
    labels += [""] * (-(-shown // across) - len(labels))
    return _Panel(caption, cells, across, labels, 32 if text else 22, 9)


def _step_panels(trace: Trace, step: int, page: int, text: Mapping[str, Text]) -> list[_Panel]:
    return [_lanes(trace, step, text), *(_state(trace, step, name, page, text.get(name)) for name in _names(trace))]


def _stacked(panels: list[_Panel], colours: Iterable[str], title: str, above: int) -> go.Figure:
    """The panels below each other. colours: all that they have. above: the pixels of the title."""
    heights, gap = [panel.height * len(panel.labels) for panel in panels], 40
    whole = sum(heights) + gap * (len(panels) - 1)
    spacing = gap / whole if len(panels) > 1 else 0
    captions = [panel.caption for panel in panels]
    figure = make_subplots(len(panels), 1, row_heights=heights, vertical_spacing=spacing, subplot_titles=captions)
    for row, panel in enumerate(panels, 1):
        behind = {"colorscale": [plots.INK, plots.INK], "showscale": False, "hoverinfo": "skip", "hoverongaps": False}
        figure.add_heatmap(z=[], xgap=1, ygap=1, row=row, col=1, **behind)  # what is framed: its squares show around
        look = {"texttemplate": "%{text}", "textfont": {"size": panel.font}, "xgap": 5, "ygap": 5}
        squares(figure, [], colours, hovertemplate="%{customdata}<extra></extra>", row=row, col=1, **look)
        figure.update_xaxes(range=[-0.5, panel.width - 0.5], row=row, col=1)
        lines = len(panel.labels)
        figure.update_yaxes(tickvals=[*range(lines)], range=[lines - 0.5, -0.5], row=row, col=1)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(showgrid=False, zeroline=False, tickfont={"size": 10})
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    _fill(figure, panels, colours)
    height, margin = whole + above + 16, {"t": above, "b": 16, "l": 80, "r": 16}
    place = {"y": 1 - 28 / height, "yref": "container", "yanchor": "top"}
    return plots.styled(figure, title, height).update_layout(margin=margin, title=place)


def _fill(figure: go.Figure, panels: list[_Panel], colours: Iterable[str]) -> None:
    """Set what stands in the cells, beside them and above them. What is as it was is not sent to a FigureWidget."""
    number = {colour: i for i, colour in enumerate(colours)}
    for row, panel in enumerate(panels):
        gaps = len(panel.labels) * panel.across - len(panel.cells)
        cells = [(1 if cell.framed else None, number[cell.colour], cell.text, cell.hover) for cell in panel.cells]
        cells += [(None, None, "", "")] * gaps
        lines = [
            [list(column[i : i + panel.across]) for i in range(0, len(column), panel.across)] for column in zip(*cells)
        ]
        frame, shown = figure.data[2 * row : 2 * row + 2]
        frame.z, shown.z, shown.text, shown.customdata = lines
        frame.visible = any(cell.framed for cell in panel.cells)  # the browser paints no picture of none
        figure.layout[f"yaxis{row + 1 if row else ''}"].ticktext = panel.labels
        figure.layout.annotations[row].text = panel.caption


# ---- parts ----


def _names(trace: Trace) -> list[str]:
    """The arrays that were touched, in the order of their first touch."""
    touched = {name: touching[0].index for name in trace.arrays if (touching := trace.touching(name))}
    return sorted(touched, key=touched.__getitem__)


def _touches(steps: Iterable[Step], name: str, way: str, size: int) -> dict[int, tuple]:
    """Cell -> (the threads that touched it, the line and the value of the last touch)."""
    found: dict[int, tuple] = {}
    for step in (step for step in steps if step.kind == KIND_OF[way]):
        for thread, element, array, value in zip(step.threads, step.elements, step.arrays, step.values, strict=True):
            for i in range(max(1, step.count)) if array == name else ():
                cell = (element + i) // size
                who = found[cell][0] if cell in found else set()
                said = _long(value[i] if isinstance(value, tuple) else value)
                found[cell] = (who | {thread}, step.line, said)
    return found


def _page(trace: Trace, index: int, name: str, size: int, across: int) -> tuple[int, int]:
    """(first element, number of elements) of the page of an array that was touched last, up to and with a step. The
    number is the same for every step, so that the figure keeps its height."""
    places, _, steps, _ = trace.touches[name]
    size = max(across, size - size % across)
    if trace.fault and trace.fault.array == name and trace.fault.element in range(trace.size(name)):
        places, steps = np.append(places, trace.fault.element), np.append(steps, len(trace) - 1)
    start = int(places.min()) - int(places.min()) % across
    if places.min() // size == places.max() // size:
        return start, -(-(int(places.max()) + 1 - start) // across) * across
    done = np.searchsorted(steps, index, side="right")
    here = np.flatnonzero(steps == steps[max(done - 1, 0)])  # all lanes of the step that touched it last
    return int(places[here].min()) // size * size, size


def _step_title(trace: Trace, step: Step, text: Mapping[str, Text]) -> str:
    if step.kind == "fault":
        both = [f"thread {trace.fault.thread}: {_source(step.line)}"]
        if trace.fault.other_line:
            other = next(line for line in str(trace.fault).split("\n") if line.startswith("and thread"))
            both.append(f"{other}: {_source(trace.fault.other_line)}")
        return f"<b>{_escaped(step.name)}</b><br><sup>{'<br>'.join(both)}</sup>"
    code = step.line.text if len(step.line.text) <= MOST_CODE else step.line.text[:MOST_CODE] + " …"
    source = (
        f"<b>{step.line.file}:{step.line.number}</b>  "
        f"<span style='font-family:monospace;font-size:{14 if len(code) < 70 else 12}px'>{_escaped(code)}</span>"
    )
    said = step.describe().partition(": ")[2]
    said = said.partition(" = ")[0] if step.array in text else said  # the cells show what a packed word means
    said = f"step {step.index} of {len(trace) - 1}: warp {step.warp}, {_escaped(said)}"
    if len(step.path) > 1:
        said += f", called from {step.path[0].file}:{step.path[0].number}"
    return f"{source}<br><sup>{said}<br>{STEPPED}</sup>"


def _source(line: Line | None) -> str:
    return _escaped(f"{line.file}:{line.number}  {line.text[:MOST_CODE]}") if line else "nobody knows where"


def _now(step: Step) -> str:
    colours = {"read": plots.BLUE, "write": plots.ORANGE, "atomic": plots.ORANGE, "fault": plots.RED}
    return colours.get(step.kind, plots.GREY)


def _colour(who: set[int]) -> str:
    least, most = min(who), max(who)
    if len(who) > 1 and not (most - least + 1 == len(who) < 32):
        return SHARED_BY_MANY
    return LANE_COLOURS[(least + most) // 2 % 32]


def _numbers(who: set[int], room: int) -> str:
    """{3} -> "3"; {0, .., 15} -> "0–15" where so many characters fit; others "×n"."""
    least, most = min(who), max(who)
    if len(who) == 1:
        return f"{least}"
    span = f"{least}–{most}"
    return span if most - least + 1 == len(who) < 32 and len(span) <= room else f"×{len(who)}"


def _across(array) -> int:
    """Return how many cells a line has: a short last dimension stays in one piece, as a whole tile or row."""
    last = array.shape[-1] if len(array.shape) > 1 else ACROSS
    return ACROSS if last > ACROSS else last if last >= ACROSS // 4 else ACROSS // last * last


def _kind(array) -> str:
    return f"{array.space} {array.dtype} [{', '.join(map(str, array.shape))}]"


def _coordinates(array, element: int) -> str:
    return ", ".join(str(int(i)) for i in np.unravel_index(element, array.shape)) if array.shape else "0"


def _short(value) -> str:
    """A number in four or five characters; "" for None."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"{len(value)}×"
    if not isinstance(value, float):
        return f"{value}" if -1000 < value < 10000 else "…"
    if not abs(value) < 1000 or 0 < abs(value) < 0.005:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    digits = 0 if value == int(value) or abs(value) > 9.95 else 1 if abs(value) >= 0.05 else 2
    return f"{value:.{digits}f}".replace("0.0", ".0")  # "-0.03" is wider than a cell


def _long(value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_long, value))})"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value} (0x{value % 2**64:x})" if abs(value) > 999 else f"{value}"


def _escaped(text: str) -> str:
    """As plotly's little HTML takes it: no tags, and blanks kept."""
    return html.escape(text, quote=False)
