// CUDA's vector types and the intrinsics on plain numbers, for a C++ compiler, with the bits a GPU gives.
//
// The conversions and the arithmetic here and in cuda_fp16.h and cuda_bf16.h were compared with nvcc 13.0's on an H100,
// bit by bit: every pattern of one 16-bit or 32-bit operand, every pair of 16-bit ones, else random and tied ones, NaN
// included. All were equal but rsqrtf, which differs in the last bit. That other GPUs give the same is assumed.
//
// What the language itself computes is this processor's, and differs in these ways:
// - A NaN that + - * / or <math.h> makes has this processor's bits; a float one of a GPU is 0x7fffffff.
// - nvcc may turn a * b + c into one fma; here products are rounded first, unless the source says fma.
// - expf, tanhf and the rest of <math.h> are the C library's, and __expf, __sinf, ... stand for the same functions; a
//   GPU's may differ in the last bits, and its fast ones by more. fmaxf(-0, +0) may be either zero; max gives +0.
// - A float that does not fit the integer type it is cast to is undefined here and clamped on a GPU; __float2int_rz is
//   clamped in both.
// - A shift by the width of its type or more is undefined here; a GPU shifts out every bit.
#pragma once
#include <math.h>

#include "cuda_rounding.h"

// ---- vector types: of 2 and 4 elements with the alignment of one access, of 1 and 3 with their element's ----

#if defined(SIM_WATCHED)  // these also have to be built from braces
#define SIM_FROM_BRACES(NAME, PARAMETERS, ...) \
    NAME() = default;                          \
    SIM_UNWATCHED constexpr NAME PARAMETERS : __VA_ARGS__ {} \
    SIM_SEEN_COPIES(NAME)
#else
#define SIM_FROM_BRACES(NAME, PARAMETERS, ...)
#endif
#define SIM_VECTORS(NAME, TYPE, ALIGN2, ALIGN4)                                                                  \
    struct NAME##1 { TYPE x; SIM_FROM_BRACES(NAME##1, (TYPE a), x(a)) };                                         \
    struct alignas(ALIGN2) NAME##2 { TYPE x, y; SIM_FROM_BRACES(NAME##2, (TYPE a, TYPE b = 0), x(a), y(b)) };    \
    struct NAME##3 {                                                                                             \
        TYPE x, y, z;                                                                                            \
        SIM_FROM_BRACES(NAME##3, (TYPE a, TYPE b = 0, TYPE c = 0), x(a), y(b), z(c))                             \
    };                                                                                                           \
    struct alignas(ALIGN4) NAME##4 {                                                                             \
        TYPE x, y, z, w;                                                                                         \
        SIM_FROM_BRACES(NAME##4, (TYPE a, TYPE b = 0, TYPE c = 0, TYPE d = 0), x(a), y(b), z(c), w(d))           \
    };                                                                                                           \
    SIM_VALUE NAME##1 make_##NAME##1(TYPE x) { return NAME##1{x}; }                                              \
    SIM_VALUE NAME##2 make_##NAME##2(TYPE x, TYPE y) { return NAME##2{x, y}; }                                   \
    SIM_VALUE NAME##3 make_##NAME##3(TYPE x, TYPE y, TYPE z) { return NAME##3{x, y, z}; }                        \
    SIM_VALUE NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return NAME##4{x, y, z, w}; }
SIM_VECTORS(char, signed char, 2, 4)
SIM_VECTORS(uchar, unsigned char, 2, 4)
SIM_VECTORS(short, short, 4, 8)
SIM_VECTORS(ushort, unsigned short, 4, 8)
SIM_VECTORS(int, int, 8, 16)
SIM_VECTORS(uint, unsigned int, 8, 16)
SIM_VECTORS(long, long, 2 * sizeof(long), 16)
SIM_VECTORS(ulong, unsigned long, 2 * sizeof(long), 16)
SIM_VECTORS(longlong, long long, 16, 16)
SIM_VECTORS(ulonglong, unsigned long long, 16, 16)
SIM_VECTORS(float, float, 8, 16)
SIM_VECTORS(double, double, 16, 16)
#undef SIM_VECTORS

// As in CUDA, the one type here that starts as something: (1, 1, 1), known at compile time.
struct dim3 {
    unsigned int x, y, z;
    SIM_UNWATCHED constexpr dim3(unsigned int vx = 1, unsigned int vy = 1, unsigned int vz = 1) : x(vx), y(vy), z(vz) {}
    SIM_UNWATCHED constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    SIM_UNWATCHED constexpr operator uint3() const { return uint3{x, y, z}; }
};

