"""The notebook on other sparsities: patterns of zeros in weights, what they cost a model, and what they gain."""

from . import figures
from .data import (
    begins,
    pays_after,
    products,
    pruned_losses,
    recorded,
    retrained,
    threshold_for,
    timed_here,
    view,
    weigh,
)
