"""How the kernels for the rows that a sparse training step cannot hold are launched (kernels/smxx_train_lost.cu,
smxx_lost_weights.cu).

Only the GPU knows how many rows are lost, and which: `lost`, int32 [1 + tokens] or longer, holds their count and then
their numbers, ascending. Every launch has a fixed grid and ends at once where lost[0] is 0. CUDA tensors run on torch's
current stream, CPU tensors in twell_lab.simulator; nothing waits for the GPU. The same input gives the same bits on the
same GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import sources
from ..cuda.launcher import aligned, kernel, multiprocessors
from ..cuda.macros import value
from ..cuda.tape import empty
from .portable import pooled_takes

FILE, WEIGHTS_FILE = "smxx_train_lost.cu", "smxx_lost_weights.cu"
_number = partial(sources.number, WEIGHTS_FILE)
_ROWS, _NEURONS = map(_number, ("ROWS", "NEURONS"))
_OWN, _PIECE = map(_number, ("BLOCK_NEURONS", "SLAB"))  # neurons of a block, and columns that it takes at a time
_BLOCKS_A_MULTIPROCESSOR = 2
_BLOCKS_ON_CPU = 6  # few enough that small tests reach every way of distributing rows over blocks
_MOST_SUMS = 32 << 20  # bytes of float32 sums that the blocks of a launch keep in global memory, at most
_MOST_ENTRIES = 48 << 20  # bytes of the entries that lost_backward leaves for lost_weights, at most


def lost_forward(
    lost: Tensor,
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    y: Tensor,
    l1: Tensor,
    kept: Tensor,
) -> None:
    """Write the lost rows of y, l1 and kept.

    x and y [tokens, d_model]; gate (None: a plain layer), up, down_t [d_ff, d_model]; biases [d_ff], [d_ff], [d_model]
    or None; l1 float32 [tokens]: sum of |h|; kept int32 [tokens]: neurons that fire. bfloat16 or float16, d_model a
    multiple of 8 up to 16384. The gate is rounded to x's type before it is tested and used, as torch's linear gives it;
    u and h are not rounded, y once. Where x's row is not finite, y's row and l1 are NaN. Raises InputError for what the
    kernels do not take."""
    _check(lost, x, gate, up, down_t, gate_bias, up_bias, l1)
    _same("y and down_bias", x, (y, x.shape), (down_bias, x.shape[1:]))
    if kept.dtype != torch.int32 or kept.shape != x.shape[:1] or l1 is None:
        raise InputError(f"kept is {kept.dtype} {list(kept.shape)}; int32 [{len(x)}], beside an l1, is accepted")
    if not len(x):
        return
    blocks = _blocks(x)
    sums = empty(blocks, _ROWS, x.shape[1], dtype=torch.float32, device=x.device)
    part_l1 = empty(blocks, _ROWS, dtype=torch.float32, device=x.device)
    part_kept = empty(blocks, _ROWS, dtype=torch.int32, device=x.device)
    _run(
        "lost_forward_v1",
        blocks,
        x,
        up,
        (lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, l1, kept, sums, part_l1, part_kept),
    )
    _run("lost_finish_v1", _grid(x), x, up, (lost, down_bias, y, l1, kept, sums, part_l1, part_kept), blocks)


def lost_backward(
    lost: Tensor,
    x: Tensor,
    dy: Tensor,
    dl1: Tensor | None,
    gate: Tensor | None,
    up: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    dx: Tensor,
    dgate: Tensor | None,
    dup: Tensor,
    ddown_t: Tensor,
    dgate_bias: Tensor | None,
    dup_bias: Tensor | None,
) -> None:
    """Write the lost rows of dx, and add the lost rows' part to the gradients of weights and biases.

    dy, dx like x; dl1 float32 [tokens] or None: gradient of lost_forward's l1. dgate (None: a plain layer), dup and
    ddown_t like the weights, dgate_bias and dup_bias like the biases or None (not wanted): to the row of each neuron
    that fired in a lost row, the sum over the lost rows, ascending, is added in float32, and the result is rounded
    once; the rows of other neurons stay as they are. Where x's row is not finite, dx's row is NaN and nothing is added.
    The other arguments: see lost_forward."""
    _check_gradients(
        lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, dgate, dup, ddown_t, dgate_bias, dup_bias
    )
    if not len(x):
        return
    (d_ff, d_model), planes, groups = up.shape, 2 if gate is None else 3, -(-up.shape[0] // _NEURONS)
    room = min(len(x), max(_MOST_ENTRIES // (4 * planes * _NEURONS * groups), 1))
    blocks, others = _blocks(x), min(_grid(x), -(-d_ff // _OWN))
    # Where there is no room for the entries, this memory must hold the sums of at least one block.
    least = planes * _OWN * _PIECE * -(-d_model // _PIECE)
    most = max(planes * groups * room * _NEURONS, least)
    sums = empty(blocks, _ROWS, d_model, dtype=torch.float32, device=x.device)
    entries = empty(most, dtype=torch.float32, device=x.device)
    layer = (lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx)
    _run("lost_backward_v1", blocks, x, up, (*layer, sums, entries), room=room)
    gradients = (dgate, dup, ddown_t, dgate_bias, dup_bias)
    _run("lost_weights_v2", others, x, up, (*layer, *gradients, sums, entries), blocks, room=room)


def _check_gradients(
    lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, dgate, dup, ddown_t, dgate_bias, dup_bias
) -> None:
    _check(lost, x, gate, up, down_t, gate_bias, up_bias, dl1)
    _same("dy and dx", x, (dy, x.shape), (dx, x.shape))
    _same(
        "gradients",
        x,
        (dgate, up.shape),
        (dup, up.shape),
        (ddown_t, up.shape),
        (dgate_bias, up.shape[:1]),
        (dup_bias, up.shape[:1]),
    )
    if dup is None or ddown_t is None or (gate is None) != (dgate is None) or (gate is None and dgate_bias is not None):
        raise InputError(
            "dup and ddown_t are needed; dgate is needed for a gated layer, and dgate and dgate_bias are accepted only "
            "there"
        )


def _grid(x: Tensor) -> int:
    return _BLOCKS_A_MULTIPROCESSOR * multiprocessors(x.device.index) if x.is_cuda else _BLOCKS_ON_CPU


def _blocks(x: Tensor) -> int:
    """The number of blocks: each has 8 rows of float32 sums in global memory, all together at most _MOST_SUMS."""
    return max(1, min(_grid(x), _MOST_SUMS // (4 * _ROWS * x.shape[1])))


def _run(name: str, grid: int, x: Tensor, up: Tensor, tensors: tuple, *more: int, room: int | None = None) -> None:
    numbers = (*(() if room is None else (room,)), x.shape[1], up.shape[0], *more)
    made = kernel(WEIGHTS_FILE if "weights" in name else FILE, name, value(x.dtype))
    made.launch(x.device, (grid, 1), (*tensors, *numbers))


def _check(lost, x, gate, up, down_t, gate_bias, up_bias, by_row) -> None:
    if x.dim() != 2 or not pooled_takes(x.dtype, x.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)}; bfloat16 or float16 rows of a multiple of 8, up to 16384, are accepted"
        )
    if up.dim() != 2 or not 1 <= up.shape[0] <= 65536:
        raise InputError(f"up is {list(up.shape)}; [d_ff, {x.shape[1]}] with d_ff from 1 to 65536 is accepted")
    shape = (up.shape[0], x.shape[1])
    _same(
        "x and the weights",
        x,
        (x, x.shape),
        (gate, shape),
        (up, shape),
        (down_t, shape),
        (gate_bias, shape[:1]),
        (up_bias, shape[:1]),
    )
    long = lost.dim() == 1 and len(lost) > len(x)
    if lost.dtype != torch.int32 or not long or lost.device != x.device or not lost.is_contiguous():
        raise InputError(
            f"lost is {lost.dtype} {list(lost.shape)}; int32 [{1 + len(x)}] or longer, on {x.device}, is accepted"
        )
    if by_row is not None and (
        by_row.dtype != torch.float32 or by_row.shape != x.shape[:1] or not by_row.is_contiguous()
    ):
        raise InputError(f"l1 or dl1 is {by_row.dtype} {list(by_row.shape)}; contiguous float32 [{len(x)}] is accepted")


def _same(what: str, x: Tensor, *wanted: tuple[Tensor | None, tuple]) -> None:
    """Raise InputError unless each tensor has x's type and device, the shape given with it, and is contiguous; and, if
    its rows are as long as x's, is aligned to 16 bytes."""
    for t, shape in wanted:
        if t is None:
            continue
        if t.dtype != x.dtype or t.device != x.device or t.shape != tuple(shape) or not t.is_contiguous():
            raise InputError(
                f"{what}: a tensor is {t.dtype} {list(t.shape)} on {t.device}, strides {t.stride()}; contiguous "
                f"{x.dtype} {list(shape)} on {x.device} is accepted"
            )
        if t.shape[-1] == x.shape[1] and not aligned(t):
            raise InputError(f"{what}: a tensor does not start at a multiple of 16 bytes")
