"""gated: y = (g * (x up^T + up_bias)) down_t + down_bias over the packed values g (kernels/smxx_gated.cu, smxx_up.cu).

Both weights are read for the neurons that fire alone. What a tile's words cannot hold: see ops/down.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cuda.launch import Buffer, Entry, Macros, Source
from ..formats.twell import POOL_ROWS
from . import down
from .activation import RELU, Activation, activation
from .gate_pack import POOLED
from .pack import signs
from .reference import gated as of_gate

_MANY_TOKENS = 32  # tokens per multiprocessor from which on two passes, with one weight matrix each, are faster
_TWO_PASS_ROWS = 32768  # rows that the two passes take at a time; a multiple of POOL_ROWS
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows


def _builds(dtype: torch.dtype, widths: Sequence[int], capability) -> list[Macros]:
    more = ((), signs(True), activation("relu", both=True))
    return [*down.walk_builds(dtype, widths, more), *down.pool_builds(dtype, widths)]


GATED = Source(
    "smxx_gated",
    {
        "gated_v1": Entry(128, "pppppppppppiiii", lambda macros: "POOL" not in macros),
        **{f"gated_v{version}": down.row_entry("pppppppppppiiii", False, version == 4) for version in (2, 3, 4)},
        **{f"gated_v{version}": down.row_entry("ppppppppppppii", True, version == 6) for version in (5, 6)},
    },
    builds=_builds,
    constants=(*POOLED, ("SLAB", down.SLAB)),
)
UP = Source(
    "smxx_up",
    {"up_v1": Entry(down.team_threads, "pppppppppiii")},
    builds=lambda dtype, widths, capability: down.pool_builds(dtype, widths, (1,)),
    constants=POOLED,
)


def gated(
    call, x, packed, gate, tail, up, down_t, up_bias, down_bias, tile: int, version=None, *, signed=False, both=False
) -> Buffer:
    """Add x [rows, d_model], packed gate [rows, tiles, words], up and down_t [d_ff, d_model] -> y [rows, d_model].

    gate, tail, signed: as `down` takes them. both: up goes through a ReLU, which needs the dense gate. version: 1 to 4;
    None: the fastest. All contiguous."""
    y = call.empty(*x.shape, dtype=x.dtype)
    tensors = (x, packed, gate, *tail, up, down_t, up_bias, down_bias)
    more, words = (*signs(signed), *activation("relu", both)), packed.shape[2]
    return down.launch_rows(call, GATED, 3, tensors, (x, up, down_t, down_bias), y, words, len(up), tile, version, more)


def gated_pooled(
    call, x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x, y, most=down.ANY_NUMBER, version=None
) -> None:
    """Add x [tokens, d_model], its gate packed with a pool, up and down_t [d_ff, d_model], written into y [tokens,
    d_model]: what `pooled_takes` says, all contiguous.

    start: float32 [tokens, d_model] or None, added to y before it is rounded. lost: int32 [1 + tokens], lost_x:
    [tokens, d_model]. A row that the pool could not hold, or that has more than `most` kept values, is lost: its row of
    y is not written, lost[0] rises by 1 (it must be 0 before), and the row's number (~number where the pool could not
    hold it) and its x are written to the next place of lost[1:] and lost_x. version: 5 (one pass), 6 (one pass, several
    teams a token, for few tokens), 7 (two passes, for many tokens)."""
    (tokens, d_model), d_ff, dtype = x.shape, len(up), x.dtype
    if version is None:
        version = 6 if down.few(call, tokens) else 5 if down.few(call, tokens, _MANY_TOKENS) else 7
    if version < 7:
        if tokens:
            tensors = (x, packed, pool, up, down_t, up_bias, down_bias, start, y, lost, lost_x, None)
            call.launch(down.pooled_kernel(GATED, version, 5, dtype, d_model), (tokens, 1), *tensors, d_ff, most)
        return
    group = min(tokens, _TWO_PASS_ROWS)
    hidden = call.empty(group, *packed.shape[1:], dtype=torch.float32)
    beside = call.empty(-(-group // POOL_ROWS), *pool.shape[1:], dtype=torch.float32)
    first_pass = down.pooled_kernel(UP, 1, 1, dtype, d_model)
    second_pass = down.pooled_kernel(down.DOWN, 6, 6, dtype, d_model)
    for first in range(0, tokens, _TWO_PASS_ROWS):
        rows, grid = slice(first, first + _TWO_PASS_ROWS), (min(_TWO_PASS_ROWS, tokens - first), 1)
        words, groups, begun = packed[rows], pool[first // POOL_ROWS :], None if start is None else start[rows]
        of_up = (x[rows], words, groups, up, up_bias, hidden, beside, lost, lost_x)
        call.launch(first_pass, grid, *of_up, d_ff, first, most)
        call.launch(second_pass, grid, words, groups, hidden, beside, down_t, down_bias, begun, y[rows], None, d_ff)


def reference(x, gate, up, down_t, up_bias, down_bias, start=None, acts: Activation = RELU) -> Tensor:
    """Return what `gated` and `gated_pooled` compute of the gate that was packed, from torch's operations."""
    y = of_gate(x, gate, up, down_t.t(), up_bias, down_bias, acts)
    return y if start is None else (y.to(start.dtype) + start).to(y.dtype)
