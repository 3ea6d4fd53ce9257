"""Notebook 04, recorded: the L1 sweep of a larger model, and the trained models in data/checkpoints."""

from . import figures
from .data import checkpoint, checkpoints, recorded, renewed, where
