"""float16 and bfloat16 in the simulator's C++, bit by bit against exact results (exact.py), numpy and torch."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch

from tests.simulator import intrinsics
from tests.simulator.exact import BFLOAT16, HALF, MODES, Format, bits_of, same, to_integer
from tests.simulator.intrinsics import BUILDS, COMPARISONS, FUNCTIONS, INTEGERS, TYPES

if not BUILDS:
    pytest.skip("needs a C++ compiler, c++ or clang++", allow_module_level=True)

ALL = np.arange(65536, dtype=np.uint16)
FORMATS = pytest.mark.parametrize("f", [HALF, BFLOAT16], ids=str)


@pytest.fixture(scope="module", params=BUILDS, ids=" ".join)
def run(request, tmp_path_factory) -> intrinsics.Intrinsics:
    return intrinsics.build(*request.param, tmp_path_factory.mktemp("arithmetic"), sixteen=True)


@cache
def as_floats(f: Format) -> np.ndarray:
    """float32 of all 65,536 patterns, by numpy or by the definition."""
    return ALL.view(np.float16).astype(np.float32) if f is HALF else (ALL.astype(np.uint32) << 16).view(np.float32)


@cache
def as_doubles(f: Format) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return as_floats(f).astype(np.float64)


def specials(f: Format) -> list[int]:
    """Zeros, the least and the greatest of the subnormal, normal and finite values, values around 1, infinities,
    NaN."""
    step, one, infinity = f.step, f.one, f.infinity
    sizes = [
        0,
        1,
        2,
        3,
        step - 1,
        step,
        step + 1,
        one - step,
        one - 1,
        one,
        one + 1,
        one + step,
        infinity - 1,
        infinity,
    ]
    return [sign | size for sign in (0, f.sign) for size in [*sizes, infinity + 1, f.nan]]


# ---- conversions


@FORMATS
def test_every_pattern_as_a_float(run, f):
    floats, wanted = as_floats(f), bits_of(as_floats(f)).copy()
    if f is HALF:  # its NaN become one; a bfloat16's keep their bits
        wanted[np.isnan(floats)] = 0x7FFFFFFF
    for name in ("to_float", "cast_float"):
        same(run(f"{f}_{name}", ALL), wanted, ALL)
    same(run(f"{f}_isnan", ALL), np.isnan(floats), ALL)
    same(run(f"{f}_isinf", ALL), np.where(np.isinf(floats), np.sign(floats), 0).astype(np.int32), ALL)


@FORMATS
@pytest.mark.parametrize("mode", MODES)
def test_every_pattern_survives_the_way_to_float_and_back(run, f, mode):
    back = np.where(np.isnan(as_floats(f)), f.nan, ALL)
    same(run(f"{f}_of_float_{mode}", as_floats(f)), back, ALL)


@cache
def floats_around(f: Format) -> np.ndarray:
    """float32: every value of the format, every tie between two, those next to them, the edges, random patterns."""
    values = np.ldexp(np.array([float(f.size(bits)) for bits in range(f.infinity)]), -400)
    ties = (values[1:] + values[:-1]) / 2
    near = bits_of(np.concatenate([values, ties]).astype(np.float32))[:, None] + np.arange(-2, 3)
    size = np.concatenate(
        [near.ravel() & 0x7FFFFFFF, [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 1, 2]]
    )
    edge = bits_of(
        np.float32(math.ldexp(f.size(f.infinity - 1) + f.size(f.infinity), -401))
    )  # what is rounded to infinity
    size = np.concatenate([size, int(edge) + np.arange(-2, 3)])
    random_bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000)
    return np.concatenate([random_bits, size, size | 0x80000000]).astype(np.uint32).view(np.float32)


@FORMATS
def test_floats_are_rounded_as_torch_and_numpy_do(run, f):
    floats = floats_around(f)
    dtype = torch.float16 if f is HALF else torch.bfloat16
    wanted = torch.from_numpy(floats).to(dtype).view(torch.int16).numpy().view(np.uint16).copy()
    wanted[np.isnan(floats)] = f.nan
    for name in ("of_float_rn", "make_float"):
        same(run(f"{f}_{name}", floats), wanted, floats)
    if f is HALF:
        numbers = floats[~np.isnan(floats)]
        with np.errstate(over="ignore"):
            same(run("half_of_double", numbers), bits_of(numbers.astype(np.float16)), numbers)


@FORMATS
@pytest.mark.parametrize("mode", MODES)
def test_floats_are_rounded_as_named(run, f, mode):
    floats, wanted = floats_rounded(f, mode)
    same(run(f"{f}_of_float_{mode}", floats), wanted, floats)


@cache
def floats_rounded(f: Format, mode: str) -> tuple[np.ndarray, list[int]]:
    floats = floats_around(f)
    floats = np.concatenate([floats[::101], floats[-60:]])  # 101 and 5 have no common factor: ties and both their sides
    with np.errstate(invalid="ignore"):
        return floats, [f.of(value, mode=mode) for value in floats.astype(np.float64).tolist()]


@FORMATS
def test_doubles_are_rounded_once(run, f):
    # Beside a tie by less than a float32 can tell: rounding to float32 in between would go wrong.
    rng = random.Random(2)
    doubles = [math.ldexp(f.size(bits) + f.size(bits + 1), -401) for bits in rng.sample(range(f.infinity), 1500)]
    doubles = [math.nextafter(d, to) for d in doubles for to in (0, d, math.inf)]
    doubles += [math.ldexp(rng.uniform(-1, 1), rng.randint(-160, 140)) for _ in range(1500)]
    doubles += [sign * d for d in (0.0, math.inf, 5e-324, 1e-300, 1.7e308, 65519.99, 65520) for sign in (1.0, -1.0)]
    for name in ("of_double", "make_double"):
        same(run(f"{f}_{name}", doubles), [f.of(d) for d in doubles], doubles)
    # Unlike a float's, a double's NaN keeps its sign and the top of its payload.
    nans = np.array([0x7FF4000000000000, 0xFFF8000000000000, 0x7FFABCDEF0123456], np.uint64)
    payload = (nans >> 52 - f.fraction).astype(int) & f.step - 1
    wanted = np.where(nans >> 63, f.sign, 0) | f.infinity | f.step >> 1 | payload
    same(run(f"{f}_of_double", nans.view(np.float64)), wanted, nans)


@FORMATS
@pytest.mark.parametrize("mode", MODES)
def test_patterns_as_integers(run, f, mode):
    some = np.unique(np.concatenate([ALL[::5], specials(f)])).astype(np.uint16)
    doubles = as_doubles(f)[some].tolist()
    names = {f"to_{name}_{mode}": kind for name, kind in INTEGERS.items()}
    if mode == "rz":
        names |= {"to_char_rz": "i8", "to_uchar_rz": "u8", "cast_int": "i32"}
    for name, kind in names.items():
        same(run(f"{f}_{name}", some), [to_integer(d, TYPES[kind][1], mode) for d in doubles], some)


@FORMATS
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_rounded_once(run, f, name):
    given = intrinsics.some_integers(INTEGERS[name])
    for mode in MODES:
        wanted = [f.of_fraction(Fraction(i), mode) for i in given.tolist()]
        same(run(f"{f}_of_{name}_{mode}", given), wanted, given)
        if name == "ll" and mode == "rn":
            same(run(f"{f}_make_long", given), wanted, given)


def test_a_thread_that_flushes_its_subnormals_changes_nothing(run):
    small = np.arange(1, 0x38800000, 65537, dtype=np.uint32).view(np.float32)
    cases = [("bfloat16_of_float_rn", small), ("half_of_float_rn", small)]
    cases += [
        (f"{f}_{name}", ALL) for f in (HALF, BFLOAT16) for name in ("to_float", "hsqrt", "to_int_ru", "hadd", "lt")
    ]
    before = [run(name, given, given[::-1]) for name, given in cases]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        after = [run(name, given, given[::-1]) for name, given in cases]
    finally:
        torch.set_flush_denormal(False)
    for (_, given), was, now in zip(cases, before, after, strict=True):
        same(now, bits_of(was), given)


# ---- arithmetic


@cache
def pairs(f: Format) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of the special values; random ones; random ones of nearly the same size, where sums cancel."""
    rng = np.random.default_rng(5)
    x, y = np.array(list(itertools.product(specials(f), repeat=2)), np.uint16).T
    u, v = rng.integers(0, 65536, (2, 3000)).astype(np.uint16)
    near = ((u ^ f.sign) + rng.integers(-2 * f.step, 2 * f.step, u.size)).astype(np.uint16)
    return np.concatenate([x, u, u]), np.concatenate([y, v, near])


