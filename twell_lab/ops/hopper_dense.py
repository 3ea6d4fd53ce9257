"""Launches of the Hopper kernels that compute neurons densely: kernels/sm90_gate_up.cu and kernels/sm90_down_rows.cu.

They serve the dense path, the hot neurons of the hot/cold path, and the rows that the packed path gives up. Everything
runs on torch's current stream and nothing waits for the GPU. Only CUDA tensors of compute capability 9.0: `takes` says
so."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import sources, tma
from ..cuda.launcher import DEFINE, address, kernel
from .hopper_pack import BM, BN, VECTOR, fits, multiprocessors

CHUNK = 8192  # lost rows whose h has room at a time
_number = partial(sources.number, "sm90_down_rows.cu")
_CLUSTER, _OUT_ROWS, _PART_BYTES, _SHARED = map(_number, ("CLUSTER", "OUT_ROWS", "PART_BYTES", "OUT_END"))
_WARPS = 4 * _number("CONSUMERS") * _CLUSTER  # consumer warps of a cluster


def takes(x: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels take these matrices: bfloat16 or float16 on one GPU of capability 9.0, all sizes of weights
    multiples of 8.

    x: [rows, d_model]; weights may be slices of rows or columns that start on 16 bytes.
    """
    return fits(x, *weights) and all(w.shape[0] % VECTOR == 0 and w.shape[1] % VECTOR == 0 and len(w) for w in weights)


