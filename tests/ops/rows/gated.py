"""Cases of `gated` and `down`: patterns of what fires, widths, versions, types, overflow from the gate and the tail."""

from functools import partial

import torch

from tests.ops.rows.drawn import BF16, FP16, FP32, Layer, gate_of, named
from tests.ops.table import Case, shifted
from twell_lab.formats import TwELL
from twell_lab.ops import down, gated
from twell_lab.ops.activation import RELU, Activation
from twell_lab.ops.reference import relu

SHAPES = [(37, 2048, 1000), (5, 1032, 600), (9, 64, 257), (4, 4096, 512), (3, 5120, 300), (6, 100, 300)]
SHAPES += [(2, 12290, 256), (1, 8, 1), (0, 64, 300)]
TYPES = (BF16, FP16, FP32)
NO_TAIL = (None, None, None)


def case_of(name, version, make, tail=False, tile=256, words=32, signed=False, both=False, called="", large=False, off=False):  # fmt: skip
    """make: () -> x, gate [tokens, d_ff] before its activation, up, down_t and their biases, or None. off: all tensors
    off a boundary of 16 bytes."""

    def draw():
        x, gate, *layer = make()
        packed = (TwELL.from_dense if signed else TwELL.from_gate)(gate, tile, words)
        overflow = (packed.tail_pointer, packed.tail_column, packed.tail_value)
        unread = torch.arange(words) > packed.packed[..., :1]
        packed = packed.packed.masked_fill(unread, -1)  # NaN in a column that no matrix has
        made = [x, gate, packed, overflow, *layer]
        return tuple(shifted(t) if off and isinstance(t, torch.Tensor) else t for t in made)

    def operation(call, x, gate, packed, overflow, up, down_t, up_bias, down_bias):
        beyond = (None, overflow) if tail else (gate, NO_TAIL)
        if name == "down":
            return down.down(call, packed, *beyond, down_t, down_bias, gate.shape[1], tile, version, signed=signed)
        layer = (up, down_t, up_bias, down_bias)
        return gated.gated(call, x, packed, *beyond, *layer, tile, version, signed=signed, both=both)

    def reference(x, gate, packed, overflow, up, down_t, up_bias, down_bias):
        act = gate if signed else relu(gate)
        if name == "down":
            return down.reference(act, down_t, down_bias)
        if signed:
            return down.reference(act * torch.nn.functional.linear(x, up, up_bias), down_t, down_bias)
        acts = Activation(both=True) if both else RELU
        return gated.reference(x, gate, up, down_t, up_bias, down_bias, acts=acts)

    source = {"down": down.DOWN, "gated": gated.GATED}[name]
    return Case(called, (source,), draw, operation, reference, tolerance=gated.TOLERANCE, large=large)


def case(name, pattern, version, dtype, shape, tail=False, tile=256, words=32, signed=False, both=False, how="", biases=None, seed=0):  # fmt: skip
    rows, d_model, d_ff = shape
    biases = "ud" * (rows % 2) if biases is None else biases

    def make():
        gate = gate_of(pattern, rows, d_ff, dtype, tile, words, seed)
        layer = Layer.draw(*shape, dtype, biases=True, seed=seed)
        layer = layer.spoilt() if how == "spoilt" else layer
        if signed:
            gate = torch.where(gate > 0, torch.where(torch.arange(d_ff) % 2 == 0, gate, -gate), 0)
        biased = (bias if letter in biases else None for bias, letter in ((layer.up_bias, "u"), (layer.down_bias, "d")))
        return layer.x, gate, layer.up, layer.down_t, *biased

    more = ("tail" * tail, "signed" * signed, "both" * both, how, "" if tile == 256 else f"{tile} in {words}")
    called, large = named(f"{name}_v{version}:", pattern, dtype, *shape, *more), rows * d_model * d_ff > 10**7
    return case_of(name, version, make, tail, tile, words, signed, both, called, large, how == "shifted")


def _versions(name, newest):
    one = partial(case, name)
    versions = range(1, newest + 1)
    yield from (one("sparse", v, dtype, SHAPES[i]) for v in versions for dtype in TYPES for i in (0, 2, 5))
    yield from (one("some over", v, BF16, shape, tail) for v in versions for shape in SHAPES for tail in (False, True))
    patterns = ("dense", "silent", "all", "full tiles", "one over")
    yield from (one(p, v, FP16, SHAPES[i], v % 2 == 1) for v in versions for p in patterns for i in (0, 1))
    geometries = [(256, 64), (256, 128), (128, 9), (64, 65), (1000, 2)]
    yield from (one("some over", v, BF16, (9, 1032, 900), False, *g) for v in versions for g in geometries)
    yield from (one("dense", v, dtype, SHAPES[1], signed=True) for v in versions for dtype in TYPES)
    yield one("sparse", None, BF16, (6, 64, 520), how="shifted")
    yield from (one("some over", v, BF16, (70_001, 64, 264)) for v in (None,))


CASES = [
    *_versions("gated", 4),
    *_versions("down", 3),
    *(case("gated", "dense", v, dtype, SHAPES[1], both=True) for v in (1, 2, 3, 4) for dtype in TYPES),
    *(
        case("gated", "some over", v, t, (12, d, 700), how="spoilt")
        for v in (1, 2, 4)
        for t in TYPES
        for d in (2048, 100)
    ),
]
