"""int8: linear layers of INT8 rows, whose int32 sums never leave the chip (kernels/sm80_int8.cu); what is left of a
layer with such rows once its gate is packed (kernels/smxx_gated_int8.cu); and rows rounded to few bits
(kernels/smxx_quantise_rows.cu)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Source, aligned, value
from .down import SLAB, launch_rows, row_entry, walk_builds
from .gate_pack import most_shared
from .pack import signs

# ---- products


class Weight(NamedTuple):
    """A weight of INT8 rows: value [i, j] stands for values[i, j] * scale[i].

    values: int8 [out, in]; scale: float32 [out]; bias: [out], of the result's dtype, or None."""

    values: Tensor | Buffer | Layout
    scale: Tensor | Buffer | Layout
    bias: Tensor | Buffer | Layout | None = None


DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)
STEP = 16  # of which in and out are multiples: bytes that are copied at once, and the most columns that a lane stores
_FEW = 16  # tokens up to which the smallest tile takes all
MOST_TOKENS = 65535 * _FEW  # blocks along y of a grid, of the smallest tile
# Rows and columns of a tile, bytes of a step, parts of the pipeline; by how many tokens a tile is for.
TILES = {"few": (16, 32, 128, 8), "some": (64, 64, 128, 4), "many": (128, 256, 64, 4)}
_LONGER = (128, 256, 128, 3)  # "many" with half as many barriers, where a block may have that much shared memory


@lru_cache
def _macros(dtype: torch.dtype, gated: bool, tile: str, capability: tuple[int, int]) -> tuple[Macros, int]:
    """The macros for a tile of TILES, and its bytes of dynamic shared memory; gated: of two weights at once."""
    sizes = _LONGER if tile == "many" and most_shared(capability) > 128 * 1024 else TILES[tile]
    rows, columns, step, stages = sizes
    shared = stages * (rows + columns) * step
    named = zip(("BM", "BN", "BK", "STAGES", "LAUNCH_SHARED"), (*sizes, shared))
    return (*value(dtype), ("GATED", int(gated)), *named), shared


def _threads(macros: dict) -> int:
    rows, columns = macros["BM"], macros["BN"]
    of_warp = (64 if rows > 64 else 32 if rows > 16 else 16), (64 if columns > 64 else 32 if columns > 32 else 16)
    return rows // of_warp[0] * (columns // of_warp[1]) * 32


INT8 = Source(
    "sm80_int8",
    {f"int8_v{version}": Entry(_threads, "ppppppiiippp") for version in (1, 2)},
    lambda dtype, widths, capability: [
        _macros(dtype, gated, tile, capability)[0] for gated in (False, True) for tile in TILES if dtype in DTYPES
    ],
    oldest=OLDEST,
)