def saturated(f: Format, bits: np.ndarray) -> np.ndarray:
    values = as_floats(f)[bits]
    return np.where(values > 0, np.where(values < 1, bits, f.one), 0)


@cache
def of_pairs(f: Format, name: str) -> np.ndarray:
    x, y = pairs(f)
    a, b = as_doubles(f)[x], as_doubles(f)[y]
    with np.errstate(all="ignore"):
        near = {"hadd": a + b, "hsub": a - b, "hmul": a * b, "hdiv": a / b}[name]
    exactly = {
        "hadd": lambda a, b: Fraction(a) + Fraction(b),
        "hsub": lambda a, b: Fraction(a) - Fraction(b),
        "hmul": lambda a, b: Fraction(a) * Fraction(b),
        "hdiv": lambda a, b: Fraction(a) / Fraction(b) if math.isfinite(b) else Fraction(0),
    }[name]
    operands = zip(near.tolist(), a.tolist(), b.tolist(), strict=True)
    return np.array([f.of(r, lambda a=a, b=b: exactly(a, b)) for r, a, b in operands], np.uint16)


@FORMATS
def test_sums_products_and_quotients_are_rounded_once(run, f):
    x, y = pairs(f)
    for name, operator in {"hadd": "plus", "hsub": "minus", "hmul": "times", "hdiv": "over"}.items():
        for other in (name, f"operator_{operator}", f"assign_{operator}"):
            same(run(f"{f}_{other}", x, y), of_pairs(f, name), x, y)
        if name != "hdiv":
            same(run(f"{f}_{name}_sat", x, y), saturated(f, of_pairs(f, name)), x, y)


