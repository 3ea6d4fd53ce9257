"""The notebook on other sparsities: patterns of zeros in weights, what they cost a model, and what they gain."""

from . import figures
from .data import (
    conversions,
    crossing_lines,
    crossings,
    fastest,
    few_bits,
    patterns,
    products,
    pruned_losses,
    recorded,
    retrained,
    row_products,
    sentence,
    study,
    three_lines,
    threshold_for,
    timed_here,
    unstructured_in_blocks,
    view,
    weigh,
)
