"""Whole models: swapping their layers, making them ReLU models, and the course's own small one. May import analysis and
all below."""
