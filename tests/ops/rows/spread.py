"""Cases of `spread`: rows with few and many kept values, as those of `listed`."""

from dataclasses import replace

from tests.ops.rows import listed as rows
from tests.ops.rows.drawn import BF16, FP16
from twell_lab.ops import spread


def case(counts, d_model, d_ff, *how, **more):
    like = rows.case(1, counts, d_model, d_ff, *how, **more)
    name, operation = like.name.replace("listed_v1", "spread"), lambda call, *arguments: spread.spread(call, *arguments)
    return replace(like, name=name, sources=(spread.SPREAD,), operation=operation, reference=spread.reference)


CASES = [
    *(case(rows.HEAVY, 264, 1504, dtype, g, b) for dtype in (BF16, FP16) for g in (True, False) for b in (True, False)),
    *(case(rows.HEAVY, *sizes, biases=True) for sizes in [(2048, 5632), (8, 16384), (4104, 648), (16384, 1024)]),
    *(case([0, 3, 1, 70, 29, 200], *sizes, biases=True) for sizes in [(24, 712), (520, 2056)]),
    *(case(counts, 64, 640, spoilt=True) for counts in ([640] * 8, [0] * 8, [5, 600] * 10)),
    case([], 64, 640),
    case([7 * i % 900 for i in range(300)], 768, 1000),
]
