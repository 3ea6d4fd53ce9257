"""The widget of notebook 11: give the lists less room, and see which tokens are lost."""

from __future__ import annotations

from ..widgets import Explorer
from . import figures


def capacity_explorer(sweep: list[dict]) -> Explorer:
    """A slider over the capacities of a sweep. sweep: what `backward.capacity_sweep` returned."""
    return Explorer(
        figures.capacity(sweep),
        lambda figure, index: figures.move_capacity(figure, sweep, index),
        [(f"{row['capacity']:,}", row["capacity"]) for row in sweep],
        "room for kept values",
    )
