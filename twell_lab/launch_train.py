"""How the row kernels of a training step are launched: what a layer keeps for the backward pass, and what it makes of it.

A forward pass keeps the `Survivors` of its gate and nothing as wide as d_ff. As in twell_lab.launch, tensors come checked by
the caller as far as types and devices go, CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU
tensors run the same kernels in twell_lab.simulator. 16-bit values, rows that `launch.pooled_takes`, d_ff up to 65,536.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import launch
from .errors import InputError
from .formats import POOL_ROWS, POOL_WORDS, TILE, WORDS

MOST_COLUMNS = 65536  # a word has 16 bits for the column
ROOM_A_TOKEN, ROOM_A_NEURON = 128, 16  # entries that the list has room for
_MOST_ENTRIES = 2**31 - 2
_ROWS_A_BLOCK, _PLACE_THREADS = 8, 1024  # as in smxx_survivors.cu
_SLABS = (1, 2, 4)  # parts into which rows may be cut
_LEAST_SLAB = 512  # columns
SURVIVORS, ROWS = "smxx_survivors.cu", "smxx_train_rows.cu"


@dataclass(frozen=True)
class Survivors:
    """The kept entries of all rows, row by row without gaps. h = g * u, or g where ups is None (a plain layer).

    spans: int32 [tokens, 2], (start, count) of each row's entries; (-1, 0) for a lost row. words: int32 [capacity], the 16
    bits of g << 16 | column; columns ascending within a row. ups: float32 [capacity] or None, u = x . up[column] + up_bias[column], not
    rounded. lost: int32 [1 + tokens], how many rows are lost, then their numbers, ascending. kept: int32 [tokens], entries of
    each row, l1: float32 [tokens], sum of |h|; both unwritten for lost rows, for whoever computes those to fill in. What is
    not in use of any of them is never read and not cleared.
    """

    spans: Tensor
    words: Tensor
    ups: Tensor | None
    lost: Tensor
    kept: Tensor
    l1: Tensor

    @property
    def tokens(self) -> int:
        return self.spans.shape[0]

    @property
    def capacity(self) -> int:
        return self.words.shape[0]


def capacity_for(tokens: int, d_ff: int) -> int:
    """How many entries the list has room for; rows that need more are lost."""
    return ROOM_A_TOKEN * tokens + ROOM_A_NEURON * d_ff


def takes(dtype: torch.dtype, tokens: int, d_model: int, d_ff: int) -> bool:
    """Whether the kernels here take a layer of these sizes, for so many tokens at once."""
    small = 0 < d_ff <= MOST_COLUMNS and capacity_for(tokens, d_ff) <= _MOST_ENTRIES
    return small and launch.pooled_takes(dtype, d_model)


def survivors(
    x: Tensor, packed: Tensor, pool: Tensor, up: Tensor | None, up_bias: Tensor | None, d_ff: int, capacity: int | None = None
) -> Survivors:
    """The entries of x's packed gate, with u beside each where `up` is given.

    x: [tokens, d_model]; packed: [tokens, tiles, 32], pool: [ceil(tokens / 16), tiles, 64], of the gate of this x
    (kernels/twell.cuh); up: [d_ff, d_model], up_bias: [d_ff]. A row is lost if a value of x's row is not finite, if a tile
    of it reached past the pool, or if its entries would end past `capacity` (None: capacity_for), which then holds
    for all rows behind it. Raises InputError for what the kernels do not take.
    """
    tokens, d_model = x.shape
    capacity = capacity_for(tokens, d_ff) if capacity is None else capacity
    _check(x.dtype, d_model, d_ff, capacity, (x, up))
    tiles = -(-d_ff // TILE)
    if packed.shape != (tokens, tiles, WORDS) or pool.shape != (-(-tokens // POOL_ROWS), tiles, POOL_WORDS):
        raise InputError(
            f"packed is {list(packed.shape)} and pool is {list(pool.shape)}; {tokens} tokens and {d_ff} columns make "
            f"{[tokens, tiles, WORDS]} and {[-(-tokens // POOL_ROWS), tiles, POOL_WORDS]}"
        )
    if up is not None and up.shape != (d_ff, d_model):
        raise InputError(f"up is {list(up.shape)}; {[d_ff, d_model]} is accepted")

    def new(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device=x.device)

    spans, words, lost, kept = new(tokens, 2), new(capacity), new(1 + tokens), new(tokens)
    l1, ups = new(tokens, dtype=torch.float32), None if up is None else new(capacity, dtype=torch.float32)
    made = Survivors(spans, words, ups, lost, kept, l1)
    if not tokens:
        lost.zero_()
        return made
    defines, block = _row_kernel(x.dtype, d_model)
    rows, columns = ctypes.c_int(tokens), ctypes.c_int(d_ff)
    warps = (-(-tokens // _ROWS_A_BLOCK), 1), (32 * _ROWS_A_BLOCK, 1)
    x, packed, pool = x.contiguous(), packed.contiguous(), pool.contiguous()
    counts = new(tokens)

    def run(name, grid, block, *arguments):
        launch._launch(SURVIVORS, name, defines, grid, block, x.device, arguments)

    run("survivor_counts_v1", *warps, x, packed, pool, counts, rows, columns)
    run("survivor_places_v1", (1, 1), (_PLACE_THREADS, 1), counts, spans, lost, kept, rows, ctypes.c_int(capacity))
    if up is None:
        run("survivors_plain_v1", *warps, packed, pool, spans, words, l1, rows, columns)
    else:
        up, up_bias = up.contiguous(), None if up_bias is None else up_bias.contiguous()
        run("survivors_v1", (tokens, 1), block, x, packed, pool, up, up_bias, spans, words, ups, l1, columns)
    return made


def weighted_rows(s: Survivors, down_t: Tensor, bias: Tensor | None, slabs: int | None = None) -> Tensor:
    """y [tokens, d_model] = sum of h * down_t[column] + bias; down_t: [d_ff, d_model]. Lost rows are left unwritten.

    slabs: into how many parts rows are cut; None: as many as the L2 cache wants.
    """
    y = torch.empty(s.tokens, down_t.shape[1], dtype=down_t.dtype, device=down_t.device)
    down_t, bias = down_t.contiguous(), None if bias is None else bias.contiguous()
    _check(y.dtype, y.shape[1], down_t.shape[0], s.capacity, (down_t, bias))
    _rows("weighted_rows_v1", y, [down_t], slabs, (s.spans, s.words, s.ups, down_t, bias, y))
    return y


def hidden_gradient(dy: Tensor, s: Survivors, down_t: Tensor, dl1: Tensor | None) -> Tensor:
    """dh float32 [capacity] at the entries: dy [tokens, d_model] . down_t[column] + dl1 * sign(h); dl1: float32 [tokens]."""
    dh = torch.empty(s.capacity, dtype=torch.float32, device=dy.device)
    dy, down_t = dy.contiguous(), down_t.contiguous()
    _check(dy.dtype, dy.shape[1], down_t.shape[0], s.capacity, (dy, down_t))
    if dl1 is not None and (dl1.dtype != torch.float32 or dl1.shape != (s.tokens,)):
        raise InputError(f"dl1 is {dl1.dtype} {list(dl1.shape)}; float32 [{s.tokens}] is accepted")
    dl1 = None if dl1 is None else dl1.contiguous()
    _rows("hidden_gradient_v1", dy, [down_t], 1, (dy, s.spans, s.words, s.ups, down_t, dl1, dh))
    return dh


def input_gradient(s: Survivors, dh: Tensor, gate: Tensor | None, up: Tensor, slabs: int | None = None) -> Tensor:
    """dx [tokens, d_model]: sum of dh * u * gate[column] + dh * g * up[column], of a plain layer dh * up[column].

    dh: float32 [capacity]; gate, up: [d_ff, d_model], gate None for a plain layer. Lost rows are left unwritten.
    """
    if (gate is None) != (s.ups is None):
        raise InputError(f"gate is {'' if gate is None else 'not '}None and ups is {'' if s.ups is None else 'not '}None; both or neither")
    dx = torch.empty(s.tokens, up.shape[1], dtype=up.dtype, device=up.device)
    gate, up = None if gate is None else gate.contiguous(), up.contiguous()
    _check(dx.dtype, dx.shape[1], up.shape[0], s.capacity, (gate, up))
    matrices = [up] if gate is None else [gate, up]
    _rows("input_gradient_v1", dx, matrices, slabs, (s.spans, s.words, s.ups, dh, gate, up, dx))
    return dx


def _check(dtype, d_model, d_ff, capacity, vectors) -> None:
    if not launch.pooled_takes(dtype, d_model):
        raise InputError(f"rows are {dtype} of {d_model}; 16-bit values and a multiple of 8, up to 16384, are accepted")
    if not 0 < d_ff <= MOST_COLUMNS:
        raise InputError(f"d_ff is {d_ff}; 1 to {MOST_COLUMNS} are accepted")
    if not 0 <= capacity <= _MOST_ENTRIES:
        raise InputError(f"capacity is {capacity} entries; up to {_MOST_ENTRIES} are accepted: take fewer tokens at once")
    if not launch._aligned(*vectors):
        raise InputError("the row kernels read 16 bytes at a time; a tensor does not start at a multiple of them")


def _row_kernel(dtype: torch.dtype, width: int, stride: int | None = None) -> tuple[tuple, tuple]:
    """(macros, block) of a kernel that takes rows, or slabs, of `width` columns."""
    defines = launch.specialisation(dtype, width)
    block = (32 * dict(defines)["WARPS"], 1)
    return defines if stride in (None, width) else (*defines, ("STRIDE", stride)), block


def _rows(name: str, rows: Tensor, matrices: list[Tensor], slabs: int | None, arguments: tuple) -> None:
    """Launch a kernel with a block for each of these rows and slabs; matrices: what it reads a row of for each entry."""
    tokens, d_model = rows.shape
    if not tokens:
        return
    if slabs is None:
        slabs = _slabs(d_model, sum(m.numel() * m.element_size() for m in matrices), rows.device)
    elif slabs < 1 or d_model % (8 * slabs):
        raise InputError(f"slabs is {slabs}; a number of which d_model / 8 ({d_model // 8}) is a multiple is accepted")
    defines, block = _row_kernel(rows.dtype, d_model // slabs, d_model)
    launch._launch(ROWS, name, defines, (tokens, slabs), block, rows.device, arguments)


def _slabs(d_model: int, matrix_bytes: int, device: torch.device) -> int:
    """Into how many slabs rows are cut, so that what is in use of the matrices at once fits half of the L2 cache."""
    half = _cache(device.index) // 2 if device.type == "cuda" else matrix_bytes
    fit = [n for n in _SLABS if d_model % (8 * n) == 0 and (n == 1 or d_model // n >= _LEAST_SLAB)]
    return next((n for n in fit if matrix_bytes <= n * half), fit[-1])


@cache
def _cache(device: int) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size


def builds(dtype: torch.dtype, d_model: int) -> list[tuple[str, tuple]]:
    """(file, macros) of everything that rows of this type and width may compile."""
    whole = [(SURVIVORS, _row_kernel(dtype, d_model)[0]), (ROWS, _row_kernel(dtype, d_model)[0])]
    cut = [n for n in _SLABS[1:] if d_model % (8 * n) == 0 and d_model // n >= _LEAST_SLAB]
    return whole + [(ROWS, _row_kernel(dtype, d_model // n, d_model)[0]) for n in cut]
