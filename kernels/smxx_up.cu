// up: hidden = g * (x up^T + up_bias) at the kept gate values g of each row and nowhere else, the first of the two
// passes of a gated layer; smxx_down.cu, compiled with HIDDEN, is the second. (A sampled dense-dense product, then a
// sparse-dense one.)
//
// Why two passes. One kernel that reads a row of up and a row of down_t for every kept value (gated_v5) has both
// matrices in use at once, 46 MB at d_model 2048, d_ff 5632, in an L2 cache of 50 MB through which x, start and y pass
// as well. Each pass has one matrix in use, and needs fewer registers, so that more tokens a multiprocessor are under
// way. Between the passes lie 8 bytes a kept value.
//
// What bounds it: the L2 cache, 4 KB a kept value and pass at d_model 2048. Worklog: docs/kernels/smxx_up.md
#define LEAN
#include "pool_walk.cuh"

// first: the number of row 0, in `lost`. most: a row with more kept values is lost (pool_walk.cuh).
extern "C" __global__ void ONE_TOKEN_BLOCK
up_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
      const value_t* __restrict__ up, const value_t* __restrict__ up_bias, float* __restrict__ hidden,
      float* __restrict__ hidden_pool, int* __restrict__ lost, value_t* __restrict__ lost_x, int columns, int first,
      int most) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const RowVectors in = load_row_once(x + (long long)row * D_MODEL);
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts(most);
    const bool spoilt = any_nonfinite(in) && facts.kept < columns;  // see gated_v1
    const HiddenRow list(hidden, row, columns);
    const bool listed = facts.kept < list.room;
    if (threadIdx.x == 0) {
        const int became = facts.lost ? ROW_LOST : spoilt ? ROW_NAN : listed ? ROW_LISTED : ROW_BESIDE;
        list.head() = facts.kept << 3 | facts.pooled << 2 | became;
    }
    if (facts.lost) return hand_on(in, first + row, facts, lost, lost_x);
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
