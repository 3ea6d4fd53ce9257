"""twell and hot_cold: the neurons that fire are packed while the gate's GEMM still holds them, and the rest of the
layer is computed for these entries alone; hot_cold computes the first `hot` neurons, those that fire most, densely."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS
from ..storage import COLUMNS, ROWS
from .path import Path, dense_parts

if TYPE_CHECKING:
    from .cost import Work

STEP = 256  # hot sizes are multiples of this, so that the cold part starts with a whole tile
_WORD_BYTES = 4


class Twell(Path):
    """An entry costs one row of `down` transposed, and in a gated layer one of `up`."""

    name = "twell"
    reads = {"gate": ROWS, "up": ROWS, "down": COLUMNS}

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        launches = 2 if work.fuses_gate or work.few else 3
        return packed_cost(work, 0, work.fuses_gate, work.gemm(work.firing.d_ff, work.firing.d_model), 0, launches)


class HotCold(Twell):
    """Dense and packed parts have one sum, which is rounded once. A layer that is given a LayerPlan with this path has
    its neurons put in order (layers.storage); one that is given a Choice keeps the order that it has."""

    name = "hot_cold"
    splits = True

    def sizes(self, d_ff: int) -> range:
        return range(STEP, d_ff, STEP)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        d_model, tokens = work.firing.d_model, work.tokens
        fused = work.fuses_gate
        gemm = work.gemm(work.firing.d_ff - hot, d_model) + work.gemm(hot, d_model, work.gemms)
        moved = 2 * tokens * hot * work.itemsize + 2 * tokens * d_model * 4
        launches = (2 if fused or work.few else 3) + (2 if fused else 5)
        return packed_cost(work, hot, fused, gemm, moved, launches)


def hot_first(counts: Tensor, hot: int) -> Tensor:
    """Return an order of the neurons, int64: first the `hot` with the highest counts, by count; then the others, spread
    over tiles of 256.

    They are dealt to the tiles like cards, back and forth, so that every tile gets its share of those that still fire
    often. Equal counts keep their order."""
    order = counts.argsort(descending=True, stable=True)
    rest = order[hot:]
    place = torch.arange(rest.numel(), device=rest.device)
    tile, slot, tiles = place // STEP, place % STEP, -(-rest.numel() // STEP)
    turn = slot * tiles + torch.where(slot % 2 == 1, tiles - 1 - tile, tile)
    dealt = torch.empty_like(rest)
    dealt[turn.argsort()] = rest
    return torch.cat([order[:hot], dealt])


def packed_cost(work: Work, hot: int, fused: bool, gemm: float, moved: int, launches: int) -> dict[str, float]:
    """Return the seconds of a call that packs all but the `hot` most used neurons, by what they go to (Path.cost).

    gemm: seconds of its GEMMs. moved: bytes that are read and written besides x, y and what is packed. launches: their
    number, without those of the pieces that a fused call is cut into."""
    firing, tokens, itemsize, rates = work.firing, work.tokens, work.itemsize, work.rates
    cold, few = firing.d_ff - hot, work.few
    packed = tokens * math.ceil(cold / TILE) * (WORDS * _WORD_BYTES + 32)  # written whole, read as far as it is used
    values = 0 if fused or few else 2 * tokens * cold * itemsize
    if work.lists:
        packed = 0
    # The kernels for few tokens take any number of entries.
    lost = 0.0 if few else firing.lost(hot)
    heavy, entries = firing.heavy(hot) if fused else (0.0, 0.0)
    pieces = 2 * work.pieces if fused else 0
    return {
        "gemm": gemm,
        "rows": work.rows(firing.frequency[hot:]) * (1 - entries),
        "memory": (2 * tokens * firing.d_model * itemsize + packed + values + moved) / rates.bandwidth,
        "launches": (launches + pieces) * rates.launch,
        "lost": max(lost, heavy) * sum(dense_parts(work)),
    }
