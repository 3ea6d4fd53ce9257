"""Notebook 05: three ways to a model whose neurons are silent (cut it, convert it, train it), and what each costs."""

from . import figures
from .data import (
    MODEL,
    ON,
    Judged,
    by_layer,
    converted,
    cut,
    cut_to,
    exact_sentence,
    further,
    judge,
    recorded,
    shipped,
    smooth,
    span,
    table,
    three_lines,
    to_relu,
    trained,
)
