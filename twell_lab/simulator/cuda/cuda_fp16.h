// CUDA's <cuda_fp16.h> for a C++ compiler: __half (half) and __half2 (half2), with the bits a GPU gives.
#pragma once
#include "cuda_types.h"

// Every float16 has its float32, but all NaN become one. 112 is the difference of the two exponent biases.
SIM_VALUE float sim_half_to_float(unsigned int bits) {
    const unsigned int sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
    if (size > 0x7c00u) return sim_bits<float>(0x7fffffffu);
    if (size == 0x7c00u) return sim_bits<float>(sign | 0x7f800000u);
    if (size >= 0x0400u) return sim_bits<float>(sign | ((size << 13) + (112u << 23)));
    return sim_bits<float>(sign | sim_bits<unsigned int>((float)size * 0x1p-24f));
}

#define SIM_TYPE __half
#define SIM_PAIR __half2
#define SIM_FORMAT 10, 5
#define SIM_FLOAT sim_half_to_float
#include "cuda_sixteen_bits.h"
#undef SIM_TYPE
#undef SIM_PAIR
#undef SIM_FORMAT
#undef SIM_FLOAT
typedef __half half;
typedef __half nv_half;
typedef __half2 half2;
typedef __half2 nv_half2;

// ---- bits ----

SIM_VALUE unsigned short __half_as_ushort(__half a) { return a.__x; }
SIM_VALUE short __half_as_short(__half a) { return (short)a.__x; }
SIM_VALUE __half __ushort_as_half(unsigned short bits) { return sim_sixteen<__half>(bits); }
SIM_VALUE __half __short_as_half(short bits) { return sim_sixteen<__half>((unsigned short)bits); }

// ---- floats ----

SIM_VALUE float __half2float(__half a) { return sim_half_to_float(a.__x); }
SIM_VALUE __half __float2half(float f) { return f; }
SIM_VALUE __half __float2half_rn(float f) { return f; }
SIM_VALUE __half sim_double2half(double d, SimRounding rounding) { return sim_sixteen<__half>(sim_narrow<10, 5>(d, rounding)); }
SIM_VALUE __half __float2half_rz(float f) { return sim_double2half(sim_from_float(f), SIM_ZERO); }
SIM_VALUE __half __float2half_ru(float f) { return sim_double2half(sim_from_float(f), SIM_UP); }
SIM_VALUE __half __float2half_rd(float f) { return sim_double2half(sim_from_float(f), SIM_DOWN); }
SIM_VALUE __half __double2half(double d) { return d; }

// ---- integers: __half2int_rn, __int2half_rn and so on ----

#define SIM_HALF_MODE(NAME, TYPE, MODE, ROUNDING)                                                                          \
    SIM_VALUE TYPE __half2##NAME##_##MODE(__half a) { return sim_to_integer<TYPE>(sim_value(a), ROUNDING, false); }        \
    SIM_VALUE __half __##NAME##2half_##MODE(TYPE i) { return sim_double2half(sim_from_integer(i), ROUNDING); }
#define SIM_HALF_INTEGER(NAME, TYPE)             \
    SIM_HALF_MODE(NAME, TYPE, rn, SIM_NEAREST)   \
    SIM_HALF_MODE(NAME, TYPE, rz, SIM_ZERO)      \
    SIM_HALF_MODE(NAME, TYPE, ru, SIM_UP)        \
    SIM_HALF_MODE(NAME, TYPE, rd, SIM_DOWN)
SIM_HALF_INTEGER(short, short)
SIM_HALF_INTEGER(ushort, unsigned short)
SIM_HALF_INTEGER(int, int)
SIM_HALF_INTEGER(uint, unsigned int)
SIM_HALF_INTEGER(ll, long long)
SIM_HALF_INTEGER(ull, unsigned long long)
#undef SIM_HALF_INTEGER
#undef SIM_HALF_MODE
SIM_VALUE signed char __half2char_rz(__half a) { return a; }
SIM_VALUE unsigned char __half2uchar_rz(__half a) { return a; }

// ---- pairs: x is the low half of the 32 bits, y the high half ----

SIM_VALUE __half2 make_half2(__half x, __half y) { return __half2(x, y); }
SIM_VALUE __half2 __halves2half2(__half low, __half high) { return __half2(low, high); }
SIM_VALUE __half2 __half2half2(__half a) { return __half2(a, a); }
SIM_VALUE __half2 __float2half2_rn(float f) { return __half2(f, f); }
SIM_VALUE __half2 __floats2half2_rn(float low, float high) { return __half2(low, high); }
SIM_VALUE __half2 __float22half2_rn(float2 f) { return __half2(f.x, f.y); }
SIM_VALUE float2 __half22float2(__half2 a) { return float2{__low2float(a), __high2float(a)}; }
SIM_VALUE __half __low2half(__half2 a) { return a.x; }
SIM_VALUE __half __high2half(__half2 a) { return a.y; }
SIM_VALUE __half2 __low2half2(__half2 a) { return __half2(a.x, a.x); }
SIM_VALUE __half2 __high2half2(__half2 a) { return __half2(a.y, a.y); }
SIM_VALUE __half2 __lows2half2(__half2 a, __half2 b) { return __half2(a.x, b.x); }
SIM_VALUE __half2 __highs2half2(__half2 a, __half2 b) { return __half2(a.y, b.y); }
