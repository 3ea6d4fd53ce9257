"""Sparse matrix formats over torch tensors, exact both ways. Imports core alone."""

from .classic import COO, CSR, ELL, Hybrid
from .matrix import as_tensor
from .twell import (
    POOL_ROWS,
    POOL_WORDS,
    TILE,
    VALUE_DTYPES,
    WORDS,
    TwELL,
    check_geometry,
    fires,
    join_words,
    split_words,
    tail_of,
    word_dtype,
)

__all__ = [
    "COO",
    "CSR",
    "ELL",
    "POOL_ROWS",
    "POOL_WORDS",
    "TILE",
    "VALUE_DTYPES",
    "WORDS",
    "Hybrid",
    "TwELL",
    "as_tensor",
    "check_geometry",
    "fires",
    "join_words",
    "split_words",
    "tail_of",
    "word_dtype",
]
