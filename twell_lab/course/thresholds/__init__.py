"""Thresholds for models that were not trained to be sparse: drag a sparsity, see what it saves and costs."""

from . import figures
from .data import SPARSITIES, Counted, Step, clock, count, measure, sentence, view
