"""Cases of the gate GEMMs that pack: widths, versions, biases, tiles that overflow, rows of NaN; and of the dense gate.

x and the weights are of so few bits that every order of adding gives the same gate, so words and pool are those of
torch's, bit for bit."""

from functools import partial

import torch

from tests.formats.pools import pool_used
from tests.ops.rows.drawn import BF16, FP16, Layer, named
from tests.ops.table import Case
from twell_lab.ops import gate_pack as ops

POISON = 12345


def read(result):
    """Return the words and the pool with what nobody reads at 0, and each NaN as the same bits; and `lost`."""
    packed, pool, *lost = result
    dtype_bits = [(0x7F80, 0x007F), (0x7C00, 0x03FF)]  # of infinity, and of NaN beside it: bfloat16, float16

    def plain(words, unread):
        words = words.masked_fill(unread, 0)
        value = words >> 16 & 0x7FFF
        spoilt = [(value & top == top) & (value & low != 0) for top, low in dtype_bits]
        return torch.where(spoilt[0] | spoilt[1], words & 0xFFFF | 0x7FFF0000, words)

    first = torch.arange(packed.shape[2]) > packed[..., :1]
    beyond = torch.arange(pool.shape[2]) >= pool_used(packed)[..., None]
    words = plain(packed, first)
    words[..., 0] = packed[..., 0]
    return words, plain(pool, beyond), *lost


def drawn(tokens, d_model, d_ff, silent, dtype, biases, how=""):
    layer = Layer.draw(tokens, d_model, d_ff, dtype, biases=biases, bits=True, silent=silent)
    x, gate, bias = layer.x, layer.gate, layer.gate_bias
    if how == "overflow":  # some rows have a second tile of 40 values
        x[:, 1] = (torch.arange(tokens) % 5 < 2).to(dtype) * 32
        gate[:, 1] = 0
        gate[256:296, 1] = 1
    if how == "spoilt":
        layer.spoilt()
    if how == "slices":  # of rows of the weights, and of columns of x
        x, gate = torch.cat([x, x], 1)[:, d_model:], torch.cat([gate, gate])[d_ff:]
    return x, gate, bias


def case(source, version, *shape, dtype=BF16, biases=False, how=""):
    tokens = shape[0]

    def draw():
        return *drawn(*shape, dtype, biases, how), torch.full((3,), POISON, dtype=torch.int32)

    def operation(call, x, gate, bias, lost):
        pack = ops.gate_pack_sm90 if source is ops.SM90 else ops.gate_pack_sm80
        return *pack(call, x, gate, bias, lost, version), lost

    def reference(x, gate, bias, lost):
        return *ops.reference(x, gate, bias), torch.tensor(
            [0, POISON, POISON] if tokens else [POISON] * 3, dtype=torch.int32
        )

    name = f"{source.name}_v{version}:"
    more = ("biases" * biases, how)
    oldest = (8, 0) if dtype == BF16 else (7, 5)
    return Case(
        named(name, dtype, *shape, *more), (source,), draw, operation, reference, reads=read, oldest=oldest, large=True
    )


def dense(*shape, dtype=BF16, biases=False, how=""):
    name, draw = named("dense_gate:", dtype, *shape, "biases" * biases, how), partial(drawn, *shape, dtype, biases, how)
    return Case(name, (ops.SM90,), draw, ops.dense_gate, ops.dense_reference)


SHAPES = [  # tokens, d_model, d_ff, deviations by which the gate lies below zero
    (1, 64, 256, 0), (17, 72, 8, 0), (300, 2048, 5632, 2.5), (513, 1024, 336, 0), (2048, 512, 5632, 1), (255, 200, 232, 0),
    (20_000, 64, 1000, 0), (300, 768, 3072, 2), (70_001, 64, 264, 2), (129, 4096, 520, 2.5), (0, 64, 264, 0), (33, 136, 24, 0),
]  # fmt: skip
VERSIONS = {ops.SM90: (1, 2, 3), ops.SM80: (1, 2, 3, 4)}


def _each(source):
    for v in VERSIONS[source]:
        yield from (case(source, v, *shape) for shape in SHAPES)
        yield from (case(source, v, *SHAPES[i], dtype=FP16, biases=b) for i in (1, 2, 3) for b in (True, False))
        yield from (case(source, v, *SHAPES[i], biases=True) for i in (2, 3, 8))
        yield from (case(source, v, 2000, 1024, 2816, 2.5, dtype=dtype, how="overflow") for dtype in (BF16, FP16))
        yield from (case(source, v, 300, 200, 1000, 1, dtype=dtype, how="spoilt") for dtype in (BF16, FP16))
    yield case(source, None, 300, 256, 1536, 2)


CASES = [
    *_each(ops.SM90),
    *_each(ops.SM80),
    *(case(ops.SM90, v, 300, 256, 1536, 1, biases=True, how="slices") for v in (1, 2, 3)),
    *(dense(*shape, dtype=dtype, biases=b) for shape in SHAPES[:6] for dtype in (BF16, FP16) for b in (True, False)),
    dense(300, 256, 1536, 0, how="slices"),
    dense(300, 200, 1000, 1, how="spoilt"),
]
