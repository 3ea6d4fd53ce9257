"""Notebook 07: one matrix in five formats, and TwELL word by word."""

from . import figures
from .data import (
    forms,
    found_by,
    framed,
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
