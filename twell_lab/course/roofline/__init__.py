"""Notebooks 09 and 11, computed: a layer's operations, bytes and least time; tiles, the pool, hot and cold neurons."""

from . import figures
from .data import (
    break_even,
    datasheet,
    floors,
    floors_table,
    gained,
    of_the_roof,
    other_tokens,
    packing_left,
    points,
    pool_table,
    pool_text,
    rates,
    read_back,
    split,
    split_sentence,
    story,
    versions,
    waves,
    work,
)
