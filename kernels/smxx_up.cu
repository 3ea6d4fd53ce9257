// up: hidden = g * (x up^T + up_bias) at the kept gate values g of each row and nowhere else, the first of the two passes of
// a gated layer; smxx_down.cu, compiled with HIDDEN, is the second. (A sampled dense-dense product, then a sparse-dense one.)
//
// Why two passes. One kernel that reads a row of up and a row of down_t for every kept value (gated_v5) has both matrices in
// use at once: 46 MB at d_model 2048, d_ff 5632, in an L2 cache of 50 MB through which x, start and y pass as well. Where
// all neurons fire about equally often, as those do that a hot/cold split leaves, many rows come from device memory again.
// Each pass has one matrix in use, 23 MB. It needs fewer registers too, so that 12 tokens a multiprocessor are under way
// instead of 8. Between the passes lie 8 bytes a kept value.
//
// Floor of both passes, 16,384 tokens, d_model 2048 bf16: 134 MB of x and y through device memory, 0.045 ms at 3.0 TB/s,
// 0.09 with `start`; 8 KB a kept value through the L2 cache, 0.018 ms for each value of the mean nnz at 7.4 TB/s.
//
// Versions, in ms for 16,384 tokens on an H100 SXM (2026-11-21, cold L2): up_v1 and down_v6 together beside the one pass of
// gated_v5, both with stats
//                        lognormal rates, 30% dead                all neurons equally often
//   mean nnz             4      8      15     29     60           4      8      15     29
//   gated_v5             0.098  0.154  0.269  0.503  0.995        0.149  0.220  0.343  0.581
//   up_v1, down_v6       0.096  0.154  0.254  0.463  0.910        0.118  0.167  0.282  0.518
//   with start:
//   gated_v5             0.133  0.175  0.288  0.521  1.013        0.192  0.261  0.381  0.614
//   up_v1, down_v6       0.133  0.176  0.274  0.483  0.930        0.158  0.192  0.301  0.536
// With fewer tokens one pass wins, 0.029 beside 0.036 ms at 2,048 and nnz 8; at 4,096 neither does clearly.
// stats were counted by each block of up_v1 then, which at nnz 4 cost 0.004 to 0.005 ms (16,384 atomic operations on one
// number); now every sixteenth block of down_v6 counts, which has not been timed.
// Tried, exploring runs of which no record was kept: a down pass that walks the tiles again for its columns instead of
// reading a list, 0.113 instead of 0.095 ms at nnz 4 (three loads that wait for each other where the list needs one); two rows
// of up under way at once, 0.092 instead of 0.085 ms for this pass at nnz 8; the shuffles of four dot products together, one
// warp a token, x kept as floats: no change; four warps a token, 16 tokens a multiprocessor at 64 registers: 2 to 8% slower.
#define LEAN
#include "pool_walk.cuh"

// first: the number of row 0, in `lost`.
extern "C" __global__ void ONE_TOKEN_BLOCK
up_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
      const value_t* __restrict__ up, const value_t* __restrict__ up_bias, float* __restrict__ hidden,
      float* __restrict__ hidden_pool, int* __restrict__ lost, value_t* __restrict__ lost_x, int columns, int first) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const RowVectors in = load_row_once(x + (long long)row * D_MODEL);
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts();
    const bool spoilt = any_nonfinite(in) && facts.kept < columns;  // see gated_v1
    const HiddenRow list(hidden, row, columns);
    const bool listed = facts.kept < list.room;
    if (threadIdx.x == 0) {
        const int became = facts.lost ? ROW_LOST : spoilt ? ROW_NAN : listed ? ROW_LISTED : ROW_BESIDE;
        list.head() = facts.kept << 3 | facts.pooled << 2 | became;
    }
    if (facts.lost) return hand_on(in, first + row, lost, lost_x);
    if (spoilt) return;

    Entries e;
    for (int at = 1, turn = 0; walk.next(e); at += __popc(e.lanes), turn ^= 1) {
        sum_t dot = 0;  // of lane k: this warp's part of the k-th entry's
        for (unsigned left = e.lanes; left; left &= left - 1) {
            const int k = __ffs(left) - 1;
            const long long column = __shfl_sync(ALL_LANES, e.column, k);
            const sum_t of_k = warp_sum(dot_part(in, load_row(up + column * D_MODEL)));
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
        if (threadIdx.x < WARP && (e.lanes >> lane & 1)) {
            const float h = e.value * (dot + (up_bias ? to_float(up_bias[e.column]) : 0.0f));
            if (listed)
                list.pairs[at + lane] = make_int2(__float_as_int(h), e.column);
            else
                *walk.beside(hidden, hidden_pool) = h;
        }
    }
}
