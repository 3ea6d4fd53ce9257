"""Notebook 04, trained live: small models with and without the L1 term, and which neurons still fire in them."""

from . import figures
from .data import (
    SMALL,
    dead_seen_in,
    first_token_sentence,
    held_out,
    nnz_by_position,
    pull,
    skew_sentence,
    some_text,
    table,
    verdicts,
)
