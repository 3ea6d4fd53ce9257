"""How the kernels for the rows that a sparse training step does not hold are launched: the first `room` of them on
tensor cores (kernels/sm80_train_lost.cu), the others without (smxx_train_lost.cu, smxx_lost_weights.cu).

Only the GPU knows how many rows are lost, and which: `lost`, int32 [1 + tokens] or longer, holds their count and then
their numbers, ascending. Every launch has a fixed grid and ends at once where there is nothing for it to do. CUDA
tensors run on torch's current stream, CPU tensors in twell_lab.simulator; nothing waits for the GPU. The same input
gives the same bits on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources
from ..cuda.launcher import aligned, capability, kernel, multiprocessors
from ..cuda.macros import TENSOR_CORES_OF_BF16, value
from ..cuda.tape import empty
from .portable import pooled_takes

FILE, WEIGHTS_FILE, TENSOR_FILE = "smxx_train_lost.cu", "smxx_lost_weights.cu", "sm80_train_lost.cu"
_number = partial(sources.number, WEIGHTS_FILE)
_ROWS, _NEURONS = map(_number, ("ROWS", "NEURONS"))
_OWN, _PIECE = map(_number, ("BLOCK_NEURONS", "SLAB"))  # neurons of a block, and columns that it takes at a time
_tensor_number = partial(sources.number, TENSOR_FILE)
_TILE_NEURONS, _WARP_NEURONS = map(_tensor_number, ("NEURONS", "WARP_NEURONS"))
# Blocks that a multiprocessor runs at a time, and bytes of shared memory that each asks for:
_RESIDENT, _SHARED = map(_tensor_number, ("RESIDENT", "SHARED_BYTES"))
_TILE = _tensor_number("TILE")  # values of the largest tile of lost_products
_BLOCKS_A_MULTIPROCESSOR = 2
_BLOCKS_ON_CPU = 6  # few enough that small tests reach every way of distributing rows over blocks
_MOST_SUMS = 32 << 20  # bytes of float32 sums that the blocks of a launch keep in global memory, at most
_MOST_ENTRIES = 48 << 20  # bytes of the entries that lost_backward leaves for lost_weights, at most
# On tensor cores there is room for one of so many tokens, and for so many rows at least. At 16,384 tokens and d_ff 5632
# that takes 69 MB, which kernels before these used.
TOKENS_A_ROW, _LEAST_ROOM = 8, 256
# More heavy rows than this are computed here rather than walked (docs/kernels/sm80_train_lost.md has the times).
FEW_HEAVY = 36


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
    u and h are not rounded, y once. Where x's row is not source, y's row and l1 are NaN. Raises InputError for what the
    kernels do not take."""
    _check(lost, x, gate, up, down_t, gate_bias, up_bias, l1)
    _same("y and down_bias", x, (y, x.shape), (down_bias, x.shape[1:]))
    if kept.dtype != torch.int32 or kept.shape != x.shape[:1] or l1 is None:
        raise InputError(f"kept is {kept.dtype} {list(kept.shape)}; int32 [{len(x)}], beside an l1, is accepted")
    if not len(x):
        return
    room = held(x)
    if room:
        _forward_on_tensor_cores(room, lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, l1, kept)
    if room == len(x):
        return
    blocks = _blocks(x)
    sums = empty(blocks, _ROWS, x.shape[1], dtype=torch.float32, device=x.device)
    part_l1 = empty(blocks, _ROWS, dtype=torch.float32, device=x.device)
    part_kept = empty(blocks, _ROWS, dtype=torch.int32, device=x.device)
    layer = (lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, l1, kept, sums, part_l1, part_kept)
    _run(FILE, "lost_forward_v1", blocks, x, up, layer, (room,))
    _run(
        FILE,
        "lost_finish_v1",
        _grid(x),
        x,
        up,
        (lost, down_bias, y, l1, kept, sums, part_l1, part_kept),
        (room,),
        blocks,
    )


