"""Cases of the Hopper kernels that compute neurons densely: `gate_up`, `down_sums`, `finish_lost`."""

import torch

from tests.ops.rows.drawn import BF16, FP16, Layer, gate_of, named
from tests.ops.table import Case
from twell_lab.formats.twell import packed_and_pool
from twell_lab.ops import down_rows, down_sums, gate_up, gated
from twell_lab.ops.down import reference as down_of
from twell_lab.ops.reference import relu

TYPES = (BF16, FP16)
SIZES = [(8, 8), (64, 256), (72, 1000), (768, 264), (2048, 5632), (4096, 512)]


def hidden(rows, d_model, d_ff, dtype=BF16, gated=True, biases=False, how=""):
    def draw():
        layer = Layer.draw(rows, d_model, d_ff, dtype, gated, biases)
        if how == "spoilt":
            layer.spoilt()
        x, gate, up, _, gate_bias, up_bias, _ = layer
        if how == "slices":
            x = torch.cat([x, x], 1)[:, d_model:]
            gate, up = (
                None if w is None else torch.cat([torch.cat([w, w])] * 2, 1)[d_ff:, d_model:] for w in (gate, up)
            )
        return x, gate, up, gate_bias, up_bias

    name = named("gate_up:", dtype, rows, d_model, d_ff, "plain" * (not gated), "biases" * biases, how)
    sources = (gate_up.GATE_UP,)
    return Case(name, sources, draw, gate_up.gate_up, gate_up.reference, tolerance=gate_up.TOLERANCE)


def sums(rows, d_ff, d_model, dtype=BF16, bits=False, spoilt=False):
    """h, part of a wider matrix, and down_t, part of a longer one. bits: the sums are the same in every order."""

    def draw():
        layer = Layer.draw(rows, d_ff + 64, d_model, dtype, bits=bits)
        h = layer.spoilt().x if spoilt else layer.x
        h[:, -1] = h[:, 64]
        return h[:, 64:], layer.gate.t().contiguous()[:d_ff]

    name = named("down_sums:", dtype, rows, d_ff, d_model, "bits" * bits, "spoilt" * spoilt)
    tolerance = 0.0 if bits else down_sums.TOLERANCE
    return Case(name, (down_sums.DOWN_SUMS,), draw, down_sums.down_sums, down_sums.reference, tolerance=tolerance)


def cold(layer, first=0):
    """Slices of the weights from this neuron on, as `finish_lost` takes them."""
    parts = layer.gate, layer.up, layer.gate_bias, layer.up_bias, layer.down_t
    return *(t if t is None else t[first:] for t in parts), layer.down_bias


def finish(tokens, rows, d_model, d_ff, dtype=BF16, gated=True, full=False, hot=0, order=0):
    """rows: how many of them are lost. full: with biases and `start`. hot: slices of the weights from this row on."""

    def draw():
        layer, seed = Layer.draw(tokens, d_model, hot + d_ff, dtype, gated, full), torch.Generator().manual_seed(rows)
        picked = torch.randperm(tokens, generator=seed)[:rows]
        picked = picked if not order else picked.flip(0)
        lost, lost_x = torch.full((1 + tokens,), 2**30, dtype=torch.int32), torch.full_like(layer.x, torch.nan)
        lost[0], lost[1 : 1 + rows], lost_x[:rows] = rows, picked.int(), layer.x[picked]
        start = torch.randn(tokens, d_model, generator=seed) if full else None
        return layer, lost, lost_x, start, torch.full_like(layer.x, 77.0)

    def operation(call, layer, lost, lost_x, start, y):
        down_rows.finish_lost(call, lost, lost_x, *cold(layer, hot), start, y)
        return y

    def reference(layer, lost, lost_x, start, y):
        picked, right = lost[1 : 1 + rows].long(), y.clone()
        right[picked] = down_rows.reference(layer.x, *cold(layer, hot), start)[picked]
        return right

    more = ("plain" * (not gated), "full" * full, f"from {hot}" if hot else "", "in another order" * order)
    name = named("finish_lost:", dtype, f"{rows} of {tokens}", d_model, d_ff, *more)
    sources = (down_rows.DOWN_ROWS, gate_up.GATE_UP)
    return Case(name, sources, draw, operation, reference, tolerance=down_rows.TOLERANCE)


