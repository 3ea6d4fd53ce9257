"""How the row kernels of a training step are launched: those that collect what a layer keeps for the backward pass, and
those that use it.

A forward pass keeps the `Survivors` of its gate and nothing as wide as d_ff. The caller has checked types and devices.
CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors run the same kernels in
twell_lab.simulator. The kernels take 16-bit values, rows that `portable.pooled_takes`, and d_ff up to 65,536."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import SLAB_SHAPES as _SHAPES
from ..cuda.macros import slabs as _slab_defines
from ..cuda.tape import empty
from . import portable

MOST_COLUMNS = 65536  # a word has 16 bits for the column
ROOM_A_TOKEN, ROOM_A_NEURON = 128, 16  # entries that the list has room for, per token and per neuron
_MOST_ENTRIES = 2**31 - 2
_VECTOR = 8  # values in 16 bytes
_MOST_SLABS = 16  # slabs whose pieces of dot products are kept at once
SURVIVORS, ROWS, SLABS = "smxx_survivors.cu", "smxx_train_rows.cu", "smxx_train_slabs.cu"
_PACKED_ROWS = sources.number(SURVIVORS, "BLOCK_ROWS")
_SLAB_WARPS = sources.number(SLABS, "BLOCK_WARPS")


@dataclass(frozen=True)
class Survivors:
    """The kept entries of all rows, row by row without gaps. h = g * u, or g where ups is None (a plain layer).

    spans: int32 [tokens, 2], (start, count) of each row's entries; (-1, 0) for a lost row. words: int32 [capacity], the
    16 bits of g << 16 | column; columns ascending within a row. ups: float32 [capacity] or None, x . up[column] +
    up_bias[column], not rounded. lost: int32 [tokens + 2], how many rows are lost, then their numbers, ascending; and
    from the end backwards, how many rows are heavy, then their numbers, ascending. A heavy row has more than HEAVY
    entries (kernels/spans.cuh); it is held as any other, and many warps share it. kept: int32 [tokens], entries of each
    row, l1: float32 [tokens], sum of |h|; of lost rows neither is written here, but by train_lost. Unused parts of all
    these are neither cleared nor read."""

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
    """How many entries the list has room for; rows that do not fit are lost."""
    return ROOM_A_TOKEN * tokens + ROOM_A_NEURON * d_ff


def takes(dtype: torch.dtype, tokens: int, d_model: int, d_ff: int) -> bool:
    """Whether the kernels here take a layer of these sizes, for so many tokens at once."""
    small = 0 < d_ff <= MOST_COLUMNS and capacity_for(tokens, d_ff) <= _MOST_ENTRIES
    return small and portable.pooled_takes(dtype, d_model)


def survivors(
    x: Tensor,
    packed: Tensor,
    pool: Tensor,
    up: Tensor | None,
    up_bias: Tensor | None,
    d_ff: int,
    capacity: int | None = None,
    few: int = _MOST_ENTRIES,
    most: int = 0,
) -> Survivors:
    """The entries of x's packed gate, with u beside each where `up` is given.

    x: [tokens, d_model]; packed: [tokens, tiles, 32], pool: [ceil(tokens / 16), tiles, 64], of the gate of this x
    (kernels/twell.cuh); up: [d_ff, d_model], up_bias: [d_ff]. A row is lost
    - if its row of x has a value that is not finite, or the pool could not hold one of its tiles;
    - if it is heavy, where there are more than `few` heavy rows, and no more than `most` heavy and lost ones together;
    - if the entries of the rows that are left would end past `capacity` (None: capacity_for) with it; after the first
      such row all later rows are lost too.

    Raises InputError for what the kernels do not take."""
    tokens, d_model = x.shape
    capacity = capacity_for(tokens, d_ff) if capacity is None else capacity
    _check_survivors(x, packed, pool, up, d_ff, capacity)
    x, packed, pool, up, up_bias = (t if t is None else t.contiguous() for t in (x, packed, pool, up, up_bias))

    def new(*shape, dtype=torch.int32):
        return empty(*shape, dtype=dtype, device=x.device)

    spans, words, lost, kept = new(tokens, 2), new(capacity), new(tokens + 2), new(tokens)
    l1, ups = new(tokens, dtype=torch.float32), None if up is None else new(capacity, dtype=torch.float32)
    made = Survivors(spans, words, ups, lost, kept, l1)
    if not tokens:
        lost.zero_()
        return made
    blocks = -(-tokens // _PACKED_ROWS)
    counts, totals = new(tokens), new(blocks, 4)
    defines = portable.specialisation(x.dtype, d_model)

    def run(name, blocks, *arguments):
        launcher.kernel(SURVIVORS, name, defines).launch(x.device, (blocks, 1), arguments)

    run("survivor_counts_v2", blocks, x, packed, counts, totals, tokens, d_ff)
    run("survivor_places_v2", 1, counts, totals, lost, tokens, capacity, few, most)
    alone = l1 if up is None else None  # in a gated layer the kernel that computes u also writes l1
    placed = (packed, pool, counts, totals, spans, kept, lost, words, alone)
    run("survivor_words_v2", blocks, *placed, tokens, d_ff, capacity)
    if up is not None:
        _dots(x, made, up, "up_values_v1", (up_bias, ups, l1))
    return made


def _check_survivors(x, packed, pool, up, d_ff, capacity) -> None:
    tokens, d_model = x.shape
    _check(x.dtype, d_model, d_ff, capacity, (x, up))
    portable.check_packed(packed, pool, tokens, d_ff)
    if up is not None and up.shape != (d_ff, d_model):
        raise InputError(f"up is {list(up.shape)}; {[d_ff, d_model]} is accepted")


def weighted_rows(s: Survivors, down_t: Tensor, bias: Tensor | None, version: int = 2) -> Tensor:
    """y [tokens, d_model] = sum of h * down_t[column] + bias; down_t: [d_ff, d_model]. Lost rows are not written.

    version: 1 (whole rows in registers; heavy rows as any other) or 2 (slabs of columns)."""
    y = empty(s.tokens, down_t.shape[1], dtype=down_t.dtype, device=down_t.device)
    down_t, bias = down_t.contiguous(), None if bias is None else bias.contiguous()
    _check(y.dtype, y.shape[1], down_t.shape[0], s.capacity, (down_t, bias))
    _rows("weighted_rows", version, y, s, (s.ups, down_t, bias, y))
    return y


def hidden_gradient(dy: Tensor, s: Survivors, down_t: Tensor, dl1: Tensor | None, version: int = 2) -> Tensor:
    """dh float32 [capacity] at the entries: dy [tokens, d_model] . down_t[column] + dl1 * sign(h); dl1: float32
    [tokens]."""
    dh = empty(s.capacity, dtype=torch.float32, device=dy.device)
    dy, down_t = dy.contiguous(), down_t.contiguous()
    _check(dy.dtype, dy.shape[1], down_t.shape[0], s.capacity, (dy, down_t))
    if dl1 is not None and (dl1.dtype != torch.float32 or dl1.shape != (s.tokens,)):
        raise InputError(f"dl1 is {dl1.dtype} {list(dl1.shape)}; float32 [{s.tokens}] is accepted")
    dl1 = None if dl1 is None else dl1.contiguous()
    if version == 2:
        _dots(dy, s, down_t, "hidden_gradient_v2", (s.ups, dl1, dh))
    else:
        _rows("hidden_gradient", version, dy, s, (s.ups, down_t, dl1, dh), dy)
    return dh


def input_gradient(s: Survivors, dh: Tensor, gate: Tensor | None, up: Tensor, version: int = 2) -> Tensor:
    """dx [tokens, d_model]: sum of dh * u * gate[column] + dh * g * up[column], of a plain layer dh * up[column].

    dh: float32 [capacity]; gate, up: [d_ff, d_model], gate None for a plain layer. Lost rows are not written."""
    if (gate is None) != (s.ups is None):
        kinds = ["None" if t is None else "a tensor" for t in (gate, s.ups)]
        raise InputError(f"gate is {kinds[0]} and ups is {kinds[1]}; two tensors, or twice None, are accepted")
    dx = empty(s.tokens, up.shape[1], dtype=up.dtype, device=up.device)
    gate, up = None if gate is None else gate.contiguous(), up.contiguous()
    _check(dx.dtype, dx.shape[1], up.shape[0], s.capacity, (gate, up))
    _rows("input_gradient", version, dx, s, (s.ups, dh, gate, up, dx))
    return dx


def _check(dtype, d_model, d_ff, capacity, vectors) -> None:
    if not portable.pooled_takes(dtype, d_model):
        raise InputError(f"rows are {dtype} of {d_model}; 16-bit values and a multiple of 8, up to 16384, are accepted")
    if not 0 < d_ff <= MOST_COLUMNS:
        raise InputError(f"d_ff is {d_ff}; 1 to {MOST_COLUMNS} are accepted")
    if not 0 <= capacity <= _MOST_ENTRIES:
        raise InputError(
            f"capacity is {capacity} entries; up to {_MOST_ENTRIES} are accepted: take fewer tokens at once"
        )
    if not launcher.aligned(*vectors):
        raise InputError("a tensor does not start at a multiple of 16 bytes, and the row kernels need that")


def _slabs(d_model: int, group: int) -> int:
    return -(-d_model // (group * _VECTOR))


def _run_slabs(name: str, shape: tuple[int, int], rows: Tensor, slabs: int, tensors: tuple, *numbers: int) -> None:
    """Launch a kernel of smxx_train_slabs.cu for these rows and this number of slabs; 0 for the kernels that take no
    slabs, but a warp per row."""
    defines = _slab_defines(rows.dtype, rows.shape[1], shape)
    grid = (-(-len(rows) // (_SLAB_WARPS * (32 // shape[0] if slabs else 1))), max(slabs, 1))
    made = launcher.kernel(SLABS, name, defines)
    made.launch(rows.device, grid, (*tensors, *numbers))


def _rows(name: str, version: int, rows: Tensor, s: Survivors, more: tuple, *before: Tensor) -> None:
    """Launch version 1 or 2 of a kernel that reads, or writes, each of these rows; before, more: the tensors before and
    behind those of s that both versions take."""
    if version not in (1, 2):
        raise InputError(f"version is {version}; 1 and 2 are accepted")
    if not len(rows):
        return
    if version == 2:
        shape = _SHAPES[name]
        tensors = (*before, s.spans, s.lost, s.words, *more)
        return _run_slabs(f"{name}_v2", shape, rows, _slabs(rows.shape[1], shape[0]), tensors, len(rows))
    defines = portable.specialisation(rows.dtype, rows.shape[1])
    made = launcher.kernel(ROWS, f"{name}_v1", defines)
    made.launch(rows.device, (len(rows), 1), (*before, s.spans, s.words, *more))


def _dots(rows: Tensor, s: Survivors, matrix: Tensor, finish: str, more: tuple) -> None:
    """Launch the dot product of each entry's row with the entry's row of the matrix: one kernel computes a piece of it
    for each slab of columns, and the kernel `finish` adds the pieces up and uses the sums."""
    if not len(rows):
        return
    shape = _SHAPES["dots"]
    slabs = _slabs(rows.shape[1], shape[0])
    capacity = s.capacity
    pieces = empty(min(slabs, _MOST_SLABS), capacity, dtype=torch.float32, device=rows.device)
    sizes, listed = (len(rows), capacity), (s.spans, s.lost, s.words)
    for first in range(0, slabs, _MOST_SLABS):
        some = min(_MOST_SLABS, slabs - first)
        _run_slabs("pieces_v1", shape, rows, some, (rows, *listed, matrix, pieces), *sizes, first)
        order = some, int(first > 0), int(first + some == slabs)
        _run_slabs(finish, shape, rows, 0, (*listed, pieces, *more), *sizes, *order)
