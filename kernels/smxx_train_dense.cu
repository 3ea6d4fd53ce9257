// The element-wise middle of a dense training step, each direction in one pass: what lies between the matrix products
// of a gated layer, h = relu(g) * u, or of a plain one, h = relu(g); with its L1 sum, and with the gradient of that
// sum.
//
// What bounds it: device memory. Forward reads g, u and writes h; backward reads g, u, dh and writes h, dg, du.
//
//   dense_hidden_v1, dense_gradients_v1  a warp a row, a value a lane: any d_ff, any address
//   dense_hidden_v2, dense_gradients_v2  16 bytes a lane, AT_ONCE of them under way, where rows start on 16-byte
//                                        boundaries
//
// Worklog: docs/kernels/smxx_train_dense.md
#include "twell.cuh"

#ifndef THREADS
#define THREADS 256  // a warp a row
#endif
#define AT_ONCE 4    // vectors of each array that a lane has under way

__device__ __forceinline__ float relu(float g) { return !(g <= 0.0f) ? g : 0.0f; }  // NaN stays
__device__ __forceinline__ float sign(float h) { return (float)((h > 0.0f) - (h < 0.0f)); }  // 0 for NaN, as in torch

// What the matrix product reads: rounded once, the product of two 16-bit values being exact before.
__device__ __forceinline__ float hidden(float g, float u, bool gated) {
    return to_float(from_float(gated ? relu(g) * u : relu(g)));
}

struct RowSum {
    sum_t l1;
    int kept;
    __device__ __forceinline__ void add(float g, float h) { l1 += (sum_t)fabsf(h), kept += !(g <= 0.0f); }
    // The warp's, of lane 0.
    __device__ __forceinline__ void store(float* l1_of_row, int* kept_of_row) {
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            l1 += __shfl_xor_sync(ALL_LANES, l1, step);
            kept += __shfl_xor_sync(ALL_LANES, kept, step);
        }
        if (threadIdx.x % WARP == 0) *l1_of_row = (float)l1, *kept_of_row = kept;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
dense_hidden_v1(const value_t* __restrict__ gate, const value_t* __restrict__ up, value_t* __restrict__ h,
                float* __restrict__ l1, int* __restrict__ kept, long long rows, int d_ff) {
    const long long row = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    RowSum sum = {0, 0};
    for (int c = threadIdx.x % WARP; c < d_ff; c += WARP) {
        const long long at = row * d_ff + c;
        const float g = to_float(gate[at]), f = hidden(g, up ? to_float(up[at]) : 0.0f, up != nullptr);
        h[at] = from_float(f);
        sum.add(g, f);
    }
    sum.store(l1 + row, kept + row);
}

extern "C" __global__ void __launch_bounds__(THREADS)
dense_hidden_v2(const value_t* __restrict__ gate, const value_t* __restrict__ up, value_t* __restrict__ h,
                float* __restrict__ l1, int* __restrict__ kept, long long rows, int d_ff) {
    const long long row = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const long long start = row * d_ff;
    RowSum sum = {0, 0};
    for (int c = threadIdx.x % WARP * VECTOR; c < d_ff; c += AT_ONCE * WARP * VECTOR) {
        Vector g[AT_ONCE], u[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int at = c + k * WARP * VECTOR;
            g[k].raw = at < d_ff ? __ldcs((const uint4*)(gate + start + at)) : make_uint4(0, 0, 0, 0);
            u[k].raw = up && at < d_ff ? __ldcs((const uint4*)(up + start + at)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            float a[VECTOR], b[VECTOR];
            g[k].to_floats(a), u[k].to_floats(b);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                b[i] = hidden(a[i], b[i], up != nullptr);
                sum.add(a[i], b[i]);  // past the row's end g is 0: nothing
            }
            const int at = c + k * WARP * VECTOR;
            if (at < d_ff) *(uint4*)(h + start + at) = Vector::of_floats(b).raw;
        }
    }
    sum.store(l1 + row, kept + row);
}

// h, dg and du of one value, from g, u and dh; slope: dl1 of the row.
__device__ __forceinline__ void gradients(float& g, float& u, float& dh, float slope, bool gated) {
    const float h = hidden(g, u, gated), active = relu(g);
    const float whole = dh + slope * sign(h);
    dh = !(g <= 0.0f) ? (gated ? whole * u : whole) : 0.0f;
    u = whole * active;
    g = h;
}

// dg is written over dh.
extern "C" __global__ void __launch_bounds__(THREADS)
dense_gradients_v1(const value_t* __restrict__ gate, const value_t* __restrict__ up, const float* __restrict__ dl1,
                   value_t* __restrict__ dh, value_t* __restrict__ h, value_t* __restrict__ du, long long rows, int d_ff) {
    const long long row = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const float slope = dl1 ? dl1[row] : 0.0f;
    for (int c = threadIdx.x % WARP; c < d_ff; c += WARP) {
        const long long at = row * d_ff + c;
        float a = to_float(gate[at]), b = up ? to_float(up[at]) : 0.0f, d = to_float(dh[at]);
        gradients(a, b, d, slope, up != nullptr);
        h[at] = from_float(a), dh[at] = from_float(d);
        if (up) du[at] = from_float(b);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
dense_gradients_v2(const value_t* __restrict__ gate, const value_t* __restrict__ up, const float* __restrict__ dl1,
                   value_t* __restrict__ dh, value_t* __restrict__ h, value_t* __restrict__ du, long long rows, int d_ff) {
    const long long row = (long long)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    const long long start = row * d_ff;
    const float slope = dl1 ? dl1[row] : 0.0f;
    for (int c = threadIdx.x % WARP * VECTOR; c < d_ff; c += AT_ONCE * WARP * VECTOR) {
        Vector g[AT_ONCE], u[AT_ONCE], d[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int at = c + k * WARP * VECTOR;
            g[k].raw = at < d_ff ? __ldcs((const uint4*)(gate + start + at)) : make_uint4(0, 0, 0, 0);
            u[k].raw = up && at < d_ff ? __ldcs((const uint4*)(up + start + at)) : make_uint4(0, 0, 0, 0);
            d[k].raw = at < d_ff ? __ldcs((const uint4*)(dh + start + at)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            const int at = c + k * WARP * VECTOR;
            float a[VECTOR], b[VECTOR], e[VECTOR];
            g[k].to_floats(a), u[k].to_floats(b), d[k].to_floats(e);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) gradients(a[i], b[i], e[i], slope, up != nullptr);
            if (at < d_ff) {
                *(uint4*)(h + start + at) = Vector::of_floats(a).raw;
                *(uint4*)(dh + start + at) = Vector::of_floats(e).raw;
                if (up) *(uint4*)(du + start + at) = Vector::of_floats(b).raw;
            }
        }
    }
}
