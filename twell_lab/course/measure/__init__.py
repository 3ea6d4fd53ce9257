"""Notebooks 00 and 01: times of sparse and dense products on this machine."""

from ...bench.density import DENSITIES, DENSITY, SIZES, against_density, clock, multipliers, scattered
from . import figures
from .data import (
    break_even_sentence,
    calls_text,
    compare,
    cut_trained,
    median,
    ms,
    recorded,
    recorded_calls,
    recorded_layers,
    recorded_sentences,
    relative_error,
    threshold_sweep,
    weights_or_activations,
    zeros_sentence,
)
