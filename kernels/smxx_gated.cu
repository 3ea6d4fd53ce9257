// gated: y = (g * (x up^T + up_bias)) down_t + down_bias over the kept gate values g of each row: what is left of a
// gated feed-forward layer once its gate is packed. up and down_t are [columns][d_model].
//
// What bounds it: the L2 cache. Every kept value reads a row of up and a row of down_t through it, 8 KB at d_model
// 2048, 16 bits.
//
//   gated_v1  a block for a token and SLAB columns of y; its threads share each dot product and meet at two barriers
//             for every kept value. Scalar loads, any d_model
//   gated_v2  a warp a token (WARPS of them where a lane would hold more than four chunks): x and the sums stay in
//             registers
//   gated_v3  the row of down_t is fetched before the dot product is known: two latencies overlap
//   gated_v4  for few tokens: TEAMS teams share the kept values of one token and add up at the end
// With POOL (16-bit values) overflow comes from the pool, lost rows are handed on, and sums can start from `start`:
//   gated_v5  v3, with x and start read past the caches; gated_v6  v4. For many tokens smxx_up.cu is faster.
// Worklog: docs/kernels/smxx_gated.md
#include "dense_row.cuh"
#include "row_walk.cuh"
#if defined(POOL)
#include "pool_walk.cuh"
#endif

#if !defined(POOL)
// Whether a silent neuron makes NaN of a row of x that is not finite. With a ReLU on up (BOTH, see activation.cuh) it does
// not where up is minus infinity; so there one neuron after the other of the dense gate is asked, and nearly always one
// of the first answers.
__device__ __forceinline__ bool spoilt_v1(const Packed& m, int row, const value_t* in, const value_t* up,
                                          const value_t* up_bias, int d_model) {
#if defined(BOTH)
    __shared__ sum_t part[128 / WARP];
    for (int column = 0; column < m.columns; ++column) {
        if (kept(m.gate[(long long)row * m.columns + column])) continue;
        const value_t* u = up + (long long)column * d_model;
        sum_t dot = 0;
        for (int c = threadIdx.x; c < d_model; c += blockDim.x) dot = fma((sum_t)to_float(in[c]), (sum_t)to_float(u[c]), dot);
        dot = warp_sum(dot);
        if (threadIdx.x % WARP == 0) part[threadIdx.x / WARP] = dot;
        __syncthreads();
        dot = part[0] + part[1] + part[2] + part[3];
        __syncthreads();
        if (!(dot + (up_bias ? to_float(up_bias[column]) : 0.0f) <= 0)) return true;
    }
    return false;
#else
    return true;
#endif
}

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
    if (__syncthreads_or(nonfinite) && !walk.full() && spoilt_v1(m, row, in, up, up_bias, d_model)) {
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
            const sum_t h = hidden(value, dot + (up_bias ? to_float(up_bias[column]) : 0.0f));
            const value_t* w = down_t + (long long)column * d_model;
            for (int c = first + threadIdx.x; c < last; c += blockDim.x)
                sum[c - first] = fma(h, (sum_t)to_float(w[c]), sum[c - first]);
        }
    }
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float((float)sum[c - first]);
}
#endif

// The sum over the lanes of the team. Several warps meet at one barrier in each call. Two sets of parts take turns, so
// that a warp which is already in the next call writes the set that no warp is reading.
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
            if (mine) add_scaled(sum, hidden(value, dot), w);
        }
    }
}

#if !defined(POOL)
// As spoilt_v1. Every team computes the same, so that all of the block agree.
__device__ __forceinline__ bool spoilt(const Packed& m, int row, const RowVectors& in, const value_t* up,
                                       const value_t* up_bias) {
#if defined(BOTH)
    int turn = 0;
    for (int column = 0; column < m.columns; ++column) {
        if (kept(m.gate[(long long)row * m.columns + column])) continue;
        const sum_t dot = team_sum(dot_part(in, load_row(up + (long long)column * D_MODEL)), turn);
        if (!(dot + (up_bias ? to_float(up_bias[column]) : 0.0f) <= 0)) return true;
    }
    return false;
#else
    return true;
#endif
}

template <bool BOTH_ROWS_AT_ONCE>
__device__ __forceinline__ void gated_row(const value_t* __restrict__ x, const Packed& m,
                                          const value_t* __restrict__ up, const value_t* __restrict__ down_t,
                                          const value_t* __restrict__ up_bias,
                                          const value_t* __restrict__ down_bias, value_t* __restrict__ y,
                                          int row) {
    const RowVectors in = load_row(x + (long long)row * D_MODEL);
    RowWalk walk(m, row);
    if (any_nonfinite(in) && !walk.full() && spoilt(m, row, in, up, up_bias)) {  // see gated_v1
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
                    value_t* __restrict__ lost_x, unsigned long long* __restrict__ stats, int columns, int most) {
    const int row = blockIdx.x;
    const RowVectors in = load_row_once(x + (long long)row * D_MODEL);
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts(most);
    if (facts.lost) {  // the same in every warp
        count_row(stats, facts);
        return hand_on(in, row, facts, lost, lost_x);
    }
    count_row(stats, facts);  // not before: registers would be spilled
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
