"""The puzzles' pictures: the GPU's hierarchy, who should touch what, and who did, from the reader's own kernel.

Colour is never the only sign: each cell names its thread, and what is written has a frame.
"""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ... import plots
from ..drawing import frames, squares, text_on
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
    across, block, warp = 1920, 2, 1
    rows = {"grid": (300, 350), "block": (175, 225), "warp": (50, 100)}
    chosen = {"grid": block, "block": warp, "warp": 8}
    parts = {"grid": 6, "block": 4, "warp": 32}
    for level, (low, high) in rows.items():
        width = across / parts[level]
        for part in range(parts[level]):
            here = part == chosen[level]
            colour = LANE_COLOURS[part] if level == "warp" else plots.SKY if here else UNTOUCHED
            gap = 2 if level == "warp" else 8
            _box(figure, part * width + gap, low, (part + 1) * width - gap, high, colour, here)
            text = {
                "grid": f"block {part}",
                "block": f"warp {part}: threads {32 * part} to {32 * part + 31}",
                "warp": f"{part}",
            }[level]
            ink = text_on(colour) if level == "warp" else plots.INK
            _say(figure, (part + 0.5) * width, (low + high) / 2, text, ink, bold=here)
    for (upper, lower), text in (
        (("grid", "block"), "<b>block</b>: 128 threads, which share memory and meet at barriers; blockDim.x = 128"),
        (("block", "warp"), "<b>warp</b>: 32 <b>lanes</b>, which get one instruction together"),
    ):
        width, top = across / parts[upper], rows[lower][1]
        for edge, end in ((chosen[upper] * width + 8, 8), ((chosen[upper] + 1) * width - 8, across - 8)):
            line = {"color": plots.GREY, "width": 1, "dash": "dot"}
            figure.add_shape(type="line", x0=edge, y0=rows[upper][0], x1=end, y1=top, line=line)
        _say(figure, 270, top + 18, text, anchor="left")
    _say(
        figure,
        0,
        rows["grid"][1] + 17,
        "<b>grid</b>: all blocks of a launch, in any order; gridDim.x = 6",
        anchor="left",
    )
    own = 128 * block + 32 * warp + chosen["warp"]
    _say(
        figure,
        0,
        20,
        f"The framed lane {chosen['warp']}: threadIdx.x = {32 * warp + chosen['warp']}, blockIdx.x = {block}, and "
        f"blockIdx.x * blockDim.x + threadIdx.x = {block} * 128 + {32 * warp + chosen['warp']} = <b>{own}</b>",
        anchor="left",
    )
    figure.update_xaxes(visible=False, range=[-10, across + 10])
    figure.update_yaxes(visible=False, range=[0, 385])
    figure = plots.styled(figure, "768 threads, and the number of one of them", height=430)
    return figure.update_layout(BARE, margin={"l": 10, "r": 10, "t": 50, "b": 5})


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
    side = SIDE
    places = {  # left, bottom, width, height
        "a": (0, 0, depth, rows),
        "b": (depth + 1, rows + 1, columns, depth),
        "c": (depth + 1, 0, columns, rows),
    }
    step, own = 1, (0, 1)  # the strip's tile that is in shared memory now; row and column of the block's tile
    for name, (x, y, wide, high) in places.items():
        for line in range(high):
            for column in range(wide):
                strip = {"a": line == own[0], "b": column == own[1], "c": (line, column) == own}[name]
                now = strip and {"a": column == step, "b": line == step, "c": True}[name]
                colour = (plots.ORANGE if name == "c" else plots.BLUE) if now else "#CFE4F3" if strip else UNTOUCHED
                x0, y0 = side * (x + column + 0.04), side * (y + high - line - 0.96)
                _box(figure, x0, y0, x0 + 0.92 * side, y0 + 0.92 * side, colour, now)
                if now:
                    text = {"a": "tile_a", "b": "tile_b", "c": "c"}[name]
                    centre = side * (x + column + 0.5), side * (y + high - 0.5 - line)
                    _say(figure, *centre, text, WHITE if name != "c" else plots.INK, bold=True)
    for (x, y, _, high), text in zip(
        places.values(),
        ("<b>a</b>, rows x depth", "<b>b</b>, depth x columns", "<b>c</b>, rows x columns"),
        strict=True,
    ):
        _say(figure, side * x, side * (y + high + 0.3), text, anchor="left")
    _say(
        figure,
        0,
        side * 6.3,
        "Blue: in shared memory at this step,<br>16 x 16 values of each, read from global<br>"
        "memory once and used 16 times.<br>"
        "Pale: the rest of the strips.<br>Between the steps: barriers.<br>Orange: what the block makes.",
        anchor="left",
        top=True,
    )
    figure.update_xaxes(visible=False, range=[-4, side * 8.2], constrain="domain")
    figure.update_yaxes(visible=False, range=[-4, side * 7.6], scaleanchor="x")
    figure = plots.styled(figure, f"Asked: {title}", height=500)
    return figure.update_layout(BARE, margin={"l": 10, "r": 10, "t": 50, "b": 5})


def _box(figure: go.Figure, x0: float, y0: float, x1: float, y1: float, colour: str, framed: bool) -> None:
    line = {"color": plots.INK, "width": 2.5} if framed else {"width": 0}
    figure.add_shape(type="rect", x0=x0, y0=y0, x1=x1, y1=y1, fillcolor=colour, line=line)


def _say(
    figure: go.Figure,
    x: float,
    y: float,
    text: str,
    colour: str = plots.INK,
    bold: bool = False,
    anchor: str = "center",
    top: bool = False,
) -> None:
    figure.add_annotation(
        x=x,
        y=y,
        text=f"<b>{text}</b>" if bold else text,
        showarrow=False,
        xanchor=anchor,
        yanchor="top" if top else "middle",
        align="left" if anchor == "left" else "center",
        font={"size": 12, "color": colour},
    )
