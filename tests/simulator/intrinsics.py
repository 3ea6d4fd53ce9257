"""The simulator's CUDA intrinsics as functions over arrays: a C++ file that maps each, and a way to compile and call
it."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess
from pathlib import Path

import numpy as np

from tests.simulator.exact import MODES

HEADERS = Path(__file__).resolve().parents[2] / "twell_lab" / "simulator" / "cuda"

TYPES = {
    **{"u8": ("unsigned char", np.uint8), "u16": ("unsigned short", np.uint16), "u32": ("unsigned int", np.uint32)},
    **{"u64": ("unsigned long long", np.uint64), "i8": ("signed char", np.int8), "i16": ("short", np.int16)},
    **{"i32": ("int", np.int32), "i64": ("long long", np.int64)},
    **{"f32": ("float", np.float32), "f64": ("double", np.float64)},
}
INTEGERS = {"short": "i16", "ushort": "u16", "int": "i32", "uint": "u32", "ll": "i64", "ull": "u64"}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FUNCTIONS: dict[str, tuple[str, str, str]] = {}  # name -> type of the result, of x, y and z, expression


def _functions_of(n: str, pair: str) -> None:
    """What __half and __nv_bfloat16 can do, as functions of their bits; the names begin with `n`."""
    x, y, z = (f"__ushort_as_{n}({v})" for v in "xyz")
    two, other = f"__halves2{pair}({x}, {y})", f"__halves2{pair}({y}, {z})"

    def add(name, out, into, expression):
        FUNCTIONS[f"{n}_{name}"] = out, into, expression

    def sixteen(name, into, expression):
        add(name, "u16", into, f"__{n}_as_ushort({expression})")

    add("to_float", "f32", "u16", f"__{n}2float({x})")
    add("cast_float", "f32", "u16", f"(float){x}")
    add("isinf", "i32", "u16", f"__hisinf({x})")
    add("isnan", "u8", "u16", f"__hisnan({x})")
    sixteen("of_double", "f64", f"__double2{n}(x)")
    sixteen("make_float", "f32", f"make<{n}_t>(x)")
    sixteen("make_double", "f64", f"make<{n}_t>(x)")
    sixteen("make_long", "i64", f"make<{n}_t>(x)")
    for mode in MODES:
        sixteen(f"of_float_{mode}", "f32", f"__float2{n}_{mode}(x)")
        for name, kind in INTEGERS.items():
            add(f"to_{name}_{mode}", kind, "u16", f"__{n}2{name}_{mode}({x})")
            sixteen(f"of_{name}_{mode}", kind, f"__{name}2{n}_{mode}(x)")
    add("to_char_rz", "i8", "u16", f"__{n}2char_rz({x})")
    add("to_uchar_rz", "u8", "u16", f"__{n}2uchar_rz({x})")
    add("cast_int", "i32", "u16", f"(int){x}")
    ones = (
        "__hneg __habs hsqrt hrcp htrunc hceil hfloor hrint hexp hexp2 hexp10 hlog hlog2 hlog10 hsin hcos htanh hrsqrt"
    )
    for name in ones.split():
        sixteen(name.strip("_"), "u16", f"{name}({x})")
    sixteen("minus", "u16", f"-({x})")
    for name in "hadd hsub hmul hmax hmin hmax_nan hmin_nan hadd_sat hsub_sat hmul_sat hdiv".split():
        sixteen(name, "u16", f"__{name}({x}, {y})")
        of_pairs = "h2div" if name == "hdiv" else "2_".join(name.split("_")) if "_" in name else f"{name}2"
        add(f"pair_{name}", "u32", "u16", f"bits_of(__{of_pairs}({two}, {other}))")
    for name in ("hfma", "hfma_sat", "hfma_relu"):
        sixteen(name, "u16", f"__{name}({x}, {y}, {z})")
    add("pair_hfma", "u32", "u16", f"bits_of(__hfma2({two}, {other}, {two}))")
    for name, sign in {"plus": "+", "minus": "-", "times": "*", "over": "/"}.items():
        sixteen(f"operator_{name}", "u16", f"{x} {sign} {y}")
        sixteen(f"assign_{name}", "u16", f"[&] {{ auto t = {x}; t {sign}= {y}; return t; }}()")
    for name, sign in zip(COMPARISONS, ("==", "!=", "<", "<=", ">", ">="), strict=True):
        add(f"operator_{name}", "u8", "u16", f"{x} {sign} {y}")
        for u in ("", "u"):
            add(f"{name}{u}", "u8", "u16", f"__h{name}{u}({x}, {y})")
            add(f"mask_{name}{u}", "u32", "u16", f"__h{name}{u}2_mask({two}, {other})")
            add(f"pair_{name}{u}", "u32", "u16", f"bits_of(__h{name}{u}2({two}, {other}))")
            add(f"both_{name}{u}", "u8", "u16", f"__hb{name}{u}2({two}, {other})")


_functions_of("half", "half2")
_functions_of("bfloat16", "bfloat162")
for _name, _sign in {"add": "x, y", "sub": "x, y", "mul": "x, y", "maf": "x, y, z"}.items():
    for _mode in MODES:
        FUNCTIONS[f"f{_name}_{_mode}"] = "f32", "f32", f"__f{_name}_{_mode}({_sign})"
for _kind in ("f32", "f64"):
    for _name in ("min", "max"):
        FUNCTIONS[f"{_name}_{_kind}"] = _kind, _kind, f"{_name}(x, y)"
for _name, _mode in itertools.product(("int", "uint", "ll", "ull"), MODES):
    FUNCTIONS[f"float2{_name}_{_mode}"] = INTEGERS[_name], "f32", f"__float2{_name}_{_mode}(x)"
    FUNCTIONS[f"double2{_name}_{_mode}"] = INTEGERS[_name], "f64", f"__double2{_name}_{_mode}(x)"
    FUNCTIONS[f"{_name}2float_{_mode}"] = "f32", INTEGERS[_name], f"__{_name}2float_{_mode}(x)"
for _mode in MODES:
    FUNCTIONS[f"double2float_{_mode}"] = "f32", "f64", f"__double2float_{_mode}(x)"
for _name in ("fdiv_rn(x, y)", "frcp_rn(x)", "fsqrt_rn(x)", "frsqrt_rn(x)", "saturatef(x)"):
    FUNCTIONS[_name.split("(")[0]] = "f32", "f32", f"__{_name}"
for _name in (
    *("popc(x)", "clz(x)", "ffs(x)", "brev(x)", "umulhi(x, y)", "mulhi(x, y)", "umul24(x, y)", "mul24(x, y)"),
    *("byte_perm(x, y, z)", "funnelshift_l(x, y, z)", "funnelshift_r(x, y, z)", "funnelshift_lc(x, y, z)"),
    *("funnelshift_rc(x, y, z)", "usad(x, y, z)", "sad(x, y, z)"),
):
    FUNCTIONS[_name.split("(")[0]] = "u32", "u32", f"(unsigned int)__{_name}"
for _name in ("popcll(x)", "clzll(x)", "ffsll(x)", "brevll(x)", "umul64hi(x, y)", "mul64hi(x, y)"):
    FUNCTIONS[_name.split("(")[0]] = "u64", "u64", f"(unsigned long long)__{_name}"

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string.h>
#include <type_traits>

typedef __half half_t;
typedef __nv_bfloat16 bfloat16_t;
template <class T, class From>
static T make(From from) { T t = from; return t; }
template <class Pair>
static unsigned int bits_of(Pair pair) { unsigned int bits; memcpy(&bits, &pair, 4); return bits; }

#define SAME(TYPE, EXPRESSION) static_assert(std::is_same<TYPE, decltype(EXPRESSION)>::value, #EXPRESSION)
SAME(int, min(1, 2)); SAME(unsigned, min(1, 2u)); SAME(unsigned, max(1u, 2)); SAME(float, min(1.0f, 2.0f));
SAME(double, max(1.0f, 2.0)); SAME(double, min(1.0, 2.0f)); SAME(unsigned long long, max(1ull, 2ll)); SAME(long, min(1l, 2l));
SAME(int, min((short)1, (char)2)); SAME(unsigned long, max(1l, 2ul)); SAME(__half, __half(1) + __half(2)); SAME(half2, make_half2(1, 2));

#define LAYOUT(TYPE, SIZE, ALIGN)                                                                          \
    static_assert(sizeof(TYPE) == SIZE && alignof(TYPE) == ALIGN, #TYPE);                                  \
    static_assert(std::is_trivially_default_constructible<TYPE>::value && std::is_trivially_copyable<TYPE>::value, #TYPE)
LAYOUT(char1, 1, 1); LAYOUT(uchar2, 2, 2); LAYOUT(char3, 3, 1); LAYOUT(uchar4, 4, 4);
LAYOUT(short2, 4, 4); LAYOUT(ushort3, 6, 2); LAYOUT(ushort4, 8, 8); LAYOUT(int2, 8, 8); LAYOUT(uint3, 12, 4);
LAYOUT(int4, 16, 16); LAYOUT(uint4, 16, 16); LAYOUT(float1, 4, 4); LAYOUT(float2, 8, 8); LAYOUT(float3, 12, 4);
LAYOUT(float4, 16, 16); LAYOUT(longlong2, 16, 16); LAYOUT(ulonglong4, 32, 16); LAYOUT(double2, 16, 16);
LAYOUT(double3, 24, 8); LAYOUT(double4, 32, 16); LAYOUT(__half, 2, 2); LAYOUT(__half2, 4, 4);
LAYOUT(__nv_bfloat16, 2, 2); LAYOUT(__nv_bfloat162, 4, 4);
static_assert(dim3().z == 1 && dim3(7).y == 1 && dim3(uint3{1, 2, 3}).z == 3, "dim3");
thread_local uint4 shared_vectors[3];
thread_local __half2 shared_halves[3];

// A bit for each of what arrays are not needed for.
extern "C" unsigned odds_and_ends() {
    const float4 f = make_float4(1, 2, 3, 4);
    const half2 h = __floats2half2_rn(1.5f, -2.0f);
    const __nv_bfloat162 b = __float22bfloat162_rn(make_float2(1.5f, -2.0f));
    const double pi = 3.141592653589793;
    half counter = 1;
    const half before = counter++;
    half2 pair = h + h;
    pair *= __half2half2(2);
    bool ok[] = {
        f.w == 4 && make_uchar2(1, 255).y == 255 && make_longlong4(1, 2, 3, -4).w == -4,
        min(-1, 1u) == 1u && max(-1, 1u) == 0xffffffffu && min(-1ll, 1ll) == -1 && max(3, 2) == 3 && max(-1l, 1l) == 1,
        __low2float(h) == 1.5f && __high2float(h) == -2.0f && bits_of(h) == 0xc0003e00u,
        __low2float(b) == 1.5f && __high2float(b) == -2.0f && bits_of(b) == 0xc0003fc0u,
        __half22float2(__lowhigh2highlow(h)).x == -2.0f && __bfloat1622float2(__high2bfloat162(b)).x == -2.0f,
        __low2half(__lows2half2(h, h)) == h.x && __high2half(__low2half2(h)) == h.x && __highs2half2(h, h).x == h.y,
        __high2bfloat16(__highs2bfloat162(b, b)) == b.y && __low2bfloat16(__bfloat162bfloat162(b.y)) == b.y,
        (float)before == 1 && (float)counter == 2 && (float)++counter == 3 && (float)counter-- == 3 && (int)--counter == 1,
        __low2float(pair) == 6 && __high2float(pair) == -8 && -pair < pair + __float2half2_rn(20) && pair == pair,
        __float_as_uint(1.0f) == 0x3f800000u && __float_as_int(-1.0f) < 0 && __uint_as_float(0x40000000u) == 2,
        __int_as_float(0x40400000) == 3 && __longlong_as_double(__double_as_longlong(pi)) == pi,
        __hiloint2double(__double2hiint(pi), __double2loint(pi)) == pi && __double2hiint(-1.0) == (int)0xbff00000,
        rsqrtf(4) == 0.5f && rsqrt(0.25) == 2 && __fdividef(1, 4) == 0.25f && fabsf(__expf(1) - 2.7182817f) < 1e-6f,
        fma(2.0f, 3.0f, 4.0f) == 10 && __fma_rn(pi, 2, -pi) == pi && __dadd_rn(1, 2) == 3 && __dmul_rn(2, 4) == 8,
        isnan(nanf("")) && __int2double_rn(-3) == -3 && __ull2double_rn(1ull << 63) == 0x1p63,
        (signed char)h.x == 1 && (bool)h.x && !(bool)half(-0.0f) && (long long)b.y == -2 && half(3u) == half(3ll),
        __sinf(0) == 0 && __cosf(0) == 1 && __powf(2, 3) == 8 && __logf(1) == 0 && __exp10f(2) == 100 && __log2f(8) == 3,
    };
    unsigned failed = 0;
    for (unsigned i = 0; i < sizeof ok; ++i) failed |= (ok[i] ? 0u : 1u) << i;
    return failed;
}
"""


