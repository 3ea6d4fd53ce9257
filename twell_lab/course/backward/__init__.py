"""Notebook 11: the backward pass by hand (data), recorded steps (measured), a run that switches layers (live)."""

from . import figures, live, measured
from .data import (
    Case,
    break_even_sentences,
    by_neuron,
    by_row,
    capacity_sweep,
    census,
    dense_floor,
    dense_saved,
    different_sums,
    drawn,
    exact,
    floors,
    hybrid,
    memory_sentence,
    memory_table,
    parts,
    rooms,
    saved_tensors,
    sparse_saved,
    worst,
)
