"""Cases of `listed` and `spread`: rows with few and many kept values."""

from dataclasses import replace

import torch

from tests.ops.rows.drawn import BF16, FP16, Layer, gate_of, named
from tests.ops.table import Case
from twell_lab.ops import listed

HEAVY = [1500, 0, 3, 700, 513, 512, 1]  # kept values by row: more than 512 are heavy


def case(version, counts, d_model, d_ff, dtype=BF16, gated=True, biases=False, spoilt=False):
    def draw():
        layer = Layer.draw(len(counts), d_model, d_ff, dtype, gated=True, biases=biases)
        if spoilt:
            layer.spoilt()
        gate = -gate_of("all", len(counts), d_ff, dtype)
        for row, count in enumerate(counts):
            gate[row, torch.randperm(d_ff, generator=torch.Generator().manual_seed(row))[:count]] *= -1
        up, up_bias = (layer.up, layer.up_bias) if gated else (None, None)
        return layer.x, gate, up, layer.down_t, up_bias, layer.down_bias

    more = ("plain" * (not gated), "biases" * biases, "spoilt" * spoilt)
    return Case(
        named(f"listed_v{version}:", dtype, len(counts), d_model, d_ff, *more),
        (listed.LISTED,),
        draw,
        lambda call, *arguments: listed.listed(call, *arguments, version=version),
        listed.reference,
        tolerance=listed.TOLERANCE,
        large=d_ff > 2000 or d_model > 4096 or len(counts) > 20,
    )


def spread(counts, *sizes, **how):
    like = case(1, counts, *sizes, **how)
    operation = lambda call, *arguments: listed.spread(call, *arguments)  # noqa: E731
    return replace(like, name=like.name.replace("listed_v1", "spread"), sources=(listed.SPREAD,), operation=operation)


CASES = [
    *(case(v, HEAVY, 264, 1504, dtype, g, b) for v in (1, 2) for dtype in (BF16, FP16) for g in (True, False) for b in (True, False)),
    *(case(None, HEAVY, *sizes, biases=True) for sizes in [(2048, 5632), (8, 16384), (4104, 648), (16384, 1024)]),
    *(case(v, counts, 64, 640, spoilt=True) for v in (1, 2) for counts in ([640] * 8, [0] * 8, [5, 600] * 10)),
    *(case(v, [], 64, 640) for v in (1, 2)),
    *(case(v, [7 * i % 900 for i in range(n)], 768, 1000) for v in (1, None) for n in (300, 2048)),
    *(spread(HEAVY, 264, 1504, dtype, g, b) for dtype in (BF16, FP16) for g in (True, False) for b in (True, False)),
    *(spread(HEAVY, *sizes, biases=True) for sizes in [(2048, 5632), (8, 16384), (4104, 648), (16384, 1024)]),
    *(spread([0, 3, 1, 70, 29, 200], *sizes, biases=True) for sizes in [(24, 712), (520, 2056)]),
    *(spread(counts, 64, 640, spoilt=True) for counts in ([640] * 8, [0] * 8, [5, 600] * 10)),
    spread([], 64, 640),
    spread([7 * i % 900 for i in range(300)], 768, 1000),
]  # fmt: skip