def source(functions: dict) -> str:
    """SOURCE and, for each of the functions, t_NAME(x, y, z, out, n)."""
    mapped = "".join(
        f'extern "C" void t_{name}(const {TYPES[into][0]}* a, const {TYPES[into][0]}* b, const {TYPES[into][0]}* c, '
        f"{TYPES[out][0]}* out, long n) {{\n"
        f"    for (long i = 0; i < n; ++i) {{\n        const auto x = a[i], y = b[i], z = c[i];\n"
        f"        (void)x, (void)y, (void)z;\n        out[i] = {expression};\n    }}\n}}\n"
        for name, (out, into, expression) in functions.items()
    )
    return SOURCE + mapped


def compile(code: str, to: Path, *flags: str) -> Path:
    """Builds `to` from C++ text; a warning of the compiler is an error."""
    to.with_suffix(".cpp").write_text(code)
    flags = ("-std=c++17", "-Wall", "-Wextra", "-fPIC", "-ffp-contract=off", f"-I{HEADERS}", *flags)
    command = ["g++", *flags, str(to.with_suffix(".cpp")), "-o", str(to)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:4000]
    return to


class Intrinsics:
    """The compiled file; `intrinsics("half_hadd", x, y)` maps over the arrays, which may be of any shape."""

    def __init__(self, library: Path):
        self.library = ctypes.CDLL(str(library))

    def __call__(self, name: str, *arrays) -> np.ndarray:
        out, into, _ = FUNCTIONS[name]
        arrays = np.broadcast_arrays(*(np.asarray(array, TYPES[into][1]) for array in arrays))
        arrays = [np.ascontiguousarray(array) for array in (*arrays, *arrays[:1] * (3 - len(arrays)))]
        result = np.empty(arrays[0].shape, TYPES[out][1])
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, result)]
        getattr(self.library, f"t_{name}")(*pointers, ctypes.c_long(result.size))
        return result


def build(folder: Path, *, sixteen: bool) -> Intrinsics:
    """Compiled with those of FUNCTIONS that take 16-bit floats, or with the others."""
    chosen = {name: parts for name, parts in FUNCTIONS.items() if name.startswith(("half_", "bfloat16_")) == sixteen}
    return Intrinsics(compile(source(chosen), folder / "intrinsics.so", "-shared", "-O1"))


def some_integers(kind: str) -> np.ndarray:
    """Small ones, those near powers of two and near ties of every format, the limits, random ones of all sizes."""
    limits, rng = np.iinfo(TYPES[kind][1]), random.Random(3)
    near = [1 << power for power in range(65)]
    downs = (7, 8, 9, 10, 11, 12, 23, 24, 25)
    near += [(1 << power) + (1 << power - down) for power in range(64) for down in downs if power >= down]
    found = [n + d for n in near for d in (-1, 0, 1)] + list(range(100)) + [limits.max, -limits.min]
    found += [rng.getrandbits(rng.randint(1, 64)) for _ in range(300)]
    return np.array([v for n in found for v in (n, -n) if limits.min <= v <= limits.max], TYPES[kind][1])
