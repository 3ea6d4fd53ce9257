"""Notebook 05: three ways to a model whose neurons are silent (cut it, convert it, train it), and what each costs."""
