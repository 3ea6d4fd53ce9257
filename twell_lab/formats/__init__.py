"""Sparse matrix formats over torch tensors, exact both ways. Imports core alone."""

from .classic import COO, CSR, ELL, Hybrid
from .matrix import Format, as_matrix, as_tensor, check_tensor, dtype_names, row_pointers, rows_of
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
    packed_and_pool,
    split_words,
    tail_of,
    word_dtype,
)
