"""Rows to be rounded to few bits: drawn, and beside torch's operations, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from twell_lab.ops.quantise_rows import quantise_rows
from twell_lab.sparsities.quantised import _rows


def draw(columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary rows, zeros, tiny and large ones, halves of steps, NaN and both infinities."""
    x = torch.randn(10, columns, generator=torch.Generator().manual_seed(seed))
    finite = torch.finfo(dtype)
    x[1], x[2], x[3] = 0, x[2] * finite.tiny, x[3].sign() * finite.max
    x[4] = torch.arange(columns) % 255 - 127 + 0.5
    x[4, 0] = 127
    x[5, -1], x[6, columns // 2], x[7, 0] = torch.nan, torch.inf, -torch.inf
    x[8, 0] = 1000
    return x.to(dtype)


def check(x: Tensor, kind: torch.dtype, versions=(None,), padded: int = 16) -> None:
    """Values and scales bit for bit, the rows of padding zero."""
    expected = _rows(x, kind)
    for version in versions:
        values, scale = quantise_rows(x, kind, padded, version)
        assert values.dtype == kind and len(values) == len(scale) == max(len(x), padded)
        raw = values.view(torch.int8)
        assert torch.equal(raw[: len(x)], expected.values.view(torch.int8)) and not raw[len(x) :].any()
        assert torch.equal(scale[: len(x)].nan_to_num(-1.0), expected.scale.nan_to_num(-1.0))
        assert not scale[len(x) :].any()
