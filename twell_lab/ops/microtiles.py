"""microtiles: columns of stripes that hold anything are found, and multiplied on tensor cores
(kernels/smxx_find_microtiles.cu and kernels/sm80_microtiles.cu).

`sparsities.microtiles` says what they are for, and computes what these kernels do not take."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Source, aligned, value

HEIGHTS = (32, 64, 128)  # rows of a stripe
VECTOR = 8  # values in 16 bytes
COLUMNS = 256  # of c that a block computes
OLDEST = (8, 0)
TOLERANCE = 1.0
_DTYPES = (torch.bfloat16, torch.float16)
_STAGES, _STEP = 4, 32  # parts of the pipeline, and micro-tiles of each
_MOST = 2**31 - 1
_WIDEST = 65_535 * COLUMNS  # columns of c: a grid's second dimension


def _macros(dtype: torch.dtype, height: int) -> Macros:
    return (*value(dtype), ("BM", height))


def _product_macros(dtype: torch.dtype, height: int) -> tuple[Macros, int]:
    """The macros of the product, and the bytes of one part of its pipeline."""
    stage = _STEP * (COLUMNS + height) * 2
    return (*_macros(dtype, height), ("LAUNCH_SHARED", _STAGES * stage)), stage


FIND = Source(
    "smxx_find_microtiles",
    {f"find_microtiles_v{version}": Entry(512, "ppppii") for version in (1, 2)},
    lambda dtype, *_: [_macros(dtype, height) for height in HEIGHTS if dtype in _DTYPES],
    (("THREADS", 512),),
)
MICROTILES = Source(
    "sm80_microtiles",
    {f"microtiles_v{version}": Entry(lambda macros: -(-macros["BM"] // 64) * 128, "pppppiii") for version in (1, 2)},
    lambda dtype, *_: [_product_macros(dtype, height)[0] for height in HEIGHTS if dtype in _DTYPES],
    (("BN", COLUMNS), ("STAGES", _STAGES)),
    OLDEST,
)


def finds(a: Layout | Buffer, height: int) -> bool:
    """Return whether `find` takes a [rows, width] and tiles of this height: 16-bit values, contiguous."""
    rows, width = a.shape
    return (
        a.dtype in _DTYPES
        and tuple(a.strides) in ((width, 1), (1, 1))
        and height in HEIGHTS
        and max(rows, width) + height <= _MOST
    )


def find(call: Call, a: Buffer, height: int, version: int | None = None) -> tuple[Buffer, Buffer, Buffer]:
    """Find which columns of each stripe of `height` rows hold anything, of a that `finds` takes.

    version: 1, or 2 for widths that are multiples of 8, aligned to 16 bytes; None: the newest that takes a. Returns
    counts int32 [stripes], columns int32 [stripes, width], ascending, and values [stripes, width, height]. What lies
    past a stripe's count is not written."""
    rows, width = a.shape
    stripes = -(-rows // height)
    counts = call.empty(stripes, dtype=torch.int32)
    columns = call.empty(stripes, width, dtype=torch.int32)
    values = call.empty(stripes, width, height, dtype=a.dtype)
    version = version or (2 if width % VECTOR == 0 and aligned(a) else 1)
    if stripes:
        kernel = FIND.kernel(f"find_microtiles_v{version}", _macros(a.dtype, height))
        call.launch(kernel, (stripes, 1), a, counts, columns, values, rows, width)
    return counts, columns, values


def find_reference(a: Tensor, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `find` does by torch's operations, of any type and height; what lies past a count is in order too."""
    values = pad(a, (0, 0, 0, -len(a) % height)).view(-1, height, a.shape[1]).transpose(1, 2)
    used = (values != 0).any(2)
    columns = (~used).to(torch.uint8).argsort(dim=1, stable=True)  # those that hold anything first, ascending
    return used.sum(1).int(), columns.int(), values.gather(1, columns[..., None].expand_as(values))


def multiplies(values: Layout | Buffer, b: Layout | Buffer, capability: tuple[int, int]) -> bool:
    """Return whether `product` takes values [stripes, width, height] and b [width, n]: of one 16-bit dtype on a GPU of
    compute capability 8.0 or more, contiguous, on 16-byte boundaries, n a multiple of 8."""
    width, n = b.shape
    fits = b.dtype == values.dtype and b.dtype in _DTYPES and n % VECTOR == 0 and n <= _WIDEST
    laid_out = tuple(b.strides) in ((n, 1), (1, 1)) and aligned(values, b) and values.shape[1] == width
    return fits and laid_out and values.shape[2] in HEIGHTS and capability >= OLDEST


def product(call: Call, counts, columns, values, b, rows: int, version: int = 2) -> Buffer:
    """Multiply what `find` found of a [rows, width] with b [width, n]: a b [rows, n]; sums in float32."""
    (stripes, width, height), n = values.shape, b.shape[1]
    c = call.empty(rows, n, dtype=b.dtype)
    macros, stage = _product_macros(b.dtype, height)
    if c.numel():
        kernel = MICROTILES.kernel(f"microtiles_v{version}", macros, stage if version == 1 else _STAGES * stage)
        grid = stripes, -(-n // COLUMNS)
        call.launch(kernel, grid, counts, columns, values, b, c, rows, width, n)
    return c


def product_reference(counts: Tensor, columns: Tensor, values: Tensor, b: Tensor, rows: int) -> Tensor:
    """Return a b by torch's operations, stripe by stripe. Waits for the counts."""
    made = b.new_zeros(len(values), values.shape[2], b.shape[1])
    for stripe, count in enumerate(counts.tolist()):
        made[stripe] = values[stripe, :count].t() @ b[columns[stripe, :count].long()]
    return made.flatten(0, 1)[:rows]
