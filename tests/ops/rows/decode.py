"""Cases of `decode` and of the products with kept inputs: few tokens, each activation.

A gate at a threshold fires or not by its last bit. So where there is one, the gates are sums of few bits, which every
order of adding gives exactly."""

from functools import partial

import torch

from tests.ops.rows.drawn import BF16, FP16, Layer, named
from tests.ops.table import Case
from twell_lab.ops import decode, kept_inputs
from twell_lab.ops.activation import RELU, Activation
from twell_lab.ops.kept_inputs import Kept

TYPES = (BF16, FP16)
SHAPES = [(2048, 5632), (768, 3072), (64, 333), (2056, 1000), (8, 5), (4104, 640)]
KINDS = [Activation("above", 0.5), Activation("silu", 0.2), Activation("gelu", 0.4), Activation("gelu_tanh", 0.4), Activation(both=True)]  # fmt: skip


def case(tokens, d_model, d_ff, dtype=BF16, acts=RELU, version=2, gated=True, biases=True, silent=0.0, spoilt=False):
    def draw():
        bits = acts != RELU or bool(silent)
        layer = Layer.draw(tokens, d_model, d_ff, dtype, gated, biases, bits=bits, silent=silent)
        return tuple(layer.spoilt() if spoilt else layer)

    more = (acts.kind, "both" * acts.both, "plain" * (not gated), "biases" * biases, "spoilt" * spoilt)
    return Case(
        named(f"decode_v{version}:", dtype, tokens, d_model, d_ff, *more, f"below by {silent}" if silent else ""),
        (decode.DECODE,),
        draw,
        partial(decode.decode, acts=acts, version=version),
        partial(decode.reference, acts=acts),
        tolerance=decode.TOLERANCE,
        large=tokens * d_model * d_ff > 2 * 10**6,
        long=tokens in (8, 16, 32),  # the ordinary tests have one token more of each
    )


def product(tokens, inputs, outputs, dtype=BF16, kind="silu", paired=True, biases=True, version=None, threshold=0.5, spoilt=False):  # fmt: skip
    def draw():
        layer = Layer.draw(tokens, inputs, outputs, dtype, biases=biases)
        x, gate, up, _, gate_bias, up_bias, _ = layer.spoilt() if spoilt else layer
        x[:, 0] = 0
        second, second_bias = (up.t().contiguous(), up_bias) if paired else (None, None)
        return x, gate.t().contiguous(), second, gate_bias, second_bias

    how = dict(threshold=threshold, kind=kind)
    more = (kind, "paired" * paired, "biases" * biases, f"from {threshold}", "spoilt" * spoilt)
    return Case(
        named(f"kept_inputs_v{version}:", dtype, tokens, inputs, outputs, *more),
        (kept_inputs.KEPT_INPUTS,),
        draw,
        partial(kept_inputs.product, version=version, **how),
        partial(kept_inputs.reference, **how),
        tolerance=kept_inputs.TOLERANCE,
        large=tokens * inputs * outputs > 10**6,
    )


def layer(tokens, d_model, d_ff, gated=True, dtype=BF16, kind="relu", hidden=2.25):
    kept = Kept(kind, 0.5, hidden)

    def draw():
        x, gate, up, down_t, *biases = Layer.draw(tokens, d_model, d_ff, dtype, gated, True, bits=True)
        up = up if not gated else gate.flip(0).contiguous()  # of few bits as well: so h is exact, and who is kept
        biases[1] = biases[1] if not gated else biases[0].flip(0).contiguous()
        return x, *(t if t is None else t.t().contiguous() for t in (gate, up)), down_t, *biases

    def reference(x, gate_t, up_t, down_t, gate_bias, up_bias, down_bias):
        weights = (up_t, None, up_bias) if gate_t is None else (gate_t, up_t, gate_bias, up_bias)
        of_x = partial(kept_inputs.reference, threshold=kept.inputs)
        h = of_x(x, *weights, kind=kept.kind)
        # Which of h is kept is asked of what is rounded: the gate, and then its product with up.
        x, *weights = (t if t is None else t.double() for t in (x, *weights))
        seen = of_x(x, weights[0], None, weights[2], kind=kept.kind).to(dtype)
        if gate_t is not None:
            seen = (seen.double() * of_x(x, weights[1], None, weights[3])).to(dtype)
        h = h.masked_fill(seen.abs() < kept.hidden, 0)
        return kept_inputs.reference(h, down_t, None, down_bias, threshold=0.0)

    name = named("kept_inputs, a layer:", dtype, tokens, d_model, d_ff, kind, "plain" * (not gated))
    operation = lambda call, *tensors: kept_inputs.layer(call, *tensors, kept)  # noqa: E731
    large, sources = tokens * d_model * d_ff > 10**6, (kept_inputs.KEPT_INPUTS,)
    return Case(name, sources, draw, operation, reference, tolerance=kept_inputs.TOLERANCE, large=large)


