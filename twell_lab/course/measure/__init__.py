"""Notebooks 00 and 01: times of sparse and dense products on this machine, and how to measure them."""

from ...bench.density import DENSITIES, DENSITY, SIZES, against_density, clock, multipliers, scattered
from . import figures
from .data import (
    Queue,
    break_even_sentence,
    calls_text,
    compare,
    cut_trained,
    median,
    ms,
    one_by_one,
    recorded,
    recorded_calls,
    recorded_layers,
    recorded_sentences,
    relative_error,
    stop_watch,
    threshold_sweep,
    warm_and_cold,
    weights_or_activations,
    without_multiplying,
    zeros_sentence,
)