def apart(rows, d_model, d_ff, dtype=BF16, gated_layer=True, beyond=False):
    """Lost rows of a packed gate. Its values are not those of the gate's weights, so it is seen which way was taken:
    few rows are computed from their kept values, more, or one that the pool could not hold, from the weights."""
    few = rows <= 24 and not beyond  # FEW_ROWS of few_rows.cuh

    def draw():
        layer, seed = Layer.draw(300, d_model, d_ff, dtype, gated_layer, True), torch.Generator().manual_seed(rows)
        values = gate_of("sparse", 300, d_ff, dtype)
        picked = torch.arange(3, 300, 300 // rows)[:rows]
        some = torch.rand(rows, d_ff, generator=seed)
        values[picked] = torch.where(some < 0.12, some.to(dtype), -some.to(dtype))
        packed, pool, _ = packed_and_pool(values)
        lost, lost_x = torch.full((301,), 2**30, dtype=torch.int32), torch.full_like(layer.x, torch.nan)
        lost[0], lost[1 : 1 + rows], lost_x[:rows] = rows, picked.int(), layer.x[picked]
        if beyond:
            lost[1] = ~lost[1]
        start = torch.randn(300, d_model, generator=seed)
        return layer, values, packed, pool, lost, lost_x, start, torch.full_like(layer.x, 77.0)

    def operation(call, layer, values, packed, pool, lost, lost_x, start, y):
        down_rows.finish_lost(call, lost, lost_x, *cold(layer), start, y, packed, pool)
        return y

    def reference(layer, values, packed, pool, lost, lost_x, start, y):
        x, _, up, down_t, _, up_bias, down_bias = layer
        if not few:
            every = down_rows.reference(x, *cold(layer), start)
        elif gated_layer:
            every = gated.reference(x, values, up, down_t, up_bias, down_bias, start)
        else:
            every = down_of(relu(values), down_t, down_bias, start)
        picked, right = lost[1 : 1 + rows].long(), y.clone()
        picked = torch.where(picked < 0, ~picked, picked)
        right[picked] = every[picked]
        return right

    name = named("finish_lost, apart:", dtype, rows, d_model, d_ff, "plain" * (not gated_layer), "beyond" * beyond)
    sources = (down_rows.DOWN_ROWS, gate_up.GATE_UP)
    return Case(name, sources, draw, operation, reference, tolerance=down_rows.TOLERANCE)


CHUNK = down_rows.CHUNK
CASES = [
    *(hidden(rows, *SIZES[i], dtype, g, b) for rows in (1, 300) for i in (0, 2, 3) for dtype in TYPES for g in (True, False) for b in (True, False)),
    *(hidden(rows, *size, biases=True) for rows in (128, 4097) for size in SIZES),
    *(hidden(300, 136, 1000, gated=g, how=how) for g in (True, False) for how in ("spoilt", "slices")),
    hidden(0, 64, 256),
    *(sums(rows, *sizes, dtype) for rows in (1, 300, 4097) for sizes in ((8, 8), (256, 2048), (264, 72), (1000, 1000), (5632, 768)) for dtype in TYPES),
    *(sums(rows, 512, 4096, bits=True) for rows in (0, 128, 20_000)),
    sums(300, 264, 136, spoilt=True),
    *(finish(t, r, 64, 264, dtype, g) for t, r in ((1, 0), (1, 1), (300, 1), (300, 300), (0, 0)) for dtype in TYPES for g in (True, False)),
    *(finish(t, r, 768, 1256, dtype, g, True, 256) for t, r in ((300, 17), (4097, 129)) for dtype in TYPES for g in (True, False)),
    *(finish(20_000, r, 256, 512, full=True, hot=512) for r in (0, CHUNK, CHUNK + 1, 20_000)),
    *(finish(600, r, 2048, 5632, full=True, order=order) for r in (1, 70, 200, 600) for order in (0, 1)),
    *(apart(r, *sizes, g_dtype, g) for r in (1, 3, 24, 25) for sizes, g_dtype in (((2048, 5632), BF16), ((264, 1256), FP16), ((64, 9000), BF16)) for g in (True, False)),
    *(apart(3, 4096, 520, dtype, g, True) for dtype in TYPES for g in (True, False)),
]  # fmt: skip