@cache
def triples(f: Format) -> np.ndarray:
    """Special values; random ones; c that cancels most of a * b; ties of a * b that only a far smaller c decides."""
    rng = random.Random(6)
    few = [
        f.sign * sign | bits for sign in (0, 1) for bits in (0, 1, f.step, f.one + 1, f.infinity - 1, f.infinity, f.nan)
    ]
    found = list(itertools.product(few, repeat=3))
    found += [tuple(rng.getrandbits(16) for _ in range(3)) for _ in range(1000)]
    digits = np.arange(f.step, 2 * f.step)
    products = np.multiply.outer(digits, digits)
    last = np.where(products < 2 * f.step**2, f.step, 2 * f.step)  # the last place that is kept of each
    ties = np.argwhere(products % last == last // 2).tolist()
    far = f.step if f is HALF else f.one - 60 * f.step
    for a, b in rng.choices(ties, k=500):
        a, b = (f.one + rng.randint(-6, 6) * f.step + digits for digits in (a, b))
        product = f.of(float(as_doubles(f)[a] * as_doubles(f)[b]))
        found += [(a, b, sign | rng.randrange(1, far)) for sign in (0, f.sign)]
        found += [(a, b ^ f.sign, 0), (a, b, (product ^ f.sign) + rng.randint(-1, 1))]
    return np.array(found, np.uint16).T


@cache
def fma_of_triples(f: Format) -> np.ndarray:
    a, b, c = (as_doubles(f)[bits] for bits in triples(f))
    with np.errstate(all="ignore"):
        near = (a * b + c).tolist()
    operands = zip(near, a.tolist(), b.tolist(), c.tolist(), strict=True)
    exact = [f.of(r, lambda a=a, b=b, c=c: Fraction(a) * Fraction(b) + Fraction(c)) for r, a, b, c in operands]
    return np.array(exact, np.uint16)


@FORMATS
def test_fma_is_rounded_once(run, f):
    x, y, z = triples(f)
    wanted = fma_of_triples(f)
    same(run(f"{f}_hfma", x, y, z), wanted, x, y, z)
    same(run(f"{f}_hfma_sat", x, y, z), saturated(f, wanted), x, y, z)
    values = as_floats(f)[wanted]
    same(run(f"{f}_hfma_relu", x, y, z), np.where(np.isnan(values), f.nan, np.where(values > 0, wanted, 0)), x, y, z)


@cache
def of_one(f: Format) -> tuple[np.ndarray, dict[str, list[int]]]:
    """Some patterns, with what the exact functions make of them."""
    some = np.unique(np.concatenate([ALL[::9], specials(f)])).astype(np.uint16)
    values = as_doubles(f)[some]
    made = {
        name: [f.of(v) for v in to_whole(values).tolist()]
        for name, to_whole in {"htrunc": np.trunc, "hceil": np.ceil, "hfloor": np.floor, "hrint": np.rint}.items()
    }
    with np.errstate(all="ignore"):
        near = zip((1 / values).tolist(), np.sqrt(values).tolist(), values.tolist(), strict=True)
    made["hrcp"], made["hsqrt"] = [], []
    for inverse, root, value in near:
        made["hrcp"].append(
            f.of(inverse, lambda value=value: 1 / Fraction(value) if math.isfinite(value) else Fraction(0))
        )
        square = int(Fraction(value) * (1 << 800)) if math.isfinite(root) else 0
        whole = math.isqrt(square)
        made["hsqrt"].append(f.rounded(whole, whole * whole != square, False) if square else f.of(root))
    return some, made


@FORMATS
def test_functions_that_a_gpu_approximates_are_nearest_values(run, f):
    some = np.concatenate([ALL[::97], specials(f)]).astype(np.uint16)
    with np.errstate(all="ignore"):
        values = as_doubles(f)[some]
        near = {
            name: getattr(np, name)(values) for name in ("exp", "exp2", "log", "log2", "log10", "sin", "cos", "tanh")
        }
        near |= {"exp10": 10.0**values, "rsqrt": 1 / np.sqrt(values)}
    for name, wanted in near.items():
        same(run(f"{f}_h{name}", some), [f.of(value) for value in wanted.tolist()], some)


@FORMATS
def test_functions_of_one_value(run, f):
    for name, wanted in {"hneg": ALL ^ f.sign, "minus": ALL ^ f.sign, "habs": ALL & f.sign - 1}.items():
        same(run(f"{f}_{name}", ALL), np.where(np.isnan(as_floats(f)), f.nan, wanted), ALL)
    some, made = of_one(f)
    for name, wanted in made.items():
        same(run(f"{f}_{name}", some), wanted, some)


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
