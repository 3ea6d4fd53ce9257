"""The puzzles' pictures: the GPU's hierarchy, who should touch what, and who did, from the reader's own kernel.

Colour is never the only sign: each cell names its thread, and what is written has a frame.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..drawing import box, frames, say, sheet, squares, text_on
from ..first_kernels.figures import LANE_COLOURS, UNTOUCHED, who_touches_what
from . import pictures
from .cases import PUZZLES, SIDE
from .data import trace_of
from .pictures import GHOST, Panel

CELL, BAR, GAP = 24, 16, 34  # heights in pixels: of a line of cells, of a barrier, between panels
CELLS = 192  # of one array, at most, in the picture of the reader's kernel
FEWER_CELLS = {"gemm_tile": 64}
WHITE = "#FFFFFF"
BARE = {"template": "none", "plot_bgcolor": WHITE}  # no axis is shown: the template would be half of what is stored
NOTE = "number: the thread; framed: written"
NOTES = {
    "ballot_count": "colour: the lane; grey: zero or less; framed: written",
    "prefix_sum": "number: the sum so far; colour: the lane that added; framed: written",
    "vector_loads": "number: the thread",
    "neuron_counts": "number in fired: the neuron; numbers in counts: the threads; framed: added to",
    "pack_words": "number in gate: the lane; numbers in words: the count and the columns; framed: written",
}


def hierarchy() -> go.Figure:
    """A grid of 6 blocks, one of its blocks of 4 warps, one of its warps of 32 lanes, with the number of each."""
    figure = go.Figure()
    across, block, warp, lane = 1920, 2, 1, 8
    levels = (  # how many, which is looked at, from where to where up, and the name of each
        (6, block, 300, "block {0}"),
        (4, warp, 175, "warp {0}: threads {1} to {2}"),
        (32, lane, 50, "{0}"),
    )
    for parts, chosen, low, name in levels:
        width, gap = across / parts, 2 if parts == 32 else 8
        for part in range(parts):
            here = part == chosen
            fill = LANE_COLOURS[part] if parts == 32 else plots.SKY if here else UNTOUCHED
            text = name.format(part, 32 * part, 32 * part + 31)
            looks = {"framed": here, "colour": text_on(fill) if parts == 32 else plots.INK}
            box(figure, part * width + gap, low, width - 2 * gap, 50, fill, f"<b>{text}</b>" if here else text, **looks)
    for (parts, chosen, low, _), text in zip(
        levels,
        (
            "<b>block</b>: 128 threads, which share memory and meet at barriers; blockDim.x = 128",
            "<b>warp</b>: 32 <b>lanes</b>, which get one instruction together",
        ),
    ):
        width = across / parts
        for edge, end in ((chosen * width + 8, 8), ((chosen + 1) * width - 8, across - 8)):
            line = {"color": plots.GREY, "width": 1, "dash": "dot"}
            figure.add_shape(type="line", x0=edge, y0=low, x1=end, y1=low - 75, line=line)
        say(figure, 270, low - 57, text, "left")
    say(figure, 0, 367, "<b>grid</b>: all blocks of a launch, in any order; gridDim.x = 6", "left")
    thread = 32 * warp + lane
    text = (
        f"The framed lane {lane}: threadIdx.x = {thread}, blockIdx.x = {block}, and blockIdx.x * blockDim.x + "
        f"threadIdx.x = {block} * 128 + {thread} = <b>{128 * block + thread}</b>"
    )
    say(figure, 0, 20, text, "left")
    figure = sheet(figure, "768 threads, and the number of one of them", across + 10, 385, 430)
    return figure.update_xaxes(range=[-10, across + 10])


def asked(name: str) -> go.Figure:
    """Who should touch what in a puzzle."""
    title, panels = pictures.picture(name)
    if name == "gemm_tile":
        return _matrices(title)
    heights = [CELL * len(panel.lines) or BAR for panel in panels]
    whole = sum(heights) + GAP * (len(panels) - 1)
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        row_heights=heights,
        vertical_spacing=GAP / whole if len(panels) > 1 else 0,
        subplot_titles=[panel.caption for panel in panels],
    )
    for row, panel in enumerate(panels, 1):
        _draw(figure, panel, row)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    figure = plots.styled(figure, "", height=whole + 96)
    return _titled(figure, f"Asked: {title}<br><sup>{NOTES.get(name, NOTE)}</sup>")


def yours(name: str, file: str | Path, step: bool = False):
    """Who touches what in the reader's kernel: one block of the puzzle's first launch.

    None, where nothing was touched, nothing can be run, or a fault stopped the launch (the check names it). With `step`
    a slider through the block's steps (StepExplorer), up to the fault if there is one; None where it makes none.
    """
    trace = trace_of(name, file)
    if step and trace:
        from ..first_kernels.widget import StepExplorer  # which needs ipywidgets

        return StepExplorer(trace, page=CELLS)
    if not trace or trace.fault or not any(map(trace.touching, trace.arrays)):
        return None
    case = PUZZLES[name].cases()[0]
    figure = who_touches_what(trace, cells=FEWER_CELLS.get(name, CELLS))
    for cells in figure.data:
        if cells.text is not None:
            cells.text = [[_narrow(text) for text in line] for line in cells.text]
    blocks = case.grid[0] * (case.grid + (1,))[1]
    block = f", block {case.look} (of 0 to {blocks - 1})" if blocks > 1 else ""
    return _titled(
        figure,
        f"Yours: {case.said}{block}<br><sup>number: the thread; ×n: n of them; all: the whole block; framed: written "
        "or updated</sup>",
    )


# ---- parts ----


def _narrow(text: str) -> str:
    """ "30–32" does not fit a cell: "×3"."""
    first, dash, last = text.partition("–")
    return f"×{int(last) - int(first) + 1}" if dash and len(text) > 3 else text


def _titled(figure: go.Figure, title: str) -> go.Figure:
    height = figure.layout.height
    figure.update_yaxes(ticks="")
    return figure.update_layout(
        BARE,
        margin={"t": 84, "b": 12, "l": 84, "r": 12},
        title={"text": title, "y": 1 - 26 / height, "yref": "container", "yanchor": "top"},
    )


def _draw(figure: go.Figure, panel: Panel, row: int) -> None:
    if not panel.lines:
        squares(figure, [[0]], [plots.RED], hoverinfo="skip", row=row, col=1)
        figure.update_xaxes(visible=False, row=row, col=1)
        figure.update_yaxes(visible=False, row=row, col=1)
        return
    longest = max(map(len, panel.lines))
    across = longest if longest in (8, 12, 16) else 32
    looks = {None: UNTOUCHED, GHOST: WHITE}
    owners = list(dict.fromkeys(cell.owner for line in panel.lines for cell in line))
    number = {owner: i for i, owner in enumerate(owners)}
    colours = [looks[owner] if owner in looks else LANE_COLOURS[owner % 32] for owner in owners]
    frame = [[1 if cell.framed else None for cell in line] + [None] * (across - len(line)) for line in panel.lines]
    frames(figure, frame, row)
    squares(
        figure,
        [[number[cell.owner] for cell in line] + [None] * (across - len(line)) for line in panel.lines],
        colours,
        text=[[cell.text for cell in line] + [""] * (across - len(line)) for line in panel.lines],
        texttemplate="%{text}",
        textfont={"size": 10},
        hoverinfo="skip",
        xgap=5,
        ygap=5,
        row=row,
        col=1,
    )
    figure.update_xaxes(visible=False, range=[-0.5, across - 0.5], row=row, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(panel.lines))),
        ticktext=panel.labels,
        showgrid=False,
        zeroline=False,
        tickfont={"size": 10},
        range=[len(panel.lines) - 0.5, -0.5],
        row=row,
        col=1,
    )


def _matrices(title: str) -> go.Figure:
    """a, b and c of the matrix product in tiles: the strips that a block walks, and the tile of c that it makes."""
    figure = go.Figure()
    rows, columns, depth = 2, 3, 4  # in tiles
    step, own = 1, (0, 1)  # the strip's tile that is in shared memory now; row and column of the block's tile
    for name, sides, text, x, y, wide, high in (
        ("a", "rows x depth", "tile_a", 0, 0, depth, rows),
        ("b", "depth x columns", "tile_b", depth + 1, rows + 1, columns, depth),
        ("c", "rows x columns", "c", depth + 1, 0, columns, rows),
    ):
        for line, column in itertools.product(range(high), range(wide)):
            strip = {"a": line == own[0], "b": column == own[1], "c": (line, column) == own}[name]
            now = strip and {"a": column == step, "b": line == step, "c": True}[name]
            fill = (plots.ORANGE if name == "c" else plots.BLUE) if now else "#CFE4F3" if strip else UNTOUCHED
            place = SIDE * (x + column + 0.04), SIDE * (y + high - line - 0.96), 0.92 * SIDE, 0.92 * SIDE
            ink = plots.INK if name == "c" else WHITE
            box(figure, *place, fill, f"<b>{text}</b>" * now, framed=now, colour=ink)
        say(figure, SIDE * x, SIDE * (y + high + 0.3), f"<b>{name}</b>, {sides}", "left")
    legend = (
        "Blue: in shared memory at this step,<br>16 x 16 values of each, read from global<br>memory once and used 16 "
        "times.<br>Pale: the rest of the strips.<br>Between the steps: barriers.<br>Orange: what the block makes."
    )
    say(figure, 0, SIDE * 6.3, legend, "left", yanchor="top")
    figure = sheet(figure, f"Asked: {title}", SIDE * 8.2, SIDE * 7.6, 500)
    figure.update_xaxes(range=[-4, SIDE * 8.2], constrain="domain")
    return figure.update_yaxes(range=[-4, SIDE * 7.6], scaleanchor="x")
