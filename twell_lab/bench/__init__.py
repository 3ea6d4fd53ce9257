"""Benchmarks: rows of records, never prose. May import sparsities and all below.

A new benchmark is a function of a file here that returns the steps of its record (`sections`), and a line in
`_SECTIONS` of app/recordings.py, which `twell-lab record NAME` runs."""

from .forward import ffn, kernel_versions, layer
from .models import model

__all__ = ["ffn", "kernel_versions", "layer", "model"]
