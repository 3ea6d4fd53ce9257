"""survivors: what a training step keeps of a packed gate, row by row without gaps (kernels/smxx_survivors.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cuda.launch import Entry, Source
from ..formats.twell import fires
from .down import pooled_takes, short_rows, specialisation

MOST_COLUMNS = 65536  # a word has 16 bits for the column
TOKEN_ENTRIES, NEURON_ENTRIES = 128, 16  # entries of the list, for each token and for each neuron
HEAVY = 256  # a row with more entries is walked by many warps
_MOST_ENTRIES = 2**31 - 2
_BLOCK_ROWS, _PLACE_THREADS = 16, 1024


SURVIVORS = Source(
    "smxx_survivors",
    {
        "survivor_counts_v2": Entry(32 * _BLOCK_ROWS, "ppppii"),
        "survivor_places_v2": Entry(_PLACE_THREADS, "pppiiii"),
        "survivor_words_v2": Entry(32 * _BLOCK_ROWS, "pppppppppiii"),
    },
    builds=short_rows,
    constants=(("BLOCK_ROWS", _BLOCK_ROWS), ("PLACE_THREADS", _PLACE_THREADS), ("HEAVY", HEAVY)),
)


class Survivors(NamedTuple):
    """The kept entries of all rows: buffers in a call, tensors outside. h = g * u, or g where ups is None (a plain
    layer).

    spans: int32 [tokens, 2], (start, count) of each row's entries; (-1, 0) for a lost row. words: int32 [capacity], the
    16 bits of g << 16 | column; columns ascending within a row. ups: float32 [capacity] or None, x . up[column] +
    up_bias[column], not rounded. lost: int32 [tokens + 2], how many rows are lost, then their numbers, ascending; and
    from the end backwards, how many rows are heavy, then their numbers, ascending. A heavy row has more than HEAVY
    entries. kept: int32 [tokens], entries of each row, l1: float32 [tokens], sum of |h|; of lost rows neither is
    written here, but by lost_forward. Unused parts of all these are neither cleared nor read."""

    spans: Any
    words: Any
    ups: Any
    lost: Any
    kept: Any
    l1: Any


def capacity_for(tokens: int, d_ff: int) -> int:
    """Return the length of the list of entries; rows that do not fit are lost."""
    return TOKEN_ENTRIES * tokens + NEURON_ENTRIES * d_ff


def takes(dtype: torch.dtype, tokens: int, d_model: int, d_ff: int) -> bool:
    """Return whether the row kernels take a layer of these sizes, for so many tokens at once."""
    small = 0 < d_ff <= MOST_COLUMNS and capacity_for(tokens, d_ff) <= _MOST_ENTRIES
    return small and pooled_takes(dtype, d_model)


def survivors(call, x, packed, pool, d_ff: int, gated: bool, capacity=None, few=_MOST_ENTRIES, most=0) -> Survivors:
    """List the entries of x's packed gate. In a gated layer ups and l1 are left to train_rows.up_values.

    x: [tokens, d_model]; packed: [tokens, tiles, 32], pool: [ceil(tokens / 16), tiles, 64], of the gate of this x
    (kernels/twell.cuh). A row is lost
    - if its row of x has a value that is not finite, or the pool could not hold one of its tiles;
    - if it is heavy, where there are more than `few` heavy rows, and no more than `most` heavy and lost ones together;
    - if the entries of the rows that are left would end past `capacity` (None: capacity_for) with it; after the first
      such row all later rows are lost too."""
    tokens, d_model = x.shape
    capacity = capacity_for(tokens, d_ff) if capacity is None else capacity
    spans, words, lost, kept, counts = (
        call.empty(*shape, dtype=torch.int32)
        for shape in ((tokens, 2), (capacity,), (tokens + 2,), (tokens,), (tokens,))
    )
    ups = call.empty(capacity, dtype=torch.float32) if gated else None
    l1 = call.empty(tokens, dtype=torch.float32)
    blocks = -(-tokens // _BLOCK_ROWS)
    totals = call.empty(blocks, 4, dtype=torch.int32)
    macros = specialisation(x.dtype, d_model)

    launch = lambda name, grid, *given: call.launch(SURVIVORS.kernel(name, macros), (grid, 1), *given)
    launch("survivor_counts_v2", blocks, x, packed, counts, totals, tokens, d_ff)
    launch("survivor_places_v2", 1, counts, totals, lost, tokens, capacity, few, most)
    placed = (packed, pool, counts, totals, spans, kept, lost, words, None if gated else l1)
    launch("survivor_words_v2", blocks, *placed, tokens, d_ff, capacity)
    return Survivors(spans, words, ups, lost, kept, l1)


def reference(gate: Tensor, lost: Tensor, capacity: int) -> Survivors:
    """Return the survivors of a plain layer with this gate [tokens, d_ff], of which these rows are lost (bool
    [tokens]); zeros in what is not used. TOLERANCE: none, the same bits, but for l1."""
    keep = fires(gate) & ~lost[:, None]
    counts = keep.sum(1, dtype=torch.int32)
    starts = torch.where(lost, -1, counts.cumsum(0) - counts).to(torch.int32)
    rows, columns = keep.nonzero(as_tuple=True)
    words = torch.zeros(capacity, dtype=torch.int32, device=gate.device)
    words[: len(rows)] = gate[rows, columns].view(torch.int16).to(torch.int32) << 16 | columns.to(torch.int32)
    numbers = torch.zeros(len(gate) + 2, dtype=torch.int32, device=gate.device)
    numbered = lambda some: torch.cat([some.sum()[None], some.nonzero()[:, 0]]).to(torch.int32)
    of_lost, of_heavy = numbered(lost), numbered(counts > HEAVY)
    numbers[: len(of_lost)], numbers[len(numbers) - len(of_heavy) :] = of_lost, of_heavy.flip(0)
    l1 = torch.where(keep, gate, 0).double().sum(1).float()
    return Survivors(torch.stack([starts, counts], 1), words, None, numbers, counts, l1)


TOLERANCE = 0.0
