"""twell: what fires packed while the gate's GEMM still holds it, the rest of the layer for those entries alone."""

from __future__ import annotations

import math

from ...formats.twell import TILE, WORDS
from ...ops import decode, dispatch
from ...ops.copies import TRANSPOSED
from .cost import Call
from .dense import dense_parts
from .path import Copy, Path

_WORD_BYTES = 4


class Twell(Path):
    """An entry costs one row of `down` transposed, and in a gated layer one of `up`."""

    name = "twell"
    copies = (Copy("down_t", "down_t", "down", TRANSPOSED),)

    def cost(self, call: Call, hot: int = 0) -> dict[str, float]:
        fused, few = call.fuses(dispatch.LEAST_TWELL), call.tokens <= decode.MOST_TOKENS
        launches = 2 if fused or few else 3
        return packed_cost(call, 0, fused, call.gemm(call.firing.d_ff, call.firing.d_model), 0, launches)


def packed_cost(call: Call, hot: int, fused: bool, gemm: float, moved: int, launches: int) -> dict[str, float]:
    """Seconds of a call that packs all but the `hot` most used neurons. gemm: seconds of its GEMMs; moved: bytes
    besides x, y and what is packed; launches: besides those of the pieces that a fused call is cut into."""
    firing, tokens, itemsize, rates = call.firing, call.tokens, call.itemsize, call.rates
    cold, few = firing.d_ff - hot, tokens <= decode.MOST_TOKENS
    packed = tokens * math.ceil(cold / TILE) * (WORDS * _WORD_BYTES + 32)  # written whole, read as far as it is used
    values = 0 if fused or few else 2 * tokens * cold * itemsize
    # The kernels for few tokens take any number of entries.
    lost = 0.0 if few else firing.lost(hot)
    pieces = 2 * math.ceil(tokens / 8192) if fused else 0
    return {
        "gemm": gemm,
        "rows": call.rows(firing.frequency[hot:]),
        "memory": (2 * tokens * firing.d_model * itemsize + packed + values + moved) / rates.bandwidth,
        "launches": (launches + pieces) * rates.launch,
        "lost": lost * sum(dense_parts(call)),
    }
