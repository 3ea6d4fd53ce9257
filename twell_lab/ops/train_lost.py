"""The rows that a sparse training step's list does not have: the first of them on tensor cores
(kernels/sm80_train_lost.cu), the others without (smxx_train_lost.cu, smxx_lost_weights.cu).

A row is lost where its tiles overflow and the pool of the packed gate (ops.gate_pack) has no room for the rest, or
where the compact form (ops.survivors) has none: then it is computed from the dense weights, exactly, and costs time.
Only the GPU knows how many rows are lost, and which: `lost`, int32 [1 + tokens] or longer, holds their count and then
their numbers, ascending. Every launch has a fixed grid and ends at once where there is nothing for it to do. The same
input gives the same bits on the same GPU. The reference is that of a whole step (ops.train_rows)."""

from __future__ import annotations

import torch

from ..cuda.launch import Buffer, Call, Entry, Source, capability, sixteen_bits, value

_ROWS, _NEURONS, _THREADS = 8, 4, 256  # of smxx_: rows of a block, neurons of a warp
_OWN, _PIECE = 8, 4 * _THREADS  # of lost_weights: neurons of a block, and columns that it takes at a time
_TILE_NEURONS, _RESIDENT, _SHARED = 64, 2, 98304  # of sm80_: neurons of a tile, blocks of a multiprocessor, bytes
_WARP_NEURONS, _TILE = _TILE_NEURONS // 4, 32 * 4 * 128  # and values of the largest tile of lost_products
_BLOCKS_A_MULTIPROCESSOR = 2
_BLOCKS_ON_CPU = 6  # few enough that small tests reach every way of distributing rows over blocks
_MOST_SUMS = 32 << 20  # bytes of float32 sums that the blocks of a launch keep in global memory, at most
_MOST_ENTRIES = 48 << 20  # bytes of the entries that lost_backward leaves for lost_weights, at most
# Tensor cores take one of so many tokens, and so many rows at least. At 16,384 tokens and d_ff 5632 that takes 69 MB,
# which kernels before these used.
TOKENS_A_ROW, _LEAST_ROWS = 8, 256
# More heavy rows than this are computed here rather than walked (docs/kernels/sm80_train_lost.md has the times).
FEW_HEAVY = 36

_SIZES = (("ROWS", _ROWS), ("NEURONS", _NEURONS), ("THREADS", _THREADS))
LOST = Source(
    "smxx_train_lost",
    {
        "lost_forward_v1": Entry(_THREADS, "ppppppppppppppiii"),
        "lost_finish_v1": Entry(_THREADS, "ppppppppiiii"),
        "lost_backward_v1": Entry(_THREADS, "ppppppppppppiiii"),
    },
    builds=sixteen_bits,
    constants=_SIZES,
)
WEIGHTS = Source(
    "smxx_lost_weights",
    {"lost_weights_v2": Entry(_THREADS, "pppppppppppppppppiiiii")},
    builds=sixteen_bits,
    constants=(*_SIZES, ("BLOCK_NEURONS", _OWN), ("LAUNCH_SLAB", _PIECE)),
)
TENSOR = Source(
    "sm80_train_lost",
    {
        "lost_hidden_v1": Entry(256, "pppppppppppiii"),
        "lost_hidden_gradients_v1": Entry(256, "ppppppppppppppiii"),
        "lost_products_v1": Entry(256, "ppppppppppppppiii"),
        "lost_weight_products_v1": Entry(256, "ppppppppppppiii"),
    },
    builds=sixteen_bits,
    constants=(("NEURONS", _TILE_NEURONS), ("RESIDENT", _RESIDENT), ("SHARED_BYTES", _SHARED), ("LAUNCH_TILE", _TILE)),
    oldest=(8, 0),
)


