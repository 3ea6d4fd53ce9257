"""float16 and bfloat16 in the simulator's C++, bit by bit against exact results (exact.py), numpy and torch."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch

from tests.simulator import intrinsics
from tests.simulator.exact import BFLOAT16, HALF, MODES, Format, bits_of, exact_sum, same, to_integer
from tests.simulator.intrinsics import COMPARISONS, FUNCTIONS, INTEGERS, TYPES
from twell_lab import simulator

ALL = np.arange(65536, dtype=np.uint16)
FORMATS = pytest.mark.parametrize("f", [HALF, BFLOAT16], ids=str)
pytestmark = [
    pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN and infinities
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> intrinsics.Intrinsics:
    return intrinsics.build(tmp_path_factory.mktemp("arithmetic"), sixteen=True)


@cache
def as_floats(f: Format) -> np.ndarray:
    """float32 of all 65,536 patterns, by numpy or by the definition."""
    return ALL.view(np.float16).astype(np.float32) if f is HALF else (ALL.astype(np.uint32) << 16).view(np.float32)


@cache
def as_doubles(f: Format) -> np.ndarray:
    return as_floats(f).astype(np.float64)


def specials(f: Format) -> np.ndarray:
    """Zeros, the least and the greatest of the subnormal, normal and finite values, values around 1, infinities,
    NaN."""
    near = [place + off for place in (f.step, f.one, f.infinity) for off in (-1, 0, 1)]
    sizes = [*range(4), *near, f.one - f.step, f.one + f.step, f.nan]
    return np.array([sign | size for sign in (0, f.sign) for size in sizes], np.uint16)


@FORMATS
def test_every_pattern_as_a_float_and_back(run, f):
    floats, wanted = as_floats(f), bits_of(as_floats(f)).copy()
    if f is HALF:  # its NaN become one; a bfloat16's keep their bits
        wanted[np.isnan(floats)] = 0x7FFFFFFF
    for name in ("to_float", "cast_float"):
        same(run(f"{f}_{name}", ALL), wanted, ALL)
    same(run(f"{f}_isnan", ALL), np.isnan(floats), ALL)
    same(run(f"{f}_isinf", ALL), np.where(np.isinf(floats), np.sign(floats), 0).astype(np.int32), ALL)
    for mode in MODES:
        same(run(f"{f}_of_float_{mode}", floats), np.where(np.isnan(floats), f.nan, ALL), ALL)


@cache
def floats_around(f: Format) -> np.ndarray:
    """float32: every value of the format, every tie between two, those next to them, the edges, random patterns."""
    values = as_floats(f)[: f.infinity]
    near = bits_of(np.concatenate([values, (values[1:] + values[:-1]) / 2]))[:, None] + np.arange(-2, 3)
    edge = bits_of(np.float32(values[-1] * (1 + 2.0 ** -(f.fraction + 2))))  # what is rounded to infinity
    edges = [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 2, *(int(edge) + np.arange(-2, 3))]
    size = np.concatenate([near.ravel() & 0x7FFFFFFF, edges])
    anything = np.random.default_rng(1).integers(0, 1 << 32, 100_000)
    return np.concatenate([anything, size, size | 0x80000000]).astype(np.uint32).view(np.float32)


@FORMATS
def test_floats_are_rounded_as_named(run, f):
    """To the nearest as torch does, too."""
    floats = floats_around(f)
    wanted = {mode: f.of(floats, mode=mode) for mode in MODES}
    beside = torch.from_numpy(floats).to(torch.float16 if f is HALF else torch.bfloat16)
    by_torch = np.where(np.isnan(floats), f.nan, beside.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(wanted["rn"], by_torch)
    for mode in MODES:
        same(run(f"{f}_of_float_{mode}", floats), wanted[mode], floats)
    same(run(f"{f}_make_float", floats), by_torch, floats)


@FORMATS
def test_doubles_are_rounded_once(run, f):
    # Beside a tie by less than a float32 can tell: rounding to float32 in between would go wrong.
    rng, values = np.random.default_rng(2), as_doubles(f)[: f.infinity]
    ties = (values[1:] + values[:-1])[rng.integers(0, f.infinity - 1, 1500)] / 2
    doubles = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    doubles = np.concatenate([doubles, np.ldexp(rng.random(1500), rng.integers(-160, 140, 1500))])
    doubles = np.concatenate([doubles, [0.0, np.inf, 5e-324, 1e-300, 1.7e308, 65519.99, 65520]])
    doubles = np.concatenate([doubles, -doubles])
    for name in ("of_double", "make_double"):
        same(run(f"{f}_{name}", doubles), f.of(doubles), doubles)
    # Unlike a float's, a double's NaN keeps its sign and the top of its payload.
    nans = np.array([0x7FF4000000000000, 0xFFF8000000000000, 0x7FFABCDEF0123456], np.uint64)
    payload = (nans >> 52 - f.fraction).astype(int) & f.step - 1
    wanted = np.where(nans >> 63, f.sign, 0) | f.infinity | f.step >> 1 | payload
    same(run(f"{f}_of_double", nans.view(np.float64)), wanted, nans)


@FORMATS
@pytest.mark.parametrize("mode", MODES)
def test_patterns_as_integers_and_back(run, f, mode):
    some = np.unique(np.concatenate([ALL[::11], specials(f)]))
    doubles = as_doubles(f)[some].tolist()
    names = {f"to_{name}_{mode}": kind for name, kind in INTEGERS.items()}
    if mode == "rz":
        names |= {"to_char_rz": "i8", "to_uchar_rz": "u8", "cast_int": "i32"}
    for name, kind in names.items():
        same(run(f"{f}_{name}", some), [to_integer(d, TYPES[kind][1], mode) for d in doubles], some)
    for name, kind in INTEGERS.items():
        given = intrinsics.some_integers(kind)
        same(run(f"{f}_of_{name}_{mode}", given), f.of_integers(given, mode), given)
    if mode == "rn":
        same(run(f"{f}_make_long", given := intrinsics.some_integers("i64")), f.of_integers(given, mode), given)


def test_a_thread_that_flushes_its_subnormals_changes_nothing(run):
    small = np.arange(1, 0x38800000, 65537, dtype=np.uint32).view(np.float32)
    names = [f"{f}_{name}" for f in (HALF, BFLOAT16) for name in ("to_float", "hsqrt", "to_int_ru", "hadd", "lt")]
    cases = [("bfloat16_of_float_rn", small), ("half_of_float_rn", small), *((name, ALL) for name in names)]
    before = [run(name, given, given[::-1]) for name, given in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        after = [run(name, given, given[::-1]) for name, given in cases]
    finally:
        torch.set_flush_denormal(False)
    for (_, given), was, now in zip(cases, before, after, strict=True):
        same(now, bits_of(was), given)


@cache
def pairs(f: Format) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of the special values; random ones; random ones of nearly the same size, where sums cancel."""
    rng = np.random.default_rng(5)
    x, y = np.array(list(itertools.product(specials(f), repeat=2)), np.uint16).T
    u, v = rng.integers(0, 65536, (2, 20_000)).astype(np.uint16)
    near = ((u ^ f.sign) + rng.integers(-2 * f.step, 2 * f.step, u.size)).astype(np.uint16)
    return np.concatenate([x, u, u]), np.concatenate([y, v, near])


