"""Notebook 08: kernels stepped through, counted, compared with recorded times, and broken, in the simulator."""

from . import figures
from .data import Layer, against_time, fault_of, gate, recorded, yours
