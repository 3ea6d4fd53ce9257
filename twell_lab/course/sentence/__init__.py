"""Notebooks 00 and 05: a sentence of the reader's own, read by small models whose quiet neurons are cut."""

from .data import CUTS, SENTENCE, read, said, shipped, times, view
