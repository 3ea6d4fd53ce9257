"""blocks: a linear layer whose weight is block-sparse, y = x W^T + b on tensor cores (kernels/sm80_blocks.cu).

    weight = BlockOperand(to_bsr(w, 32))    # sparsities.blocks.to_bsr; checked once
    y = weight(x)                           # for many products

x [tokens, in] and y [tokens, out] lie as every other layer has them, and nothing is turned. torch's own product of the
same tensor, `F.linear(x, to_bsr(w, 32))`, runs Triton kernels. Blocks that are not stored are skipped: their zeros
times an infinity in x add nothing. CPU tensors are computed by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import DeviceError, InputError
from ..cuda.launch import Buffer, Call, Entry, Macros, Source, aligned, capability, layout, run, value
from ..formats.matrix import rows_of
from . import checks

VERSIONS = (1, 2)
DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability
STEP, LARGEST = 16, 128  # block sizes: multiples of STEP up to LARGEST
TILE_ROWS, _STAGES = 256, 4  # tokens of a tile; parts of the pipeline
_TILES = ((16, 16), (16, 32), (32, 32), (64, 32), (128, 32))  # columns of y, and steps along `in`
_MOST_TILES = 65535  # along y of a grid
_CHUNK = 2**22  # values that the product on a CPU gathers at a time


def _macros(dtype: torch.dtype, columns: int, step: int) -> tuple[Macros, int]:
    """The macros for a tile, and its bytes of dynamic shared memory."""
    shared = _STAGES * (TILE_ROWS + columns) * step * 2
    return (*value(dtype), ("BN", columns), ("BK", step), ("LAUNCH_SHARED", shared)), shared


BLOCKS = Source(
    "sm80_blocks",
    {f"blocks_v{version}": Entry(256, "pppppppiiiii") for version in VERSIONS},
    lambda dtype, widths, capability: [_macros(dtype, *tile)[0] for tile in _TILES] if dtype in DTYPES else [],
    (("BM", TILE_ROWS), ("STAGES", _STAGES)),
    OLDEST,
)
TOLERANCE = 1.0


def blocks(call: Call, x, pointer, column, values, bias, order, version: int = 2) -> Buffer:
    """Multiply x [tokens, in] with blocks, plus bias [out]: y [tokens, out]. x and values on 16-byte boundaries.

    pointer: int32 [block rows + 1]; column: int32 [blocks]; values: [blocks, high, wide]; order: int32 [block rows],
    those with the most blocks first, so that none is left over at the end. Takes the largest tile that divides the
    blocks."""
    (tokens, inner), (_, high, wide) = x.shape, values.shape
    out = len(order) * high
    tile = max(tile for tile in _TILES if not (high % tile[0] or wide % tile[1]))
    macros, shared = _macros(x.dtype, *tile)
    kernel = BLOCKS.kernel(f"blocks_v{version}", macros, shared if version == 2 else 0)
    y = call.empty(tokens, out, dtype=x.dtype)
    if y.numel():
        given = (x, pointer, column, values, bias, order, y, tokens, inner, out, high, wide)
        call.launch(kernel, (out // tile[0], -(-tokens // TILE_ROWS)), *given)
    return y


def reference(x: Tensor, pointer: Tensor, column: Tensor, values: Tensor, bias: Tensor | None, order: Tensor) -> Tensor:
    """Return what `blocks` computes by torch's operations: float32 sums (float64 for float64), rounded once."""
    (blocks, high, wide), (tokens, _) = values.shape, x.shape
    row, dtype = rows_of(pointer), torch.promote_types(x.dtype, torch.float32)
    start = torch.zeros(len(order) * high, device=x.device) if bias is None else bias
    y, many = x.new_empty(tokens, len(start)), max(1, _CHUNK // max(1, blocks * max(high, wide)))
    for first in range(0, tokens, many):
        part = x[first : first + many].to(dtype)
        read = part.view(len(part), -1, wide)[:, column.long()]
        sums = start.to(dtype).expand(len(part), -1).reshape(len(part), -1, high).clone()
        sums.index_add_(1, row, torch.einsum("tbw,bhw->tbh", read, values.to(dtype)))
        y[first : first + many] = sums.view(len(part), -1)
    return y


class BlockOperand:
    """A block-sparse weight [out, in], checked and prepared once for any number of products. That waits for the device;
    a product does not. The weight's tensors are not copied, and their indices not to be changed afterwards; no gradient
    goes to its values.

    weight: of layout torch.sparse_bsr, of bfloat16 or float16, with blocks of multiples of 16 up to 128
    (`sparsities.blocks.to_bsr`). Raises InputError for anything else, for indices out of range and for a block that is
    stored twice, DeviceError for a GPU older than compute capability 8.0."""

    def __init__(self, weight: Tensor) -> None:
        if not isinstance(weight, Tensor) or weight.layout != torch.sparse_bsr or weight.dim() != 2:
            shown = weight.layout if isinstance(weight, Tensor) else type(weight).__name__
            raise InputError(f"the weight is {shown}; a torch.sparse_bsr matrix [out, in] is accepted")
        weight = weight.detach()
        values, pointer, column = weight.values().contiguous(), weight.crow_indices(), weight.col_indices()
        if values.dtype not in DTYPES or any(size % STEP or not 0 < size <= LARGEST for size in values.shape[1:]):
            raise InputError(
                f"the weight has blocks {list(values.shape[1:])} of {values.dtype}; multiples of {STEP} up to "
                f"{LARGEST} are accepted, of bfloat16 and float16"
            )
        if values.is_cuda and capability(values.device.index) < OLDEST:
            raise DeviceError(f"the weight is on {values.device}; a GPU of compute capability 8.0 or newer is accepted")
        self.shape, wide = tuple(weight.shape), values.shape[2]
        counts, across = pointer.diff(), self.shape[1] // wide
        rising = pointer[0] == 0 and pointer[-1] == len(column) and not (counts < 0).any()
        inside = rising and not ((column < 0) | (column >= across)).any()
        if not inside or (rows_of(pointer, len(column)) * across + column).unique().numel() != len(column):
            raise InputError("the weight has blocks outside of it or twice at one place; each place once is accepted")
        self.values = values if aligned(layout(values)) else values.clone()
        self.pointer, self.column = pointer.int(), column.int()
        self.order = counts.argsort(descending=True, stable=True).int()

    def __call__(self, x: Tensor, bias: Tensor | None = None, version: int | None = None) -> Tensor:
        """Return y [..., out] = x [..., in] W^T + bias [out], in x's dtype; sums in float32.

        version: of the kernel, 1 or 2, None for 2; a CPU takes None alone. Raises InputError for another x, bias or
        version, and where x or the bias needs a gradient, which this product does not have."""
        out, inner = self.shape
        same = {"dtype": self.values.dtype, "device": self.values.device}
        checks.check_tensor("x", x, **same)
        if bias is not None:
            checks.check_tensor("bias", bias, shape=(out,), **same)
        accepted = (None, *VERSIONS) if x.is_cuda else (None,)
        if x.shape[-1] != inner or version not in accepted or checks.needs_gradient(x, bias):
            raise InputError(
                f"x is {list(x.shape)} and version {version}, on {x.device}; [..., {inner}] and {accepted} are "
                "accepted, without a gradient"
            )
        rows = x.detach().reshape(-1, inner).contiguous()
        rows = rows if aligned(layout(rows)) else rows.clone()
        if -(-len(rows) // TILE_ROWS) > _MOST_TILES:
            raise InputError(f"x has {len(rows):,} tokens; up to {_MOST_TILES * TILE_ROWS:,} are accepted")
        bias = None if bias is None else bias.detach().contiguous()
        given = (rows, self.pointer, self.column, self.values, bias, self.order)
        y = run(blocks, *given, version or VERSIONS[-1]) if x.is_cuda else reference(*given)
        return y.view(*x.shape[:-1], out)
