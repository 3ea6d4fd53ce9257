"""The widget of notebook 04: pick a training run and see its neurons fall silent."""

from __future__ import annotations

from ..widgets import Explorer
from . import figures


def run_explorer(runs: dict[str, object]) -> Explorer:
    """Pick one of several training runs. runs: label -> TrainResult, or its summary()."""
    return Explorer(
        figures.picked_run(runs),
        lambda figure, index: figures.pick_run(figure, runs, index),
        [(label, label) for label in runs],
        "run",
    )
