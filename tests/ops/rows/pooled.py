"""Cases of `gated_pooled` and `down_pooled`: rows that the pool holds and that it does not, heavy rows, rows of NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.formats.pools import pool_used
from tests.ops.rows.drawn import BF16, FP16, Layer, adversarial, gate_of, named
from tests.ops.table import Case
from twell_lab.formats import POOL_ROWS, WORDS
from twell_lab.formats.twell import packed_and_pool
from twell_lab.ops import down, gated
from twell_lab.ops.down import ANY_NUMBER
from twell_lab.ops.reference import relu

POISON = 12345


class Pooled(NamedTuple):
    """A layer without its gate's weight: gate is [tokens, d_ff], before the ReLU; y begins with `start`, or with 0."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down_t: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    start: Tensor | None

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, biases: bool = False, start: bool = False, seed: int = 0) -> Pooled:
        generator = torch.Generator().manual_seed(d_model + gate.shape[1] + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (tokens, d_ff), dtype = gate.shape, gate.dtype
        x, up, down_t = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5, normal(d_ff, d_model) / d_ff**0.5
        both = (normal(d_ff).to(dtype), normal(d_model).to(dtype)) if biases else (None, None)
        return cls(x.to(dtype), gate, up.to(dtype), down_t.to(dtype), *both, normal(tokens, d_model) if start else None)


def right(name, x, gate, up, down_t, up_bias, down_bias, start):
    """Return y of "down" or "gated"."""
    if name == "down":
        return down.reference(relu(gate), down_t, down_bias, start)
    return gated.reference(x, gate, up, down_t, up_bias, down_bias, start)


def ordered(result):
    """Return y, the list of lost rows in their order, each behind the number of others, and their x."""
    y, lost, lost_x = result
    count = int(lost[0])
    rows = lost[1 : 1 + count]
    order = torch.where(rows < 0, ~rows, rows).argsort()
    return y, torch.cat([lost[:1], rows[order], lost[1 + count :]]), torch.cat([lost_x[:count][order], lost_x[count:]])


def case_of(name, version, make, called="", most=ANY_NUMBER, large=False):
    """make: () -> a Pooled. What is not to be written keeps its poison."""

    def draw():
        layer = make()
        packed, pool, beyond = packed_and_pool(layer.gate)
        pool[torch.arange(pool.shape[2]) >= pool_used(packed)[..., None]] = POISON  # nobody may read these
        packed = packed.masked_fill(torch.arange(WORDS) > packed[..., :1], POISON)
        lost = torch.full((1 + len(layer.x),), POISON, dtype=torch.int32)
        lost[0] = 0
        return *layer, packed, pool, beyond, lost, *(torch.full_like(layer.x, POISON) for _ in range(2))

    def operation(call, x, gate, up, down_t, up_bias, down_bias, start, packed, pool, beyond, lost, y, lost_x):
        beside = (start, lost, lost_x, y, most, version)
        if name == "down":
            down.down_pooled(call, x, packed, pool, down_t, down_bias, *beside)
        else:
            gated.gated_pooled(call, x, packed, pool, up, down_t, up_bias, down_bias, *beside)
        return y, lost, lost_x

    def reference(*given):
        layer, (packed, _, beyond, lost, y, lost_x) = given[:7], given[7:]
        gone = beyond | (packed[..., 0].sum(1) > most)
        rows = gone.nonzero()[:, 0]
        numbers = torch.cat([gone.sum()[None], torch.where(beyond[rows], ~rows, rows)]).int()
        y = torch.where(gone[:, None], y, right(name, *layer))
        return y, torch.cat([numbers, lost[len(numbers) :]]), torch.cat([layer[0][rows], lost_x[len(rows) :]])

    sources = {"down": (down.DOWN,), "gated": (gated.GATED,) if version in (5, 6) else (gated.UP, down.DOWN)}[name]
    return Case(called, sources, draw, operation, reference, gated.TOLERANCE, reads=ordered, large=large)


def case(name, version, tokens, d_model, d_ff, dtype, pattern="adversarial", biases=False, start=False, most=ANY_NUMBER, spoilt=False):  # fmt: skip
    def make():
        gate = adversarial(tokens, d_ff, dtype) if pattern == "adversarial" else gate_of(pattern, tokens, d_ff, dtype)
        layer = Layer.draw(tokens, d_model, d_ff, dtype, biases=biases)
        layer = layer.spoilt() if spoilt else layer
        begun = torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(tokens)) if start else None
        return Pooled(layer.x, gate, layer.up, layer.down_t, layer.up_bias, layer.down_bias, begun)

    more = ("biases" * biases, "start" * start, "" if most == ANY_NUMBER else f"most {most}", "spoilt" * spoilt)
    called = named(f"{name}_pooled_v{version}:", pattern, dtype, tokens, d_model, d_ff, *more)
    return case_of(name, version, make, called, most, tokens * d_model * d_ff > 1.1 * 10**7)


EVERY = [("gated", 5), ("gated", 6), ("gated", 7), ("down", 4), ("down", 5)]
assert gated._TWO_PASS_ROWS % POOL_ROWS == 0
CASES = [
    *(case(*one, tokens, 264, 600, dtype, biases=True, start=True) for one in EVERY for tokens in (40, 300) for dtype in (BF16, FP16)),
    *(case(*one, tokens, 1032, 600, BF16, biases=tokens == 16) for one in EVERY for tokens in (0, 1, 15, 16, 17)),
    *(case(*one, 50, 264, 600, BF16, biases=True, most=30, spoilt=one[0] == "gated") for one in EVERY),
    *(case(*one, 300, 2048, 5632, dtype, biases=True, spoilt=one[0] == "gated") for one in EVERY for dtype in (BF16, FP16)),
    *(case(*one, 300, d_model, 1100, BF16, start=True) for one in EVERY for d_model in (8, 768, 5120, 16384)),
    *(case(*one, 300, 64, 9000, BF16, "heavy", most=128) for one in EVERY),
    *(case(*one, gated._TWO_PASS_ROWS + 1003, 264, 520, BF16, "some over", True, True) for one in EVERY),
    *(case(name, None, 4000, 2048, 1100, BF16, "some over") for name in ("gated", "down")),
]  # fmt: skip
