"""Kernels compiled, loaded and launched, whatever they compute. May import simulator, formats and core."""
