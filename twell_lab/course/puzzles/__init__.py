"""The notebook of CUDA puzzles: twelve kernels that the reader writes, each judged at once and drawn."""

from . import figures
from .cases import PUZZLES
from .data import Verdict, judge, standing, trace_of
