// gated: y = (g * (x up^T + up_bias)) down_t + down_bias over the kept gate values g of each row: what is left of
// a gated feed-forward layer once its gate is packed. up and down_t are [columns][d_model].
//
// Floor: every kept value reads a row of up and a row of down_t through the L2 cache. At d_model 2048 bf16 that
// is 8 KB; 29 values a token and 16,384 tokens make 3.9 GB, 0.53 ms at 7.4 TB/s. x in and y out add 134 MB of
// device memory, 0.045 ms at 3.0 TB/s, mostly hidden behind it.
//
// Versions, with their time for 16,384 tokens, mean nnz 29, on an H100 SXM (2026-11-21, cold L2)
//   gated_v1  2.58 ms   one block a token and 2048 columns of y; the block's threads share each dot product and meet
//                       at a barrier twice for every kept value. Scalar loads, any d_model.
//   gated_v2  0.497 ms  a warp (WARPS of them, so that each lane holds at most four chunks of a row) a token: x and the
//                       sums stay in registers, 16-byte loads, the dot product is summed by shuffles.
//   gated_v3  0.491 ms  the row of down_t is fetched before the dot product is known: both rows of a kept value are
//                       under way together, so their latencies overlap.
//   gated_v4  for few tokens: TEAMS teams share the kept values of one token and add up at the end. At 1 / 8 / 64 / 256
//             tokens 13 / 17 / 17 / 27 us instead of v3's 31 / 43 / 36 / 33. At 16,384 it is slower (0.97 ms): the GPU
//             is full without it.
// With POOL (16-bit values) the kernels take overflow from the pool (pool_walk.cuh), hand lost rows on, and can start from sums
// that are there already (`start`):
//   gated_v5  v3 in one pass; x and start are read past the caches, so that they push out fewer weights. 0.503 ms beside 0.502
//             of v3 in the same run, at nnz 4 / 8 / 60 0.098 / 0.154 / 0.995 beside 0.103 / 0.156 / 0.994. start adds 0.035 ms at
//             nnz 4 and 0.02 from nnz 8 on: 134 MB, 0.045 ms at 3.0 TB/s, partly hidden. Counting into stats: no difference.
//   gated_v6  v5 with teams, for few tokens: 12 / 15 / 16 / 24 us at 1 / 8 / 64 / 256 tokens, beside 13 / 17 / 17 / 27 of v4.
//   For many tokens the two passes of smxx_up.cu are faster.
// A fifth of the rows with a tile of 40 instead of 31 values, at nnz 60: 1.120 instead of 1.089 ms, what 1.8 values more a row
// cost anyway.
// Tried, in an exploring run of which no record was kept (leads rather than evidence): v3 at WARPS = 1 and eight chunks a
// lane, 0.593 ms; its 231 registers a thread leave 9 warps on a multiprocessor, two warps a token at 128 leave 16. Four
// warps a token: 0.541 ms, eight: 0.812 ms. The one-warp version capped at 168 registers spilled: 1.02 ms. Of v5: all dot
// products of a turn first, then all the sums, 0.108 / 0.162 / 0.497 ms at nnz 4 / 8 / 29 instead of 0.099 / 0.156 / 0.493;
// that with four warps a token, 0.122 / 0.177 / 0.506; rows of weights past L1, 0.100 / 0.161 / 0.519.
#include "dense_row.cuh"
#include "row_walk.cuh"
#if defined(POOL)
#include "pool_walk.cuh"
#endif

#if !defined(POOL)
extern "C" __global__ void __launch_bounds__(128)
gated_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const value_t* __restrict__ gate,
         const long long* __restrict__ tail_pointer, const int* __restrict__ tail_column,
         const value_t* __restrict__ tail_value, const value_t* __restrict__ up,
         const value_t* __restrict__ down_t, const value_t* __restrict__ up_bias,
         const value_t* __restrict__ down_bias, value_t* __restrict__ y,
         int d_model, int columns, int tile, int words) {
    __shared__ sum_t sum[SLAB];
    __shared__ sum_t part[128 / WARP];
    const int row = blockIdx.x;
    const int first = blockIdx.y * SLAB, last = min(first + SLAB, d_model);
    const value_t* in = x + (long long)row * d_model;

    const Packed m = {packed, gate, tail_pointer, tail_column, tail_value, columns, tile, words};
    RowWalk walk(m, row);
    bool nonfinite = false;
    for (int c = threadIdx.x; c < d_model; c += blockDim.x) nonfinite |= !(fabsf(to_float(in[c])) <= 3.402823466e38f);
    // In such a row every up value is infinite or NaN; the dense layer multiplies those of silent neurons by
    // zero, which makes the whole row NaN. Follow it.
    if (__syncthreads_or(nonfinite) && !walk.full()) {
        for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float(nanf(""));
        return;
    }

    for (int c = first + threadIdx.x; c < last; c += blockDim.x)
        sum[c - first] = down_bias ? to_float(down_bias[c]) : 0;
    Entries e;
    while (walk.next(e)) {
        for (unsigned left = e.lanes; left; left &= left - 1) {
            const float value = __shfl_sync(ALL_LANES, e.value, __ffs(left) - 1);
            const int column = __shfl_sync(ALL_LANES, e.column, __ffs(left) - 1);
            const value_t* u = up + (long long)column * d_model;
            sum_t dot = 0;
            for (int c = threadIdx.x; c < d_model; c += blockDim.x) dot = fma((sum_t)to_float(in[c]), (sum_t)to_float(u[c]), dot);
            dot = warp_sum(dot);
            if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = dot;
            __syncthreads();
            dot = part[0] + part[1] + part[2] + part[3];
            __syncthreads();  // everybody has read the parts before the next value overwrites them
            const sum_t hidden = value * (dot + (up_bias ? to_float(up_bias[column]) : 0.0f));
            const value_t* w = down_t + (long long)column * d_model;
            for (int c = first + threadIdx.x; c < last; c += blockDim.x)
                sum[c - first] = fma(hidden, (sum_t)to_float(w[c]), sum[c - first]);
        }
    }
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float((float)sum[c - first]);
}
#endif

