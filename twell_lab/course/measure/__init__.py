"""Notebooks 00 and 01: times of sparse and dense products on this machine."""

from ...bench.density import DENSITIES, DENSITY, SIZES, against_density, clock, multipliers, scattered
from . import figures
from .data import (
    as_fast,
    compare,
    cut_trained,
    median,
    ms,
    plain_calls,
    recorded,
    recorded_calls,
    recorded_layers,
    recorded_zeros,
    relative_error,
    threshold_sweep,
    turning,
    weights_or_activations,
)
