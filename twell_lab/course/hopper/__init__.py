"""Notebook 09: the Hopper kernels drawn and computed, recorded layers, and the reader's own times."""

from . import calls, drawings, figures
from .data import about, by_nnz, cells, crossing_sentence, losses, parts, parts_sentence, recorded, summary, yours
from .tile import neuron_at, overflow, pack_row, sizes, sums
