"""Cases of the kernels of a training step. Every value lies on a grid so coarse that gate, up and their products are
exact in float32, in any order of the sum: so no neuron's sign, and no rounding of a gate, depends on the order."""

from functools import partial

import torch

from tests.ops.table import Case
from twell_lab.formats import fires
from twell_lab.formats.twell import packed_and_pool
from twell_lab.ops import columns, survivors, train, train_dense, train_lost, train_rows

ROWS_ALL = (survivors.SURVIVORS, train_rows.SLABS, columns.COLUMNS, columns.GRADIENTS, train_lost.LOST)
ODD = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])


def grid(generator, *shape, most=4, unit=0.125):
    return torch.randint(-most, most + 1, shape, generator=generator) * unit


def layer(tokens, d_model, d_ff, dtype, gated=True, biased=True, slope=True, *, rate=1.8, rows=""):
    """x, gate, up, down_t, gate_bias, up_bias, down_bias, dy, dl1, packed, pool.

    rate: a neuron fires with about the probability of a normal variable above it. rows: in which many fire: "some" (one
    in seven) or "all"; and "spoilt" (not finite)."""
    draw = torch.Generator().manual_seed(tokens * 31 + d_model + d_ff)
    x, dy = grid(draw, tokens, d_model, unit=0.5), grid(draw, tokens, d_model)
    gate, up, down_t = (grid(draw, d_ff, d_model) for _ in range(3))
    x[:, 0], (gate if gated else up)[:, 0] = 1.0, -round(3.3 * rate * d_model**0.5) / 8  # 0.41: of one product
    if "some" in rows or "all" in rows:
        x[:: 7 if "some" in rows else 1, 0] = -1.0
    if "spoilt" in rows:
        x[1, 2], x[tokens // 2, 1], x[-1, 0] = torch.nan, torch.inf, -torch.inf
    biases = [grid(draw, n).to(dtype) if biased else None for n in (d_ff, d_ff, d_model)]
    x, dy, gate, up, down_t = (t.to(dtype) for t in (x, dy, gate, up, down_t))
    gate, biases[0] = (gate, biases[0]) if gated else (None, None)
    first, bias = (gate, biases[0]) if gated else (up, biases[1])
    g = x.float() @ first.float().t()
    packed, pool, _ = packed_and_pool((g if bias is None else g + bias.float()).to(dtype))
    return x, gate, up, down_t, *biases, dy, grid(draw, tokens) if slope else None, packed, pool


def step(call, x, gate, up, down_t, gate_bias, up_bias, down_bias, dy, dl1, packed, pool):
    s, y = train.forward_rows(call, packed, pool, x, gate, up, down_t, gate_bias, up_bias, down_bias)
    return y, s.l1, s.kept, *train.backward_rows(call, s, dy, dl1, x, gate, up, down_t, gate_bias, up_bias)


def first_versions(call, x, gate, up, down_t, gate_bias, up_bias, down_bias, dy, dl1, packed, pool):
    """The same by the kernels' first versions, for a layer without lost rows."""
    s = survivors.survivors(call, x, packed, pool, len(up), gate is not None)
    if gate is not None:
        train_rows.up_values(call, x, s, up, up_bias)
    y = train_rows.weighted_rows(call, s, down_t, down_bias, 1)
    dh = train_rows.hidden_gradient(call, dy, s, down_t, dl1, 1)
    gradients = columns.weight_gradients(call, x, dy, s, dh, len(up), up_bias is not None, 1)
    return y, s.l1, s.kept, train_rows.input_gradient(call, s, dh, gate, up, 1), *gradients


def reference(*given, dtype):
    return train_rows.reference(*given[:9], dtype)


def told(result):
    """How many neurons fire is not said of a row that is not finite."""
    y, l1, kept, *gradients = result
    return y, l1, kept.masked_fill(l1.isnan(), 0), *gradients


def case(name, dtype, *sizes, operation=step, sources=ROWS_ALL, oldest=(7, 5), long=False, **how):
    made = f"train {name}: {dtype}, {' x '.join(map(str, sizes[:3]))}, {'gated' if sizes[3] else 'plain'}"
    draw, exact = partial(layer, *sizes[:3], dtype, sizes[3], **how), partial(reference, dtype=dtype)
    return Case(made, sources, draw, operation, exact, train_rows.TOLERANCE, reads=told, oldest=oldest, long=long)


def list_case(name, dtype, tokens, d_ff, capacity, few, most, **how):
    """The list of survivors alone: which rows are lost is written down here once more."""

    def draw():
        x, gate, up, *_, packed, pool = layer(tokens, 64, d_ff, dtype, False, False, **how)
        g = (x.float() @ up.float().t()).to(dtype)
        counts, lost = fires(g).sum(1), packed_and_pool(g)[2] | ~x.isfinite().all(1)
        heavy = ~lost & (counts > survivors.HEAVY)
        if few < heavy.sum() and (lost | heavy).sum() <= most:
            lost = lost | heavy
        ends = torch.where(lost, 0, counts).cumsum(0)
        lost = lost | (ends > capacity).cummax(0)[0]
        return x, packed, pool, g, lost

    def operation(call, x, packed, pool, g, lost):
        return survivors.survivors(call, x, packed, pool, d_ff, False, capacity, few, most)

    def used(s):
        lost, heavy = int(s.lost[0]), int(s.lost[-1])
        there = s.spans[:, 0] >= 0
        numbers = torch.cat([s.lost[: 1 + lost], s.lost[len(s.lost) - 1 - heavy :]])
        return s.spans, s.words[: int(s.spans[:, 1].sum())], numbers, s.kept[there], s.l1[there]

    exact = partial(lambda x, packed, pool, g, lost: survivors.reference(g, lost, capacity))
    return Case(f"survivors {name}: {dtype}", (survivors.SURVIVORS,), draw, operation, exact, reads=used)


def dense_cases(dtype, rows, d_ff, gated, version, slope=True):
    def draw():
        generator = torch.Generator().manual_seed(rows * 31 + d_ff)
        g, u, dh = (grid(generator, rows, d_ff) for _ in range(3))
        for t in (g, u, dh):
            pick = torch.randint(0, 200, t.shape, generator=generator)
            t[pick < len(ODD)] = ODD[pick[pick < len(ODD)]]
        g, u, dh = (t.to(dtype) for t in (g, u, dh))
        return g, u if gated else None, dh, grid(generator, rows) if slope else None

    def made(name, operation, exact):
        title = f"dense {name}_v{version}: {dtype}, {rows} x {d_ff}, {'gated' if gated else 'plain'}"
        return Case(title, (train_dense.DENSE,), draw, operation, exact)

    hidden = lambda call, g, u, dh, dl1: train_dense.dense_hidden(call, g, u, version)  # noqa: E731
    exact = lambda g, u, dh, dl1: train_dense.hidden_reference(g, u)  # noqa: E731
    gradients = lambda call, *given: train_dense.dense_gradients(call, *given, version)  # noqa: E731
    return [made("hidden", hidden, exact), made("gradients", gradients, train_dense.gradients_reference)]


def transpose_case(dtype, rows, columns):
    draw = lambda: (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype),)  # noqa: E731
    title = f"transpose: {dtype}, {rows} x {columns}"
    return Case(title, (train_rows.TRANSPOSE,), draw, train_rows.transposed, lambda m: m.t().contiguous())


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FIRST = (survivors.SURVIVORS, train_rows.ROWS, train_rows.SLABS, columns.COLUMNS, columns.GRADIENTS)
LOSING, TENSOR = (*ROWS_ALL, train_lost.WEIGHTS), (*ROWS_ALL, train_lost.TENSOR)
CASES = [
    *(case("step", dtype, 40, 264, 600, gated) for dtype in (BF16, FP16) for gated in (True, False)),
    case("step without biases", BF16, 33, 264, 1000, True, biased=False, slope=False),
    case("one token", BF16, 1, 264, 8, True, rate=0.0),
    case("many columns", BF16, 3, 264, 20_008, False, long=True),
    case("wide rows, many slabs", BF16, 6, 4360, 264, True),
    case("nothing fires", BF16, 20, 264, 512, True, rate=9.0),
    case("heavy rows", BF16, 20, 264, 3000, True, rate=1.3),
    case("long lists, cut into pieces", BF16, 1100, 264, 16, True, rate=-1.0),
    *(case("lost rows", BF16, 60, 264, 1000, gated, rows="some spoilt", sources=LOSING) for gated in (True, False)),
    case("many rows lost", FP16, 620, 264, 104, True, rows="all", sources=LOSING, long=True),
    *(
        case("first versions", dtype, 21, 264, 600, gated, operation=first_versions, sources=FIRST)
        for dtype, gated in ((BF16, True), (FP16, False))
    ),
    case("first versions, wide rows", BF16, 5, 1032, 40, True, operation=first_versions, sources=FIRST),
    # On a GPU with tensor cores these have lost rows there, and more than those take; the simulator computes them as it
    # does "lost rows".
    *(
        case("tensor cores", dtype, 300, 264, 1000, gated, rows="some spoilt", sources=TENSOR, oldest=(8, 0), long=True)
        for dtype in (BF16, FP16)
        for gated in (True, False)
    ),
    case(
        "beyond tensor cores", BF16, 700, 264, 520, True, rows="all", sources=(*TENSOR, train_lost.WEIGHTS), long=True
    ),
    list_case("light", BF16, 40, 1000, 10_000, 10_000, 0),
    list_case("spoilt", FP16, 40, 1000, 10_000, 10_000, 0, rows="some spoilt"),
    list_case("heavy", BF16, 50, 3000, 60_000, 10_000, 0, rate=1.3),
    list_case("heavy ones lost", BF16, 50, 3000, 60_000, 3, 100, rate=1.3),
    list_case("too many heavy ones", BF16, 50, 3000, 60_000, 3, 4, rate=1.3),
    list_case("no more entries", BF16, 40, 1000, 300, 10_000, 0),
    *(
        one
        for dtype in (BF16, FP16, FP32)
        for gated in (True, False)
        for version, d_ff in ((1, 37), (2, 1032))
        for one in dense_cases(dtype, 9, d_ff, gated, version)
    ),
    *dense_cases(BF16, 3, 4104, True, None, slope=False),
    *(transpose_case(dtype, *shape) for dtype in (BF16, FP16) for shape in ((8, 8), (264, 72), (64, 1000))),
]
