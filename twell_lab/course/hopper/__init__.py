"""Notebook 09: the Hopper kernels drawn and computed, recorded layers, and the reader's own times."""

from . import calls, drawings, figures
from .data import by_nnz, cells, crossing_sentence, losses, parts, parts_sentence, recorded, yours
from .tile import overflow, pack_row
