"""Notebook 09: the Hopper kernels drawn and computed, recorded layers, and the reader's own times."""
