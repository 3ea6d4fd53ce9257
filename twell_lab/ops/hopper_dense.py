"""Launches of the Hopper kernels that compute neurons densely: kernels/sm90_gate_up.cu, sm90_down_sums.cu and
sm90_down_rows.cu.

They serve the dense path, the hot neurons of the hot/cold path, and the rows that the packed path lost: those that its
pool could not hold, and those with many kept values. Everything runs on torch's current stream and nothing waits for
the GPU. Compute capability 9.0 only; `takes` tells what they accept."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources, tma
from ..cuda.launcher import kernel, multiprocessors
from ..cuda.macros import value
from ..cuda.tape import empty
from .hopper_pack import BM, BN, VECTOR, fits
from .portable import check_packed

# Lost rows that are computed at a time, which bounds the memory for their h. Each chunk costs the host two launches.
CHUNK = 16384
_number = partial(sources.number, "sm90_down_rows.cu")
_K_STEP = _number("BK")
_CLUSTER, _OUT_ROWS, _PART_BYTES, _SHARED = map(_number, ("CLUSTER", "OUT_ROWS", "PART_BYTES", "OUT_END"))
_SUMS_SHARED = sources.number("sm90_down_sums.cu", "EPILOGUE")
_WARPS = 4 * _number("CONSUMERS") * _CLUSTER  # consumer warps of a cluster


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels take these matrices: bfloat16 or float16 on one GPU of capability 9.0, both sizes of each
    weight multiples of 8.

    x: [rows, d_model]; weights may be slices of rows or columns, aligned to 16 bytes.
    """
    return fits(x, *weights) and all(w.shape[0] % VECTOR == 0 and w.shape[1] % VECTOR == 0 and len(w) for w in weights)


