"""The widget of the recorded sweep: pick an L1 and see its loss, its layers and its training."""

from __future__ import annotations

from ...training.sweep import pressed
from ..widgets import Explorer
from . import figures


def run_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep, by its value: loss against nnz, nnz during training, nnz by layer."""
    return Explorer(
        figures.picked(rows, 0, where),
        lambda figure, index: figures.pick(figure, rows, index, where),
        [(figures.short(row), row["config"]["l1"]) for row in pressed(rows)],
        "L1",
    )
