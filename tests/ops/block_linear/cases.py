"""Block-sparse weights, inputs and a check that the tests of the blocks share, on a CPU and on a GPU."""

import torch

from twell_lab.ops import accuracy
from twell_lab.ops.block_linear import BlockOperand
from twell_lab.sparsities.blocks import to_bsr


def draw(high, wide, rows, columns, dtype, density=0.5, seed=0):
    """W of rows x columns blocks; of three rows of blocks and more one is full and one is empty."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, 1, columns, 1, generator=generator) < density
    if rows > 2 and 0 < density < 1:
        kept[1], kept[2] = True, False
    return (torch.randn(rows, high, columns, wide, generator=generator) * kept).reshape(rows * high, -1).to(dtype)


def inputs(tokens, w, seed=0):
    """x [tokens, in], of which a row is not finite, and a bias [out]."""
    generator = torch.Generator().manual_seed(seed)
    x, bias = torch.randn(tokens, w.shape[1], generator=generator), torch.randn(len(w), generator=generator)
    if tokens > 4:
        x[3] = torch.inf
    return x.to(w.dtype), bias.to(w.dtype)


def assert_right(y, x, w, bias, size):
    """Beside float64 and torch's dense layer, where x is finite; where it is not, blocks that are not stored still give
    nothing."""
    dense, exact = (
        torch.nn.functional.linear(*(t.to(dtype) for t in (x, w, bias))) for dtype in (w.dtype, torch.float64)
    )
    finite = x.isfinite().all(1)
    assert accuracy.worst_row(y[finite], dense[finite], exact[finite])[0] <= 1.0
    high, wide = size
    empty = ~(w != 0).view(len(w) // high, high, -1).any(2).any(1).repeat_interleave(high)
    assert torch.equal(y[:, empty], bias[empty].expand(len(y), -1))
    assert not y[~finite][:, ~empty].isfinite().any()


def operand(w, size):
    return BlockOperand(to_bsr(w, size))