// ---- the same bits as another type ----

SIM_VALUE unsigned int __float_as_uint(float f) { return sim_bits<unsigned int>(f); }
SIM_VALUE int __float_as_int(float f) { return sim_bits<int>(f); }
SIM_VALUE float __uint_as_float(unsigned int u) { return sim_bits<float>(u); }
SIM_VALUE float __int_as_float(int i) { return sim_bits<float>(i); }
SIM_VALUE long long __double_as_longlong(double d) { return sim_bits<long long>(d); }
SIM_VALUE double __longlong_as_double(long long i) { return sim_bits<double>(i); }
SIM_VALUE int __double2hiint(double d) { return (int)(sim_bits<unsigned long long>(d) >> 32); }
SIM_VALUE int __double2loint(double d) { return (int)sim_bits<unsigned long long>(d); }
SIM_VALUE double __hiloint2double(int high, int low) {
    return sim_bits<double>((unsigned long long)(unsigned int)high << 32 | (unsigned int)low);
}

// ---- min and max: the overloads of CUDA, so that what is ambiguous there is ambiguous here ----

#define SIM_MIN_MAX(RESULT, A, B)                                                                   \
    SIM_VALUE RESULT min(A a, B b) { return (RESULT)a < (RESULT)b ? (RESULT)a : (RESULT)b; }        \
    SIM_VALUE RESULT max(A a, B b) { return (RESULT)a > (RESULT)b ? (RESULT)a : (RESULT)b; }
SIM_MIN_MAX(int, int, int)
SIM_MIN_MAX(unsigned int, unsigned int, unsigned int)
SIM_MIN_MAX(unsigned int, unsigned int, int)
SIM_MIN_MAX(unsigned int, int, unsigned int)
SIM_MIN_MAX(long, long, long)
SIM_MIN_MAX(unsigned long, unsigned long, unsigned long)
SIM_MIN_MAX(unsigned long, unsigned long, long)
SIM_MIN_MAX(unsigned long, long, unsigned long)
SIM_MIN_MAX(long long, long long, long long)
SIM_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
SIM_MIN_MAX(unsigned long long, unsigned long long, long long)
SIM_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef SIM_MIN_MAX

// Of a number and a NaN, the number; of two NaN, the GPU's NaN (for double, the second one made quiet); and -0 < +0.
SIM_VALUE float sim_extreme(float a, float b, bool least) {
    const unsigned int p = sim_bits<unsigned int>(a), q = sim_bits<unsigned int>(b);
    if (a != a) return b != b ? sim_bits<float>(0x7fffffffu) : b;
    if (a == b) return sim_bits<float>(least ? p | q : p & q);
    return b != b || (a < b) == least ? a : b;
}
SIM_VALUE double sim_extreme(double a, double b, bool least) {
    const unsigned long long p = sim_bits<unsigned long long>(a), q = sim_bits<unsigned long long>(b);
    if (a != a) return b != b ? sim_bits<double>(q | 1ull << 51) : b;
    if (a == b) return sim_bits<double>(least ? p | q : p & q);
    return b != b || (a < b) == least ? a : b;
}
SIM_VALUE float min(float a, float b) { return sim_extreme(a, b, true); }
SIM_VALUE float max(float a, float b) { return sim_extreme(a, b, false); }
SIM_VALUE double min(double a, double b) { return sim_extreme(a, b, true); }
SIM_VALUE double max(double a, double b) { return sim_extreme(a, b, false); }
SIM_VALUE double min(float a, double b) { return min((double)a, b); }
SIM_VALUE double min(double a, float b) { return min(a, (double)b); }
SIM_VALUE double max(float a, double b) { return max((double)a, b); }
SIM_VALUE double max(double a, float b) { return max(a, (double)b); }

// ---- bits and integers ----

