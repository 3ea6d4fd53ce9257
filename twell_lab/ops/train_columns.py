"""The gradients of a sparse layer's weights: the survivors of its forward pass are sorted by neuron and summed up.

See kernels/columns.cuh, smxx_columns.cu and smxx_weight_gradients.cu. CUDA tensors run on torch's current stream,
nothing waits for the GPU; CPU tensors run the same kernels in twell_lab.simulator. The same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import value
from ..cuda.tape import empty
from . import portable
from .train_rows import MOST_COLUMNS, Survivors

_number = partial(sources.number, "smxx_columns.cu")
_MOST_CHUNKS = _number("MOST_CHUNKS")
_COUNTS = 3 << 19  # counts, one for each chunk and column, at most: 6 MiB
_LEAST_ROWS = 16  # rows of a chunk, at least
_COUNT_SLAB, _FILL_SLAB = map(_number, ("COUNT_SLAB", "FILL_SLAB"))
_BLOCK_WARPS, _CLASSES = map(_number, ("BLOCK_WARPS", "CLASSES"))
_PLAN_INTS = 2 + 2 * (_CLASSES + 1)  # size of a Plan of columns.cuh
# A list of more than 8 units is cut into pieces of 8 units and one of the rest, so never into more than one piece for
# each 4 units.
_UNITS_A_PIECE = 4
# Each piece of a long list leaves a row of partial sums. There are at most _MOST_PIECES, and at most _PARTIAL_BYTES of
# them, but never fewer than _LEAST_PIECES.
_MOST_PIECES, _PARTIAL_BYTES, _LEAST_PIECES = 512, 13 << 20, 16
# Columns of x and dy that a warp sums up at a time:
_WIDTH = sources.number("smxx_weight_gradients.cu", "SLAB")


@dataclass(frozen=True)
class Columns:
    """The survivors sorted by neuron. records: int32 [capacity, 4]: the token, then the bits of the float32 values
    dgate_of, dup_of and hidden; the records of neuron j are starts[j] to starts[j + 1], tokens ascending.
    kernels/columns.cuh describes the others."""

    records: Tensor
    starts: Tensor
    order: Tensor
    pieces: Tensor
    first_piece: Tensor
    plan: Tensor


def by_column(s: Survivors, dh: Tensor, d_ff: int, dtype: torch.dtype, pieces: int = _MOST_PIECES) -> Columns:
    """The survivors s, whose values are of `dtype`, with dh float32 [capacity], sorted by neuron.

    pieces: how many pieces the longest lists may be cut into, together. Raises InputError for too many tokens."""
    tokens, device = len(s.spans), dh.device
    chunks, rows = _chunks(tokens, d_ff)
    defines = value(dtype)
    shapes = [(len(s.words), 4), (d_ff + 1,), (d_ff,), (pieces, 2), (d_ff,), (_PLAN_INTS,)]
    counts, totals, *columns = (
        empty(*shape, dtype=torch.int32, device=device) for shape in ((chunks, d_ff), (d_ff,), *shapes)
    )
    found = Columns(*columns)

    def run(name, grid, *arguments):
        launcher.kernel("smxx_columns.cu", f"columns_{name}_v2", defines).launch(device, grid, arguments)

    run("count", (chunks, -(-d_ff // _COUNT_SLAB)), s.spans, s.words, counts, tokens, d_ff, rows)
    run("scan", (-(-d_ff // 32), 1), counts, totals, chunks, d_ff)
    lists = (totals, found.starts, found.order, found.pieces, found.first_piece, found.plan)
    run("plan", (1, 1), *lists, d_ff, _UNITS_A_PIECE * pieces)
    entries = (s.spans, s.words, s.ups, dh, counts, found.starts, found.records)
    run("fill", (chunks, -(-d_ff // _FILL_SLAB)), *entries, tokens, d_ff, rows)
    return found


def _chunks(tokens: int, d_ff: int) -> tuple[int, int]:
    """(chunks, rows of a chunk) for counting the survivors."""
    chunks = max(1, min(_MOST_CHUNKS, _COUNTS // d_ff))
    rows = max(_LEAST_ROWS, -(-tokens // chunks))
    if rows > 65535:
        raise InputError(f"there are {tokens} tokens; at most {chunks * 65535} are accepted at once for d_ff {d_ff}")
    return -(-tokens // rows), rows


def weight_gradients(
    x: Tensor, dy: Tensor, s: Survivors, dh: Tensor, d_ff: int, biases: bool, version: int = 2
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(dgate, dup, ddown_t, dgate_bias, dup_bias), of x's dtype: [d_ff, d_model], the biases' [d_ff].

    x, dy: [tokens, d_model], 16-bit, rows of a multiple of 8 values; s: the survivors of x; dh: float32 [capacity], the
    gradient of each survivor's h. With g, u, h of a survivor at (t, j), and dg = dh u, du = dh g: dgate[j] = sum of dg
    x[t], dup[j] = sum of du x[t], ddown_t[j] = sum of h dy[t]; the biases' gradients are the sums of dg and du. A plain
    layer (s.ups is None) has neither dgate nor dgate_bias; dup and dup_bias are then sums of dh x[t] and dh. biases:
    whether the biases' gradients are wanted; otherwise they are None. Lost rows add nothing. Every row is written, with
    zeros for a neuron that never fired. Sums are float32 and rounded once. version: 1 or 2. Raises InputError for what
    the kernels do not take."""
    x, dy, dh = x.contiguous(), dy.contiguous(), dh.contiguous()
    _check(x, dy, s, dh, d_ff, version)
    (tokens, d_model), gated = x.shape, s.ups is not None
    rows = lambda wanted: empty(d_ff, d_model, dtype=x.dtype, device=x.device) if wanted else None  # noqa: E731
    bias = lambda wanted: empty(d_ff, dtype=x.dtype, device=x.device) if wanted else None  # noqa: E731
    outputs = (rows(gated), rows(True), rows(True), bias(biases and gated), bias(biases))
    if tokens == 0:
        return tuple(t if t is None else t.zero_() for t in outputs)
    sums = 3 if gated else 2
    pieces = max(_LEAST_PIECES, min(_MOST_PIECES, _PARTIAL_BYTES // (4 * sums * d_model)))
    columns = by_column(s, dh, d_ff, x.dtype, pieces)
    partials, bias_partials = (
        empty(pieces, width, dtype=torch.float32, device=x.device) for width in (sums * d_model, 2)
    )
    defines = (*value(x.dtype), *(() if gated else (("GATED", 0),)))

    def run(name, grid, *tensors):
        made = launcher.kernel("smxx_weight_gradients.cu", f"weight_gradients_{name}", defines)
        made.launch(x.device, grid, (*tensors, *outputs, d_model))

    if version == 1:
        run("v1", (d_ff, -(-d_model // 128)), x, dy, columns.starts, columns.records)
        return outputs
    blocks = _most_blocks(d_ff, pieces)
    plan = (columns.starts, columns.order, columns.pieces, columns.plan, columns.records)
    run("v2", (blocks, -(-d_model // _WIDTH)), x, dy, *plan, partials, bias_partials)
    finish = (columns.starts, columns.order, columns.first_piece, columns.plan, partials, bias_partials)
    run("finish_v2", (pieces // 2, -(-sums * d_model // 1024)), *finish)
    return outputs


def _most_blocks(d_ff: int, pieces: int) -> int:
    """The most blocks that a plan can have: a warp for each list, for long lists less than two for each unit, rounded
    up to whole blocks in each class."""
    return -(-(d_ff + 2 * _UNITS_A_PIECE * pieces) // _BLOCK_WARPS) + _CLASSES


def _check(x: Tensor, dy: Tensor, s: Survivors, dh: Tensor, d_ff: int, version: int) -> None:
    if x.dim() != 2 or not portable.pooled_takes(x.dtype, x.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)}; bfloat16 and float16 rows of a multiple of 8 values, up to 16384, are "
            f"accepted"
        )
    if dy.shape != x.shape or dy.dtype != x.dtype:
        raise InputError(f"dy is {dy.dtype} {list(dy.shape)}; what x is, {x.dtype} {list(x.shape)}, is accepted")
    if len(s.spans) != len(x) or dh.dtype != torch.float32 or dh.shape != s.words.shape:
        raise InputError(
            f"the survivors are of {len(s.spans)} rows and dh is {dh.dtype} {list(dh.shape)}; {len(x)} rows and "
            f"float32 {list(s.words.shape)} are accepted"
        )
    if not 0 < d_ff <= MOST_COLUMNS:
        raise InputError(f"d_ff is {d_ff}; 1 to {MOST_COLUMNS} is accepted")
    if version not in (1, 2):
        raise InputError(f"version is {version}; 1 and 2 are accepted")
    if not launcher.aligned(x, dy):
        raise InputError("x or dy does not start at a multiple of 16 bytes, and the kernels need that")
