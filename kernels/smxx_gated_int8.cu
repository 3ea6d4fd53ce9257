// gated_int8: y = (g * (x up^T + up_bias)) down + down_bias over the kept gate values g of each row, as smxx_gated.cu, with
// rows of INT8: up and down are int8 [columns][d_model], each row with a float to multiply it with. Without up (null), as
// in a plain layer, y = g down + down_bias. A row of x that is not finite gives NaN.
//
// What bounds it: the L2 cache. Every kept value reads a row of up and a row of down through it, 4 KB at d_model 2048;
// next the conversions, two instructions for each byte, which are fused: no 16-bit row is ever written.
//
//   gated_int8_v1  a block for a token and SLAB columns of y; bytes one by one, any d_model
//   gated_int8_v2  a warp a token (WARPS of them where a lane would hold more than four chunks), 8 bytes a lane and load:
//                  x and the sums stay in registers
//   gated_int8_v3  the row of down is fetched before the dot product is known
//   gated_int8_v4  for few tokens: TEAMS teams share the kept values of one token and add up at the end
// Worklog: docs/kernels/smxx_gated_int8.md
#include "dense_row.cuh"
#include "row_walk.cuh"

#define WORDS_OF_BYTES (VECTOR / 4)  // 32-bit words in the bytes that go with one vector of x

// This thread's part of a row of bytes: those of the columns that it has of x.
struct RowBytes {
    unsigned w[CHUNKS][WORDS_OF_BYTES];
};

__device__ __forceinline__ RowBytes load_bytes(bool wanted, const signed char* row) {
    RowBytes r;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        const bool there = wanted && chunk_column(k) < D_MODEL;
#if defined(VALUE_FP32)
        r.w[k][0] = there ? __ldg((const unsigned*)(row + chunk_column(k))) : 0;
#else
        const uint2 pair = there ? __ldg((const uint2*)(row + chunk_column(k))) : make_uint2(0, 0);
        r.w[k][0] = pair.x, r.w[k][1] = pair.y;
#endif
    }
    return r;
}

// Byte i of a chunk. With its sign turned, a byte b is b + 128 from 0 to 255; as the last bits of 2^23's float it is
// 2^23 + b + 128, exactly. So no conversion instruction is needed, of which a multiprocessor does few at a time.
__device__ __forceinline__ float byte_of(const unsigned* w, int i) {
    return __uint_as_float(__byte_perm(w[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7440 + i % 4)) - 8388736.0f;
}

__device__ __forceinline__ sum_t dot_bytes(const RowVectors& x, const RowBytes& row) {
    sum_t sum = 0;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float f[VECTOR];
        x.v[k].to_floats(f);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum = fma((sum_t)f[i], (sum_t)byte_of(row.w[k], i), sum);
    }
    return sum;
}

__device__ __forceinline__ void add_bytes(RowSums& sum, sum_t scale, const RowBytes& row) {
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
            sum.f[k * VECTOR + i] = fma(scale, (sum_t)byte_of(row.w[k], i), sum.f[k * VECTOR + i]);
}

extern "C" __global__ void __launch_bounds__(128)
gated_int8_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const value_t* __restrict__ gate,
              const signed char* __restrict__ up, const float* __restrict__ up_scale,
              const signed char* __restrict__ down, const float* __restrict__ down_scale,
              const value_t* __restrict__ up_bias, const value_t* __restrict__ down_bias, value_t* __restrict__ y,
              int d_model, int columns, int tile, int words) {
    __shared__ sum_t sum[SLAB];
    __shared__ sum_t part[128 / WARP];
    const int row = blockIdx.x;
    const int first = blockIdx.y * SLAB, last = min(first + SLAB, d_model);
    const value_t* in = x + (long long)row * d_model;

    bool nonfinite = false;
    for (int c = threadIdx.x; c < d_model; c += blockDim.x) nonfinite |= !(fabsf(to_float(in[c])) <= 3.402823466e38f);
    nonfinite = __any_sync(ALL_LANES, nonfinite);
    if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = nonfinite;
    __syncthreads();
    nonfinite = part[0] + part[1] + part[2] + part[3] > 0;
    __syncthreads();
    if (nonfinite) {
        for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float(nanf(""));
        return;
    }

    for (int c = first + threadIdx.x; c < last; c += blockDim.x)
        sum[c - first] = down_bias ? to_float(down_bias[c]) : 0;
    const Packed m = {packed, gate, nullptr, nullptr, nullptr, columns, tile, words};
    RowWalk walk(m, row);
    Entries e;
    while (walk.next(e)) {
        for (unsigned left = e.lanes; left; left &= left - 1) {
            const float value = __shfl_sync(ALL_LANES, e.value, __ffs(left) - 1);
            const int column = __shfl_sync(ALL_LANES, e.column, __ffs(left) - 1);
            sum_t h = value;
            if (up) {
                const signed char* u = up + (long long)column * d_model;
                sum_t dot = 0;
                for (int c = threadIdx.x; c < d_model; c += blockDim.x) dot = fma((sum_t)to_float(in[c]), (sum_t)u[c], dot);
                dot = warp_sum(dot);
                if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = dot;
                __syncthreads();
                dot = part[0] + part[1] + part[2] + part[3];
                __syncthreads();  // everybody has read the parts before the next value overwrites them
                h *= dot * up_scale[column] + (up_bias ? to_float(up_bias[column]) : 0.0f);
            }
            h *= down_scale[column];
            const signed char* w = down + (long long)column * d_model;
            for (int c = first + threadIdx.x; c < last; c += blockDim.x) sum[c - first] = fma(h, (sum_t)w[c], sum[c - first]);
        }
    }
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float((float)sum[c - first]);
}

