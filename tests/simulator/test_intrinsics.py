"""CUDA's types and the intrinsics on integers, float32 and float64 in the simulator's C++, bit by bit."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import numpy as np
import pytest

from tests.simulator import intrinsics
from tests.simulator.exact import FLOAT32, MODES, bits_of, exact_sum, same, to_integer
from tests.simulator.intrinsics import INTEGERS, TYPES
from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
WIDE = {name: kind for name, kind in INTEGERS.items() if not name.endswith("short")}
NAN32 = 0x7FFFFFFF


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> intrinsics.Intrinsics:
    return intrinsics.build(tmp_path_factory.mktemp("intrinsics"), sixteen=False)


def test_types_overloads_and_what_needs_no_arrays(run):
    assert run.library.odds_and_ends() == 0


def test_a_watched_build_sees_nothing_of_an_intrinsic(tmp_path):
    # The function around them would be seen, so it is left out as they are. One that is not shows that the flags act.
    code = """
        #include <cuda_fp16.h>
        {} unsigned f(unsigned short a, float b, int c) {{
            const __half h = __hfma(__ushort_as_half(a), __float2half_rn(b), h2exp(__half2(c, 1)).x) + half(b) * half(1);
            return __popc(__float2int_rz(__half2float(h))) + min(c, 3) + __float2uint_rn(__fadd_rz(b, max(b, 2.0f)));
        }}"""
    flags = ("-c", "-O0", "-fsanitize=thread", "-finstrument-functions")
    seen = (b"__cyg_profile_func_enter", b"__tsan_read", b"__tsan_write")
    for how in ("SIM_UNWATCHED", ""):
        text = intrinsics.compile(code.format(how), tmp_path / "it.o", *flags).read_bytes()
        assert any(name in text for name in seen) == (how == "")


@pytest.mark.parametrize("name", WIDE)
def test_integers_become_the_nearest_float_or_the_named_one(run, name):
    given = intrinsics.some_integers(WIDE[name])
    for mode in MODES:
        same(run(f"{name}2float_{mode}", given), FLOAT32.of_integers(given, mode), given)


def test_floats_and_doubles_as_integers(run):
    rng = random.Random(4)
    values = [
        v + d for v in (0, 0.5, 1.5, 2.5, 2**31, 2**32, 2**63, 2**64) for d in (0, 0.25, -0.25, 0.5, -0.5, 1, -1, 4096)
    ]
    values += [math.ldexp(rng.random(), rng.randint(-3, 70)) for _ in range(300)] + [1e-40, math.inf, math.nan]
    doubles = np.array([sign * v for v in values for sign in (1.0, -1.0)])
    floats = doubles.astype(np.float32)
    for (name, kind), mode in itertools.product(WIDE.items(), MODES):
        dtype = TYPES[kind][1]
        same(run(f"float2{name}_{mode}", floats), [to_integer(v, dtype, mode) for v in floats.tolist()], floats)
        same(
            run(f"double2{name}_{mode}", doubles), [to_integer(v, dtype, mode, True) for v in doubles.tolist()], doubles
        )


@pytest.mark.parametrize("mode", MODES)
def test_doubles_are_rounded_to_float_as_named(run, mode):
    some = np.random.default_rng(7).integers(0, FLOAT32.infinity, 3000).astype(np.uint32)
    ties = (some.view(np.float32).astype(np.float64) + (some + 1).view(np.float32)) / 2
    doubles = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    doubles = np.concatenate([doubles, [0.0, math.inf, 1e-300, 1e300, 3.4028235e38, 3.4028236e38]])
    doubles = np.concatenate([doubles, -doubles])
    same(run(f"double2float_{mode}", doubles), FLOAT32.of(doubles, mode=mode), doubles)
    nans = np.array([0x7FF4000000000000, 0xFFF8000000000000, 0x7FFABCDEF0123456], np.uint64)
    wanted = [0x7FE00000, 0xFFC00000, 0x7FD5E6F7]  # the sign, the quiet bit, the top of the payload
    same(run(f"double2float_{mode}", nans.view(np.float64)), wanted, nans)


@cache
def float_triples() -> np.ndarray:
    """Some special values, all combined; random ones; b near -a, c near -a * b; sums that a far smaller c decides."""
    rng, sign = np.random.default_rng(8), 1 << 31
    sizes = (0, 1, 0x800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC01234)
    few = list(itertools.product([s | size for s in (0, sign) for size in sizes], repeat=3))
    a, b, c = rng.integers(0, 1 << 32, (3, 2000))
    u, v = 0x3F800000 + (rng.integers(-20, 21, (2, 2000)) << 23) + rng.integers(0, 1 << 23, (2, 2000))
    product = bits_of(-np.multiply(*np.array([u, v], np.uint32).view(np.float32))).astype(np.int64)
    far = rng.integers(0, 1 << 24, 2000) | rng.integers(0, 2, 2000) << 31
    near = (a, (a ^ sign) + rng.integers(-3, 4, 2000), c), (u, v, product + rng.integers(-1, 2, 2000))
    rows = [np.stack(row, 1) for row in ((a, b, c), *near, (u, v & 0xFFFFF000, far))]
    return (np.concatenate([few, *rows]) & 0xFFFFFFFF).astype(np.uint32).view(np.float32).T


@pytest.mark.parametrize("mode", MODES)
def test_float_arithmetic_is_rounded_once_as_named(run, mode):
    a, b, c = (floats.astype(np.float64) for floats in float_triples())
    with np.errstate(all="ignore"):  # a product of two is exact in a double
        terms = {"add": (a, b), "sub": (a, -b), "mul": (a * b, a), "maf": (a * b, c)}
    for name, (p, q) in terms.items():
        total, lost = (p, 0.0) if name == "mul" else exact_sum(p, q)
        # A sum of opposite terms that is zero is -0 when rounded down.
        opposite = (total == 0) & (np.signbit(p) != np.signbit(q)) & (mode == "rd") & (name != "mul")
        wanted = np.where(opposite, FLOAT32.sign, FLOAT32.of(total, lost, mode))
        same(run(f"f{name}_{mode}", *float_triples()), wanted, *float_triples())


def test_quotients_and_roots_of_floats(run):
    with np.errstate(all="ignore"):
        x, y, _ = (floats.astype(np.float64) for floats in float_triples())
        # 53 bits are enough to round a quotient of two numbers of 24 bits from, and a root; for 1 / sqrt(x), whose two
        # roundings are those of the C++, that was seen over every float.
        near = {"fdiv_rn": x / y, "frcp_rn": 1 / x, "fsqrt_rn": np.sqrt(x), "frsqrt_rn": 1 / np.sqrt(x)}
    for name, value in near.items():
        same(run(name, *float_triples()[:2]), FLOAT32.of(value), *float_triples()[:2])


def test_saturate_greatest_and_least(run):
    x, y, _ = float_triples()
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    with np.errstate(invalid="ignore"):
        same(run("saturatef", x), bits_of(np.where(x > 0, np.minimum(x, 1), 0).astype(np.float32)), x)
        for kind, nan in {"f32": NAN32, "f64": None}.items():
            a, b = (v.astype(TYPES[kind][1]) for v in (x, y))
            p, q = bits_of(a), bits_of(b)
            both = nan if nan else q | 1 << 51  # doubles: the second NaN, made quiet
            other = np.where(nan_x, np.where(nan_y, both, q), p)
            for name, is_x in {"max": (a > b) | ((a == b) & (p <= q)), "min": (a < b) | ((a == b) & (p >= q))}.items():
                same(run(f"{name}_{kind}", a, b), np.where(nan_x | nan_y, other, np.where(is_x, p, q)), a, b)


def signed(value: int, bits: int) -> int:
    return value - (value >> bits - 1 << bits)


def words(bits: int) -> list[tuple[int, int, int]]:
    rng = random.Random(9)
    few = [0, 1, 2, 31, 32, 33, (1 << bits - 1) - 1, 1 << bits - 1, (1 << bits) - 1]
    return list(itertools.product(few, repeat=3)) + [
        tuple(rng.getrandbits(bits) for _ in range(3)) for _ in range(2000)
    ]


def test_integer_intrinsics(run):
    def shifted(x, y, by):
        return (y << 32 | x) << by >> 32, (y << 32 | x) >> by

    def permuted(x, y, s):
        chosen = (y << 32 | x).to_bytes(8, "little")
        return int.from_bytes([chosen[s >> 4 * n & 7] for n in range(4)], "little")

    def reversed_bits(value, bits):
        return int(f"{value:0{bits}b}"[::-1], 2)

    reference = {
        "popc": lambda x, y, z: x.bit_count(),
        "clz": lambda x, y, z: 32 - x.bit_length(),
        "ffs": lambda x, y, z: (x & -x).bit_length(),
        "brev": lambda x, y, z: reversed_bits(x, 32),
        "umulhi": lambda x, y, z: x * y >> 32,
        "mulhi": lambda x, y, z: signed(x, 32) * signed(y, 32) >> 32,
        "umul24": lambda x, y, z: (x % (1 << 24)) * (y % (1 << 24)),
        "mul24": lambda x, y, z: signed(x % (1 << 24), 24) * signed(y % (1 << 24), 24),
        "byte_perm": permuted,
        "funnelshift_l": lambda x, y, z: shifted(x, y, z % 32)[0],
        "funnelshift_r": lambda x, y, z: shifted(x, y, z % 32)[1],
        "funnelshift_lc": lambda x, y, z: shifted(x, y, min(z, 32))[0],
        "funnelshift_rc": lambda x, y, z: shifted(x, y, min(z, 32))[1],
        "usad": lambda x, y, z: abs(x - y) + z,
        "sad": lambda x, y, z: abs(signed(x, 32) - signed(y, 32)) + z,
        "popcll": lambda x, y, z: x.bit_count(),
        "clzll": lambda x, y, z: 64 - x.bit_length(),
        "ffsll": lambda x, y, z: (x & -x).bit_length(),
        "brevll": lambda x, y, z: reversed_bits(x, 64),
        "umul64hi": lambda x, y, z: x * y >> 64,
        "mul64hi": lambda x, y, z: signed(x, 64) * signed(y, 64) >> 64,
    }
    for name, of in reference.items():
        bits = 64 if "ll" in name or "64" in name else 32
        given = words(bits)
        x, y, z = np.array(given, np.uint64).T
        same(run(name, x, y, z), [of(*row) % (1 << bits) for row in given], x, y, z)
