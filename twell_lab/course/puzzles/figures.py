"""The puzzles' pictures: who touches what, in the course's answer and in the reader's kernel. Colour is never the only
sign: each cell names its thread, and what is written has a frame."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import plotly.graph_objects as go

from ..first_kernels.figures import TOUCHED, who_touches_what
from .cases import PUZZLES
from .data import answer, trace_of

CELLS = 192  # of one array, at most


def asked(name: str) -> go.Figure | None:
    """Who touches what in the course's answer to a puzzle: one block of its first launch. None without a compiler."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.cu"
        file.write_text(answer(name), encoding="utf-8")
        figure = _drawn(name, trace_of(name, file), "Asked")
    # What a pointer over a cell would show is the answer's code.
    return figure and figure.update_traces(customdata=None, hovertemplate=None, hoverinfo="skip")


def yours(name: str, file: str | Path, step: bool = False):
    """Who touches what in the reader's kernel: one block of the puzzle's first launch; None where nothing was touched,
    nothing can be run, or a fault stopped the launch (the check names it). step: instead a slider through the block's
    steps (StepExplorer), up to a fault."""
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
    figure = who_touches_what(trace, cells=64 if name == "gemm_tile" else CELLS)
    figure.layout.title.text = f"{whose}: {case.said}{block}<br><sup>{TOUCHED}</sup>"
    # No axis is shown: the template would be half of what is stored.
    return figure.update_layout(template="none", plot_bgcolor="white").update_yaxes(ticks="")
