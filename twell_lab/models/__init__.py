"""Whole models: swapping their layers, ReLU or thresholds for others, and the course's own small one. May import
analysis and all below."""
