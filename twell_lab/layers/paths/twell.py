"""twell: the neurons that fire are packed while the gate's GEMM still holds them; the rest of the layer is computed for
these entries alone."""

from __future__ import annotations

import math

from ...formats.twell import TILE, WORDS
from ...ops import decode, dispatch, hopper_dense
from ...ops.copies import TRANSPOSED
from .cost import Work
from .dense import dense_parts
from .path import Copy, Path

_WORD_BYTES = 4


class Twell(Path):
    """An entry costs one row of `down` transposed, and in a gated layer one of `up`. The transpose is a copy, or of a
    turned `down` (ops.turned) a view."""

    name = "twell"
    copies = (Copy("down_t", "down_t", "down", TRANSPOSED),)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        fused, few = work.fuses(dispatch.LEAST_PACKED), work.tokens <= decode.MOST_TOKENS
        launches = 2 if fused or few else 3
        return packed_cost(work, 0, fused, work.gemm(work.firing.d_ff, work.firing.d_model), 0, launches)


def packed_cost(work: Work, hot: int, fused: bool, gemm: float, moved: int, launches: int) -> dict[str, float]:
    """Seconds of a call that packs all but the `hot` most used neurons, by what they go to (Path.cost).

    gemm: seconds of its GEMMs. moved: bytes that are read and written besides x, y and what is packed. launches: their
    number, without those of the pieces that a fused call is cut into."""
    firing, tokens, itemsize, rates = work.firing, work.tokens, work.itemsize, work.rates
    cold, few = firing.d_ff - hot, tokens <= decode.MOST_TOKENS
    packed = tokens * math.ceil(cold / TILE) * (WORDS * _WORD_BYTES + 32)  # written whole, read as far as it is used
    values = 0 if fused or few else 2 * tokens * cold * itemsize
    if work.lists(dispatch.LEAST_PACKED):
        packed = 0
    # The kernels for few tokens take any number of entries.
    lost = 0.0 if few else firing.lost(hot)
    heavy, entries = firing.beyond(dispatch.HEAVY, hot) if fused else (0.0, 0.0)
    pieces = 2 * math.ceil(tokens / hopper_dense.CHUNK) if fused else 0
    return {
        "gemm": gemm,
        "rows": work.rows(firing.frequency[hot:]) * (1 - entries),
        "memory": (2 * tokens * firing.d_model * itemsize + packed + values + moved) / rates.bandwidth,
        "launches": (launches + pieces) * rates.launch,
        "lost": max(lost, heavy) * sum(dense_parts(work)),
    }
