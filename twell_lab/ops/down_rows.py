"""finish_lost: the rows of y that the packed path lost, computed densely (kernels/sm90_gate_up.cu, sm90_down_rows.cu).

Lost are rows that the pool could not hold, and those with many kept values (ops/gated.py). Few of the latter are
computed from their kept values instead, shared among all blocks (kernels/few_rows.cuh). Hopper alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda.launch import Call, Entry, Source, sixteen_bits, value
from ..cuda.tma import matrix_map
from . import down
from .gate_pack import BK, BM, CLUSTER, CONSUMERS, THREADS
from .gate_up import ROWS_OUT, SHARED, launch_gate_up, whole_grid
from .gate_up import reference as hidden_of

CHUNK = 16384  # lost rows that are computed at a time, which bounds the memory for their h
_PART_BYTES = 32 * 128 * 4  # what a consumer warp adds to a tile that clusters share
_WARPS = 4 * CONSUMERS * CLUSTER  # consumer warps of a cluster
DOWN_ROWS = Source(
    "sm90_down_rows",
    {"down_rows": Entry(THREADS, "mmppppiiiippi")},
    builds=sixteen_bits,
    constants=(*ROWS_OUT, ("LAUNCH_PART_BYTES", _PART_BYTES)),
    oldest=(9, 0),
    alone=True,
)
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows


def finish_lost(
    call: Call, lost, lost_x, gate, up, gate_bias, up_bias, down_t, down_bias, start, y, packed=None, pool=None
) -> None:
    """Add y[lost[1 + i]] = start[same row] + down_bias + h(lost_x[i]) down_t for the lost rows, written into y.

    lost: int32 [1 + tokens], how many rows are lost, then their numbers, ~number where the pool could not hold the row;
    lost_x [tokens, d_model]: their rows of x, in that order; down_t: [d_ff, d_model], down transposed, may be a slice
    of rows; start: float32 [tokens, d_model] or None; y: [tokens, d_model], contiguous. packed, pool: the gate of all
    tokens, as `gated_pooled` takes it: with it, few rows that the pool holds are computed from their kept values, and
    not densely. The host does not know how many rows are lost: there are two launches for each CHUNK tokens, which end
    at once where nothing is lost. For what gate_up's `takes` says of lost_x, gate, up, down_t and the biases."""
    (tokens, d_model), d_ff, dtype = lost_x.shape, len(up), up.dtype
    if not tokens:
        return
    clusters = call.units // CLUSTER
    h = call.empty(min(tokens, CHUNK), d_ff, dtype=dtype)
    parts = call.empty(clusters * _WARPS * _PART_BYTES, dtype=torch.uint8)  # of tiles that clusters share
    counters = call.empty(clusters * _WARPS, dtype=torch.int32)
    finish = DOWN_ROWS.kernel("down_rows", value(dtype), SHARED, early=True)
    for first in range(0, tokens, CHUNK):
        slots = min(CHUNK, tokens - first)
        apart = (packed, pool, down_t, parts) if packed is not None and first == 0 else (None,) * 4
        launch_gate_up(call, lost_x, gate, up, gate_bias, up_bias, h, first, slots, lost, counters, apart)
        tensors, numbers = (down_bias, start, y, lost), (first, slots, d_ff, d_model)
        maps, few_apart = (matrix_map(h, BM), matrix_map(down_t, BK)), int(apart[0] is not None)
        # The grid is for all clusters, also where there are few tiles: several clusters then share a tile.
        call.launch(finish, whole_grid(call), *maps, *tensors, *numbers, counters, parts, few_apart)


def reference(x, gate, up, gate_bias, up_bias, down_t, down_bias, start=None) -> Tensor:
    """Return what `finish_lost` computes, for all rows, from torch's operations."""
    return down.reference(hidden_of(x, gate, up, gate_bias, up_bias), down_t, down_bias, start)