def saturated(f: Format, bits: np.ndarray) -> np.ndarray:
    values = as_floats(f)[bits]
    return np.where(values > 0, np.where(values < 1, bits, f.one), 0)


@FORMATS
def test_sums_products_and_quotients_are_rounded_once(run, f):
    x, y = pairs(f)
    a, b = as_doubles(f)[x], as_doubles(f)[y]
    # A product of two is exact in a double, and no quotient is so near to a tie that rounding it twice matters.
    results = {"hadd": exact_sum(a, b), "hsub": exact_sum(a, -b), "hmul": (a * b, 0.0), "hdiv": (a / b, 0.0)}
    for (name, result), operator in zip(results.items(), ("plus", "minus", "times", "over"), strict=True):
        wanted = f.of(*result)
        for other in (name, f"operator_{operator}", f"assign_{operator}"):
            same(run(f"{f}_{other}", x, y), wanted, x, y)
        if name != "hdiv":
            same(run(f"{f}_{name}_sat", x, y), saturated(f, wanted), x, y)


@cache
def triples(f: Format) -> np.ndarray:
    """Special values; random ones; c that cancels most of a * b; ties of a * b that only a far smaller c decides."""
    rng = np.random.default_rng(6)
    few = [sign | size for sign in (0, f.sign) for size in (0, 1, f.step, f.one + 1, f.infinity - 1, f.infinity, f.nan)]
    digits = np.arange(f.step, 2 * f.step)
    products = np.multiply.outer(digits, digits)
    last = np.where(products < 2 * f.step**2, f.step, 2 * f.step)  # the last place that is kept of each
    ties = np.argwhere(products % last == last // 2)
    a, b = (f.one + rng.integers(-6, 7, 500) * f.step + part for part in ties[rng.integers(0, len(ties), 500)].T)
    far = rng.integers(1, f.step if f is HALF else f.one - 60 * f.step, 500)
    product = f.of(as_doubles(f)[a] * as_doubles(f)[b])
    rows = [(a, b, far), (a, b, f.sign | far), (a, b ^ f.sign, 0 * a)]
    rows.append((a, b, (product ^ f.sign) + rng.integers(-1, 2, 500)))
    every = [list(itertools.product(few, repeat=3)), rng.integers(0, 65536, (5000, 3)), *(np.stack(r, 1) for r in rows)]
    return np.concatenate(every).astype(np.uint16).T


@FORMATS
def test_fma_is_rounded_once(run, f):
    x, y, z = triples(f)
    a, b, c = (as_doubles(f)[bits] for bits in (x, y, z))
    wanted = f.of(*exact_sum(a * b, c))
    same(run(f"{f}_hfma", x, y, z), wanted, x, y, z)
    same(run(f"{f}_hfma_sat", x, y, z), saturated(f, wanted), x, y, z)
    values = as_floats(f)[wanted]
    same(run(f"{f}_hfma_relu", x, y, z), np.where(np.isnan(values), f.nan, np.where(values > 0, wanted, 0)), x, y, z)


@FORMATS
def test_functions_of_one_value(run, f):
    """Those that a GPU approximates give the nearest value."""
    for name, wanted in {"hneg": ALL ^ f.sign, "minus": ALL ^ f.sign, "habs": ALL & f.sign - 1}.items():
        same(run(f"{f}_{name}", ALL), np.where(np.isnan(as_floats(f)), f.nan, wanted), ALL)
    values, near = as_doubles(f), {"trunc": np.trunc, "ceil": np.ceil, "floor": np.floor, "rint": np.rint}
    near |= {name: getattr(np, name) for name in "sqrt exp exp2 log log2 log10 sin cos tanh".split()}
    near |= {"rcp": lambda x: 1 / x, "exp10": lambda x: 10.0**x, "rsqrt": lambda x: 1 / np.sqrt(x)}
    for name, function in near.items():
        some = ALL if name in ("trunc", "ceil", "floor", "rint", "sqrt", "rcp") else ALL[::97]
        same(run(f"{f}_h{name}", some), f.of(function(values[some])), some)


@FORMATS
def test_greatest_least_and_comparisons(run, f):
    x, y = pairs(f)
    a, b = as_floats(f)[x], as_floats(f)[y]
    nans = np.isnan(a) | np.isnan(b)
    other = np.where(np.isnan(a), np.where(np.isnan(b), f.nan, y), x)  # the one that is no NaN
    for name, is_x in {"hmax": (a > b) | ((a == b) & (x <= y)), "hmin": (a < b) | ((a == b) & (x >= y))}.items():
        same(run(f"{f}_{name}", x, y), np.where(nans, other, np.where(is_x, x, y)), x, y)
        same(run(f"{f}_{name}_nan", x, y), np.where(nans, f.nan, np.where(is_x, x, y)), x, y)
    ordered = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    for name in COMPARISONS:
        same(run(f"{f}_{name}", x, y), ordered[name] & ~nans, x, y)
        same(run(f"{f}_{name}u", x, y), ordered[name] | nans, x, y)
        same(run(f"{f}_operator_{name}", x, y), ordered[name], x, y)


@FORMATS
def test_pairs_are_two_single_values(run, f):
    x, y, z = triples(f)

    def joined(low, high, of=1):
        return low.astype(np.uint32) * of | high.astype(np.uint32) * of << 16

    for pair in (name for name in FUNCTIONS if name.startswith(f"{f}_pair_h") and not name.endswith("fma")):
        single = pair.replace("pair_", "")
        same(run(pair, x, y, z), joined(run(single, x, y), run(single, y, z)), x, y, z)
    same(run(f"{f}_pair_hfma", x, y, z), joined(run(f"{f}_hfma", x, y, x), run(f"{f}_hfma", y, z, y)), x, y, z)
    for name in (name + u for name in COMPARISONS for u in ("", "u")):
        low, high = run(f"{f}_{name}", x, y), run(f"{f}_{name}", y, z)
        same(run(f"{f}_pair_{name}", x, y, z), joined(low, high, f.one), x, y, z)
        same(run(f"{f}_mask_{name}", x, y, z), joined(low, high, 0xFFFF), x, y, z)
        same(run(f"{f}_both_{name}", x, y, z), low & high, x, y, z)