def tensor_core_rows(tokens: int, device: torch.device) -> int:
    """Return how many lost rows of so many tokens are computed on tensor cores, at most: the first of the list."""
    if device.type != "cuda" or capability(device.index) < TENSOR.oldest:
        return 0
    return min(tokens, max(tokens // TOKENS_A_ROW, _LEAST_ROWS))


def lost_forward(call: Call, lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, l1, kept) -> tuple:
    """Write the lost rows of y, l1 and kept, and return these.

    x and y [tokens, d_model]; gate (None: a plain layer), up, down_t [d_ff, d_model]; biases [d_ff], [d_ff], [d_model]
    or None; l1 float32 [tokens]: sum of |h|; kept int32 [tokens]: neurons that fire. bfloat16 or float16, d_model a
    multiple of 8 up to 16384. The gate is rounded to x's type before it is tested and used, as torch's linear gives it;
    u and h are not rounded, y once. Where x's row is not finite, y's row and l1 are NaN."""
    tokens, d_model = x.shape
    layer, size = (x, gate, up), (d_model, len(up))
    room = tensor_core_rows(tokens, call.device)
    if room:
        h, source, counters, parts = _between(call, room, x, up)
        groups = h.shape[1] // _WARP_NEURONS
        of_l1, of_kept = (call.empty(groups, room, dtype=dtype) for dtype in (torch.float32, torch.int32))
        hidden = (lost, *layer, gate_bias, up_bias, h, source, counters, of_l1, of_kept)
        _on_tensor_cores(call, "lost_hidden_v1", x, *hidden, room, *size)
        products = (lost, h, down_t, None, None, down_bias, source, counters, parts, y, of_l1, of_kept, l1, kept)
        _on_tensor_cores(call, "lost_products_v1", x, *products, room, *size)
    if room < tokens:
        grid, blocks = _grids(call, d_model)
        sums = call.empty(blocks, _ROWS, d_model, dtype=torch.float32)
        of_blocks = [call.empty(blocks, _ROWS, dtype=dtype) for dtype in (torch.float32, torch.int32)]
        given = (lost, *layer, down_t, gate_bias, up_bias, down_bias, y, l1, kept, sums, *of_blocks)
        macros = value(x.dtype)
        call.launch(LOST.kernel("lost_forward_v1", macros), (blocks, 1), *given, room, *size)
        finish = (lost, down_bias, y, l1, kept, sums, *of_blocks)
        call.launch(LOST.kernel("lost_finish_v1", macros), (grid, 1), *finish, room, *size, blocks)
    return y, l1, kept


def lost_backward(call, lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients) -> tuple:
    """Write the lost rows of dx, add the lost rows' part to the gradients of weights and biases, and return all these.

    dy, dx like x; dl1 float32 [tokens] or None: gradient of lost_forward's l1. gradients: dgate (None: a plain layer),
    dup and ddown_t like the weights, dgate_bias and dup_bias like the biases or None (not wanted): to the row of each
    neuron that fired in a lost row, the sum over the lost rows, ascending, is added in float32, and the result is
    rounded once; the rows of other neurons stay as they are. Where x's row is not finite, dx's row is NaN and nothing
    is added. The other arguments: see lost_forward."""
    (tokens, d_model), d_ff = x.shape, len(up)
    size = d_model, d_ff
    layer = (lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias)
    first = tensor_core_rows(tokens, call.device)
    if first:
        of_h, source, counters, parts = _between(call, first, x, up)
        of_up, of_gate = (None if w is None else call.empty(*of_h.shape, dtype=x.dtype) for w in (up, gate))
        hidden = (*layer, of_h, of_up, of_gate, source, counters)
        _on_tensor_cores(call, "lost_hidden_gradients_v1", x, *hidden, first, *size)
        products = (lost, of_up, up, of_gate, gate, None, source, counters, parts, dx, None, None, None, None)
        _on_tensor_cores(call, "lost_products_v1", x, *products, first, *size)
        sums = (lost, x, dy, of_h, of_up, of_gate, source, *gradients)
        _on_tensor_cores(call, "lost_weight_products_v1", x, *sums, first, *size)
    if first < tokens:
        planes, groups = 2 if gate is None else 3, -(-d_ff // _NEURONS)
        room = min(tokens, max(_MOST_ENTRIES // (4 * planes * _NEURONS * groups), 1))
        grid, blocks = _grids(call, d_model)
        # Where there is no room for the entries, this memory must hold the sums of at least one block.
        least = planes * _OWN * _PIECE * -(-d_model // _PIECE)
        entries = call.empty(max(planes * groups * room * _NEURONS, least), dtype=torch.float32)
        sums, macros = call.empty(blocks, _ROWS, d_model, dtype=torch.float32), value(x.dtype)
        call.launch(LOST.kernel("lost_backward_v1", macros), (blocks, 1), *layer, dx, sums, entries, first, room, *size)
        given = (*layer, dx, *gradients, sums, entries)
        others = min(grid, -(-d_ff // _OWN))
        call.launch(WEIGHTS.kernel("lost_weights_v2", macros), (others, 1), *given, first, room, *size, blocks)
    return dx, *gradients


def _between(call: Call, room: int, x: Buffer, up: Buffer) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Memory between the tensor-core kernels of one pass: hidden entries, numbers of rows, counters, parts of sums."""
    blocks, pitch = _RESIDENT * call.units, -(-len(up) // _TILE_NEURONS) * _TILE_NEURONS
    hidden = call.empty(room, pitch, dtype=x.dtype)
    source, counters = call.empty(room, dtype=torch.int32), call.empty(blocks, dtype=torch.int32)
    return hidden, source, counters, call.empty(blocks, _TILE, dtype=torch.float32)


def _on_tensor_cores(call: Call, name: str, x: Buffer, *arguments) -> None:
    call.launch(TENSOR.kernel(name, value(x.dtype), _SHARED), (_RESIDENT * call.units, 1), *arguments)


def _grids(call: Call, d_model: int) -> tuple[int, int]:
    """Return the blocks that run at a time, and how many of them may have 8 rows of float32 sums in global memory."""
    grid = _BLOCKS_A_MULTIPROCESSOR * call.units if call.device.type == "cuda" else _BLOCKS_ON_CPU
    return grid, max(1, min(grid, _MOST_SUMS // (4 * _ROWS * d_model)))
