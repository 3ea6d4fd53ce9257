"""Cases of `int8`: products bit by bit, what is left of a packed layer, and rows rounded to few bits."""

from functools import partial

import torch
from torch.nn.functional import pad

from tests.ops.rows.drawn import gate_of
from tests.ops.table import Case
from twell_lab.ops import int8
from twell_lab.ops.int8 import Weight
from twell_lab.ops.pack import PACK, pack
from twell_lab.sparsities.quantised import quantise, round_rows

# ---- products


def rows(number, columns, seed=0):
    """Values and scales: some rows of the largest magnitudes, whose sums are largest, and one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-127, 128, (number, columns), generator=generator, dtype=torch.int8)
    values[::5] = torch.where(values[::5] < 0, -127, 127).to(torch.int8)
    values[3:4] = 0
    return values, torch.rand(number, generator=generator) * 2**-9 + 2**-12


def weight(out, columns, dtype, seed=1, bias=True):
    """Rows, and a bias that is about as large as the products."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(out, generator=generator) * columns**0.5 * 127**2 * 2**-20
    return Weight(*rows(out, columns, seed), drawn.to(dtype) if bias else None)


def gate_up_reference(x, scale, gate, up, dtype):
    first, beside = (int8.product_reference(x, scale, each, dtype) for each in (gate, up))
    return first.relu() * beside


def product(tokens, inner, out, dtype, version, tile=None, bias=True, gated=False, large=False):
    def arguments():
        weights = [weight(out, inner, dtype, seed, bias) for seed in (1, 2)[: 1 + gated]]
        return *rows(tokens, inner), *weights

    name = "gate_up" if gated else "product"

    def operation(call, *given):
        return int8.product(call, *given[:3], dtype, None, *given[3:], version=version, tile=tile)

    title = f"int8_v{version} {name}: {tokens} x {inner} x {out}, {tile}, {dtype}, {bias}"
    exact = partial(gate_up_reference if gated else int8.product_reference, dtype=dtype)
    return Case(title, (int8.INT8,), arguments, operation, exact, int8.TOLERANCE, large=large)


PRODUCTS = [
    *(
        product(*shape, int8.DTYPES[at % 2], version, tile, at != 1, gated)
        for at, shape in enumerate([(1, 16, 16), (17, 208, 48), (70, 80, 80)])
        for version in (1, 2)
        for tile in int8.TILES
        for gated in (False, True)
    ),
    *(
        product(*shape, dtype, version, None, True, gated, large=True)
        for shape in [(16, 2048, 528), (300, 720, 272), (513, 48, 1040), (100, 5632, 2048), (4096, 2048, 5632)]
        for dtype in int8.DTYPES
        for version in (1, 2)
        for gated in (False, True)
    ),
]

# ---- what is left of a layer once its gate is packed


def packed(call, x, gate, up, down, up_bias, down_bias, tile, words, version, signed):
    words_of = pack(call, gate, tile, words, signed=signed)
    return int8.gated_int8(call, x, words_of, gate, up, down, up_bias, down_bias, tile, version, signed=signed)


def layer_of(x, gate, up, down, up_bias, down_bias, signed):
    return int8.gated_reference(x, gate if signed else torch.relu(gate), up, down, up_bias, down_bias)


def gated(pattern, dtype, version, tokens, d_ff, d_model, tile, words, plain=False, signed=False, large=False):
    def arguments():
        gate = gate_of(pattern, tokens, d_ff, dtype, tile, words)
        generator = torch.Generator().manual_seed(d_model)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        x = normal(tokens, d_model).to(dtype)
        x[1 % tokens, -1] = torch.nan
        up, down = (Weight(*quantise(normal(d_ff, d_model) / d_model**0.5)) for _ in range(2))
        up.values[:, :2], down.values[:, :2] = torch.tensor([-127, 127], dtype=torch.int8), -128
        biases = normal(d_ff).to(dtype), normal(d_model).to(dtype)
        return x, gate, None if plain else up, down, None if plain else biases[0], biases[1]

    how = {"tile": tile, "words": words, "version": version, "signed": signed}
    name = f"gated_int8_v{version}{' plain' * plain}{' signed' * signed}: {pattern}, {dtype}, "
    name += f"{tokens} x {d_ff} x {d_model}, {tile} in {words}"
    sources, operation, exact = (PACK, int8.GATED_INT8), partial(packed, **how), partial(layer_of, signed=signed)
    return Case(name, sources, arguments, operation, exact, 1.0, large=large)


VERSIONS = (None, 1, 2, 3, 4)
GATED = [
    *(
        gated(pattern, dtype, version, 4, 300, 264, 64, 17, plain)
        for at, pattern in enumerate(("sparse", "all", "silent", "one over", "some over"))
        for dtype in (torch.bfloat16, torch.float32)[at % 2 :][:1]
        for version in VERSIONS
        for plain in (False, True)
    ),
    *(gated("some over", torch.bfloat16, version, 3, 75, 1032, 16, 5) for version in VERSIONS),
    *(gated("some over", torch.bfloat16, version, 3, 75, 77, 16, 5) for version in (None, 1)),
    *(gated("some over", torch.bfloat16, version, 3, 75, 264, 16, 5, signed=True) for version in VERSIONS),
    *(
        gated(pattern, dtype, version, 9, 700, d_model, 256, 32, large=True)
        for pattern in ("sparse", "one over", "some over")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for d_model in (2048, 5120)
        for version in VERSIONS
    ),
    gated("sparse", torch.bfloat16, None, 4096, 5632, 2048, 256, 32, large=True),
]

# ---- rows of few bits


def quantise_reference(x, kind, padded):
    values, scale = round_rows(x, kind)
    missing = max(0, padded - len(x))
    return pad(values.view(torch.int8), (0, 0, 0, missing)), pad(scale, (0, missing))


def odd_rows(columns, dtype):
    """Ordinary rows, zeros, tiny and large ones, halves of steps, NaN and both infinities."""
    x = torch.randn(10, columns, generator=torch.Generator().manual_seed(columns))
    finite = torch.finfo(dtype)
    x[1], x[2], x[3] = 0, x[2] * finite.tiny, x[3].sign() * finite.max
    x[4] = torch.arange(columns) % 255 - 127 + 0.5
    x[4, 0] = 127
    x[5, -1], x[6, columns // 2], x[7, 0] = torch.nan, torch.inf, -torch.inf
    x[8, 0] = 1000
    return x.to(dtype)


def every_half():
    """Every value of float16 up to 448, with 448 itself: the scale of E4M3 is one."""
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return x[x.abs() <= 448][None].contiguous()


def rounding(name, make, kind, version, padded=0):
    title, how = f"quantise_rows_v{version}: {name}, {kind}, {padded}", {"kind": kind, "padded": padded}
    operation, exact = partial(int8.quantise_rows, **how, version=version), partial(quantise_reference, **how)
    reads = lambda found: (found[0], found[1].nan_to_num(-1.0, -1.0))  # noqa: E731
    return Case(title, (int8.QUANTISE_ROWS,), lambda: (make(),), operation, exact, reads=reads)


ROUNDED = [
    *(
        rounding(f"odd rows of {columns}, {dtype}", partial(odd_rows, columns, dtype), kind, version, padded)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for kind in int8.KINDS
        for columns, version, padded in ((77, None, 24), (296, 1, 0), (296, 2, 16), (1, 1, 0), (2056, 2, 0))
    ),
    rounding("every half", every_half, torch.float8_e4m3fn, 1),
    rounding("no row", lambda: torch.ones(0, 8), torch.int8, None),
]
CASES = [*PRODUCTS, *GATED, *ROUNDED]
