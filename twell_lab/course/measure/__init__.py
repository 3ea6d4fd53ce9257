"""Notebooks 00 and 01: times of sparse and dense products on this machine."""

from ...bench.comparison import DENSITIES, DENSITY, FORMATS, SIZES, against_density, scattered
from . import figures
from .data import as_fast, clock, compare, median, ms, ratios, recorded, recorded_calls, relative_error, runs_here
