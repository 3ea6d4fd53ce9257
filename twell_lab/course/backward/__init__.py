"""Notebook 11: the backward pass by hand (data), recorded steps (measured), a run that switches layers (live)."""
