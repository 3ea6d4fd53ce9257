"""Notebook 02, recorded: an L1 sweep of a larger model, and the two models of it that are shipped."""

from . import figures
from .data import (
    awake,
    checkpoint,
    position_sentence,
    quality,
    recorded,
    renewed_sentences,
    settled_sentence,
    table,
    verdict,
    where,
)
