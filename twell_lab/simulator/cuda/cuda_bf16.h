// CUDA's <cuda_bf16.h> for a C++ compiler: __nv_bfloat16 and __nv_bfloat162, with the bits a GPU gives.
// For GPUs older than sm_80 nvcc has no bfloat16 __hfma, hsqrt or hexp; here they are always there.
#pragma once
#include "cuda_types.h"

// A bfloat16 is the upper half of a float32, also of a NaN.
SIM_VALUE float sim_bfloat16_to_float(unsigned int bits) { return sim_bits<float>(bits << 16); }

#define SIM_TYPE __nv_bfloat16
#define SIM_PAIR __nv_bfloat162
#define SIM_FORMAT 7, 8
#define SIM_FLOAT sim_bfloat16_to_float
#include "cuda_sixteen_bits.h"
#undef SIM_TYPE
#undef SIM_PAIR
#undef SIM_FORMAT
#undef SIM_FLOAT
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// ---- bits ----

SIM_VALUE unsigned short __bfloat16_as_ushort(__nv_bfloat16 a) { return a.__x; }
SIM_VALUE short __bfloat16_as_short(__nv_bfloat16 a) { return (short)a.__x; }
SIM_VALUE __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return sim_sixteen<__nv_bfloat16>(bits); }
SIM_VALUE __nv_bfloat16 __short_as_bfloat16(short bits) { return sim_sixteen<__nv_bfloat16>((unsigned short)bits); }

// ---- floats ----

SIM_VALUE float __bfloat162float(__nv_bfloat16 a) { return sim_bfloat16_to_float(a.__x); }
SIM_VALUE __nv_bfloat16 __float2bfloat16(float f) { return f; }
SIM_VALUE __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
SIM_VALUE __nv_bfloat16 sim_double2bfloat16(double d, SimRounding rounding) {
    return sim_sixteen<__nv_bfloat16>(sim_narrow<7, 8>(d, rounding));
}
SIM_VALUE __nv_bfloat16 __float2bfloat16_rz(float f) { return sim_double2bfloat16(sim_from_float(f), SIM_ZERO); }
SIM_VALUE __nv_bfloat16 __float2bfloat16_ru(float f) { return sim_double2bfloat16(sim_from_float(f), SIM_UP); }
SIM_VALUE __nv_bfloat16 __float2bfloat16_rd(float f) { return sim_double2bfloat16(sim_from_float(f), SIM_DOWN); }
SIM_VALUE __nv_bfloat16 __double2bfloat16(double d) { return d; }

// ---- integers: __bfloat162int_rn, __int2bfloat16_rn and so on ----

#define SIM_BFLOAT16_MODE(NAME, TYPE, MODE, ROUNDING)                                          \
    SIM_VALUE TYPE __bfloat162##NAME##_##MODE(__nv_bfloat16 a) {                                   \
        return sim_to_integer<TYPE>(sim_value(a), ROUNDING, false);                                \
    }                                                                                              \
    SIM_VALUE __nv_bfloat16 __##NAME##2bfloat16_##MODE(TYPE i) { return sim_double2bfloat16(sim_from_integer(i), ROUNDING); }
#define SIM_BFLOAT16_INTEGER(NAME, TYPE)             \
    SIM_BFLOAT16_MODE(NAME, TYPE, rn, SIM_NEAREST)   \
    SIM_BFLOAT16_MODE(NAME, TYPE, rz, SIM_ZERO)      \
    SIM_BFLOAT16_MODE(NAME, TYPE, ru, SIM_UP)        \
    SIM_BFLOAT16_MODE(NAME, TYPE, rd, SIM_DOWN)
SIM_BFLOAT16_INTEGER(short, short)
SIM_BFLOAT16_INTEGER(ushort, unsigned short)
SIM_BFLOAT16_INTEGER(int, int)
SIM_BFLOAT16_INTEGER(uint, unsigned int)
SIM_BFLOAT16_INTEGER(ll, long long)
SIM_BFLOAT16_INTEGER(ull, unsigned long long)
#undef SIM_BFLOAT16_INTEGER
#undef SIM_BFLOAT16_MODE
SIM_VALUE signed char __bfloat162char_rz(__nv_bfloat16 a) { return a; }
SIM_VALUE unsigned char __bfloat162uchar_rz(__nv_bfloat16 a) { return a; }

// ---- pairs: x is the low half of the 32 bits, y the high half ----

SIM_VALUE __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162(x, y); }
SIM_VALUE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return __nv_bfloat162(low, high); }
SIM_VALUE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return __nv_bfloat162(a, a); }
SIM_VALUE __nv_bfloat162 __float2bfloat162_rn(float f) { return __nv_bfloat162(f, f); }
SIM_VALUE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return __nv_bfloat162(low, high); }
SIM_VALUE __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __nv_bfloat162(f.x, f.y); }
SIM_VALUE float2 __bfloat1622float2(__nv_bfloat162 a) { return float2{__low2float(a), __high2float(a)}; }
SIM_VALUE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
SIM_VALUE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
SIM_VALUE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 a) { return __nv_bfloat162(a.x, a.x); }
SIM_VALUE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 a) { return __nv_bfloat162(a.y, a.y); }
SIM_VALUE __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(a.x, b.x); }
SIM_VALUE __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return __nv_bfloat162(a.y, b.y); }
