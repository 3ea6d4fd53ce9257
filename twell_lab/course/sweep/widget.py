"""The widgets of the recorded sweep: pick an L1 and see its loss, its layers, its training and where neurons fire."""

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
    """Pick an L1 of the recorded sweep, by its value: loss against nnz, nnz during training, nnz by layer."""
    return _explorer(figures.picked, figures.pick, rows, where)


def layer_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: firing neurons of each layer during training."""
    return _explorer(figures.layer_over_time, figures.pick_layers, rows, where)


def place_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: firing neurons by position in a window, and by byte."""
    return _explorer(figures.where_it_fires, figures.pick_where, rows, where)
