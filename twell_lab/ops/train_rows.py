"""The products of a training step that go over a row's survivors: y, u, the gradient of h, and the gradient of x.

Version 1 (kernels/smxx_train_rows.cu) holds whole rows in registers; version 2 (kernels/smxx_train_slabs.cu) takes
slabs of columns, and shares a heavy row among many warps. And the transpose of a matrix (kernels/smxx_transpose.cu)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from ..cuda.launch import VALUE, Buffer, Call, Entry, Macros, Source, sixteen_bits, value
from ..formats.twell import fires
from .down import short_rows, specialisation, team_threads
from .survivors import HEAVY, Survivors

_VECTOR = 8  # values in 16 bytes
_BLOCK_WARPS = 4
_SIDE = 64  # of the square that a block transposes
_MOST_SLABS = 16  # slabs whose pieces of dot products are kept at once
# By kernel: the lanes that share an entry, which is also the width of a slab in vectors of 16 bytes; and the entries
# that a lane loads at once.
_SHAPES = {"weighted_rows": (32, 8), "input_gradient": (16, 2), "dots": (32, 8)}


def _slab_macros(dtype: torch.dtype, d_model: int, shape: tuple[int, int]) -> Macros:
    return ((VALUE[dtype], True), ("D_MODEL", d_model), ("ROW_LANES", shape[0]), ("AT_ONCE", shape[1]))


def _slab_builds(dtype: torch.dtype, widths: Sequence[int], capability: tuple[int, int]) -> list[Macros]:
    taken = [dict(macros)["D_MODEL"] for macros in short_rows(dtype, widths)]
    return [_slab_macros(dtype, width, shape) for width in taken for shape in dict.fromkeys(_SHAPES.values())]


ROWS = Source(
    "smxx_train_rows",
    {
        "weighted_rows_v1": Entry(team_threads, "pppppp"),
        "hidden_gradient_v1": Entry(team_threads, "ppppppp"),
        "input_gradient_v1": Entry(team_threads, "ppppppp"),
    },
    builds=short_rows,
    constants=(("HEAVY", HEAVY),),
)
TRANSPOSE = Source(
    "smxx_transpose", {"transpose_v1": Entry(256, "ppii")}, sixteen_bits, (("SIDE", _SIDE), ("THREADS", 256))
)
SLABS = Source(
    "smxx_train_slabs",
    {
        "weighted_rows_v2": Entry(32 * _BLOCK_WARPS, "pppppppi"),
        "input_gradient_v2": Entry(32 * _BLOCK_WARPS, "ppppppppi", lambda macros: macros["AT_ONCE"] < 8),
        "pieces_v1": Entry(32 * _BLOCK_WARPS, "ppppppiii"),
        "up_values_v1": Entry(32 * _BLOCK_WARPS, "pppppppiiiii"),
        "hidden_gradient_v2": Entry(32 * _BLOCK_WARPS, "pppppppiiiii"),
    },
    builds=_slab_builds,
    constants=(("HEAVY", HEAVY), ("BLOCK_WARPS", _BLOCK_WARPS)),
)


def transposed(call: Call, m: Buffer) -> Buffer:
    """Transpose m [rows, columns] of 16-bit values, contiguous, both multiples of 8."""
    rows, columns = m.shape
    out = call.empty(columns, rows, dtype=m.dtype)
    grid = -(-columns // _SIDE), -(-rows // _SIDE)
    call.launch(TRANSPOSE.kernel("transpose_v1", value(m.dtype)), grid, m, out, rows, columns)
    return out


def up_values(call: Call, x: Buffer, s: Survivors, up: Buffer, up_bias: Buffer | None) -> None:
    """Write s.ups = x . up[column] + up_bias[column], and s.l1, of a gated layer. up: [d_ff, d_model]."""
    _dots(call, x, s, up, "up_values_v1", (up_bias, s.ups, s.l1))


def weighted_rows(call: Call, s: Survivors, down_t: Buffer, bias: Buffer | None, version: int = 2) -> Buffer:
    """Compute y [tokens, d_model] = sum of h * down_t[column] + bias; down_t: [d_ff, d_model]. Lost rows are not
    written."""
    y = call.empty(len(s.spans), down_t.shape[1], dtype=down_t.dtype)
    _rows(call, "weighted_rows", version, y, s, (s.ups, down_t, bias, y))
    return y


def hidden_gradient(call: Call, dy: Buffer, s: Survivors, down_t: Buffer, dl1, version: int = 2) -> Buffer:
    """Compute dh float32 [capacity] at the entries: dy [tokens, d_model] . down_t[column] + dl1 * sign(h); dl1: float32
    [tokens]."""
    dh = call.empty(len(s.words), dtype=torch.float32)
    if version == 2:
        _dots(call, dy, s, down_t, "hidden_gradient_v2", (s.ups, dl1, dh))
    else:
        _rows(call, "hidden_gradient", version, dy, s, (s.ups, down_t, dl1, dh), dy)
    return dh


def input_gradient(call: Call, s: Survivors, dh: Buffer, gate: Buffer | None, up: Buffer, version: int = 2) -> Buffer:
    """Compute dx [tokens, d_model]: sum of dh * u * gate[column] + dh * g * up[column], of a plain layer dh *
    up[column].

    dh: float32 [capacity]; gate, up: [d_ff, d_model], gate None for a plain layer. Lost rows are not written."""
    dx = call.empty(len(s.spans), up.shape[1], dtype=up.dtype)
    _rows(call, "input_gradient", version, dx, s, (s.ups, dh, gate, up, dx))
    return dx


def _run_slabs(call: Call, name: str, shape, rows: Buffer, slabs: int, arguments: tuple) -> None:
    """Launch a kernel of the slabs for these rows; slabs 0: for the kernels that take no slabs, but a warp a row."""
    kernel = SLABS.kernel(name, _slab_macros(rows.dtype, rows.shape[1], shape))
    grid = (-(-len(rows) // (_BLOCK_WARPS * (32 // shape[0] if slabs else 1))), max(slabs, 1))
    call.launch(kernel, grid, *arguments)


def _rows(call: Call, name: str, version: int, rows: Buffer, s: Survivors, more: tuple, *before: Buffer) -> None:
    """Launch version 1 or 2 of a kernel that reads, or writes, each of these rows; before, more: the buffers before and
    behind those of s that both versions take."""
    if version == 1:
        kernel = ROWS.kernel(f"{name}_v1", specialisation(rows.dtype, rows.shape[1]))
        return call.launch(kernel, (len(rows), 1), *before, s.spans, s.words, *more)
    shape = _SHAPES[name]
    slabs = -(-rows.shape[1] // (shape[0] * _VECTOR))
    _run_slabs(call, f"{name}_v2", shape, rows, slabs, (*before, s.spans, s.lost, s.words, *more, len(rows)))


def _dots(call: Call, rows: Buffer, s: Survivors, matrix: Buffer, finish: str, more: tuple) -> None:
    """Launch the dot product of each entry's row with the entry's row of the matrix: one kernel computes a piece of it
    for each slab of columns, and the kernel `finish` adds the pieces up and uses the sums."""
    shape = _SHAPES["dots"]
    slabs, capacity = -(-rows.shape[1] // (shape[0] * _VECTOR)), len(s.words)
    pieces = call.empty(min(slabs, _MOST_SLABS), capacity, dtype=torch.float32)
    sizes, listed = (len(rows), capacity), (s.spans, s.lost, s.words)
    for first in range(0, slabs, _MOST_SLABS):
        some = min(_MOST_SLABS, slabs - first)
        _run_slabs(call, "pieces_v1", shape, rows, some, (rows, *listed, matrix, pieces, *sizes, first))
        order = some, int(first > 0), int(first + some == slabs)
        _run_slabs(call, finish, shape, rows, 0, (*listed, pieces, *more, *sizes, *order))


def reference(x, gate, up, down_t, gate_bias, up_bias, down_bias, dy, dl1, dtype: torch.dtype) -> tuple:
    """Return what a whole step computes, lost rows included, by torch's operations on all neurons, in the type of x: y,
    l1, kept, dx, dgate, dup, ddown_t, dgate_bias, dup_bias.

    dtype: to which the gate is rounded before it is tested and used. It is the reference of the operations here, and of
    those of ops.columns and ops.train_lost."""
    finite = x.isfinite().all(1, keepdim=True)
    g = linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)
    g = g.to(dtype).to(x.dtype)
    keep, u = fires(g) & finite, torch.ones_like(g) if gate is None else linear(x, up, up_bias)
    h = torch.where(keep, g * u, 0)
    l1 = h.abs().sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
    dh = dy @ down_t.t()
    if dl1 is not None:
        dh = (dh + dl1[:, None] * h.sign()).to(x.dtype)
    dg, du = torch.where(keep, dh * u, 0), torch.where(keep, dh if gate is None else dh * g, 0)
    rows, of_y = torch.where(finite, x, 0), torch.where(finite, dy, 0)
    dx = du @ up if gate is None else dg @ gate + du @ up
    spoilt = ~finite[:, 0]
    y = linear(h, down_t.t(), down_bias)
    y[spoilt], dx[spoilt], l1[spoilt] = torch.nan, torch.nan, torch.nan
    of_gate = (None, None) if gate is None else (dg.t() @ rows, dg.sum(0))
    biases = None if gate_bias is None else of_gate[1], None if up_bias is None else du.sum(0)
    return y, l1, keep.sum(1, dtype=torch.int32), dx, of_gate[0], du.t() @ rows, h.t() @ of_y, *biases


TOLERANCE = 1.0  # times what the library allows (accuracy.worst_row)
