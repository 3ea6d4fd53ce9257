"""The widget of notebook 09: move the cut between hot and cold neurons."""

from __future__ import annotations

from ..widgets import Explorer
from . import figures


def cut_explorer(shares: list[float], rows: list[dict]) -> Explorer:
    """A slider over numbers of hot neurons. shares: of tokens, for each neuron; rows: data.split of the same shares."""
    return Explorer(
        figures.cut(shares, rows),
        lambda figure, index: figures.move_cut(figure, rows, index),
        [(f"{row['hot']:,}", row["hot"]) for row in rows],
        "hot neurons",
    )
