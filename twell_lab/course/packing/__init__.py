"""Notebook 07: one matrix in five formats, and TwELL word by word."""

from . import figures
from .data import (
    forms,
    found_by,
    geometries,
    geometry_sentence,
    one_tile,
    row_errors,
    same_bits,
    sizes,
    toy_unpack,
    view,
    warp_slots,
)
