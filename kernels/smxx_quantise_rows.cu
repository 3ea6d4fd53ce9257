// quantise_rows: each row of x as bytes and one float that they stand for multiples of: scale = max |x| / MOST, never
// below the least normal float, and x / scale rounded to nearest even: INT8, or with -DE4M3 that format, converted by
// integer operations, as GPUs before sm_89 have no instruction for it. A row that is not finite gets a scale that is
// not, and zeros. Blocks past `rows` fill the rows of padding with zeros, and their scales.
//
// What bounds it: device memory; x is read and a byte a value written, once.
//
//   quantise_rows_v1  a block a row, one value a thread and turn, any width; the row is read twice
//   quantise_rows_v2  16 bytes a load; up to HELD vectors a thread stay in registers from the largest to the rounding
// Worklog: docs/kernels/smxx_quantise_rows.md
#include "twell.cuh"

#define THREADS 256
#define HELD 4  // vectors of a thread that stay in registers
#if defined(E4M3)
#define MOST 448.0
#else
#define MOST 127.0
#endif

__device__ __forceinline__ unsigned byte_for(float v, float scale) {
    float q = v / scale;
    if (q != q) q = 0.0f;
#if defined(E4M3)
    const unsigned bits = __float_as_uint(q), sign = bits >> 31 << 7, most = bits & 0x7fffffffu;
    // Below 2^-6 steps are 2^-9, the last place of a float from 2^14 on; above, the mantissa is cut to three bits.
    if (most < 121u << 23) return sign | (__float_as_uint(__uint_as_float(most) + 16384.0f) - (141u << 23));
    return sign | (most - (120u << 23) + 0x7ffffu + (most >> 20 & 1u)) >> 20;
#else
    return (unsigned)__float2int_rn(q) & 0xffu;
#endif
}

// The scale of a row of which each thread passes its largest magnitude, as bits: they are ordered as the magnitudes,
// with infinity and NaN above all.
__device__ __forceinline__ float scale_of(unsigned largest) {
    __shared__ unsigned part[THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = largest;
    __syncthreads();
    largest = part[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; ++w) largest = max(largest, part[w]);
    const float scale = __uint_as_float(largest) * (float)(1.0 / MOST);
    return scale < 1.17549435e-38f ? 1.17549435e-38f : scale;  // NaN stays
}

__device__ __forceinline__ unsigned magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

extern "C" __global__ void __launch_bounds__(THREADS)
quantise_rows_v1(const value_t* __restrict__ x, signed char* __restrict__ values, float* __restrict__ scales, int rows,
                 int columns) {
    const long long start = (long long)blockIdx.x * columns;
    const bool there = blockIdx.x < rows;
    unsigned largest = 0;
    for (int c = threadIdx.x; there && c < columns; c += THREADS)
        largest = max(largest, magnitude(to_float(x[start + c])));
    const float scale = scale_of(largest);
    if (threadIdx.x == 0) scales[blockIdx.x] = there ? scale : 0.0f;
    for (int c = threadIdx.x; c < columns; c += THREADS)
        values[start + c] = there ? (signed char)byte_for(to_float(x[start + c]), scale) : 0;
}

__device__ __forceinline__ unsigned largest_of(const Vector& v, unsigned largest) {
    float f[VECTOR];
    v.to_floats(f);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) largest = max(largest, magnitude(f[i]));
    return largest;
}

__device__ __forceinline__ void store_bytes(signed char* to, const Vector& v, float scale) {
    float f[VECTOR];
    v.to_floats(f);
    unsigned w[VECTOR / 4];
#pragma unroll
    for (int i = 0; i < VECTOR / 4; ++i)
        w[i] = byte_for(f[4 * i], scale) | byte_for(f[4 * i + 1], scale) << 8 | byte_for(f[4 * i + 2], scale) << 16 |
               byte_for(f[4 * i + 3], scale) << 24;
#if defined(VALUE_FP32)
    *(unsigned*)to = w[0];
#else
    *(uint2*)to = make_uint2(w[0], w[1]);
#endif
}

__device__ __forceinline__ Vector load(const value_t* from) {
    Vector v;
    v.raw = __ldg((const uint4*)from);
    return v;
}

// Four blocks leave a thread 64 registers: asked for none, compilers for sm_86, sm_100 and sm_120 spill to fit more.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
quantise_rows_v2(const value_t* __restrict__ x, signed char* __restrict__ values, float* __restrict__ scales, int rows,
                 int columns) {
    const long long start = (long long)blockIdx.x * columns;
    const bool there = blockIdx.x < rows;
    Vector held[HELD];
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int c = (k * THREADS + threadIdx.x) * VECTOR;
        held[k].raw = make_uint4(0, 0, 0, 0);
        if (there && c < columns) held[k] = load(x + start + c);
    }
#pragma unroll
    for (int k = 0; k < HELD; ++k) largest = largest_of(held[k], largest);
    for (int c = (HELD * THREADS + threadIdx.x) * VECTOR; there && c < columns; c += THREADS * VECTOR)
        largest = largest_of(load(x + start + c), largest);
    const float scale = scale_of(largest);
    if (threadIdx.x == 0) scales[blockIdx.x] = there ? scale : 0.0f;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int c = (k * THREADS + threadIdx.x) * VECTOR;
        if (c < columns) store_bytes(values + start + c, held[k], scale);
    }
    for (int c = (HELD * THREADS + threadIdx.x) * VECTOR; c < columns; c += THREADS * VECTOR) {
        Vector v;
        v.raw = make_uint4(0, 0, 0, 0);
        if (there) v = load(x + start + c);
        store_bytes(values + start + c, v, scale);
    }
}
