"""Notebook 05: three ways to a model whose neurons are silent (cut it, convert it, train it), and what each costs."""

from . import figures
from .data import (
    HERE,
    MODEL,
    ON,
    Judged,
    better,
    by_layer,
    converted,
    cut,
    cut_to,
    further,
    judge,
    nearest,
    recorded,
    shipped,
    smooth,
    span,
    to_relu,
    trained,
)