def held(x: Tensor) -> int:
    """How many lost rows of x are computed on tensor cores, at most: the first of the list. 0 where there are none."""
    if not x.is_cuda or capability(x.device.index) < TENSOR_CORES_OF_BF16:
        return 0
    return min(len(x), max(len(x) // TOKENS_A_ROW, _LEAST_ROOM))


def _forward_on_tensor_cores(room, lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, l1, kept) -> None:
    new, blocks, pitch = _between(x, up)
    h = new(room, pitch, dtype=x.dtype)
    source, counters, parts = new(room), new(blocks), new(blocks, _TILE, dtype=torch.float32)
    of_l1, of_kept = new(pitch // _WARP_NEURONS, room, dtype=torch.float32), new(pitch // _WARP_NEURONS, room)
    hidden = (lost, x, gate, up, gate_bias, up_bias, h, source, counters, of_l1, of_kept)
    _run(TENSOR_FILE, "lost_hidden_v1", blocks, x, up, hidden, (room,), shared=_SHARED)
    products = (lost, h, down_t, None, None, down_bias, source, counters, parts, y, of_l1, of_kept, l1, kept)
    _run(TENSOR_FILE, "lost_products_v1", blocks, x, up, products, (room,), shared=_SHARED)


def _backward_on_tensor_cores(room, lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients) -> None:
    new, blocks, pitch = _between(x, up)
    of_h, of_up = new(room, pitch, dtype=x.dtype), new(room, pitch, dtype=x.dtype)
    of_gate = None if gate is None else new(room, pitch, dtype=x.dtype)
    source, counters, parts = new(room), new(blocks), new(blocks, _TILE, dtype=torch.float32)
    hidden = (lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, of_h, of_up, of_gate, source, counters)
    _run(TENSOR_FILE, "lost_hidden_gradients_v1", blocks, x, up, hidden, (room,), shared=_SHARED)
    products = (lost, of_up, up, of_gate, gate, None, source, counters, parts, dx, None, None, None, None)
    _run(TENSOR_FILE, "lost_products_v1", blocks, x, up, products, (room,), shared=_SHARED)
    entries = (lost, x, dy, of_h, of_up, of_gate, source, *gradients)
    _run(TENSOR_FILE, "lost_weight_products_v1", blocks, x, up, entries, (room,), shared=_SHARED)


def _between(x: Tensor, up: Tensor) -> tuple[Callable[..., Tensor], int, int]:
    """What the tensor-core kernels of one pass share: how memory between them is made, how many blocks run at a time,
    and the values in a row of hidden entries."""
    blocks = _RESIDENT * multiprocessors(x.device.index)
    return partial(_new, x.device), blocks, -(-len(up) // _TILE_NEURONS) * _TILE_NEURONS


def _new(device: torch.device, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return empty(*shape, dtype=dtype, device=device)


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
    once; the rows of other neurons stay as they are. Where x's row is not source, dx's row is NaN and nothing is added.
    The other arguments: see lost_forward."""
    _check_gradients(
        lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, dgate, dup, ddown_t, dgate_bias, dup_bias
    )
    if not len(x):
        return
    tokens, gradients = held(x), (dgate, dup, ddown_t, dgate_bias, dup_bias)
    if tokens:
        _backward_on_tensor_cores(tokens, lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients)
    if tokens == len(x):
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
    _run(FILE, "lost_backward_v1", blocks, x, up, (*layer, sums, entries), (tokens, room))
    _run(WEIGHTS_FILE, "lost_weights_v2", others, x, up, (*layer, *gradients, sums, entries), (tokens, room), blocks)


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


def _run(
    file: str,
    name: str,
    grid: int,
    x: Tensor,
    up: Tensor,
    tensors: tuple,
    before: tuple[int, ...],
    *after: int,
    shared: int = 0,
) -> None:
    """Launch a kernel; before, after: the numbers before and after the sizes of the layer."""
    made = kernel(file, name, value(x.dtype), shared)
    made.launch(x.device, (grid, 1), (*tensors, *before, x.shape[1], up.shape[0], *after))


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
