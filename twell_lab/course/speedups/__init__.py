"""Notebook 13: how a layer's speedup becomes a model's, recorded and measured here."""
