"""Kernels that the reader writes, in the notebook of CUDA puzzles and in later ones: judged at once, and drawn."""

from . import figures
from .cases import PUZZLES
from .data import judge, standing, trace_of