def _grid(rows: int, columns: int, columns_a_tile: int, device: torch.device) -> tuple[int, int]:
    """As many clusters as there are tiles, or as run at a time: a block takes a multiprocessor."""
    tiles = -(-rows // (BM * _CLUSTER)) * -(-columns // columns_a_tile)
    return min(multiprocessors(device) // _CLUSTER, tiles) * _CLUSTER, 1


def fitting(bias: Tensor | None) -> Tensor | None:
    """The kernels read a bias in pairs of values."""
    if bias is None:
        return None
    return bias.contiguous() if bias.data_ptr() % 4 == 0 else bias.clone(memory_format=torch.contiguous_format)


def biases_fit(*biases: Tensor | None) -> bool:
    """Whether `fitting` leaves them as they are."""
    return all(b is None or (b.is_contiguous() and b.data_ptr() % 4 == 0) for b in biases)


def check(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor | None = None, **biases: Tensor | None) -> None:
    """Raise InputError for what gate_up, and finish_lost where there is a down, do not take."""
    given = {name: t for name, t in (("x", x), ("gate", gate), ("up", up), ("down", down)) if t is not None}
    d_ff, d_model = up.shape if up.dim() == 2 else (0, 0)
    if (
        not takes(*given.values())
        or x.shape[1] != d_model
        or (gate is not None and gate.shape != up.shape)
        or (down is not None and down.shape != (d_model, d_ff))
    ):
        told = ", ".join(
            f"{name} {t.dtype} {list(t.shape)} strides {t.stride()} on {t.device}" for name, t in given.items()
        )
        raise InputError(
            f"{told}; x [rows, d_model], gate and up [d_ff, d_model] and down [d_model, d_ff] of bfloat16 or float16 "
            f"on one GPU of "
            "capability 9.0 are accepted, where d_model and d_ff are multiples of 8 and rows lie in one piece on 16 "
            "bytes"
        )
    _check_biases(up, **biases)


def _check_biases(up: Tensor, **biases: Tensor | None) -> None:
    for name, bias in biases.items():
        length = up.shape[name == "down_bias"]
        if bias is not None and (bias.shape != (length,) or bias.dtype != up.dtype or bias.device != up.device):
            raise InputError(
                f"{name} is {bias.dtype} {list(bias.shape)} on {bias.device}; {up.dtype} [{length}] on {up.device} is "
                f"accepted"
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
    gate_bias, up_bias = fitting(gate_bias), fitting(up_bias)
    made = GateUp(gate, up, gate_bias, up_bias)
    return made.run(x, made.maps_of(len(x), row_of(x)))


def row_of(x: Tensor) -> int:
    """Values from one row of x to the next."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


class GateUp:
    """The launches of gate_up for one layer's weights, with everything but x, h and how many rows.

    Holds addresses, not tensors: whoever keeps one knows that the weights are still there. Biases are contiguous and
    start on 4 bytes."""

    def __init__(self, gate: Tensor | None, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None):
        (self.d_ff, self.d_model), self.dtype, self.device = up.shape, up.dtype, up.device
        gated, of_up = gate is not None, tma.matrix_map(up, BM)
        self.maps = tma.matrix_map(gate, BM) if gated else of_up, of_up
        self.biases = address(gate_bias) if gated else 0, address(up_bias)
        self.columns = BN // 2 if gated else BN  # of a tile
        defines = (DEFINE[self.dtype], True), ("CLUSTER", _CLUSTER), ("GATED", int(gated))
        self.kernel = kernel("sm90_gate_up.cu", "gate_up", defines, _SHARED)

    def maps_of(self, rows: int, row: int):
        """(address of x, address of h) -> their maps, for x [rows, d_model] with `row` values from one row to the next,
        and as many rows of h [., d_ff]."""
        x = tma.matrix_numbers(rows, self.d_model, row, self.dtype, BM)
        h = tma.matrix_numbers(rows, self.d_ff, self.d_ff, self.dtype, _OUT_ROWS)
        return lambda at, h_at: (tma.tensor_map(at, *x), tma.tensor_map(h_at, *h))

    def run(self, x: Tensor, maps) -> Tensor:
        """h [..., d_ff] of x [..., d_model]; maps: `maps_of` x."""
        h = torch.empty(*x.shape[:-1], self.d_ff, dtype=self.dtype, device=self.device)
        self.launch(maps(x.data_ptr(), h.data_ptr()), 0, x.shape[:-1].numel())
        return h

    def launch(
        self, x_and_h: tuple[bytes, bytes], first: int, rows: int, lost=None, counters: int = 0, counted=0
    ) -> None:
        """Fill the first rows of h from rows first, first + 1, ... of x.

        With `lost` it is as many rows as that says, at most `rows`; what later rows of h hold then is left open. Where
        there are rows, `counted` words at the address `counters` are set to 0."""
        x, h = x_and_h
        grid = _grid(rows, self.d_ff, self.columns, self.device)
        sizes = first, rows, self.d_model, self.d_ff, counters, counted
        self.kernel.launch(self.device, grid, (x, *self.maps, h, *self.biases, lost, *sizes))


def finish_lost(
    lost: Tensor,
    lost_x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    start: Tensor | None,
    y: Tensor,
) -> None:
    """Compute the rows of y that the packed path gave up: y[lost[1 + i]] = start[same row] + down_bias + h(lost_x[i])
    down^T.

    lost: int32 [1 + tokens], lost[0] their number, on the GPU; lost_x [tokens, d_model]: their rows of x, in that
    order; down: [d_model, d_ff], may be a slice of columns; start: float32 [tokens, d_model] or None; y: [tokens,
    d_model], contiguous. The launches depend on `tokens` alone: two for each CHUNK tokens, which end at once where
    nothing is lost. Raises InputError for what `takes` refuses, and for other shapes, types and layouts than these."""
    check(lost_x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
    tokens, d_model = lost_x.shape
    _check_plain("lost", lost, torch.int32, (1 + tokens,), y.device)
    _check_plain("y", y, lost_x.dtype, (tokens, d_model), lost_x.device)
    if start is not None:
        _check_plain("start", start, torch.float32, (tokens, d_model), y.device)
    if tokens == 0:
        return
    down_bias, gate_bias, up_bias = fitting(down_bias), fitting(gate_bias), fitting(up_bias)
    made = FinishLost(tokens, row_of(lost_x), GateUp(gate, up, gate_bias, up_bias), down, down_bias)
    h, parts = (torch.empty(room, dtype=torch.uint8, device=y.device) for room in made.room)
    made.launch(lost, lost_x.data_ptr(), start, y, h.data_ptr(), parts.data_ptr())


class FinishLost:
    """The launches of finish_lost for one layer's weights and so many tokens.

    Holds addresses, not tensors: whoever keeps one knows that the weights are still there. row: values from one row of
    lost_x to the next. room: bytes that a call needs for h, and for the tiles that clusters share."""

    def __init__(self, tokens: int, row: int, gate_up: GateUp, down: Tensor, down_bias: Tensor | None):
        d_ff, d_model, self.device = gate_up.d_ff, gate_up.d_model, down.device
        self.gate_up, self.tokens, slots = gate_up, tokens, min(tokens, CHUNK)
        self.x = tma.matrix_numbers(tokens, d_model, row, down.dtype, BM)
        self.h_written = tma.matrix_numbers(slots, d_ff, d_ff, down.dtype, _OUT_ROWS)
        self.h_read = tma.matrix_numbers(slots, d_ff, d_ff, down.dtype, BM)
        self.down, self.down_bias = tma.matrix_map(down, BM), address(down_bias)
        clusters = multiprocessors(self.device) // _CLUSTER
        self.grid = clusters * _CLUSTER, 1  # all of them: few tiles are shared
        self.counted, self.counters = clusters * _WARPS, clusters * _WARPS * _PART_BYTES  # the counters come last
        self.room = slots * d_ff * down.dtype.itemsize, clusters * _WARPS * (_PART_BYTES + 4)
        self.sizes = d_ff, d_model
        defines = (DEFINE[down.dtype], True), ("CLUSTER", _CLUSTER)
        self.kernel = kernel("sm90_down_rows.cu", "down_rows", defines, _SHARED)

    def launch(self, lost, lost_x: int, start, y, h: int, parts: int) -> None:
        """lost_x, h, parts: addresses; lost, start, y: addresses, tensors or None."""
        x_and_h = tma.tensor_map(lost_x, *self.x), tma.tensor_map(h, *self.h_written)
        maps, counters = (tma.tensor_map(h, *self.h_read), self.down), parts + self.counters
        for first in range(0, self.tokens, CHUNK):
            slots = min(CHUNK, self.tokens - first)
            self.gate_up.launch(x_and_h, first, slots, lost, counters, self.counted)
            rest = first, slots, *self.sizes, counters, parts
            self.kernel.launch(self.device, self.grid, (*maps, self.down_bias, start, y, lost, *rest))


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
            f"{list(shape)} on {device} "
            "that starts on 16 bytes is accepted"
        )
