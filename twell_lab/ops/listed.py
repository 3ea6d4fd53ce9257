"""listed: what is left of a layer behind its dense gate, for some hundred tokens (kernels/smxx_listed.cu).

A block lists what fires in a row of the gate, and reads the weights of that alone. The gate is not packed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..core import InputError
from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Source, aligned, sixteen_bits, value
from .reference import gated, relu

MOST_TOKENS = 2048
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows
_VECTOR = 8
_PARTS_BYTES = 15 << 17  # of the sums of parts of heavy rows


def _builds(dtype: torch.dtype, widths, capability) -> list[Macros]:
    """List a gated layer (as the source has it) and a plain one, for few blocks on a multiprocessor and for many."""
    kinds = [(*macros, *plain) for macros in sixteen_bits(dtype) for plain in ((), (("GATED", 0),))]
    return [(*macros, *many) for macros in kinds for many in ((), (("RESIDENT", 4),))]


LISTED = Source(
    "smxx_listed",
    {
        "listed_v1": Entry(256, "pppppppii"),
        "listed_v2": Entry(256, "ppppppppii"),
        "listed_heavy": Entry(256, "pppppppppiii"),
    },
    builds=_builds,
    constants=(("MOST_LISTED", MOST_TOKENS),),
)


def takes(x: Buffer | Layout, up: Buffer | Layout, down_t: Buffer | Layout, down_bias: Buffer | Layout | None) -> bool:
    """Return whether `listed` takes x [tokens, d_model] and these weights [d_ff, d_model]: 16-bit values, both widths
    multiples of 8, at most MOST_TOKENS tokens, and all that is read 16 bytes at a time aligned to them."""
    widths = all(n and n % _VECTOR == 0 for n in up.shape)
    return x.dtype.itemsize == 2 and widths and x.shape[0] <= MOST_TOKENS and aligned(x, up, down_t, down_bias)


def listed(
    call: Call,
    x: Buffer,
    gate: Buffer,
    up: Buffer | None,
    down_t: Buffer,
    up_bias: Buffer | None,
    down_bias: Buffer | None,
    version: int | None = None,
) -> Buffer:
    """Add y [tokens, d_model] = (g * (x up^T + up_bias)) down_t + down_bias over the values g of `gate` that fire.

    x: [tokens, d_model]; gate: [tokens, d_ff], what the activation is applied to; up, down_t: [d_ff, d_model]; up None
    for a plain layer, y = g down_t + down_bias. All contiguous, and as `takes` says. version: 1 (a block a token, any
    number of tokens) or 2, the default (tokens for which many neurons fire are shared among all blocks)."""
    if version not in (None, 1, 2):
        raise InputError(f"version is {version}; 1 and 2 are accepted")
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    y = call.empty(tokens, d_model, dtype=x.dtype)
    macros = (*value(x.dtype), *(() if up is not None else (("GATED", 0),)))
    tensors = (x, gate, up, down_t, up_bias, down_bias, y)
    if not tokens:
        return y
    if version == 1:
        call.launch(LISTED.kernel("listed_v1", macros), (tokens, 1), *tensors, d_model, d_ff)
        return y
    counts = call.empty(2, tokens, dtype=torch.int32)
    many = (("RESIDENT", 4),) if tokens > 2 * call.units else ()
    call.launch(LISTED.kernel("listed_v2", (*macros, *many)), (tokens, 1), *tensors, counts, d_model, d_ff)
    blocks = max(call.units, min(2 * call.units, _PARTS_BYTES // (4 * d_model)))
    parts = call.empty(blocks, d_model, dtype=torch.float32)
    call.launch(LISTED.kernel("listed_heavy", macros), (blocks, 1), *tensors, counts, parts, tokens, d_model, d_ff)
    return y


def reference(
    x: Tensor, gate: Tensor, up: Tensor | None, down_t: Tensor, up_bias: Tensor | None, down_bias: Tensor | None
) -> Tensor:
    """Return what `listed` computes, from torch's operations."""
    if up is None:
        return linear(relu(gate), down_t.t(), down_bias)
    return gated(x, gate, up, down_t.t(), up_bias, down_bias)
