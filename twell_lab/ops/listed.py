"""What is left of a layer behind its dense gate, which is not packed: what fires in a row of the gate is listed, and
the weights of that alone are read.

listed: a block a token, for some hundred tokens (kernels/smxx_listed.cu). spread: several blocks a token, for some
dozen, in two launches: the first lists what fires and computes h, the second adds up y (kernels/smxx_spread.cu)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cuda.launch import Buffer, Call, Entry, Macros, Source, aligned, sixteen_bits
from .reference import gated, relu

MOST_TOKENS = 2048
MOST_SPREAD = 96  # tokens up to which `spread` is faster
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows
_VECTOR = 8  # values that a thread reads at once
_PARTS_BYTES = 15 << 17  # of the sums of parts of heavy rows
_SLAB = 256  # columns of y that a block of `spread` adds up
_PARTS, _WIDEST = 8, 2048  # blocks of `spread` that list a token's gate, where none then lists more columns than this
_MANY = (("RESIDENT", 4),)  # for more blocks on a multiprocessor than the source has


def plain_or_gated(dtype: torch.dtype, widths=(), capability=(9, 0)) -> list[Macros]:
    """List a gated layer (as sources have it) and a plain one, of 16-bit values (Source.builds)."""
    return [(*macros, *plain) for macros in sixteen_bits(dtype) for plain in ((), (("GATED", 0),))]


_as_written = lambda macros: "RESIDENT" not in macros
LISTED = Source(
    "smxx_listed",
    {
        "listed_v1": Entry(256, "pppppppii", _as_written),
        "listed_v2": Entry(256, "ppppppppii"),
        "listed_heavy": Entry(256, "pppppppppiii", _as_written),
    },
    lambda dtype, *_: [(*macros, *many) for macros in plain_or_gated(dtype) for many in ((), _MANY)],
    (("MOST_LISTED", MOST_TOKENS),),
)
SPREAD = Source(
    "smxx_spread", {"spread_up": Entry(256, "ppppppiii"), "spread_down": Entry(256, "pppppiiii")}, plain_or_gated
)


def takes(x, up, down_t, down_bias, most: int = MOST_TOKENS) -> bool:
    """Return whether these kernels take x [tokens, d_model] and these weights [d_ff, d_model]: 16-bit values, both
    widths multiples of 8, at most `most` tokens, and all that is read 16 bytes at a time aligned to them."""
    widths = all(n and n % _VECTOR == 0 for n in up.shape)
    return x.dtype.itemsize == 2 and widths and x.shape[0] <= most and aligned(x, up, down_t, down_bias)


def listed(call: Call, x, gate, up, down_t, up_bias, down_bias, version: int | None = None) -> Buffer:
    """Add y [tokens, d_model] = (g * (x up^T + up_bias)) down_t + down_bias over the values g of `gate` that fire.

    x: [tokens, d_model]; gate: [tokens, d_ff], what the activation is applied to; up, down_t: [d_ff, d_model]; up None
    for a plain layer, y = g down_t + down_bias. All contiguous, and as `takes` says. version: 1 (a block a token, any
    number of tokens) or 2, the default (tokens for which many neurons fire are shared among all blocks)."""
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    y = call.empty(tokens, d_model, dtype=x.dtype)
    macros, tensors = plain_or_gated(x.dtype)[up is None], (x, gate, up, down_t, up_bias, down_bias, y)
    if not tokens:
        return y
    if version == 1:
        call.launch(LISTED.kernel("listed_v1", macros), (tokens, 1), *tensors, d_model, d_ff)
        return y
    counts = call.empty(2, tokens, dtype=torch.int32)
    many = _MANY if tokens > 2 * call.units else ()
    call.launch(LISTED.kernel("listed_v2", (*macros, *many)), (tokens, 1), *tensors, counts, d_model, d_ff)
    blocks = max(call.units, min(2 * call.units, _PARTS_BYTES // (4 * d_model)))
    parts = call.empty(blocks, d_model, dtype=torch.float32)
    call.launch(LISTED.kernel("listed_heavy", macros), (blocks, 1), *tensors, counts, parts, tokens, d_model, d_ff)
    return y


def spread(call: Call, x, gate, up, down_t, up_bias, down_bias) -> Buffer:
    """Add what `listed` adds, for any number of tokens."""
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    y = call.empty(tokens, d_model, dtype=x.dtype)
    if not tokens:
        return y
    macros = plain_or_gated(x.dtype)[up is None]
    width = min(_WIDEST, -(-d_ff // (_PARTS * _VECTOR)) * _VECTOR)
    parts, slabs = -(-d_ff // width), -(-d_model // _SLAB)
    entries = call.empty(tokens, parts, 2 * width, dtype=torch.int32)
    counts = call.empty(tokens, parts, dtype=torch.int32)
    of_up, lists = SPREAD.kernel("spread_up", macros, early=True), (x, gate, up, up_bias, entries, counts)
    call.launch(of_up, (parts, tokens), *lists, d_model, d_ff, width)
    of_down, sums = SPREAD.kernel("spread_down", macros, early=True), (entries, counts, down_t, down_bias, y)
    call.launch(of_down, (slabs, tokens), *sums, d_model, d_ff, parts, width)
    return y


def reference(x: Tensor, gate: Tensor, up: Tensor | None, down_t: Tensor, up_bias, down_bias) -> Tensor:
    """Return what both compute, from torch's operations."""
    if up is None:
        return linear(relu(gate), down_t.t(), down_bias)
    return gated(x, gate, up, down_t.t(), up_bias, down_bias)
