"""Notebook 07: one matrix in five formats, and TwELL word by word."""

from . import figures
from .data import geometries, one_tile, row_errors, same_bits, smallest, toy_unpack, warp_slots
