"""Matrices and checks that the tests of the sparse products share, on a CPU and on a GPU."""

import torch

from twell_lab.formats import COO, CSR, ELL
from twell_lab.ops import accuracy
from twell_lab.ops.spmm import SparseOperand

FORMATS = (COO, CSR, ELL)


def draw(rows, columns, density, dtype, seed=0):
    """A [rows, columns]; with three rows and more, one is full and one is empty."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rows, columns, generator=generator)
    a *= torch.rand(rows, columns, generator=generator) < density
    if rows > 2 and 0 < density < 1:
        a[1], a[2] = torch.randn(columns, generator=generator), 0
    return a.to(dtype)


def skewed(dtype):
    """Rows of 0 to 1,500 entries: full ones first, last, side by side and alone, and many empty rows in between."""
    counts = torch.zeros(60, dtype=torch.long)
    counts[[0, 20, 21, 59]], counts[[22, 40, 41, 42]], counts[43:50] = 1500, torch.tensor([256, 257, 1, 31]), 33
    generator = torch.Generator().manual_seed(1)
    a = torch.zeros(60, 1500)
    for row, count in enumerate(counts.tolist()):
        a[row, torch.randperm(1500, generator=generator)[:count]] = torch.randn(count, generator=generator)
    return a.to(dtype)


def check(a, n, formats=FORMATS, *, again=True):
    """Every version of every format, beside float64 and torch's dense product; and the same bits again."""
    b = torch.randn(a.shape[1], n, generator=torch.Generator().manual_seed(2)).to(a)
    exact, dense = a.double() @ b.double(), a @ b
    for each in formats:
        left = SparseOperand(each.from_dense(a))
        assert left.versions(b) == ((1, 2, 3, 4) if n * b.itemsize % 16 == 0 else (1, 2))
        for version in (None, *left.versions(b)):
            c = left(b, version)
            assert c.dtype == a.dtype and c.shape == exact.shape and c.is_contiguous()
            if not c.numel():
                continue
            assert accuracy.worst_row(c, dense, exact)[0] <= 1.0, (each, version)
            assert not c[(a == 0).all(1)].any(), "rows without entries are zero"
            assert not again or torch.equal(c, left(b, version))
