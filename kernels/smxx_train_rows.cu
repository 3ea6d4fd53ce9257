// What a training step computes row by row from the survivors of a layer (spans.cuh), v1: a block a token, whole rows
// in registers. h = g u in a gated layer, h = g in a plain one. Lost rows are left alone. v2, by slabs of columns:
// smxx_train_slabs.cu.
//   weighted_rows    y  = sum of h down_t[column] + bias                                     of the forward pass
//   hidden_gradient  dh = dy . down_t[column] + dl1 sign(h), in fp32 beside the words         of the backward pass
//   input_gradient   dx = sum of dh u gate[column] + dh g up[column]; plain: dh up[column]
//
// What bounds it: the L2 cache, through which every kept value reads a row of each matrix, 4 KB at d_model 2048.
// Worklog: docs/kernels/smxx_train_rows.md
#define LEAN
#include "dense_row.cuh"
#include "row_walk.cuh"
#include "spans.cuh"

__device__ __forceinline__ const value_t* row_of_matrix(const value_t* m, int row) { return m + (long long)row * D_MODEL; }

extern "C" __global__ void ONE_TOKEN_BLOCK
weighted_rows_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const int2 span = spans[row];
    if (span.x == LOST) return;
    RowSums sum = start_row(bias);
    for (int at = span.x, end = span.x + span.y; at < end; at += WARP) {
        float value = 0;
        int column = 0;
        if (at + lane < end) {
            const word_t w = words[at + lane];
            value = hidden_value(to_float(word_value(w)), ups, at + lane), column = word_column(w);
        }
        const int n = min(WARP, end - at);
        for (int k = 0; k < n; ++k) {
            const float h = __shfl_sync(ALL_LANES, value, k);
            add_scaled(sum, h, load_row(row_of_matrix(down_t, __shfl_sync(ALL_LANES, column, k))));
        }
    }
    store_row(y + (long long)row * D_MODEL, sum);
}

extern "C" __global__ void ONE_TOKEN_BLOCK
hidden_gradient_v1(const value_t* __restrict__ dy, const int2* __restrict__ spans, const word_t* __restrict__ words,
                   const float* __restrict__ ups, const value_t* __restrict__ down_t, const float* __restrict__ dl1,
                   float* __restrict__ dh) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const RowVectors in = load_row_once(dy + (long long)row * D_MODEL);
    const int2 span = spans[row];
    if (span.x == LOST) return;
    const float slope = dl1 ? dl1[row] : 0.0f;
    for (int at = span.x, end = span.x + span.y, turn = 0; at < end; at += WARP, turn ^= 1) {
        word_t word = 0;
        if (at + lane < end) word = words[at + lane];
        const int column = word_column(word), n = min(WARP, end - at);
        sum_t dot = 0;  // of lane k: this warp's part of the k-th entry's
        for (int k = 0; k < n; ++k) {
            const sum_t of_k = warp_sum(dot_part(in, load_row(row_of_matrix(down_t, __shfl_sync(ALL_LANES, column, k)))));
            if (lane == k) dot = of_k;
        }
#if WARPS > 1
        __shared__ sum_t part[2][WARPS][WARP];  // two sets take turns, see team_sum of smxx_gated.cu
        part[turn][threadIdx.x / WARP][lane] = dot;
        __syncthreads();
        dot = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) dot += part[turn][w][lane];
#endif
        if (threadIdx.x < WARP && at + lane < end) {
            if (dl1) dot = fmaf(slope, sign_of(hidden_value(to_float(word_value(word)), ups, at + lane)), dot);
            dh[at + lane] = dot;
        }
    }
}

// ups and gate: both or neither.
extern "C" __global__ void ONE_TOKEN_BLOCK
input_gradient_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                  const float* __restrict__ dh, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                  value_t* __restrict__ dx) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const int2 span = spans[row];
    if (span.x == LOST) return;
    RowSums sum = row_of(0);
    for (int at = span.x, end = span.x + span.y; at < end; at += WARP) {
        float of_gate = 0, of_up = 0;
        int column = 0;
        if (at + lane < end) {
            const word_t w = words[at + lane];
            of_up = dh[at + lane], column = word_column(w);
            if (ups) of_gate = of_up * ups[at + lane], of_up *= to_float(word_value(w));
        }
        const int n = min(WARP, end - at);
        for (int k = 0; k < n; ++k) {
            const int c = __shfl_sync(ALL_LANES, column, k);
            if (gate) add_scaled(sum, __shfl_sync(ALL_LANES, of_gate, k), load_row(row_of_matrix(gate, c)));
            add_scaled(sum, __shfl_sync(ALL_LANES, of_up, k), load_row(row_of_matrix(up, c)));
        }
    }
    store_row(dx + (long long)row * D_MODEL, sum);
}
