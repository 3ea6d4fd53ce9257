"""Notebooks 00 and 01: times of sparse and dense products on this machine."""

from ...bench.comparison import DENSITIES, DENSITY, SIZES, against_density, scattered
from . import figures
from .data import (
    as_fast,
    clock,
    compare,
    cut_trained,
    median,
    ms,
    multipliers,
    recorded,
    recorded_calls,
    recorded_layers,
    relative_error,
    turning,
    weights_or_activations,
)