SIM_VALUE int __popc(unsigned int u) { return __builtin_popcount(u); }
SIM_VALUE int __popcll(unsigned long long u) { return __builtin_popcountll(u); }
SIM_VALUE int __clz(int i) { return i ? __builtin_clz((unsigned int)i) : 32; }
SIM_VALUE int __clzll(long long i) { return i ? __builtin_clzll((unsigned long long)i) : 64; }
SIM_VALUE int __ffs(int i) { return __builtin_ffs(i); }  // the place of the lowest set bit, from 1; 0 for none
SIM_VALUE int __ffsll(long long i) { return __builtin_ffsll(i); }
SIM_VALUE unsigned long long __brevll(unsigned long long u) {
    u = (u >> 1 & 0x5555555555555555ull) | (u & 0x5555555555555555ull) << 1;
    u = (u >> 2 & 0x3333333333333333ull) | (u & 0x3333333333333333ull) << 2;
    u = (u >> 4 & 0x0f0f0f0f0f0f0f0full) | (u & 0x0f0f0f0f0f0f0f0full) << 4;
    return __builtin_bswap64(u);
}
SIM_VALUE unsigned int __brev(unsigned int u) { return (unsigned int)(__brevll(u) >> 32); }

// Byte n of the result is byte s[4n+2 .. 4n] of the eight bytes y:x.
SIM_VALUE unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int s) {
    const unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned int result = 0;
    for (int n = 0; n < 4; ++n) result |= (unsigned int)(bytes >> 8 * (s >> 4 * n & 7) & 0xff) << 8 * n;
    return result;
}

// The upper half of high:low shifted left, the lower half of it shifted right, by shift mod 32 or at most 32 (c).
SIM_VALUE unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
    return (unsigned int)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
SIM_VALUE unsigned int __funnelshift_lc(unsigned int low, unsigned int high, unsigned int shift) {
    return shift < 32 ? __funnelshift_l(low, high, shift) : low;
}
SIM_VALUE unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
    return (unsigned int)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
SIM_VALUE unsigned int __funnelshift_rc(unsigned int low, unsigned int high, unsigned int shift) {
    return shift < 32 ? __funnelshift_r(low, high, shift) : high;
}

// The upper half of a product; of 24-bit operands, the lower 32 bits.
SIM_VALUE int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
SIM_VALUE unsigned int __umulhi(unsigned int a, unsigned int b) { return (unsigned int)((unsigned long long)a * b >> 32); }
SIM_VALUE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
SIM_VALUE long long __mul64hi(long long a, long long b) {
    return (long long)((__int128)a * b >> 64);
}
SIM_VALUE unsigned int __umul24(unsigned int a, unsigned int b) { return (a & 0xffffff) * (b & 0xffffff); }
SIM_VALUE int __mul24(int a, int b) {
    return (int)((unsigned int)((int)((unsigned int)a << 8) >> 8) * (unsigned int)((int)((unsigned int)b << 8) >> 8));
}
SIM_VALUE unsigned int __usad(unsigned int a, unsigned int b, unsigned int sum) { return (a > b ? a - b : b - a) + sum; }
SIM_VALUE unsigned int __sad(int a, int b, unsigned int sum) {
    return (a > b ? (unsigned int)a - (unsigned int)b : (unsigned int)b - (unsigned int)a) + sum;
}

// ---- float arithmetic with a named rounding, never contracted ----

SIM_VALUE float sim_canonical(float f) { return f != f ? sim_bits<float>(0x7fffffffu) : f; }
SIM_VALUE float __fadd_rn(float a, float b) { return sim_canonical(a + b); }
SIM_VALUE float __fsub_rn(float a, float b) { return sim_canonical(a - b); }
SIM_VALUE float __fmul_rn(float a, float b) { return sim_canonical(a * b); }
SIM_VALUE float __fdiv_rn(float a, float b) { return sim_canonical(a / b); }
SIM_VALUE float __frcp_rn(float a) { return sim_canonical(1.0f / a); }
SIM_VALUE float __fsqrt_rn(float a) { return sim_canonical(sqrtf(a)); }
SIM_VALUE float __fmaf_rn(float a, float b, float c) { return sim_canonical(fmaf(a, b, c)); }
// __fadd_rz and so on. A zero sum of opposite terms is -0 when rounding down.
SIM_VALUE float sim_sum_to_float(double a, double b, SimRounding rounding) {
    const double sum = sim_sum(a, b);
    const bool cancelled = sum == 0 && __builtin_signbit(a) != __builtin_signbit(b);
    return cancelled && rounding == SIM_DOWN ? -0.0f : sim_to_float(sum, rounding);
}
#define SIM_DIRECTED(MODE, ROUNDING)                                                                                       \
    SIM_VALUE float __fadd_##MODE(float a, float b) {                                                                      \
        return sim_sum_to_float(sim_from_float(a), sim_from_float(b), ROUNDING);                                           \
    }                                                                                                                      \
    SIM_VALUE float __fsub_##MODE(float a, float b) {                                                                      \
        return sim_sum_to_float(sim_from_float(a), -sim_from_float(b), ROUNDING);                                          \
    }                                                                                                                      \
    SIM_VALUE float __fmul_##MODE(float a, float b) { return sim_to_float(sim_from_float(a) * sim_from_float(b), ROUNDING); } \
    SIM_VALUE float __fmaf_##MODE(float a, float b, float c) {                                                             \
        return sim_sum_to_float(sim_from_float(a) * sim_from_float(b), sim_from_float(c), ROUNDING);                       \
    }
