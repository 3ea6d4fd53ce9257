"""The gradients of a sparse layer's weights: the survivors of its forward pass are sorted by neuron, and summed up
(kernels/columns.cuh, smxx_columns.cu, smxx_weight_gradients.cu). The same input gives the same bits. The reference
is that of a whole step (ops.train_rows)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..cuda.launch import Buffer, Call, Entry, Source, sixteen_bits, value
from .listed import plain_or_gated
from .survivors import Survivors

_MOST_CHUNKS = 256
_COUNTS = 3 << 19  # counts, one for each chunk and column, at most: 6 MiB
_LEAST_ROWS = 16  # rows of a chunk, at least
_COUNT_SLAB, _FILL_SLAB, _COUNT_THREADS, _FILL_THREADS = 16384, 8192, 512, 512
_BLOCK_WARPS, _CLASSES = 8, 9
_PLAN_INTS = 2 + 2 * (_CLASSES + 1)  # size of a Plan of columns.cuh
# A list of more than 8 units is cut into pieces of 8 units and one of the rest, so never into more than one piece for
# each 4 units.
_UNITS_A_PIECE = 4
# Each piece of a long list leaves a row of partial sums. There are at most _MOST_PIECES, and at most _PARTIAL_BYTES of
# them, but never fewer than _LEAST_PIECES.
_MOST_PIECES, _PARTIAL_BYTES, _LEAST_PIECES = 512, 13 << 20, 16
_WIDTH = 256  # columns of x and dy that a warp sums up at a time
_SHARED = (("BLOCK_WARPS", _BLOCK_WARPS), ("CLASSES", _CLASSES))
COLUMNS = Source(
    "smxx_columns",
    {
        "columns_count_v2": Entry(_COUNT_THREADS, "pppiii"),
        "columns_scan_v2": Entry(1024, "ppii"),
        "columns_plan_v2": Entry(1024, "ppppppii"),
        "columns_fill_v2": Entry(_FILL_THREADS, "pppppppiii"),
    },
    builds=sixteen_bits,
    constants=(
        *_SHARED,
        ("MOST_CHUNKS", _MOST_CHUNKS),
        *(("COUNT_SLAB", _COUNT_SLAB), ("COUNT_THREADS", _COUNT_THREADS)),
        *(("FILL_SLAB", _FILL_SLAB), ("FILL_THREADS", _FILL_THREADS)),
    ),
)
GRADIENTS = Source(
    "smxx_weight_gradients",
    {
        "weight_gradients_v1": Entry(128, "pppppppppi"),
        "weight_gradients_v2": Entry(32 * _BLOCK_WARPS, "ppppppppppppppi"),
        "weight_gradients_finish_v2": Entry(32 * _BLOCK_WARPS, "pppppppppppi"),
    },
    builds=plain_or_gated,
    constants=(*_SHARED, ("LAUNCH_SLAB", _WIDTH)),
)


class Columns(NamedTuple):
    """The survivors sorted by neuron. records: int32 [capacity, 4]: the token, then the bits of the float32 values
    dgate_of, dup_of and hidden; the records of neuron j are starts[j] to starts[j + 1], tokens ascending.
    kernels/columns.cuh describes the others."""

    records: Any
    starts: Any
    order: Any
    pieces: Any
    first_piece: Any
    plan: Any


def by_column(call: Call, s: Survivors, dh, d_ff: int, dtype: torch.dtype, pieces: int = _MOST_PIECES) -> Columns:
    """Sort the survivors s, whose values are of `dtype`, with dh float32 [capacity], by neuron.

    pieces: how many pieces the longest lists may be cut into, together."""
    tokens, macros = len(s.spans), value(dtype)
    rows = max(_LEAST_ROWS, -(-tokens // max(1, min(_MOST_CHUNKS, _COUNTS // d_ff))))  # of a chunk
    chunks = -(-tokens // rows)
    shapes = [(len(s.words), 4), (d_ff + 1,), (d_ff,), (pieces, 2), (d_ff,), (_PLAN_INTS,)]
    counts, totals, *columns = (call.empty(*shape, dtype=torch.int32) for shape in ((chunks, d_ff), (d_ff,), *shapes))
    made = Columns(*columns)

    launch = lambda name, grid, *given: call.launch(COLUMNS.kernel(f"columns_{name}_v2", macros), grid, *given)
    launch("count", (chunks, -(-d_ff // _COUNT_SLAB)), s.spans, s.words, counts, tokens, d_ff, rows)
    launch("scan", (-(-d_ff // 32), 1), counts, totals, chunks, d_ff)
    launch("plan", (1, 1), totals, *made[1:], d_ff, _UNITS_A_PIECE * pieces)
    listed = (s.spans, s.words, s.ups, dh, counts, made.starts, made.records)
    launch("fill", (chunks, -(-d_ff // _FILL_SLAB)), *listed, tokens, d_ff, rows)
    return made


def weight_gradients(call: Call, x, dy, s: Survivors, dh, d_ff: int, biases: bool, version: int = 2) -> tuple:
    """Compute (dgate, dup, ddown_t, dgate_bias, dup_bias), of x's dtype: [d_ff, d_model], the biases' [d_ff].

    x, dy: [tokens, d_model], 16-bit, rows of a multiple of 8 values; s: the survivors of x; dh: float32 [capacity], the
    gradient of each survivor's h. With g, u, h of a survivor at (t, j), and dg = dh u, du = dh g: dgate[j] = sum of dg
    x[t], dup[j] = sum of du x[t], ddown_t[j] = sum of h dy[t]; the biases' gradients are the sums of dg and du. A plain
    layer (s.ups is None) has neither dgate nor dgate_bias; dup and dup_bias are then sums of dh x[t] and dh. biases:
    whether the biases' gradients are wanted; otherwise they are None. Lost rows add nothing. Every row is written, with
    zeros for a neuron that never fired. Sums are float32 and rounded once."""
    d_model, gated = x.shape[1], s.ups is not None
    wanted = (gated, True, True, biases and gated, biases)
    shapes = ((d_ff, d_model),) * 3 + ((d_ff,),) * 2
    outputs = tuple(call.empty(*shape, dtype=x.dtype) if want else None for want, shape in zip(wanted, shapes))
    sums = 3 if gated else 2
    pieces = max(_LEAST_PIECES, min(_MOST_PIECES, _PARTIAL_BYTES // (4 * sums * d_model)))
    columns = by_column(call, s, dh, d_ff, x.dtype, pieces)
    macros = plain_or_gated(x.dtype)[not gated]

    def launch(name: str, grid: tuple[int, int], *buffers: Buffer) -> None:
        call.launch(GRADIENTS.kernel(f"weight_gradients_{name}", macros), grid, *buffers, *outputs, d_model)

    if version == 1:
        launch("v1", (d_ff, -(-d_model // 128)), x, dy, columns.starts, columns.records)
        return outputs
    partials, bias_partials = (call.empty(pieces, width, dtype=torch.float32) for width in (sums * d_model, 2))
    plan = (columns.starts, columns.order, columns.pieces, columns.plan, columns.records)
    # The most blocks that a plan can have: a warp for each list, for long lists less than two for each unit, rounded up
    # to whole blocks in each class.
    blocks = -(-(d_ff + 2 * _UNITS_A_PIECE * pieces) // _BLOCK_WARPS) + _CLASSES
    launch("v2", (blocks, -(-d_model // _WIDTH)), x, dy, *plan, partials, bias_partials)
    finish = (columns.starts, columns.order, columns.first_piece, columns.plan, partials, bias_partials)
    launch("finish_v2", (pieces // 2, -(-sums * d_model // 1024)), *finish)
    return outputs
