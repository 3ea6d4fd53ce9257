"""Block sparsity: whole blocks of a weight are zero, so that the others are small dense products for tensor cores.

    prune(model, mask=lambda weight: block_mask(weight, 0.9, 32))    # weights.prune; what is left trains on
    model = to_linears(model)
    fast = to_bsr_linear(layer, 32)    # a layer with torch's block-sparse tensor and its kernels
    y = block_linear(x, fast.weight)    # ops.block_linear: the same product by our kernel

Method: Narang et al., arXiv 1711.02782 (pruning by the size of blocks); Gray et al., "GPU kernels for block-sparse
weights", 2017.

**2:4 inside blocks**: `nested_mask` keeps two of each four weights, and then the blocks in which most is left. Where a
share s of the blocks is empty, (1 - s) / 2 of the weights are left: with three of four blocks empty, 12.5%. It is a
pattern to prune to, and no faster than blocks: both products above hold its blocks, and multiply them, as dense ones. A
kernel that read them as 2:4 would fetch 56% of W's bytes and all of x's, of which there are eight times as many with
blocks of 32 x 32: 5% less in all (docs/kernels/sm80_blocks.md). Nor do torch's 2:4 products serve: each would take one
row of blocks and the columns of x that it needs, and one such call costs the host more than all dense blocks cost.

Weights that were pruned one by one have few empty blocks. `group_columns` puts columns beside each other whose zeros
lie in the same rows, as others reorder matrices into blocks (Labini et al., arXiv 2202.05868); `empty_share` says what
it was worth. It finds structure that is there: where zeros are drawn independently, a block of 32 x 32 at 90% has a
value almost surely, and no order changes much.

As a path of a feed-forward layer: `tl.plan(..., paths=["blocks"])`, `tl.sparsify(model, "blocks")`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..cuda import sources
from ..formats.matrix import as_matrix
from ..layers.paths.converted import Products
from ..layers.paths.cost import Work
from ..ops import block_linear
from ..ops.checks import needs_gradient
from .two_four import two_four_mask
from .weights import check_sparsity, checked_linear, checked_weight, kept_of, largest

Size = int | tuple[int, int]

SMALLEST, LARGEST = 16, 128
NORMS = (1, 2, math.inf)


def _cut(matrix: Tensor, size: Size) -> Tensor:
    """A view of a matrix as its blocks, [rows / high, columns / wide, high, wide]. InputError for another size than its
    widths allow."""
    high, wide = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
    for each in (high, wide):
        if type(each) is not int or not SMALLEST <= each <= LARGEST:
            raise InputError(
                f"the block size is {size!r:.80}; a whole number from {SMALLEST} to {LARGEST}, or two, (rows, "
                "columns), is accepted"
            )
    rows, columns = matrix.shape
    if not rows or not columns or rows % high or columns % wide:
        raise InputError(
            f"blocks of {high} x {wide} do not divide a matrix of shape {[rows, columns]}; sizes that divide both are "
            "accepted"
        )
    return matrix.reshape(rows // high, high, columns // wide, wide).transpose(1, 2)


def block_mask(weight: Tensor, sparsity: float, size: Size = 32, *, norm: float = 2) -> Tensor:
    """Keep the blocks whose norm is largest.

    Args:
        weight: [out, in], floating-point values of 16 bits or more.
        sparsity: from 0 up to, but not, 1. Exactly round(sparsity * blocks) blocks go; of equal norms the last in row
            order.
        size: of a block: one number for a square, or (rows, columns); 16 to 128, and divisors of out and in.
        norm: of a block's values: 1 (sum of magnitudes), 2 (root of the sum of squares) or math.inf (the largest),
            computed in float64.

    Returns:
        bool [out, in], True for what is kept.

    Raises:
        InputError: for other arguments, and for a weight that is no matrix, on meta or not finite.
    """
    check_sparsity(sparsity)
    if isinstance(norm, bool) or norm not in NORMS:
        raise InputError(f"norm is {norm!r:.80}; accepted: 1, 2 and math.inf")
    blocks = _cut(checked_weight(weight), size)
    norms = torch.linalg.vector_norm(blocks, norm, dim=(2, 3), dtype=torch.float64)
    kept = largest(norms, kept_of(norms.numel(), sparsity))
    return kept[:, :, None, None].expand(blocks.shape).transpose(1, 2).reshape(weight.shape)


def empty_share(matrix: Tensor, size: Size = 32) -> float:
    """The share of the blocks that hold zeros alone: what a block-sparse product may skip.

    matrix: [rows, columns], a weight or a mask. size: as in `block_mask`. Raises InputError for other sizes, and for
    what is no dense matrix that holds its values."""
    return 1 - _filled(matrix, size).double().mean().item()


def _filled(matrix: Tensor, size: Size) -> Tensor:
    """Which blocks hold a value that is not zero, bool [rows / high, columns / wide]."""
    return _cut(_used(matrix), size).any(3).any(2)


def _used(matrix: Tensor) -> Tensor:
    return (
        as_matrix(matrix.half() if isinstance(matrix, Tensor) and matrix.dtype == torch.bool else matrix).detach() != 0
    )


def group_columns(matrix: Tensor, size: Size = 32) -> Tensor:
    """An order of the columns that leaves more blocks empty, found greedily.

    Each block of columns begins with the column, of those left, that needs the most blocks of rows (has a value in
    them); it is filled with those that need the fewest blocks of rows more, of these with what needs the most of those
    that are needed already; of equal ones the first. Columns without values come last. Where that leaves no more blocks
    empty than the columns' own order, it is their own.

    Columns may be reordered if the inputs are: weight[:, order] takes x[..., order]. That costs nothing where the rows
    of the weight before it, and its bias, are reordered alike. For rows call it with the transpose, and `size` turned.
    Its time grows with the square of the columns.

    Args:
        matrix: [rows, columns], a weight or a mask.
        size: as in `block_mask`.

    Returns:
        int64 [columns], on the matrix's device: column order[i] comes to place i.

    Raises:
        InputError: as `empty_share`.
    """
    used = _used(matrix)
    own = torch.arange(used.shape[1], device=used.device)
    blocks = _cut(used, size)
    needs = blocks.any(2).flatten(1).cpu().double()  # [blocks of rows, columns]
    counts, rows, wide = needs.sum(0), len(blocks), blocks.shape[3]
    left, order = torch.ones(needs.shape[1], dtype=torch.bool), []
    covered = torch.zeros(rows, dtype=torch.float64)
    for place in range(needs.shape[1]):
        if place % wide == 0:
            covered = torch.zeros_like(covered)
            score = counts
        else:
            met = covered @ needs
            score = met - (rows + 1) * (counts - met)
        score = score.masked_fill(counts == 0, -(needs.numel() + 1.0))
        chosen = int(score.masked_fill(~left, -math.inf).argmax())
        left[chosen] = False
        covered = torch.maximum(covered, needs[:, chosen])
        order.append(chosen)
    found = torch.tensor(order, device=used.device)
    return found if empty_share(used[:, found], size) > empty_share(used, size) else own


def to_bsr(weight: Tensor, size: Size = 32) -> Tensor:
    """A weight as torch's block-sparse tensor (layout torch.sparse_bsr), which holds the blocks that are not all zero.

    `to_dense` gives every value back bit for bit, zeros as +0.

    Args:
        weight: [out, in], floating-point values of 16 bits or more.
        size: as in `block_mask`.

    Raises:
        InputError: for a size that does not divide, and for what is no dense matrix that holds its values.
    """
    matrix = as_matrix(weight).detach()
    return matrix.to_sparse_bsr(tuple(_cut(matrix, size).shape[2:]))


class BlockLinear(nn.Linear):
    """x W^T + b for inference, with W as torch's block-sparse tensor, whose product skips empty blocks: x
    [..., in_features], y [..., out_features]. Made by `to_bsr_linear`. torch does not copy or cast such a tensor, and
    its product has no gradient for x: copy, cast and train the dense layer, and make this one of it. To cast or move
    it is an InputError; so is an x that needs a gradient. The bias has one."""

    def forward(self, x: Tensor) -> Tensor:
        """y of x. InputError for another width, dtype or device, an x that needs a gradient, and under autocast."""
        cast = torch.is_autocast_enabled(x.device.type)
        if (
            x.shape[-1:] != (self.in_features,)
            or (x.dtype, x.device) != (self.weight.dtype, self.weight.device)
            or cast
        ):
            raise InputError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}{', under autocast' * cast}; {self.weight.dtype} "
                f"[..., {self.in_features}] on {self.weight.device} is accepted, without autocast"
            )
        if needs_gradient(x):
            raise InputError(
                "x needs a gradient, which torch's product of blocks does not have; x.detach(), torch.no_grad() and "
                "the dense layer are accepted"
            )
        return _product(x, self.weight, self.bias)

    def _apply(self, fn, recurse: bool = True):
        probe = torch.empty(0, dtype=self.weight.dtype, device=self.weight.device)
        if (fn(probe).dtype, fn(probe).device) != (probe.dtype, probe.device):
            raise InputError(
                "a BlockLinear is not cast or moved, since torch does neither with its weight; cast or move the dense "
                "layer, and make this one of it"
            )
        return self


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, weight.shape[1])
    # torch's Triton kernels take numbers of tokens that the rows of a block divide.
    missing = -len(rows) % weight.values().shape[1] if rows.is_cuda else 0
    y = F.linear(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias)
    return y[: len(rows)].reshape(*x.shape[:-1], weight.shape[0])


def to_bsr_linear(linear: nn.Linear, size: Size = 32) -> BlockLinear:
    """The layer with torch's block-sparse product. On a GPU torch runs its Triton kernels, which take float32 and 16
    bits, and block sizes that are powers of two; on a CPU MKL, which takes float32, float64 and square blocks.

    Args:
        linear: with whole blocks of zeros (`block_mask`). It is left as it was; the bias is shared.
        size: as in `block_mask`.

    Returns:
        A layer of the same widths, whose weight has no gradient.

    Raises:
        InputError: for a size that does not divide, or that the device's product does not take, as above; for a module
            that is not exactly an nn.Linear, or has hooks; and for a weight that is on meta or not finite.
    """
    weight = checked_weight(checked_linear(linear).weight)
    high, wide = _cut(weight, size).shape[2:]
    _check_product(weight, high, wide)
    made = BlockLinear(linear.in_features, linear.out_features, False, "meta", weight.dtype)
    made.weight = nn.Parameter(to_bsr(weight, size), requires_grad=False)
    made.bias = linear.bias
    return made.train(linear.training)


def _check_product(weight: Tensor, high: int, wide: int) -> None:
    """InputError where torch has no block-sparse product of such blocks on the weight's device."""
    if weight.device.type == "cpu":
        taken = high == wide and weight.dtype.itemsize >= 4
        accepted = "square blocks of float32 and float64"
    else:
        taken = not (high & (high - 1) or wide & (wide - 1)) and weight.dtype.itemsize <= 4
        accepted = "blocks of a power of two, of float32 and 16 bits"
    if not taken:
        where = weight.device.type
        raise InputError(f"blocks of {high} x {wide} of {weight.dtype} on {where}; accepted there: {accepted}")


