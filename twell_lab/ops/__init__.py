"""The operators, and how the kernels of each are launched. May import cuda, simulator, formats and core."""

from .inference import infer
from .operators import gated_ffn, pack, packed_down, packed_gated, plain_ffn

__all__ = ["gated_ffn", "infer", "pack", "packed_down", "packed_gated", "plain_ffn"]
