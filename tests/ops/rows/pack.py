"""Cases of `pack`: patterns of what fires, geometries, versions, types of values."""

from functools import partial

import torch

from tests.ops.rows.drawn import PATTERNS, gate_of
from tests.ops.table import Case, shifted
from twell_lab.ops.pack import PACK, pack, reference

SHAPES = [(5, 5632, 256, 32), (300, 1000, 256, 32), (1, 8, 256, 32)]
SHAPES += [(3, 264, 128, 17), (7, 2048, 512, 64), (0, 8, 8, 2)]
ANY = [(4, 1, 256, 32), (9, 257, 256, 32), (2, 70_001, 256, 32), (3, 1023, 100, 5)]  # for versions 1 and 2


def case(pattern, dtype, version, rows, columns, tile, words, signed=False, off=False, seed=0):
    def draw():
        gate = gate_of(pattern, rows, columns, dtype, tile, words, seed)
        return (shifted(gate) if off else gate,)

    def exact(gate):
        """With what `poisoned` leaves where a kernel must not write: past each tile's count."""
        packed = reference(gate, **how)
        return packed.masked_fill(torch.arange(words) > packed[..., :1], torch.iinfo(packed.dtype).max)

    how = dict(tile=tile, words=words, signed=signed)
    name = (
        f"pack_v{version}{' signed' * signed}{' off' * off}: {pattern}, {dtype}, {rows} x {columns}, {tile} in {words}"
    )
    return Case(name, (PACK,), draw, partial(pack, version=version, **how), exact)


TYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    *(case(pattern, dtype, v, *SHAPES[0]) for pattern in PATTERNS for dtype in TYPES for v in (1, 2, 3, 4)),
    *(case("some over", torch.bfloat16, v, *shape) for shape in SHAPES[1:] for v in (1, 2, 3, 4)),
    *(case("sparse", dtype, v, *shape) for shape in ANY for dtype in TYPES for v in (1, 2, None)),
    *(case("odd values", dtype, v, *SHAPES[1], signed=True) for dtype in TYPES for v in (1, 2, 3, 4)),
    case("sparse", torch.float16, None, 6, 520, 256, 32, off=True),
]
