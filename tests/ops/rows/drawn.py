"""What the cases draw: gates with hostile patterns of what fires, and layers around them."""

from __future__ import annotations

import torch
from torch import Tensor

CASES: list = []  # none of its own
PATTERNS = ("sparse", "dense", "silent", "all", "full tiles", "one over", "some over", "odd values")


def gate_of(pattern: str, rows: int, columns: int, dtype, tile: int = 256, words: int = 32) -> Tensor:
    """Return a gate [rows, columns], before its activation, in which what fires follows the named pattern."""
    draw = torch.Generator().manual_seed(rows * 7919 + columns)
    noise, value = torch.rand(rows, columns, generator=draw), torch.randn(rows, columns, generator=draw).abs() + 1e-3
    column, row = torch.arange(columns) % tile, torch.arange(rows)[:, None]
    if pattern == "odd values":  # NaN, infinities, denormals and negative zero
        odd = torch.tensor([torch.nan, torch.inf, 1e-41, 6e-8, -0.0, -torch.inf, -torch.nan])
        value = torch.where(noise < 0.05, odd[(noise * 1e6).long() % 7], value)
    fires = {
        "sparse": noise < 0.02,
        "dense": noise < 0.6,
        "silent": noise < 0,
        "all": noise >= 0,
        "full tiles": (column < words - 1).expand(rows, -1),  # exactly as many as there are slots
        "one over": (column >= tile - words).expand(rows, -1),
        "some over": noise < torch.where(row % 5 == 0, 0.5, 0.01),
        "odd values": noise < 0.1,
    }[pattern]
    return torch.where(fires, value, -value).to(dtype)
