"""Cases of `gated_pooled` and `down_pooled`: rows that the pool holds and that it does not, heavy rows, rows of NaN."""

import torch

from tests.formats.pools import pool_used
from tests.ops.rows.drawn import BF16, FP16, Layer, adversarial, gate_of, named
from tests.ops.table import Case
from twell_lab.formats import POOL_ROWS, WORDS
from twell_lab.formats.twell import packed_and_pool
from twell_lab.ops import down, gated
from twell_lab.ops.down import ANY_NUMBER
from twell_lab.ops.reference import relu

POISON = 12345


def ordered(result):
    """Return y, which rows are lost, and their x, in the order of the rows; what lies behind them was not written."""
    y, lost, lost_x = result
    count = int(lost[0])
    rows = lost[1 : 1 + count]
    order = torch.where(rows < 0, ~rows, rows).argsort()
    assert (lost[1 + count :] == POISON).all()
    return y, torch.cat([lost[:1], rows[order]]), lost_x[:count][order]


def case(name, version, tokens, d_model, d_ff, dtype, pattern="adversarial", biases=False, start=False, most=ANY_NUMBER, spoilt=False):  # fmt: skip
    def draw():
        gate = adversarial(tokens, d_ff, dtype) if pattern == "adversarial" else gate_of(pattern, tokens, d_ff, dtype)
        layer = Layer.draw(tokens, d_model, d_ff, dtype, biases=biases)
        if spoilt:
            layer.spoilt()
        packed, pool, _ = packed_and_pool(gate)
        pool[torch.arange(pool.shape[2]) >= pool_used(packed)[..., None]] = POISON  # nobody may read these
        packed = packed.masked_fill(torch.arange(WORDS) > packed[..., :1], POISON)
        begun = torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(tokens)) if start else None
        lost = torch.full((1 + tokens,), POISON, dtype=torch.int32)
        lost[0] = 0
        return layer.x, gate, packed, pool, layer.up, layer.down_t, layer.up_bias, layer.down_bias, begun, lost

    def operation(call, x, gate, packed, pool, up, down_t, up_bias, down_bias, begun, lost):
        y, lost_x = (call.empty(*x.shape, dtype=x.dtype) for _ in range(2))
        beside = (begun, lost, lost_x, y, most, version)
        if name == "down":
            down.down_pooled(call, x, packed, pool, down_t, down_bias, *beside)
        else:
            gated.gated_pooled(call, x, packed, pool, up, down_t, up_bias, down_bias, *beside)
        return y, lost, lost_x

    def reference(x, gate, packed, pool, up, down_t, up_bias, down_bias, begun, lost):
        beyond = packed_and_pool(gate.to(dtype))[2]
        gone = beyond | (packed[..., 0].sum(1) > most)
        rows = gone.nonzero()[:, 0].int()
        if name == "down":
            y = down.reference(relu(gate), down_t, down_bias, begun)
        else:
            y = gated.reference(x, gate, up, down_t, up_bias, down_bias, begun)
        listed = torch.full_like(lost, POISON)
        listed[: 1 + len(rows)] = torch.cat([gone.sum()[None].int(), torch.where(beyond[rows.long()], ~rows, rows)])
        return y.masked_fill(gone[:, None], torch.nan), listed, x[rows.long()]

    sources = {"down": (down.DOWN,), "gated": (gated.GATED,) if version in (5, 6) else (gated.UP, down.DOWN)}[name]
    more = ("biases" * biases, "start" * start, "" if most == ANY_NUMBER else f"most {most}", "spoilt" * spoilt)
    called = named(f"{name}_pooled_v{version}:", pattern, dtype, tokens, d_model, d_ff, *more)
    compared = {"tolerance": gated.TOLERANCE, "reads": ordered, "large": tokens * d_model * d_ff > 1.1 * 10**7}
    return Case(called, sources, draw, operation, reference, **compared)


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
