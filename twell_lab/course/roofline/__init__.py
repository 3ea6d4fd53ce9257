"""Notebooks 09 and 11, computed: a layer's operations, bytes and least time; versions, tiles and the pool."""

from . import figures
from .data import (
    datasheet,
    floors,
    gained,
    of_the_peak,
    peaks,
    points,
    pool_table,
    rates,
    versions,
    waves,
    work,
)
