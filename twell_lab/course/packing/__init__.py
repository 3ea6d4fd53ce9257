"""Notebook 07: one matrix in five formats, and TwELL word by word."""

from . import figures
from .data import (
    forms,
    found_by,
    geometries,
    one_tile,
    row_errors,
    same_bits,
    sizes,
    toy_unpack,
    usual,
    view,
    warp_slots,
)
