"""Notebook 04: runs with more and more L1, and the trained models in data/checkpoints."""

from . import figures
from .data import checkpoint, recorded, renewed, rows, where
