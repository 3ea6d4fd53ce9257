// The TwELL format in C++: value types, words, tile geometry. The one C++ home of these facts; the Python
// home is twell_lab/formats/twell.py.
//
// Compile with exactly one of -DVALUE_BF16, -DVALUE_FP16, -DVALUE_FP32.
//
// A packed matrix is word_t [rows][tiles][words]. Word 0 of a tile is the true count of kept values, also when
// it exceeds words - 1. Each other word is `value bits << COLUMN_BITS | column within the tile`, columns
// ascending. Words past the count are never read.
//
// The pool takes what a tile's words cannot hold, where the packing kernel keeps no dense row to read it from: 16-bit
// values, tiles of POOLED_TILE columns and POOLED_WORDS words. It is word_t [ceil(rows /
// POOL_ROWS)][tiles][POOL_WORDS]: the rows of one group of POOL_ROWS share POOL_WORDS words for each tile. A (row,
// tile) with more values than slots keeps the first of them in its words; the others, columns ascending, lie in the
// pool after those of the earlier rows of the group. A row of which a tile would reach past the pool is lost: it has to
// be computed from the dense weights.
#pragma once

#if defined(VALUE_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 value_t;
typedef unsigned int word_t;
#define COLUMN_BITS 16
__device__ __forceinline__ float to_float(value_t v) { return __bfloat162float(v); }
__device__ __forceinline__ value_t from_float(float f) { return __float2bfloat16_rn(f); }
__device__ __forceinline__ word_t bits_of(value_t v) { return __bfloat16_as_ushort(v); }
__device__ __forceinline__ value_t value_of_bits(word_t b) { return __ushort_as_bfloat16((unsigned short)b); }
// Two neighbouring values from one 32-bit register. A bf16 is the upper half of a float: no conversion.
__device__ __forceinline__ float2 two_floats(unsigned int pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ unsigned int pair_of(float low, float high) {
    return (unsigned int)bits_of(from_float(low)) | (unsigned int)bits_of(from_float(high)) << 16;
}
#elif defined(VALUE_FP16)
#include <cuda_fp16.h>
typedef __half value_t;
typedef unsigned int word_t;
#define COLUMN_BITS 16
__device__ __forceinline__ float to_float(value_t v) { return __half2float(v); }
__device__ __forceinline__ value_t from_float(float f) { return __float2half_rn(f); }
__device__ __forceinline__ word_t bits_of(value_t v) { return __half_as_ushort(v); }
__device__ __forceinline__ value_t value_of_bits(word_t b) { return __ushort_as_half((unsigned short)b); }
__device__ __forceinline__ float2 two_floats(unsigned int pair) {
    return make_float2(to_float(value_of_bits(pair & 0xffffu)), to_float(value_of_bits(pair >> 16)));
}
__device__ __forceinline__ unsigned int pair_of(float low, float high) {
    return (unsigned int)bits_of(from_float(low)) | (unsigned int)bits_of(from_float(high)) << 16;
}
#elif defined(VALUE_FP32)
typedef float value_t;
typedef unsigned long long word_t;
#define COLUMN_BITS 32
__device__ __forceinline__ float to_float(value_t v) { return v; }
__device__ __forceinline__ value_t from_float(float f) { return f; }
__device__ __forceinline__ word_t bits_of(value_t v) { return __float_as_uint(v); }
__device__ __forceinline__ value_t value_of_bits(word_t b) { return __uint_as_float((unsigned int)b); }
#else
#error "define one of VALUE_BF16, VALUE_FP16, VALUE_FP32"
#endif

// Sums are one step wider than the values. For float32 values that is double: two or three float32 terms can
// cancel so that torch's dense layer is exact by luck, and no other order of adding them in float32 is sure to
// come as close.
#if defined(VALUE_FP32)
typedef double sum_t;
#else
typedef float sum_t;
#endif

#ifndef POOLED_TILE
#define POOLED_TILE 256
#endif
#ifndef POOLED_WORDS
#define POOLED_WORDS 32
#endif
#ifndef POOL_ROWS
#define POOL_ROWS 16
#endif
#ifndef POOL_WORDS
#define POOL_WORDS 64
#endif
#define SLOTS (POOLED_WORDS - 1)  // values that the words of one tile hold

#define WARP 32
#define ALL_LANES 0xffffffffu
#define VECTOR (16 / (int)sizeof(value_t))  // values in one 16-byte access

// Positives and NaN are kept; zeros and negatives are silent.
__device__ __forceinline__ bool fires(value_t v) { return !(to_float(v) <= 0.0f); }

__device__ __forceinline__ word_t make_word(value_t v, int column) {
    return bits_of(v) << COLUMN_BITS | (word_t)column;
}
__device__ __forceinline__ value_t word_value(word_t w) { return value_of_bits(w >> COLUMN_BITS); }
__device__ __forceinline__ int word_column(word_t w) {
    return (int)(w & (((word_t)1 << COLUMN_BITS) - 1));
}

__host__ __device__ __forceinline__ int tiles_of(int columns, int tile) { return (columns + tile - 1) / tile; }
// The last tile may be narrower than the others.
__device__ __forceinline__ int tile_width(int columns, int tile, int t) {
    return min(tile, columns - t * tile);
}

// In 32 bits of values: the signs, and the last bit of each exponent.
#if defined(VALUE_FP32)
#define SIGNS 0x80000000u
#define EXPONENT_ONE 0x00800000u
#else
#define SIGNS 0x80008000u
#if defined(VALUE_BF16)
#define EXPONENT_ONE 0x00800080u
#else
#define EXPONENT_ONE 0x04000400u
#endif
#endif

// 16 bytes of values in registers, read and written as floats.
struct Vector {
    uint4 raw;
    // The i-th value, with its own bits; i must be known to the compiler for this to stay in registers.
    __device__ __forceinline__ value_t value(int i) const {
        const unsigned int r[4] = {raw.x, raw.y, raw.z, raw.w};
#if defined(VALUE_FP32)
        return value_of_bits(r[i]);
#else
        return value_of_bits(i % 2 ? r[i / 2] >> 16 : r[i / 2] & 0xffffu);
#endif
    }
    __device__ __forceinline__ void to_floats(float* f) const {
#if defined(VALUE_FP32)
        f[0] = __uint_as_float(raw.x); f[1] = __uint_as_float(raw.y);
        f[2] = __uint_as_float(raw.z); f[3] = __uint_as_float(raw.w);
#else
        float2 a = two_floats(raw.x), b = two_floats(raw.y), c = two_floats(raw.z), d = two_floats(raw.w);
        f[0] = a.x; f[1] = a.y; f[2] = b.x; f[3] = b.y; f[4] = c.x; f[5] = c.y; f[6] = d.x; f[7] = d.y;
#endif
    }
    // Whether some value is infinite or NaN: its exponent is all ones, so that one more carries into the place of the
    // sign.
    __device__ __forceinline__ bool nonfinite() const {
        const unsigned int r[4] = {raw.x, raw.y, raw.z, raw.w};
        unsigned int found = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) found |= (r[i] & ~SIGNS) + EXPONENT_ONE;
        return found & SIGNS;
    }
    __device__ __forceinline__ static Vector of_floats(const float* f) {
        Vector v;
#if defined(VALUE_FP32)
        v.raw = make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
#else
        v.raw = make_uint4(pair_of(f[0], f[1]), pair_of(f[2], f[3]), pair_of(f[4], f[5]), pair_of(f[6], f[7]));
#endif
        return v;
    }
};
