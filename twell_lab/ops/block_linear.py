"""A linear layer whose weight is block-sparse, y = x W^T + b on tensor cores, and how its kernel is launched
(kernels/sm80_blocks.cu).

    weight = BlockOperand(to_bsr(w, 32))    # sparsities.blocks.to_bsr; checked once,
    y = weight(x)                           # for many products

The roles are those of a linear layer: x [tokens, in] and y [tokens, out] lie as every other layer has them, and nothing
is turned. (A product W B with a dense B [in, n] is this with x = B^T.) torch's own product of the same tensor,
`F.linear(x, to_bsr(w, 32))`, runs Triton kernels.

Blocks that are not stored are skipped, as in torch's sparse products: their zeros times an infinity in x add nothing.
CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors are computed by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import DeviceError, InputError
from ..cuda import launcher, macros, sources
from ..formats.matrix import rows_of
from .checks import needs_gradient

FILE = "sm80_blocks.cu"
VERSIONS = (1, 2)
DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability
STEP, LARGEST = 16, 128  # block sizes: multiples of STEP up to LARGEST
_ROWS = sources.number(FILE, "BM")  # tokens of a tile
_MOST_TILES = 65535  # along y of a grid
_MOST = 2**31 - 1  # in, out, blocks
_CHUNK = 2**22  # values that the product on a CPU gathers at a time


def block_linear(
    x: Tensor, weight: Tensor | BlockOperand, bias: Tensor | None = None, version: int | None = None
) -> Tensor:
    """y [..., out] = x [..., in] W^T + bias [out], in x's dtype; sums in float32.

    Args:
        x: bfloat16 or float16 as W, on its device; one that is not contiguous is copied.
        weight: a tensor of layout torch.sparse_bsr [out, in], which is checked anew in each call (that waits for the
            device), or a BlockOperand, which is not.
        bias: of x's dtype and device, or None.
        version: of the kernel, 1 or 2 as its source lists them; None: the fastest. A CPU takes None alone.

    Raises:
        InputError: for a weight that `BlockOperand` does not take, for another x, bias or version, and for an x or bias
            that needs a gradient, which this product does not have.
        DeviceError: for a GPU older than compute capability 8.0.
    """
    return (weight if isinstance(weight, BlockOperand) else BlockOperand(weight))(x, bias, version)


def every_version(
    x: Tensor, weight: Tensor | BlockOperand, bias: Tensor | None = None
) -> dict[str, Callable[[], Tensor]]:
    """y = x W^T + bias in each version of the kernel, for those who compare or time them: by its name ("blocks_v2"),
    rising, a function without arguments that returns y. x on a GPU. Raises as `block_linear`."""
    operand = weight if isinstance(weight, BlockOperand) else BlockOperand(weight)
    return {f"blocks_v{version}": partial(operand, x, bias, version) for version in VERSIONS}


class Launch(NamedTuple):
    """What one product launches."""

    entry: str
    defines: tuple
    shared: int  # bytes of dynamic shared memory
    grid: tuple[int, int]
    arguments: tuple


class BlockOperand:
    """A block-sparse weight [out, in], checked and prepared once for any number of products. That waits for the device;
    a product does not. The weight's tensors are not copied, and their indices not to be changed afterwards; no gradient
    goes to its values.

    Args:
        weight: of layout torch.sparse_bsr, of bfloat16 or float16, with blocks of multiples of 16 up to 128
            (`sparsities.blocks.to_bsr`).

    Raises:
        InputError: for anything else, for indices out of range and for a block that is stored twice.
        DeviceError: for a GPU older than compute capability 8.0.
    """

    def __init__(self, weight: Tensor) -> None:
        if not isinstance(weight, Tensor) or weight.layout != torch.sparse_bsr or weight.dim() != 2:
            shown = weight.layout if isinstance(weight, Tensor) else type(weight).__name__
            raise InputError(f"the weight is {shown}; a torch.sparse_bsr matrix [out, in] is accepted")
        weight = weight.detach()
        values = weight.values()
        if values.dtype not in DTYPES or any(size % STEP or not 0 < size <= LARGEST for size in values.shape[1:]):
            raise InputError(
                f"the weight has blocks {list(values.shape[1:])} of {values.dtype}; multiples of {STEP} up to "
                f"{LARGEST} are accepted, of bfloat16 and float16"
            )
        if values.is_cuda and launcher.capability(values.device.index) < OLDEST:
            raise DeviceError(f"the weight is on {values.device}; a GPU of compute capability 8.0 or newer is accepted")
        self.shape = tuple(weight.shape)
        self.values = values.contiguous()
        if not launcher.aligned(self.values):
            self.values = self.values.clone()
        self.high, self.wide = values.shape[1:]
        pointer, column = weight.crow_indices(), weight.col_indices()
        _check(pointer, column, self.shape[0] // self.high, self.shape[1] // self.wide)
        self.pointer, self.column = pointer.to(torch.int32), column.to(torch.int32)
        # Those with the most blocks start first, so that none is left over at the end.
        self.order = pointer.diff().argsort(descending=True, stable=True).to(torch.int32)

    @property
    def nnz(self) -> int:
        """How many blocks are stored."""
        return len(self.values)

    def __call__(self, x: Tensor, bias: Tensor | None = None, version: int | None = None) -> Tensor:
        """y = x W^T + bias, as `block_linear`."""
        out, inner = self.shape
        if not isinstance(x, Tensor) or x.layout != torch.strided or not x.dim() or x.shape[-1] != inner:
            shown = f"{x.layout} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"x is {shown}; a dense tensor [..., {inner}] is accepted")
        for name, t in (("x", x), ("bias", bias)):
            if t is not None and (t.dtype != self.values.dtype or t.device != self.values.device):
                raise InputError(
                    f"{name} is {t.dtype} on {t.device}; {self.values.dtype} on {self.values.device}, as the weight, "
                    "is accepted"
                )
        if bias is not None and bias.shape != (out,):
            raise InputError(f"bias is {list(bias.shape)}; [{out}] is accepted")
        if needs_gradient(x, bias):
            raise InputError("x or bias needs a gradient, which this product does not have; .detach() is accepted")
        accepted = VERSIONS if x.is_cuda else ()
        if version not in (None, *accepted):
            raise InputError(
                f"version is {version} on {x.device}; {', '.join(map(str, (None, *accepted)))} is accepted"
            )
        rows = x.reshape(-1, inner).contiguous()
        if not launcher.aligned(rows):
            rows = rows.clone()
        if -(-len(rows) // _ROWS) > _MOST_TILES:
            raise InputError(f"x has {len(rows):,} tokens; up to {_MOST_TILES * _ROWS:,} are accepted")
        y = rows.new_empty(len(rows), out)
        if y.numel() and x.is_cuda:
            made = self.launch(rows, bias, y, version or VERSIONS[-1])
            launcher.kernel(FILE, made.entry, made.defines, made.shared).launch(x.device, made.grid, made.arguments)
        elif y.numel():
            self._on_cpu(rows, bias, y)
        return y.reshape(*x.shape[:-1], out)

    def launch(self, x: Tensor, bias: Tensor | None, y: Tensor, version: int) -> Launch:
        """What computes y [tokens, out] of x [tokens, in], both contiguous and on 16-byte boundaries."""
        (out, inner), tokens = self.shape, len(x)
        defines, shared = macros.blocks(x.dtype, self.high, self.wide)
        grid = out // dict(defines)["BN"], -(-tokens // _ROWS)
        bias = None if bias is None else bias.contiguous()
        tensors = (x, self.pointer, self.column, self.values, bias, self.order, y)
        arguments = (*tensors, tokens, inner, out, self.high, self.wide)
        return Launch(f"blocks_v{version}", defines, shared if version == 2 else 0, grid, arguments)

    def _on_cpu(self, x: Tensor, bias: Tensor | None, y: Tensor) -> None:
        row, values = rows_of(self.pointer), self.values.float()
        start = torch.zeros(self.shape[0]) if bias is None else bias.float()
        many = max(1, _CHUNK // max(1, self.nnz * max(self.high, self.wide)))
        for first in range(0, len(x), many):
            part = x[first : first + many].float()
            read = part.view(len(part), -1, self.wide)[:, self.column.long()]
            sums = start.expand(len(part), -1).reshape(len(part), -1, self.high).clone()
            sums.index_add_(1, row, torch.einsum("tbw,bhw->tbh", read, values))
            y[first : first + many] = sums.view(len(part), -1)


def _check(pointer: Tensor, column: Tensor, rows: int, columns: int) -> None:
    """InputError unless these are the indices of blocks, each once, of a matrix of so many blocks."""
    counts = pointer.diff()
    if len(column) > _MOST or int(pointer[0]) or int(pointer[-1]) != len(column) or bool((counts < 0).any()):
        raise InputError(f"the weight's row pointers are not an ascent from 0 to {len(column)}, which is accepted")
    wrong = column[(column < 0) | (column >= columns)]
    if len(wrong):
        raise InputError(f"the weight has a block in column {int(wrong[0])}; 0 to {columns - 1} are accepted")
    places = (rows_of(pointer, len(column)) * columns + column).sort().values
    twice = places[1:][places.diff() == 0]
    if len(twice):
        row, at = divmod(int(twice[0]), columns)
        raise InputError(f"the weight stores block {row}, {at} twice; each block once is accepted")