def takes(x: Layout | Buffer, weight: Weight, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether the kernel multiplies int8 rows x [tokens, in] with this weight to a result of this dtype:
    bfloat16 or float16 on a GPU of compute capability 8.0 or more, in and out multiples of 16, a bias of the same
    dtype, all contiguous."""
    values, scale, bias = weight
    out, inner = values.shape
    return (
        dtype in DTYPES
        and capability >= OLDEST
        and {x.dtype, values.dtype} == {torch.int8}
        and x.shape[1] == inner > 0 < out
        and not (inner % STEP or out % STEP)
        and len(x.shape) == 2
        and x.shape[0] <= MOST_TOKENS
        and (bias is None or bias.dtype == dtype)
        and tuple(x.strides) == tuple(values.strides) == (inner, 1)
        and aligned(x, values)
    )


def product(call, x, scale, weight, dtype: torch.dtype, tokens=None, up=None, version=2, tile=None) -> Buffer:
    """Compute y [tokens, out] = (x * scale) W^T + bias from exact int32 sums: float32(sum) * scale of the token,
    rounded, then times the scale of the column plus the bias, rounded once, and to dtype.

    x: int8 [rows, in]; scale: float32 [rows]; only the first `tokens` rows count, None: all. weight: as `takes` takes
    it, with few enough columns for int32 sums. up: a second weight like it: then y is relu(g) * u of both products.
    tile: of TILES; None: the largest of which at least half of the multiprocessors get one, or a smaller one."""
    tokens, many = len(x) if tokens is None else tokens, 1 if up is None else 2
    out, inner = weight.values.shape
    y = call.empty(tokens, out, dtype=dtype)
    if y.numel():
        enough = 2 * -(-tokens // 128) * -(-out // (256 // many)) >= call.units
        tile = tile or ("few" if tokens <= _FEW else "many" if enough else "some")
        macros, shared = _macros(dtype, many > 1, tile, call.capability)
        rows, columns = (dict(macros)[name] for name in ("BM", "BN"))
        kernel = INT8.kernel(f"int8_v{version}", macros, shared if version == 2 else 0)
        grid = -(-out * many // columns), -(-tokens // rows)
        call.launch(kernel, grid, x, scale, *weight, y, tokens, inner, out, *(up or (None, None, None)))
    return y


def layer(call: Call, x: Buffer, gate: Weight, up: Weight, down: Weight) -> Buffer:
    """Compute a ReLU-gated layer of INT8 rows, x [tokens, d_model] -> y: x and the hidden values are rounded too."""
    hidden = product(call, *quantise_rows(call, x, torch.int8), gate, x.dtype, up=up)
    return product(call, *quantise_rows(call, hidden, torch.int8), down, x.dtype)


def product_reference(x: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return what `product` computes, bit for bit, by torch's operations on a CPU. TOLERANCE: none."""
    first = (x.double() @ weight.values.double().t()).float() * scale[:, None]  # float64 holds the sums
    wide = first.double() * weight.scale.double()
    return (wide if weight.bias is None else wide + weight.bias.double()).float().to(dtype)


TOLERANCE = 0.0

# ---- what is left of a layer once its gate is packed

GATED_INT8 = Source(
    "smxx_gated_int8",
    {
        "gated_int8_v1": Entry(128, "ppppppppppiiii"),
        **{f"gated_int8_v{version}": row_entry("ppppppppppiiii", False, version == 4) for version in (2, 3, 4)},
    },
    lambda dtype, widths, capability: walk_builds(dtype, widths, ((), signs(True))),
    (("SLAB", SLAB),),
)


def gated_int8(call, x, packed, gate, up, down, up_bias, down_bias, tile: int, version=None, *, signed=False) -> Buffer:
    """Compute y [rows, d_model] from x and its packed gate [rows, tiles, words]; NaN where a row of x is not finite.

    gate: the dense gate [rows, d_ff] that was packed, after the activation unless that is the ReLU; tiles that overflow
    are read from it. up, down: rows of d_model values, [d_ff, d_model], of down transposed; without up the packed
    values are the hidden ones. signed: as `pack` packed it. version: 1 to 4; None: the fastest. All contiguous."""
    of_up = (None, None) if up is None else up[:2]
    tensors = (x, packed, gate, *of_up, *down[:2], up_bias, down_bias)
    vectors = (x, of_up[0], down.values, down_bias)
    sizes = (packed.shape[2], gate.shape[1], tile)
    y = call.empty(*x.shape, dtype=x.dtype)
    return launch_rows(call, GATED_INT8, 3, tensors, vectors, y, *sizes, version, signs(signed))


def gated_reference(x: Tensor, first: Tensor, up: Weight | None, down: Weight, up_bias, down_bias) -> Tensor:
    """Return (first * (x up^T + up_bias)) down + down_bias by torch's operations; without up first down + down_bias.

    first: [rows, d_ff] after the activation. float32 sums, or those of float64 arguments, rounded once to x's dtype;
    rows of neurons that are silent add nothing. A row of x that is not finite gives NaN."""
    wide = torch.promote_types(x.dtype, torch.float32)
    dense = lambda rows: rows.values.to(wide) * rows.scale.to(wide)[:, None]
    hidden = first.to(wide)
    if up is not None:
        beside = x.to(wide) @ dense(up).t()
        hidden = torch.where(first == 0, 0, hidden * (beside if up_bias is None else beside + up_bias))
    y = hidden @ dense(down)
    y = y if down_bias is None else y + down_bias
    return (y + torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True) * 0).to(x.dtype)


# ---- rows of few bits

KINDS = (torch.int8, torch.float8_e4m3fn)


def _kind(dtype: torch.dtype, kind: torch.dtype) -> Macros:
    return (*value(dtype), *((("E4M3", True),) if kind == torch.float8_e4m3fn else ()))


QUANTISE_ROWS = Source(
    "smxx_quantise_rows",
    {f"quantise_rows_v{version}": Entry(256, "pppii") for version in (1, 2)},
    lambda dtype, widths, capability: [_kind(dtype, kind) for kind in KINDS],
)


def quantise_rows(call: Call, x, kind: torch.dtype, padded: int = 0, version=None) -> tuple[Buffer, Buffer]:
    """Round the rows of x [rows, columns], contiguous: the bits of n rows of `kind` as int8 [n, columns], and float32
    scales [n], n the larger of rows and `padded`.

    Values and scales of rows past x's are zero; of a row that is not finite the values are zero, and the scale is not
    finite. version: 1, or 2 for widths that are multiples of 16 bytes, aligned; None: the newest that takes x."""
    rows, columns = x.shape
    n = max(rows, padded)
    version = version or (2 if columns % (16 // x.dtype.itemsize) == 0 and aligned(x) else 1)
    values, scales = call.empty(n, columns, dtype=torch.int8), call.empty(n, dtype=torch.float32)
    if n:
        kernel = QUANTISE_ROWS.kernel(f"quantise_rows_v{version}", _kind(x.dtype, kind))
        call.launch(kernel, (n, 1), x, values, scales, rows, columns)
    return values, scales
