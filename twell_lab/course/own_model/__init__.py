"""The workshop "your own model": read one, look it over, and say from the numbers what to do with it."""

from . import figures
from .data import (
    Own,
    cut,
    decide,
    gains,
    gains_table,
    go_on,
    logits,
    never_sparse,
    off,
    read,
    some_text,
    trained,
    windows,
)
