"""spread: what is left of a layer behind its dense gate, for some dozen tokens (kernels/smxx_spread.cu).

Several blocks share a token, in two launches: the first lists what fires and computes h, the second adds up y."""

from __future__ import annotations

import torch

from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Source, sixteen_bits, value
from . import listed
from .listed import reference

__all__ = ["MOST_TOKENS", "SPREAD", "TOLERANCE", "reference", "spread", "takes"]

MOST_TOKENS = 96  # up to which it is faster than `listed`
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows
_VECTOR, _SLAB = 8, 256  # values that a thread reads at once; columns of y that a block adds up
_PARTS, _WIDEST = 8, 2048  # blocks that list a token's gate, where none then lists more columns than this


def _builds(dtype: torch.dtype, widths, capability) -> list[Macros]:
    """List a gated layer (as the source has it) and a plain one."""
    return [(*macros, *plain) for macros in sixteen_bits(dtype) for plain in ((), (("GATED", 0),))]


SPREAD = Source(
    "smxx_spread", {"spread_up": Entry(256, "ppppppiii"), "spread_down": Entry(256, "pppppiiii")}, builds=_builds
)


def takes(x: Buffer | Layout, up: Buffer | Layout, down_t: Buffer | Layout, down_bias: Buffer | Layout | None) -> bool:
    """Return whether `spread` takes x [tokens, d_model] and these weights [d_ff, d_model]: what `listed` takes, for at
    most MOST_TOKENS tokens."""
    return x.shape[0] <= MOST_TOKENS and listed.takes(x, up, down_t, down_bias)


def spread(
    call: Call,
    x: Buffer,
    gate: Buffer,
    up: Buffer | None,
    down_t: Buffer,
    up_bias: Buffer | None,
    down_bias: Buffer | None,
) -> Buffer:
    """Add y [tokens, d_model] = (g * (x up^T + up_bias)) down_t + down_bias over the values g of `gate` that fire.

    x: [tokens, d_model]; gate: [tokens, d_ff], what the activation is applied to; up, down_t: [d_ff, d_model]; up None
    for a plain layer, y = g down_t + down_bias. All contiguous, and as `takes` says, but for any number of tokens."""
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    y = call.empty(tokens, d_model, dtype=x.dtype)
    if not tokens:
        return y
    macros = (*value(x.dtype), *(() if up is not None else (("GATED", 0),)))
    width = min(_WIDEST, -(-d_ff // (_PARTS * _VECTOR)) * _VECTOR)
    parts, slabs = -(-d_ff // width), -(-d_model // _SLAB)
    entries = call.empty(tokens, parts, 2 * width, dtype=torch.int32)
    counts = call.empty(tokens, parts, dtype=torch.int32)
    of_up, lists = SPREAD.kernel("spread_up", macros, early=True), (x, gate, up, up_bias, entries, counts)
    call.launch(of_up, (parts, tokens), *lists, d_model, d_ff, width)
    of_down, sums = SPREAD.kernel("spread_down", macros, early=True), (entries, counts, down_t, down_bias, y)
    call.launch(of_down, (slabs, tokens), *sums, d_model, d_ff, parts, width)
    return y
