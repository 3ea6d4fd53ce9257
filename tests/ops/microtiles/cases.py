"""Sparse matrices of micro-tiles, and what must be found in them."""

import torch

from twell_lab.ops import microtiles


def draw(rows, width, dtype, share=0.3, seed=0):
    """Columns of 16 rows that hold random values, a share of them; zeros of both signs elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=draw)
    used = torch.rand(-(-rows // 16), width, generator=draw) < share
    signs = torch.where(torch.rand(rows, width, generator=draw) < 0.5, -0.0, 0.0)
    a = torch.where(used.repeat_interleave(16, 0)[:rows], values, signs)
    a[rows // 2, width // 3] = torch.nan
    return a.to(dtype)


def expected(a, height):
    """Counts, and for each stripe its columns and their values, by plain indexing."""
    found = []
    for stripe in a.split(height):
        column = (stripe != 0).any(0).nonzero()[:, 0]
        values = stripe[:, column].t()
        found.append((column, torch.nn.functional.pad(values, (0, height - len(stripe)))))
    return found


def check_found(a, height, version=None):
    counts, columns, values = microtiles.find(a, height, version)
    wanted = expected(a, height)
    assert counts.tolist() == [len(column) for column, _ in wanted]
    for i, (column, value) in enumerate(wanted):
        assert torch.equal(columns[i, : len(column)].long(), column)
        assert torch.equal(values[i, : len(column)].view(torch.int16), value.contiguous().view(torch.int16))
