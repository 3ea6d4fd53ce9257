"""Notebook 02: a benchmark with its faults, each found by a clock or a count, and a checklist of five lines."""