SIM_DIRECTED(rz, SIM_ZERO)
SIM_DIRECTED(ru, SIM_UP)
SIM_DIRECTED(rd, SIM_DOWN)
#undef SIM_DIRECTED

SIM_VALUE double __dadd_rn(double a, double b) { return a + b; }
SIM_VALUE double __dsub_rn(double a, double b) { return a - b; }
SIM_VALUE double __dmul_rn(double a, double b) { return a * b; }
SIM_VALUE double __ddiv_rn(double a, double b) { return a / b; }
SIM_VALUE double __drcp_rn(double a) { return 1.0 / a; }
SIM_VALUE double __dsqrt_rn(double a) { return sqrt(a); }
SIM_VALUE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

SIM_VALUE float __saturatef(float f) { return f > 0 ? (f < 1 ? f : 1.0f) : 0.0f; }  // NaN becomes 0

// ---- conversions ----

#define SIM_CONVERSION(NAME, TYPE, MODE, ROUNDING)                                                                    \
    SIM_VALUE TYPE __float2##NAME##_##MODE(float f) { return sim_to_integer<TYPE>(sim_from_float(f), ROUNDING, false); }\
    SIM_VALUE TYPE __double2##NAME##_##MODE(double d) { return sim_to_integer<TYPE>(d, ROUNDING, true); }             \
    SIM_VALUE float __##NAME##2float_##MODE(TYPE i) { return sim_to_float(sim_from_integer(i), ROUNDING); }
#define SIM_CONVERSIONS(MODE, ROUNDING)                                 \
    SIM_CONVERSION(int, int, MODE, ROUNDING)                            \
    SIM_CONVERSION(uint, unsigned int, MODE, ROUNDING)                  \
    SIM_CONVERSION(ll, long long, MODE, ROUNDING)                       \
    SIM_CONVERSION(ull, unsigned long long, MODE, ROUNDING)             \
    SIM_VALUE float __double2float_##MODE(double d) {                   \
        return sim_bits<float>(sim_narrow_own<23, 8>(d, ROUNDING));     \
    }
SIM_CONVERSIONS(rn, SIM_NEAREST)
SIM_CONVERSIONS(rz, SIM_ZERO)
SIM_CONVERSIONS(ru, SIM_UP)
SIM_CONVERSIONS(rd, SIM_DOWN)
#undef SIM_CONVERSIONS
#undef SIM_CONVERSION
SIM_VALUE double __int2double_rn(int i) { return i; }
SIM_VALUE double __uint2double_rn(unsigned int i) { return i; }
SIM_VALUE double __ll2double_rn(long long i) { return (double)i; }
SIM_VALUE double __ull2double_rn(unsigned long long i) { return (double)i; }

// Over every float, 1 / sqrt(x) as a double and then as a float is the nearest float: __frsqrt_rn of a GPU gives the same.
SIM_VALUE float __frsqrt_rn(float f) { return sim_canonical((float)(1.0 / sqrt(sim_from_float(f)))); }

// ---- approximations on a GPU: nearer to the exact value here ----

SIM_VALUE float sim_rsqrtf(float f) { return __frsqrt_rn(f); }
SIM_VALUE double sim_rsqrt(double d) { return 1.0 / sqrt(d); }
SIM_VALUE float __fdividef(float a, float b) { return sim_canonical(a / b); }

// Names that C libraries declare as well, some of them only in newer versions, so that a function cannot have them.
#define rsqrt sim_rsqrt
#define rsqrtf sim_rsqrtf
#define __expf(x) expf(x)
#define __exp10f(x) ((float)pow(10.0, (double)(x)))
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
