"""Notebook 11: the backward pass by hand , training steps recorded and timed here, a run that switches layers."""
