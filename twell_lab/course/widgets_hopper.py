"""The widget of the notebook on the Hopper kernels: move the cut between hot and cold neurons."""

from __future__ import annotations

from . import plots_hopper_work
from .widgets import Explorer


def cut_explorer(shares: list[float], rows: list[dict]) -> Explorer:
    """A slider over the places to cut. shares: of tokens, one a neuron; rows: hopper_work.split of the same shares."""
    return Explorer(
        plots_hopper_work.cut(shares, rows),
        lambda figure, index: plots_hopper_work.move_cut(figure, rows, index),
        [(f"{row['hot']:,}", row["hot"]) for row in rows],
        "hot neurons",
    )