// The sum over the lanes of the team. With several warps they meet at one barrier a call: two sets of parts take
// turns, so a warp that runs ahead writes the set that nobody is reading.
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

// sum += the row's entries, each times its row of down_t. in: x's row.
template <bool BOTH_ROWS_AT_ONCE, class Walk>
__device__ __forceinline__ void add_entries(RowSums& sum, Walk& walk, const RowVectors& in,
                                            const value_t* __restrict__ up, const value_t* __restrict__ down_t,
                                            const value_t* __restrict__ up_bias) {
    int turn = 0;
    Entries e;
    while (walk.next(e)) {
        unsigned left = drop(e.lanes, team());
        // As many steps for every team, also for one that has run out: they meet at barriers.
        for (int steps = (__popc(e.lanes) + TEAMS - 1) / TEAMS; steps; --steps, left = drop(left, TEAMS)) {
            const bool mine = TEAMS == 1 || left;
            const int source = __ffs(mine ? left : e.lanes) - 1;
            const float value = __shfl_sync(ALL_LANES, e.value, source);
            const int column = __shfl_sync(ALL_LANES, e.column, source);
            const long long start = (long long)column * D_MODEL;
            const RowVectors u = load_row(up + start);
            RowVectors w;
            if (BOTH_ROWS_AT_ONCE) w = load_row_if(mine, down_t + start);
            const sum_t dot = team_sum(dot_part(in, u), turn) + (up_bias ? to_float(up_bias[column]) : 0.0f);
            if (!BOTH_ROWS_AT_ONCE) w = load_row(down_t + start);
            if (mine) add_scaled(sum, value * dot, w);
        }
    }
}

#if !defined(POOL)
template <bool BOTH_ROWS_AT_ONCE>
__device__ __forceinline__ void gated_row(const value_t* __restrict__ x, const Packed& m,
                                          const value_t* __restrict__ up, const value_t* __restrict__ down_t,
                                          const value_t* __restrict__ up_bias,
                                          const value_t* __restrict__ down_bias, value_t* __restrict__ y,
                                          int row) {
    const RowVectors in = load_row(x + (long long)row * D_MODEL);
    RowWalk walk(m, row);
    if (any_nonfinite(in) && !walk.full()) {  // see gated_v1
        if (team() == 0) store_row(y + (long long)row * D_MODEL, row_of(nanf("")));
        return;
    }
    RowSums sum = start_row(team() == 0 ? down_bias : nullptr);
    add_entries<BOTH_ROWS_AT_ONCE>(sum, walk, in, up, down_t, up_bias);
    store_teams_row(y + (long long)row * D_MODEL, sum);
}

#define GATED_KERNEL(NAME, BOTH)                                                                                \
    extern "C" __global__ void ONE_TOKEN_BLOCK NAME(                                                            \
        const value_t* __restrict__ x, const word_t* __restrict__ packed, const value_t* __restrict__ gate,     \
        const long long* __restrict__ tail_pointer, const int* __restrict__ tail_column,                        \
        const value_t* __restrict__ tail_value, const value_t* __restrict__ up,                                 \
        const value_t* __restrict__ down_t, const value_t* __restrict__ up_bias,                                \
        const value_t* __restrict__ down_bias, value_t* __restrict__ y, int d_model, int columns, int tile,     \
        int words) {                                                                                            \
        const Packed m = {packed, gate, tail_pointer, tail_column, tail_value, columns, tile, words};           \
        gated_row<BOTH>(x, m, up, down_t, up_bias, down_bias, y, blockIdx.x);                                   \
    }

#if TEAMS == 1
GATED_KERNEL(gated_v2, false)
GATED_KERNEL(gated_v3, true)
#else
GATED_KERNEL(gated_v4, true)
#endif

#else
#if TEAMS == 1
#define GATED_POOLED_KERNEL gated_v5
#else
#define GATED_POOLED_KERNEL gated_v6
#endif

extern "C" __global__ void ONE_TOKEN_BLOCK
GATED_POOLED_KERNEL(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
                    const value_t* __restrict__ up, const value_t* __restrict__ down_t,
                    const value_t* __restrict__ up_bias, const value_t* __restrict__ down_bias,
                    const float* __restrict__ start, value_t* __restrict__ y, int* __restrict__ lost,
                    value_t* __restrict__ lost_x, unsigned long long* __restrict__ stats, int columns) {
    const int row = blockIdx.x;
    const RowVectors in = load_row_once(x + (long long)row * D_MODEL);
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts();
    count_row(stats, facts);
    if (facts.lost) return hand_on(in, row, lost, lost_x);  // every warp finds the same facts
    if (any_nonfinite(in) && facts.kept < columns) {  // see gated_v1
        if (team() == 0) store_row(y + (long long)row * D_MODEL, row_of(nanf("")));
        return;
    }
    RowSums sum = start_row(team() == 0 ? down_bias : nullptr);
    if (start && team() == 0) add_floats(sum, start + (long long)row * D_MODEL);
    add_entries<true>(sum, walk, in, up, down_t, up_bias);
    store_teams_row(y + (long long)row * D_MODEL, sum);
}
#endif
