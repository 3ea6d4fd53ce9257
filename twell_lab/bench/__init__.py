"""Benchmarks: rows of records, never prose. May import sparsities and all below."""

from .forward import ffn, kernel_versions, layer
from .models import model

__all__ = ["ffn", "kernel_versions", "layer", "model"]
