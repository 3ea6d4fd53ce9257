"""Notebook 11: the backward pass by hand (data), recorded steps (measured), a run that switches layers (live)."""

from . import figures, live, measured
from .data import (
    Case,
    by_neuron,
    by_row,
    capacity_sweep,
    dense_floor,
    dense_saved,
    different_sums,
    drawn,
    exact,
    floors,
    full,
    hybrid,
    parts,
    rooms,
    saved_tensors,
    sparse_saved,
    worst,
)