# ---- 2:4 inside blocks ----


def nested_mask(weight: Tensor, sparsity: float, size: Size = 32, *, norm: float = 2) -> Tensor:
    """Keep the two largest of each four neighbours in a row (`two_four_mask`), and of the blocks those whose norm is
    then largest (`block_mask`, whose arguments, result and errors these are; sparsity: of the blocks)."""
    kept = two_four_mask(weight)
    return kept & block_mask(checked_weight(weight).masked_fill(~kept, 0), sparsity, size, norm=norm)


# ---- as a path ----

LEAST_EMPTY = 0.5  # of a projection's blocks, for it to be multiplied block by block
_SIZES = (128, 64, 32, 16)
_TOKENS = sources.number(block_linear.FILE, "BM")  # that the kernel computes with a block of W fetched once
_NEARLY = 1.1  # the largest blocks whose filled area is at most this many times that of the smallest are taken


class Blocks(Products):
    """A feed-forward layer whose weights have many empty blocks, through block-sparse products: each projection of
    which at least LEAST_EMPTY of the blocks are empty, the others densely. Exact: nothing is pruned. Blocks are squares
    of 16 to 128, the largest that leave nearly as much empty as small ones. Weights of 16 bits on a GPU from sm_80 on
    take the kernel of `ops.block_linear`, which needs less than half of the time of torch's at 90% (docs/measured.md),
    all others torch's products, as those of `BlockLinear`.

    It holds the filled blocks beside the weights. A row of x that is not finite gives NaN."""

    name = "blocks"
    patterned = True

    def product(self, weight: Tensor):
        made = to_bsr(weight, int(self.weigh(weight)[1]))
        if _has_kernel(weight):
            held = block_linear.BlockOperand(made)
            return held, [held.pointer, held.column, held.values, held.order]
        parts = [made.crow_indices(), made.col_indices(), made.values()]
        return lambda x, bias: _product(x, made, bias), parts

    def weigh(self, weight: Tensor) -> tuple[float, ...]:
        checked_weight(weight)
        sizes = [size for size in _SIZES if not any(each % size for each in weight.shape)]
        filled = {size: _filled(weight, size) for size in sizes if all(weight.shape)}
        if not filled:
            raise InputError(f"a weight of shape {list(weight.shape)}; multiples of {SMALLEST} are accepted for blocks")
        shares = {size: blocks.double().mean().item() for size, blocks in filled.items()}
        size = next(size for size in shares if shares[size] <= _NEARLY * min(shares.values()))
        _check_product(weight, size, size)
        if shares[size] > 1 - LEAST_EMPTY:
            raise InputError(
                f"{1 - shares[size]:.1%} of the weight's blocks of {size} x {size} are empty; at least "
                f"{LEAST_EMPTY:.0%} are accepted (block_mask)"
            )
        count = int(filled[size].sum())
        return count * (size * size * weight.dtype.itemsize + 8) + 8 * (len(weight) // size + 1), size, shares[size]

    def seconds(self, work: Work, n: int, k: int, counted: tuple[float, ...]) -> float:
        """As long as what takes longest: the filled blocks' operations, every tensor once from memory, or what a GPU's
        L2 cache serves: for each filled block the columns of x that it needs, and the block for each tile of tokens."""
        held, size, share = counted
        moved = held + work.tokens * (n + k) * work.itemsize
        tiles = -(-work.tokens // _TOKENS)
        served = share * n * k / size * (work.tokens + tiles * size) * work.itemsize
        rates = work.rates
        cached = served / rates.l2 if rates.cache else 0.0
        return max(2 * work.tokens * n * k * share / rates.matmul, moved / rates.bandwidth, cached)


def _has_kernel(weight: Tensor) -> bool:
    """Whether the kernel of ops.block_linear multiplies blocks of such a weight."""
    return (
        weight.is_cuda
        and weight.dtype in block_linear.DTYPES
        and torch.cuda.get_device_capability(weight.device) >= block_linear.OLDEST
    )


PATHS = (Blocks(),)
