"""Block sparsity: whole blocks of a weight are zero, so that the others are small dense products for tensor cores.

    prune(model, mask=lambda weight: block_mask(weight, 0.9, 32))    # sparsities.magnitude; what is left trains on
    fast = BlockOperand(to_bsr(weight, 32))    # ops.blocks: our kernel, for weights of 16 bits on a GPU
    y = fast(x)                                # x weight^T; F.linear(x, to_bsr(weight, 32)) is torch's own
    tl.sparsify(model, "blocks")               # as a path of feed-forward layers, or tl.plan(..., paths=["blocks"])

Method: Narang et al., arXiv 1711.02782 (pruning by the size of blocks); Gray et al., "GPU kernels for block-sparse
weights", 2017. Weights that were pruned one by one have few empty blocks; `group_columns` puts columns beside each
other whose zeros lie in the same rows (Labini et al., arXiv 2202.05868), and `empty_share` says what it was worth."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import InputError
from ..formats.matrix import as_matrix
from ..ops import blocks as kernel
from .checks import checked_weight
from .magnitude import kept_of, largest
from .products import Product, Products
from .two_four import two_four_mask

Size = int | tuple[int, int]

SMALLEST, LARGEST, _SIZES = 16, 128, (128, 64, 32, 16)
LEAST_EMPTY = 0.5  # of a projection's blocks, for it to be multiplied block by block
_NEARLY = 1.1  # the largest blocks whose filled area is at most this many times that of the smallest are taken


def _cut(matrix: Tensor, size: Size) -> Tensor:
    """Return a view of a matrix as its blocks, [rows / high, columns / wide, high, wide]."""
    high, wide = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    rows, columns = matrix.shape
    fits = all(type(n) is int and SMALLEST <= n <= LARGEST for n in (high, wide))
    if not fits or not rows or not columns or rows % high or columns % wide:
        raise InputError(
            f"the block size is {size!r:.80} for a matrix of shape {[rows, columns]}; a whole number from {SMALLEST} "
            f"to {LARGEST} that divides both, or two, (rows, columns), is accepted"
        )
    return matrix.reshape(rows // high, high, columns // wide, wide).transpose(1, 2)


def block_mask(weight: Tensor, sparsity: float, size: Size = 32) -> Tensor:
    """Keep the blocks whose sum of squares is largest, of equal ones the first: bool [out, in], True for what is kept.
    Exactly round(sparsity * blocks) go. weight: [out, in], finite. size: of a block: one number for a square, or (rows,
    columns); 16 to 128, and divisors of out and in. InputError for others."""
    blocks = _cut(checked_weight(weight), size)
    norms = torch.linalg.vector_norm(blocks, dim=(2, 3), dtype=torch.float64)
    kept = largest(norms, kept_of(norms.numel(), sparsity))
    return kept[:, :, None, None].expand(blocks.shape).transpose(1, 2).reshape(weight.shape)


def nested_mask(weight: Tensor, sparsity: float, size: Size = 32) -> Tensor:
    """Keep the two largest of each four neighbours in a row, and of the blocks those in which most is left: a pattern
    to prune to, no faster than blocks. Arguments, result and errors are those of `block_mask`."""
    kept = two_four_mask(weight)
    return kept & block_mask(checked_weight(weight).masked_fill(~kept, 0), sparsity, size)


def _used(matrix: Tensor, size: Size) -> Tensor:
    """Return which values of a weight or a mask are not zero, by blocks as `_cut` gives them."""
    is_mask = isinstance(matrix, Tensor) and matrix.dtype == torch.bool
    return _cut(as_matrix(matrix.half() if is_mask else matrix).detach() != 0, size)


def empty_share(matrix: Tensor, size: Size = 32) -> float:
    """Return the share of the blocks of a weight or mask [rows, columns] that hold zeros alone. InputError as of
    `block_mask`, and for what is no dense matrix."""
    return 1 - _used(matrix, size).any(3).any(2).double().mean().item()


def group_columns(matrix: Tensor, size: Size = 32) -> Tensor:
    """Find an order of the columns that leaves more blocks empty, greedily: int64 [columns], their own where none does.
    weight[:, order] takes x[..., order]. Arguments and errors as `empty_share`. Its time grows with the square of the
    columns. Each block of columns begins with the column, of those left, that has values in the most blocks of rows; it
    is filled with those that need the fewest blocks of rows more, of these with what shares the most."""
    needs = _used(matrix, size).any(2).double()  # [blocks of rows, blocks of columns, columns of a block]
    wide = needs.shape[2]
    needs = needs.flatten(1).cpu()
    counts, order = needs.sum(0), []
    unused, taken = counts == 0, torch.zeros_like(counts, dtype=torch.bool)
    for place in range(len(counts)):
        if place % wide == 0:
            covered, score = torch.zeros(len(needs), dtype=torch.float64), counts.clone()
        else:
            met = covered @ needs
            score = met - (len(needs) + 1) * (counts - met)
        score[unused], score[taken] = -(needs.numel() + 1.0), -math.inf
        chosen = int(score.argmax())
        taken[chosen] = True
        covered = torch.maximum(covered, needs[:, chosen])
        order.append(chosen)
    grouped = torch.tensor(order, device=matrix.device)
    better = empty_share(matrix[:, grouped], size) > empty_share(matrix, size)
    return grouped if better else torch.arange(len(order), device=matrix.device)


def to_bsr(weight: Tensor, size: Size = 32) -> Tensor:
    """Return a weight [out, in] as torch's block-sparse tensor (layout torch.sparse_bsr) of the blocks that are not all
    zero, exactly, zeros as +0. InputError as `empty_share`."""
    matrix = as_matrix(weight).detach()
    return matrix.to_sparse_bsr(tuple(_cut(matrix, size).shape[2:]))


class Blocks(Products):
    """Block-sparse products for each projection of which at least LEAST_EMPTY of the blocks are empty: of 16 bits by
    ops.blocks, on GPUs from sm_80 on, others by torch. Exact. The layer owns the filled blocks."""

    name = "blocks"
    patterned = True

    def product(self, weight: Tensor) -> Product:
        size, share = fitting(weight)
        if share > 1 - LEAST_EMPTY:
            found = f"{1 - share:.1%} of the weight's blocks of {size} x {size} are empty"
            raise InputError(f"{found}; at least {LEAST_EMPTY:.0%} are accepted (block_mask)")
        blocks = to_bsr(weight, size)
        capability = torch.cuda.get_device_capability(weight.device) if weight.is_cuda else kernel.OLDEST
        by_kernel = weight.dtype in kernel.DTYPES and capability >= kernel.OLDEST
        return kernel.BlockOperand(blocks) if by_kernel else partial(_by_torch, blocks)


def fitting(weight: Tensor) -> tuple[int, float]:
    """Return the size of the largest squares that leave nearly as much of a weight empty as small ones, and the share
    of them that is filled."""
    sizes = [size for size in _SIZES if not any(n % size or not n for n in weight.shape)]
    if not sizes:
        raise InputError(f"a weight of shape {list(weight.shape)}; multiples of {SMALLEST} are accepted for blocks")
    shares = {size: 1 - empty_share(weight, size) for size in sizes}
    return next((size, share) for size, share in shares.items() if share <= _NEARLY * min(shares.values()))


def _by_torch(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, weight.shape[1])
    # torch's Triton kernels take numbers of tokens that the rows of a block divide.
    missing = -len(rows) % weight.values().shape[1] if rows.is_cuda else 0
    y = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
    return y[: len(rows)].reshape(*x.shape[:-1], weight.shape[0])
