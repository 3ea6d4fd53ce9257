"""Micro-tiles (PIT): a sparse matrix times a dense one, in dense tensor-core tiles that are gathered from tiny ones.

    tiles = find_microtiles(h)          # h [tokens, d_ff]: which neurons fire in each 32 tokens, and their values
    y = product(tiles, down_t)          # h down_t [tokens, d_model]; down_t [d_ff, d_model], kept transposed

Method: Zheng et al., "PIT", SOSP 2023, arXiv 2301.10936. The sum over k in c = a b may be taken in any order, so of a
stripe of 32 rows of a, the columns that hold anything, micro-tiles of 32 x 1, are gathered into dense tiles. They meet
the same rows of b, and the result is the stripe of c, in place. CUDA graphs hold both functions, torch.compile
neither."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ..core import InputError
from ..cuda.launch import capability, layout, run
from ..formats.matrix import as_matrix
from ..ops import microtiles as kernels
from ..ops.checks import needs_gradient
from .checks import check_count


class MicroTiles(NamedTuple):
    """A matrix as stripes of `height` rows, of each the columns that hold a value that is not zero.

    counts: int32 [stripes], how many micro-tiles each stripe has. columns: int32 [stripes, width], their columns,
    ascending; values: [stripes, width, height], zeros past the last row. Both have room for every column, and are not
    defined past a stripe's count. shape: (rows, width) of the matrix."""

    counts: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    @property
    def height(self) -> int:
        """Rows of a micro-tile, and of a stripe."""
        return self.values.shape[2]

    @property
    def occupied(self) -> float:
        """The share of all micro-tiles that hold anything; 0 where there are none. Waits for the device."""
        return int(self.counts.sum()) / size if (size := self.columns.numel()) else 0.0


def find_microtiles(a: Tensor, height: int = 32) -> MicroTiles:
    """Find the micro-tiles of height x 1 that hold a value that is not zero (NaN is none) in a [rows, width]. On a GPU,
    16-bit values and heights of 32, 64 and 128 are found by a kernel, which does not wait; everything else by torch's
    operations. InputError for others."""
    check_count("height", height)
    a = as_matrix(a).detach()
    by_kernel = a.is_cuda and kernels.finds(layout(packed := a.contiguous()), height)
    counts, columns, values = run(kernels.find, packed, height) if by_kernel else kernels.find_reference(a, height)
    return MicroTiles(counts, columns, values, (a.shape[0], a.shape[1]))


def product(tiles: MicroTiles, b: Tensor) -> Tensor:
    """Multiply a [rows, width], as its micro-tiles, with b [width, n]: c [rows, n], the dense product for every finite
    b; what is not finite in b is met by occupied tiles alone. On a GPU from sm_80 on, 16-bit values and heights of 32,
    64 and 128 run as one kernel, and nothing waits; everything else by torch. InputError for a b of another shape,
    dtype or device, or with a gradient."""
    if not isinstance(tiles, MicroTiles):
        raise InputError(f"tiles is a {type(tiles).__name__}; what find_microtiles returns is accepted")
    wanted = tiles.values.dtype, tiles.shape[1], tiles.values.device
    b = as_matrix(b)
    if (b.dtype, b.shape[0], b.device) != wanted or needs_gradient(b):
        raise InputError(
            f"b is {b.dtype} {list(b.shape)} on {b.device}; {wanted[0]} [{wanted[1]}, n] on {wanted[2]}, without a "
            "gradient, is accepted"
        )
    b, n = b.detach(), b.shape[1]
    if b.is_cuda:
        missing = -n % kernels.VECTOR
        filled = (F.pad(b, (0, missing)) if missing else b).contiguous()
        filled = filled if filled.data_ptr() % 16 == 0 else filled.clone()
        if kernels.multiplies(layout(tiles.values), layout(filled), capability(b.device.index)):
            return run(kernels.product, *tiles[:3], filled, tiles.shape[0])[:, :n]
    return kernels.product_reference(*tiles[:3], b, tiles.shape[0])
