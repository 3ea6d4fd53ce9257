"""Notebook 07: one matrix in five formats, and TwELL word by word."""

from . import figures
from .data import one_tile, row_errors, same_bits, toy_unpack, warp_slots
