"""The puzzles' pictures: the GPU's hierarchy, and who touches what, in the course's answer and in the reader's kernel.

Colour is never the only sign: each cell names its thread, and what is written has a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import plotly.graph_objects as go

from ... import plots
from ..drawing import box, say, sheet
from ..first_kernels.figures import TOUCHED, who_touches_what
from .cases import PUZZLES
from .data import answer, trace_of

CELLS = 192  # of one array, at most
FEWER_CELLS = {"gemm_tile": 64}


def levels(rows: Sequence[tuple[Sequence[str], int, str]], title: str) -> go.Figure:
    """Draw a hierarchy: each line of boxes is what lies in the blue box above it.

    rows: (the text in each box, which of them is blue, what the level is)."""
    figure, high, step = go.Figure(), 7, 15
    for level, (names, chosen, text) in enumerate(rows):
        y, wide = step * (len(rows) - 1 - level) + 1, 98 / len(names)
        for i, name in enumerate(names):
            fill = plots.SKY if i == chosen else plots.FAINT
            box(figure, 1 + wide * i + 0.2, y, wide - 0.4, high, fill, name, size=11)
        if level + 1 < len(rows):
            line = {"color": plots.GREY, "width": 1, "dash": "dot"}
            for x0, x1 in ((1 + wide * chosen, 1), (1 + wide * (chosen + 1), 99)):
                figure.add_shape(type="line", x0=x0, y0=y, x1=x1, y1=y - step + high, line=line)
        say(figure, 1, y + high + 2, text, "left", bgcolor="white")
    return sheet(figure, title, 100, step * len(rows) - 3, 65 + 73 * len(rows))


def hierarchy() -> go.Figure:
    """A grid of 6 blocks, one of its blocks of 4 warps, one of its warps of 32 lanes, with the number of each."""
    block, warp, lane = 2, 1, 8
    thread = 32 * warp + lane
    blocks, warps = range(6), (f"warp {i}: threads {32 * i} to {32 * i + 31}" for i in range(4))
    rows = (
        ([f"block {i}" for i in blocks], block, "<b>grid</b>: all blocks of a launch, in any order; gridDim.x = 6"),
        ([*warps], warp, "<b>block</b>: 128 threads, which share memory and meet at barriers; blockDim.x = 128"),
        ([*map(str, range(32))], lane, "<b>warp</b>: 32 <b>lanes</b>, which get one instruction together"),
    )
    numbers = f"threadIdx.x = {thread}, blockIdx.x = {block}, so its number is {block} * 128 + {thread}"
    return levels(rows, f"768 threads. Lane {lane}: {numbers} = <b>{128 * block + thread}</b>")


def asked(name: str) -> go.Figure | None:
    """Who touches what in the course's answer to a puzzle: one block of its first launch. None without a compiler."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.cu"
        file.write_text(answer(name), encoding="utf-8")
        figure = _drawn(name, trace_of(name, file), "Asked")
    # What a pointer over a cell would show is the answer's code.
    return figure and figure.update_traces(customdata=None, hovertemplate=None, hoverinfo="skip")


def yours(name: str, file: str | Path, step: bool = False):
    """Who touches what in the reader's kernel: one block of the puzzle's first launch.

    None, where nothing was touched, nothing can be run, or a fault stopped the launch (the check names it). With `step`
    a slider through the block's steps (StepExplorer), up to the fault if there is one; None where it makes none.
    """
    trace = trace_of(name, file)
    if step and trace:
        from ..first_kernels.widget import StepExplorer  # which needs ipywidgets

        return StepExplorer(trace, page=CELLS)
    return _drawn(name, trace, "Yours")


def _drawn(name: str, trace, whose: str) -> go.Figure | None:
    if not trace or trace.fault or not any(map(trace.touching, trace.arrays)):
        return None
    case = PUZZLES[name].cases()[0]
    blocks = case.grid[0] * (case.grid + (1,))[1]
    block = f", block {case.look} (of 0 to {blocks - 1})" if blocks > 1 else ""
    figure = who_touches_what(trace, cells=FEWER_CELLS.get(name, CELLS))
    figure.layout.title.text = f"{whose}: {case.said}{block}<br><sup>{TOUCHED}</sup>"
    # No axis is shown: the template would be half of what is stored.
    return figure.update_layout(template="none", plot_bgcolor="white").update_yaxes(ticks="")
