"""The widgets of the recorded sweep: pick an L1, see its loss, its layers, its training, and where it fires."""

from __future__ import annotations

from ..sweep import pressed
from . import plots_sweep
from .widgets import Explorer


def _explorer(draw, change, rows: list[dict], where: str) -> Explorer:
    return Explorer(draw(rows, 0, where), lambda figure, index: change(figure, rows, index, where),
                    [(plots_sweep.short(row), row["config"]["l1"]) for row in pressed(rows)], "L1")


def run_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: loss against nnz, nnz while training, nnz by layer. The slider's values are the L1."""
    return _explorer(plots_sweep.picked, plots_sweep.pick, rows, where)


def layer_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: how each of its layers fell silent."""
    return _explorer(plots_sweep.layer_over_time, plots_sweep.pick_layers, rows, where)


def place_explorer(rows: list[dict], where: str) -> Explorer:
    """Pick an L1 of the recorded sweep: who fires by position and by byte."""
    return _explorer(plots_sweep.where_it_fires, plots_sweep.pick_where, rows, where)
