"""hot_cold: the neurons that fire most are computed densely, the others packed; one sum, rounded once.

The weights are held a second time with the hot neurons first, in buffers outside the state_dict. Where the layer's own
weights lie in that order (layers.layout), only `down` transposed is held, or, as that is turned too, nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import decode, dispatch
from ...ops.copies import ROWS, ROWS_OF_TRANSPOSE, TRANSPOSED
from .cost import Work
from .path import Copy, Path
from .twell import packed_cost

STEP = 256  # hot sizes are multiples of this, so that the cold part starts with a whole tile


class HotCold(Path):
    name = "hot_cold"
    splits = True
    copies = tuple(
        Copy(f"hot_first_{name}", name, source, how)
        for name, source, how in (
            ("gate", "gate", ROWS),
            ("up", "up", ROWS),
            ("down_t", "down", ROWS_OF_TRANSPOSE),
            ("gate_bias", "gate_bias", ROWS),
            ("up_bias", "up_bias", ROWS),
        )
    )

    in_order = (Copy("hot_first_down_t", "down_t", "down", TRANSPOSED),)

    def sizes(self, d_ff: int) -> range:
        return range(STEP, d_ff, STEP)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        d_model, tokens = work.firing.d_model, work.tokens
        fused, few = work.fuses(dispatch.LEAST_PACKED), tokens <= decode.MOST_TOKENS
        gemm = work.gemm(work.firing.d_ff - hot, d_model) + work.gemm(hot, d_model, work.gemms)
        moved = 2 * tokens * hot * work.itemsize + 2 * tokens * d_model * 4
        launches = (2 if fused or few else 3) + (2 if fused else 5)
        return packed_cost(work, hot, fused, gemm, moved, launches)


def hot_first(counts: Tensor, hot: int) -> Tensor:
    """An order of the neurons, int64: first the `hot` with the highest counts, by count; then the others, spread over
    tiles of 256.

    They are dealt to the tiles like cards, back and forth, so that every tile gets its share of those that still fire
    often: in the order of their counts, the first tile would overflow while the last ones stay empty. Equal counts
    keep their order.
    """
    order = counts.argsort(descending=True, stable=True)
    rest = order[hot:]
    place = torch.arange(rest.numel(), device=rest.device)
    tile, slot, tiles = place // STEP, place % STEP, -(-rest.numel() // STEP)
    turn = slot * tiles + torch.where(slot % 2 == 1, tiles - 1 - tile, tile)
    dealt = torch.empty_like(rest)
    dealt[turn.argsort()] = rest
    return torch.cat([order[:hot], dealt])
