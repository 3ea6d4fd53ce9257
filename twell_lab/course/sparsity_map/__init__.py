"""The notebook on other sparsities: patterns of zeros in weights, what they cost a model, and what they gain."""

from . import figures
from .data import (
    begins_sentence,
    few_bits,
    paid,
    patterns,
    pruned_losses,
    recorded,
    retrained,
    row_products,
    study,
    three_lines,
    threshold_for,
    timed_here,
    unstructured_in_blocks,
    view,
    weigh,
)
