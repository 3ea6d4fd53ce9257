"""How micro-tiles are found and multiplied (kernels/smxx_find_microtiles.cu and sm80_microtiles.cu).

CUDA tensors run on torch's current stream and nothing waits for the GPU. CPU tensors are found in twell_lab.simulator,
which cannot run the product."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import MICROTILE_ROWS, TENSOR_CORES_OF_BF16, microtile
from ..cuda.tape import empty

FIND, PRODUCT = "smxx_find_microtiles.cu", "sm80_microtiles.cu"
VECTOR = 8  # values in 16 bytes
COLUMNS = sources.number(PRODUCT, "BN")  # of c that a block computes
_DTYPES = (torch.bfloat16, torch.float16)
_MOST = 2**31 - 1
_WIDEST = 65_535 * COLUMNS  # columns of c: a grid's second dimension


def finds(a: Tensor, height: int) -> bool:
    """Whether `find` takes a [rows, width] and tiles of this height: 16-bit values, contiguous, 32, 64 or 128 rows."""
    return (
        a.dim() == 2
        and a.dtype in _DTYPES
        and a.is_contiguous()
        and height in MICROTILE_ROWS
        and max(a.shape) + height <= _MOST
    )


def find(a: Tensor, height: int, version: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each stripe of `height` rows: how many columns hold anything, which, ascending, and their values.

    version: 1 or 2, None the newest that takes a; 2 takes widths that are multiples of 8, aligned to 16 bytes.

    Returns:
        counts int32 [stripes], columns int32 [stripes, width], values [stripes, width, height]. What lies past a
        stripe's count is not written.

    Raises:
        InputError: unless finds(a, height), and for a version that does not take it.
    """
    if not finds(a, height):
        raise InputError(
            f"a is {a.dtype} {list(a.shape)} and the height {height}; contiguous bfloat16 or float16 [rows, width] and "
            f"heights of {', '.join(map(str, MICROTILE_ROWS))} are accepted"
        )
    rows, width = a.shape
    versions = (1, 2) if width % VECTOR == 0 and launcher.aligned(a) else (1,)
    if version not in (None, *versions):
        raise InputError(f"version is {version}; of {list(a.shape)} at this address {versions} are accepted")
    stripes = -(-rows // height)
    counts = empty(stripes, dtype=torch.int32, device=a.device)
    columns = empty(stripes, width, dtype=torch.int32, device=a.device)
    values = empty(stripes, width, height, dtype=a.dtype, device=a.device)
    if stripes:
        name = f"find_microtiles_v{version or versions[-1]}"
        made = launcher.kernel(FIND, name, microtile(a.dtype, height))
        made.launch(a.device, (stripes, 1), (a, counts, columns, values, rows, width))
    return counts, columns, values


def multiplies(values: Tensor, b: Tensor) -> bool:
    """Whether `product` takes values [stripes, width, height] and b [width, n]: of one 16-bit dtype on one GPU of
    compute capability 8.0 or more, contiguous, on 16-byte boundaries, n a multiple of 8."""
    if not (b.is_cuda and b.device == values.device and b.dtype == values.dtype and b.dtype in _DTYPES):
        return False
    fits = b.dim() == 2 and b.shape[0] == values.shape[1] and b.shape[1] % VECTOR == 0 and b.shape[1] <= _WIDEST
    laid_out = b.is_contiguous() and values.is_contiguous() and launcher.aligned(values, b)
    new_enough = launcher.capability(b.device.index) >= TENSOR_CORES_OF_BF16
    return fits and laid_out and new_enough and values.shape[2] in MICROTILE_ROWS


def product(
    counts: Tensor, columns: Tensor, values: Tensor, b: Tensor, rows: int, version: int | None = None
) -> Tensor:
    """a b [rows, n], for what `find` found of a [rows, width], and b [width, n]; sums in float32.

    version: 1 or 2, None for 2. Raises InputError unless multiplies(values, b)."""
    if not multiplies(values, b):
        raise InputError(
            f"the tiles are {values.dtype} {list(values.shape)} on {values.device} and b is {b.dtype} {list(b.shape)} "
            f"on {b.device}; the kernel takes one 16-bit dtype on one GPU of compute capability 8.0 or more, b "
            f"contiguous and aligned to 16 bytes, with a multiple of {VECTOR} columns"
        )
    if version not in (None, 1, 2):
        raise InputError(f"version is {version}; 1 and 2 are accepted")
    (stripes, width, height), n = values.shape, b.shape[1]
    c = empty(rows, n, dtype=b.dtype, device=b.device)
    if c.numel():
        made = _product(version or 2, b.dtype, height)
        made.launch(b.device, (stripes, -(-n // COLUMNS)), (counts, columns, values, b, c, rows, width, n))
    return c


@lru_cache
def _product(version: int, dtype: torch.dtype, height: int) -> launcher.Kernel:
    """The kernel, with the shared memory that its source says it needs; reading that takes half a millisecond."""
    defines = microtile(dtype, height)
    shared = sources.number(PRODUCT, "STAGE_BYTES" if version == 1 else "SHARED_BYTES", defines)
    return launcher.kernel(PRODUCT, f"microtiles_v{version}", defines, shared)