def _grid(rows: int, columns: int, columns_a_tile: int, device: torch.device) -> tuple[int, int]:
    """A cluster for each tile, but at most as many as run at a time, where each block has a multiprocessor."""
    tiles = -(-rows // (BM * _CLUSTER)) * -(-columns // columns_a_tile)
    return min(multiprocessors(device.index) // _CLUSTER, tiles) * _CLUSTER, 1


def _whole(device: torch.device) -> tuple[int, int]:
    """A block for each multiprocessor, in whole clusters."""
    return multiprocessors(device.index) // _CLUSTER * _CLUSTER, 1


def fitting(bias: Tensor | None) -> Tensor | None:
    """The bias, or a copy, contiguous and aligned to 4 bytes: the kernels read pairs of values."""
    if bias is None:
        return None
    return bias.contiguous() if bias.data_ptr() % 4 == 0 else bias.clone(memory_format=torch.contiguous_format)


def check(x: Tensor, gate: Tensor | None, up: Tensor, down_t: Tensor | None = None, **biases: Tensor | None) -> None:
    """Raise InputError for what gate_up does not take, or, where `down_t` is given, finish_lost."""
    given = {name: t for name, t in (("x", x), ("gate", gate), ("up", up), ("down_t", down_t)) if t is not None}
    d_ff, d_model = up.shape if up.dim() == 2 else (0, 0)
    if (
        not takes(*given.values())
        or x.shape[1] != d_model
        or any(w is not None and w.shape != up.shape for w in (gate, down_t))
    ):
        given_as = ", ".join(
            f"{name} {t.dtype} {list(t.shape)} strides {t.stride()} on {t.device}" for name, t in given.items()
        )
        raise InputError(
            f"got {given_as}; accepted are x [rows, d_model] and gate, up and down_t [d_ff, d_model] of bfloat16 or "
            "float16 on one GPU of capability 9.0, with d_model and d_ff multiples of 8, and each row contiguous and "
            "aligned to 16 bytes"
        )
    _check_biases(up, **biases)


def _check_biases(up: Tensor, **biases: Tensor | None) -> None:
    for name, bias in biases.items():
        length = up.shape[name == "down_bias"]
        if bias is not None and (bias.shape != (length,) or bias.dtype != up.dtype or bias.device != up.device):
            raise InputError(
                f"{name} is {bias.dtype} {list(bias.shape)} on {bias.device}; {up.dtype} [{length}] on {up.device} is "
                "accepted"
            )


def gate_up(
    x: Tensor, gate: Tensor | None, up: Tensor, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """relu(x gate^T + gate_bias) * (x up^T + up_bias), or relu(x up^T + up_bias) without a gate -> h [rows, d_ff].

    x: [rows, d_model]; gate and up: [d_ff, d_model], or slices of rows of such. The gate is rounded before the ReLU as
    torch's linear rounds it; products and sums are float32; h is rounded once. Raises InputError for what `takes`
    refuses."""
    check(x, gate, up, gate_bias=gate_bias, up_bias=up_bias)
    if not len(x):
        return x.new_empty(0, up.shape[0])
    h = empty(len(x), len(up), dtype=x.dtype, device=x.device)
    _gate_up(x, gate, up, fitting(gate_bias), fitting(up_bias), h)
    return h


def down_sums(h: Tensor, down_t: Tensor) -> Tensor:
    """h [rows, d_ff] down_t [d_ff, d_model] -> float32 [rows, d_model], not rounded to their type.

    Raises InputError for what `takes` refuses."""
    if h.dim() != 2 or down_t.dim() != 2 or h.shape[1] != down_t.shape[0] or not takes(h, down_t):
        raise InputError(
            f"got h {h.dtype} {list(h.shape)} strides {h.stride()} and down_t {down_t.dtype} {list(down_t.shape)} "
            f"strides {down_t.stride()} on {h.device}; accepted are h [rows, d_ff] and down_t [d_ff, d_model] of "
            "bfloat16 or float16 on one GPU of capability 9.0, d_ff and d_model multiples of 8, and each row "
            "contiguous and aligned to 16 bytes"
        )
    (rows, d_ff), d_model = h.shape, down_t.shape[1]
    sums = empty(rows, d_model, dtype=torch.float32, device=h.device)
    if rows:
        made = kernel("sm90_down_sums.cu", "down_sums", (*value(h.dtype), ("CLUSTER", _CLUSTER)), _SUMS_SHARED)
        maps = tma.matrix_map(h, BM), tma.matrix_map(down_t, _K_STEP)
        made.launch(h.device, _grid(rows, d_model, BN, h.device), (*maps, sums, rows, d_ff, d_model))
    return sums


def _gate_up(
    x, gate, up, gate_bias, up_bias, h, first=0, rows=None, lost=None, counters=None, apart=(None,) * 4
) -> None:
    """Fill the first `rows` rows of h from rows first, first + 1, ... of x.

    lost: int32, or None. With it lost[0] - first rows are computed, but at most `rows`; the other rows of h are
    undefined. If any row is computed, the words of `counters` are set to 0. apart: packed, pool, down_t and `parts` of
    finish_lost, where few rows are taken apart; h is then undefined."""
    (d_ff, d_model), rows = up.shape, len(x) if rows is None else rows
    defines = (*value(up.dtype), ("CLUSTER", _CLUSTER), ("GATED", int(gate is not None)))
    maps = tma.matrix_map(x, BM), tma.matrix_map(up if gate is None else gate, BM), tma.matrix_map(up, BM)
    numbers = first, rows, d_model, d_ff, counters, 0 if counters is None else counters.numel()
    packed, pool, down_t, parts = apart
    few: tuple = (None,) * 4 + (0, None, 0, None)
    if packed is not None:
        few = (packed, pool, x, up, up.stride(0), down_t, down_t.stride(0), parts)
    arguments = (
        *maps,
        tma.matrix_map(h, _OUT_ROWS),
        None if gate is None else gate_bias,
        up_bias,
        lost,
        *numbers,
        *few,
    )
    made = kernel("sm90_gate_up.cu", "gate_up", defines, _SHARED, early=lost is not None)
    grid = _whole(x.device) if packed is not None else _grid(rows, d_ff, BN if gate is None else BN // 2, x.device)
    made.launch(x.device, grid, arguments)


def finish_lost(
    lost: Tensor,
    lost_x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_t: Tensor,
    down_bias: Tensor | None,
    start: Tensor | None,
    y: Tensor,
    packed: Tensor | None = None,
    pool: Tensor | None = None,
) -> None:
    """Compute the rows of y that the packed path lost: y[lost[1 + i]] = start[same row] + down_bias + h(lost_x[i])
    down_t.

    lost: int32 [1 + tokens], how many rows are lost, then their numbers, ~number where the pool could not hold the row;
    lost_x [tokens, d_model]: their rows of x, in that order; down_t: [d_ff, d_model], down transposed, may be a slice
    of rows; start: float32 [tokens, d_model] or None; y: [tokens, d_model], contiguous. packed, pool: the gate of all
    tokens, as portable.gated_pooled takes it: with it, few rows that the pool holds are computed from their kept values
    (kernels/few_rows.cuh), and not densely. The host does not know how many rows are lost: there are two launches for
    each CHUNK tokens, which end at once where nothing is lost. Raises InputError for what `takes` refuses, and for
    other shapes, types and layouts than these."""
    check(lost_x, gate, up, down_t, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
    tokens, d_model = lost_x.shape
    _check_plain("lost", lost, torch.int32, (1 + tokens,), y.device)
    _check_plain("y", y, lost_x.dtype, (tokens, d_model), lost_x.device)
    if start is not None:
        _check_plain("start", start, torch.float32, (tokens, d_model), y.device)
    if packed is not None:
        check_packed(packed, pool, tokens, len(up))
        _check_plain("packed", packed, torch.int32, tuple(packed.shape), y.device)
        _check_plain("pool", pool, torch.int32, tuple(pool.shape), y.device)
    if tokens == 0:
        return
    down_bias, gate_bias, up_bias = fitting(down_bias), fitting(gate_bias), fitting(up_bias)
    d_ff, slots, device = len(up), min(tokens, CHUNK), y.device
    clusters = multiprocessors(device.index) // _CLUSTER
    h = empty(slots, d_ff, dtype=up.dtype, device=device)
    parts = empty(clusters * _WARPS * _PART_BYTES, dtype=torch.uint8, device=device)  # of tiles that clusters share
    counters = empty(clusters * _WARPS, dtype=torch.int32, device=device)
    finish = kernel("sm90_down_rows.cu", "down_rows", (*value(up.dtype), ("CLUSTER", _CLUSTER)), _SHARED, early=True)
    maps = tma.matrix_map(h, BM), tma.matrix_map(down_t, _K_STEP)
    for first in range(0, tokens, CHUNK):
        slots, apart = min(CHUNK, tokens - first), (None,) * 4
        if packed is not None and first == 0:
            apart = packed, pool, down_t, parts
        _gate_up(lost_x, gate, up, gate_bias, up_bias, h, first, slots, lost, counters, apart)
        numbers = first, slots, d_ff, d_model
        arguments = (*maps, down_bias, start, y, lost, *numbers, counters, parts, int(apart[0] is not None))
        # The grid is for all clusters, also where there are few tiles: several clusters then share a tile.
        finish.launch(device, _whole(device), arguments)


def _check_plain(name: str, t: Tensor, dtype: torch.dtype, shape: tuple, device: torch.device) -> None:
    if (
        t.dtype != dtype
        or tuple(t.shape) != shape
        or t.device != device
        or not t.is_contiguous()
        or (t.dim() == 2 and t.data_ptr() % 16)
    ):
        raise InputError(
            f"{name} is {t.dtype} {list(t.shape)} strides {t.stride()} on {t.device}; a contiguous {dtype} "
            f"{list(shape)} on {device} is accepted, aligned to 16 bytes where it has rows"
        )
