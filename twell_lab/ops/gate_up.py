"""gate_up: h = relu(x gate^T + gate_bias) * (x up^T + up_bias), every neuron, in one GEMM (kernels/sm90_gate_up.cu).

It serves the dense path, the hot neurons of the hot/cold path, and the rows that the packed path lost
(ops/down_rows.py). Compute capability 9.0 alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cuda.launch import Buffer, Call, Entry, Layout, Macros, Source, sixteen_bits, value
from ..cuda.tma import matrix_map
from .gate_pack import BM, BN, CLUSTER, CONSUMERS, EPILOGUE, MAINLOOP, POOLED, THREADS, VECTOR, fits

OUT_ROWS = 16  # of a warp, of which the copy engine writes 128 bytes each
SHARED = -(-EPILOGUE // 1024) * 1024 + CONSUMERS * 4 * 2 * OUT_ROWS * 128  # bytes of a block, for sm90_rows_out.cuh
ROWS_OUT = (*POOLED, *MAINLOOP, ("CLUSTER", CLUSTER), ("LAUNCH_SHARED", SHARED))
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows


def _builds(dtype: torch.dtype, widths, capability) -> list[Macros]:
    return [(*macros, ("GATED", gated)) for macros in sixteen_bits(dtype) for gated in (0, 1)]


GATE_UP = Source(
    "sm90_gate_up",
    {"gate_up": Entry(THREADS, "mmmmpppiiiipippppipip")},
    builds=_builds,
    constants=(*ROWS_OUT, ("LAUNCH_OUT_ROWS", OUT_ROWS)),
    oldest=(9, 0),
    alone=True,
)


def takes(capability: tuple[int, int], x, *weights, biases: tuple[Buffer | Layout | None, ...] = ()) -> bool:
    """Return whether gate_up, down_sums and finish_lost take these matrices: bfloat16 or float16, each row contiguous
    and aligned to 16 bytes, both sizes of each weight multiples of 8; biases aligned to 4 bytes.

    x: [rows, d_model]; weights [d_ff, d_model] may be slices of rows or columns."""
    sizes = all(n and n % VECTOR == 0 for w in weights for n in w.shape)
    return sizes and all(b is None or b.low % 4 == 0 for b in biases) and fits(capability, x, *weights)


def tile_grid(call: Call, rows: int, columns: int, columns_a_tile: int) -> tuple[int, int]:
    """Return a cluster for each tile, but at most as many as run at a time, where each block has a multiprocessor."""
    tiles = -(-rows // (BM * CLUSTER)) * -(-columns // columns_a_tile)
    return min(call.units // CLUSTER, tiles) * CLUSTER, 1


def whole_grid(call: Call) -> tuple[int, int]:
    """Return a block for each multiprocessor, in whole clusters."""
    return call.units // CLUSTER * CLUSTER, 1


def gate_up(call: Call, x, gate, up, gate_bias=None, up_bias=None) -> Buffer:
    """Add relu(x gate^T + gate_bias) * (x up^T + up_bias), or relu(x up^T + up_bias) without a gate -> h [rows, d_ff].

    x: [rows, d_model]; gate and up: [d_ff, d_model], or slices of rows of such. The gate is rounded before the ReLU as
    torch's linear rounds it; products and sums are float32; h is rounded once."""
    h = call.empty(len(x), len(up), dtype=x.dtype)
    if len(x):
        launch_gate_up(call, x, gate, up, gate_bias, up_bias, h)
    return h


def launch_gate_up(
    call, x, gate, up, gate_bias, up_bias, h, first=0, rows=None, lost=None, counters=None, apart=(None,) * 4
) -> None:
    """Fill the first `rows` rows of h from rows first, first + 1, ... of x.

    lost: int32, or None. With it lost[0] - first rows are computed, but at most `rows`; the other rows of h are
    undefined. If any row is computed, the words of `counters` are set to 0. apart: packed, pool, down_t and `parts` of
    finish_lost, where few rows are taken apart; h is then undefined."""
    (d_ff, d_model), rows = up.shape, len(x) if rows is None else rows
    packed, pool, down_t, parts = apart
    apart_rows: tuple = (None,) * 4 + (0, None, 0, None)
    if packed is not None:
        apart_rows = (packed, pool, x, up, up.strides[0], down_t, down_t.strides[0], parts)
    maps = matrix_map(x, BM), matrix_map(up if gate is None else gate, BM), matrix_map(up, BM), matrix_map(h, OUT_ROWS)
    numbers = first, rows, d_model, d_ff, counters, 0 if counters is None else counters.numel()
    macros = (*value(up.dtype), ("GATED", int(gate is not None)))
    kernel = GATE_UP.kernel("gate_up", macros, SHARED, early=lost is not None)
    grid = whole_grid(call) if packed is not None else tile_grid(call, rows, d_ff, BN if gate is None else BN // 2)
    biases = None if gate is None else gate_bias, up_bias
    call.launch(kernel, grid, *maps, *biases, lost, *numbers, *apart_rows)


def reference(x: Tensor, gate: Tensor | None, up: Tensor, gate_bias=None, up_bias=None) -> Tensor:
    """Return what `gate_up` computes, from torch's operations."""
    u = linear(x, up, up_bias)
    return torch.relu(u) if gate is None else torch.relu(linear(x, gate, gate_bias)) * u
