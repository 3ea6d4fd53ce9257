"""The widgets of the recorded sweep: pick an L1, see its loss, its layers, its training, and where it fires."""

from __future__ import annotations

from ...training.sweep import pressed
from ..widgets import Explorer
from . import figures


def _explorer(draw, change, rows: list[dict], where: str) -> Explorer:
    return Explorer(
        draw(rows, 0, where),
        lambda figure, index: change(figure, rows, index, where),
        [(figures.short(row), row["config"]["l1"]) for row in pressed(rows)],
        "L1",
    )


def run_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: loss against nnz, nnz while training, nnz by layer. The slider's values are the
    L1."""
    return _explorer(figures.picked, figures.pick, rows, where)


def layer_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: how each of its layers fell silent."""
    return _explorer(figures.layer_over_time, figures.pick_layers, rows, where)


def place_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: who fires by position and by byte."""
    return _explorer(figures.where_it_fires, figures.pick_where, rows, where)