// The sum over the lanes of the team; see smxx_gated.cu.
__device__ __forceinline__ sum_t team_sum(sum_t v, int& turn) {
    v = warp_sum(v);
#if WARPS > 1
    __shared__ sum_t part[2][TEAMS][WARPS];
    if (threadIdx.x % WARP == 0) part[turn][team()][threadIdx.x % LANES / WARP] = v;
    __syncthreads();
    v = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) v += part[turn][team()][w];
    turn ^= 1;
#endif
    return v;
}

template <bool BOTH_ROWS_AT_ONCE>
__device__ __forceinline__ void gated_int8_row(const value_t* __restrict__ x, const Packed& m,
                                               const signed char* __restrict__ up, const float* __restrict__ up_scale,
                                               const signed char* __restrict__ down,
                                               const float* __restrict__ down_scale,
                                               const value_t* __restrict__ up_bias,
                                               const value_t* __restrict__ down_bias, value_t* __restrict__ y, int row) {
    const RowVectors in = load_row(x + (long long)row * D_MODEL);
    if (any_nonfinite(in)) {
        if (team() == 0) store_row(y + (long long)row * D_MODEL, row_of(nanf("")));
        return;
    }
    RowSums sum = start_row(team() == 0 ? down_bias : nullptr);
    RowWalk walk(m, row);
    int turn = 0;
    Entries e;
    while (walk.next(e)) {
        unsigned left = drop(e.lanes, team());
        // As many steps for every team, also for one that has run out: they meet at barriers.
        for (int steps = (__popc(e.lanes) + TEAMS - 1) / TEAMS; steps; --steps, left = drop(left, TEAMS)) {
            const bool mine = TEAMS == 1 || left;
            const int source = __ffs(mine ? left : e.lanes) - 1;
            const int column = __shfl_sync(ALL_LANES, e.column, source);
            sum_t h = __shfl_sync(ALL_LANES, e.value, source);
            const long long start = (long long)column * D_MODEL;
            RowBytes w;
            if (BOTH_ROWS_AT_ONCE) w = load_bytes(mine, down + start);
            const float scale = __ldg(down_scale + column);  // now, not in the chain that waits for the dot product
            if (up) {
                const float up_by = __ldg(up_scale + column), bias = up_bias ? to_float(up_bias[column]) : 0.0f;
                h *= team_sum(dot_bytes(in, load_bytes(true, up + start)), turn) * up_by + bias;
            }
            if (!BOTH_ROWS_AT_ONCE) w = load_bytes(mine, down + start);
            if (mine) add_bytes(sum, h * scale, w);
        }
    }
    store_teams_row(y + (long long)row * D_MODEL, sum);
}

#define GATED_INT8_KERNEL(NAME, BOTH)                                                                               \
    extern "C" __global__ void ONE_TOKEN_BLOCK NAME(                                                                \
        const value_t* __restrict__ x, const word_t* __restrict__ packed, const value_t* __restrict__ gate,         \
        const signed char* __restrict__ up, const float* __restrict__ up_scale,                                     \
        const signed char* __restrict__ down, const float* __restrict__ down_scale,                                 \
        const value_t* __restrict__ up_bias, const value_t* __restrict__ down_bias, value_t* __restrict__ y,        \
        int d_model, int columns, int tile, int words) {                                                            \
        const Packed m = {packed, gate, nullptr, nullptr, nullptr, columns, tile, words};                           \
        gated_int8_row<BOTH>(x, m, up, up_scale, down, down_scale, up_bias, down_bias, y, blockIdx.x);              \
    }

#if TEAMS == 1
GATED_INT8_KERNEL(gated_int8_v2, false)
GATED_INT8_KERNEL(gated_int8_v3, true)
#else
GATED_INT8_KERNEL(gated_int8_v4, true)
#endif
