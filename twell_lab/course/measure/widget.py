"""The widget of the first notebook: move a threshold on the gate."""

from __future__ import annotations

from ..widgets import Explorer
from . import figures


def threshold_explorer(sweep: dict) -> Explorer:
    """Move a threshold on the gate and see who still fires, the weights read and the error made.

    sweep: what `data.threshold_sweep` returned. The slider's values are its thresholds.
    """
    choices = [(f"{row['threshold']:.2f}", row["threshold"]) for row in sweep["rows"]]
    return Explorer(
        figures.threshold(sweep),
        lambda figure, index: figures.move_threshold(figure, sweep, index),
        choices,
        "threshold on the gate",
    )