def products(tokens, inputs, outputs, dtype=BF16, spoilt=False):
    """Of the same inputs; the second one has a bias."""
    count = len(outputs)

    def draw():
        layer = Layer.draw(tokens, inputs, sum(outputs), dtype, biases=True)
        x, weight, _, _, bias, *_ = layer.spoilt() if spoilt else layer
        x[:, ::3] = 0
        biases = [part.clone() if i == 1 else None for i, part in enumerate(bias.split(outputs))]
        return x, *(part.t().contiguous() for part in weight.split(outputs)), *biases

    def reference(x, *parts):
        each = zip(parts[:count], parts[count:])
        return torch.cat([kept_inputs.reference(x, w, None, bias, threshold=0.0) for w, bias in each], 1)

    operation = lambda call, x, *parts: kept_inputs.products(call, x, parts[:count], parts[count:])  # noqa: E731
    name = named("kept_inputs_v3_each:", dtype, tokens, inputs, *outputs, "spoilt" * spoilt)
    large, sources = tokens * inputs * sum(outputs) > 10**6, (kept_inputs.KEPT_INPUTS,)
    return Case(name, sources, draw, operation, reference, tolerance=kept_inputs.TOLERANCE, large=large)


COUNTS = (1, 2, 8, 9, 16, 17, 32, 33, 64)
CASES = [
    *(case(t, 768, 3072, dtype, version=v, gated=g, silent=1.5) for t in COUNTS for dtype in TYPES for v in (1, 2) for g in (True, False)),
    *(case(t, *shape, biases=t % 2 == 1) for t in COUNTS for shape in SHAPES),
    *(case(t, 2048, 5632, silent=s) for t in (1, 16, 50) for s in (2.5, 100.0)),
    *(case(t, 768, 3072, dtype, acts) for t in (1, 5, 16, 40) for dtype in TYPES for acts in KINDS),
    *(case(t, *shape, BF16, KINDS[1]) for t in (1, 12, 64) for shape in SHAPES),
    *(case(t, 64, 333, acts=acts, version=v, gated=g) for t in (1, 12, 33) for acts in KINDS for v in (1, 2) for g in (True, acts.both)),
    *(case(t, 768, 3072, acts=acts, gated=False) for t in (1, 16) for acts in KINDS if not acts.both),
    *(case(t, 256, 1000, spoilt=True, version=v, gated=g) for t in (3, 8, 30) for v in (1, 2) for g in (True, False)),
    *(product(t, *sizes, BF16, kind, paired) for t in (1, 4) for sizes in ((2048, 5632), (264, 72)) for kind in kept_inputs.KINDS for paired in (True, False)),
    *(product(t, *sizes, FP16, "silu") for t in (1, 2, 3) for sizes in ((2048, 5632), (264, 72))),
    *(product(t, *sizes, dtype, None, False, t == 2) for t in (1, 2, 3) for sizes in ((5632, 2048), (8, 8), (9000, 24)) for dtype in TYPES),
    *(product(t, 264, 14336, BF16, kind, kind is not None) for t in (1, 2) for kind in ("silu", None)),  # wide slabs
    *(product(t, 300, 77, dtype, "gelu", version=1) for t in (1, 3) for dtype in TYPES),
    *(product(t, 264, 400, BF16, kind, kind is not None, version=2) for t in (1, 3) for kind in ("silu", None)),
    *(product(2, 264, 1000, threshold=threshold) for threshold in (0.0, 100.0)),
    *(product(2, 264, 1000, kind=kind, paired=False, spoilt=True) for kind in ("relu", None)),
    *(products(t, *sizes, dtype) for t in (1, 2, 3) for sizes in ((264, (72, 8, 200)), (520, (64, 136)), (4096, (4096, 1024, 1024))) for dtype in TYPES),
    products(2, 264, (72, 8, 200), spoilt=True),
    *(layer(t, 264, 400, g, dtype) for t in (1, 3) for g in (True, False) for dtype in TYPES),
    *(layer(t, 768, 3072, g, dtype) for t in (1, 2, 4) for g in (True, False) for dtype in TYPES),
    *(layer(t, 2048, 5632, g, kind="silu", hidden=0.0) for t in (1, 2) for g in (True, False)),
]  # fmt: skip
