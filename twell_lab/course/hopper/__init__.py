"""Notebook 09, measured: recorded layers on Hopper GPUs, the planner's trials, and the reader's own times."""

from . import calls, figures
from .data import (
    UNIFORM,
    about,
    cells,
    decode,
    decode_table,
    estimates,
    headline,
    headline_table,
    losses,
    overflow_rows,
    overflow_table,
    plan_points,
    plan_sentences,
    recorded,
    shapes,
    shapes_table,
    summary,
    trained,
    trained_sentences,
    ways,
    yours,
)
