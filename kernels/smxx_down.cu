// down: y = packed x down_t + bias, the second half of a plain ReLU layer. down_t is [columns][d_model]: the down
// projection transposed, so that one kept value needs one contiguous row.
//
// What bounds it: the L2 cache. Every kept value reads a row of down_t through it, 4 KB at d_model 2048 and 16 bits.
//
//   down_v1  a block for a token and SLAB columns of y; a thread a column at a time, scalar loads. Any d_model
//   down_v2  a warp a token (WARPS of them where a row would not fit one warp's registers), 16-byte loads, sums in
//            registers
//   down_v3  v2 for few tokens: TEAMS teams share the kept values of one token and add up at the end
// With POOL (16-bit values) overflow comes from the pool, lost rows are handed on, and sums can start from `start`:
//   down_v4  v2; down_v5  v3
//   down_v6  with HIDDEN: the second pass of a gated layer (smxx_up.cu), whose values come from a list that up_v1 left
// Worklog: docs/kernels/smxx_down.md
#if defined(HIDDEN) || defined(POOL) && !defined(TEAMS)
#define LEAN
#endif
#include "dense_row.cuh"
#include "row_walk.cuh"
#if defined(POOL)
#include "pool_walk.cuh"
#endif

#if !defined(POOL)
extern "C" __global__ void __launch_bounds__(128)
down_v1(const word_t* __restrict__ packed, const value_t* __restrict__ gate,
        const long long* __restrict__ tail_pointer, const int* __restrict__ tail_column,
        const value_t* __restrict__ tail_value, const value_t* __restrict__ down_t,
        const value_t* __restrict__ bias, value_t* __restrict__ y,
        int d_model, int columns, int tile, int words) {
    __shared__ sum_t sum[SLAB];
    const int row = blockIdx.x;
    const int first = blockIdx.y * SLAB, last = min(first + SLAB, d_model);
    // Each thread owns the columns it visits, so the sums need no barrier.
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) sum[c - first] = bias ? to_float(bias[c]) : 0;

    const Packed m = {packed, gate, tail_pointer, tail_column, tail_value, columns, tile, words};
    RowWalk walk(m, row);
    Entries e;
    while (walk.next(e)) {
        for (unsigned left = e.lanes; left; left &= left - 1) {
            const float value = __shfl_sync(ALL_LANES, e.value, __ffs(left) - 1);
            const value_t* w = down_t + (long long)__shfl_sync(ALL_LANES, e.column, __ffs(left) - 1) * d_model;
            for (int c = first + threadIdx.x; c < last; c += blockDim.x)
                sum[c - first] = fma((sum_t)value, (sum_t)to_float(w[c]), sum[c - first]);
        }
    }
    for (int c = first + threadIdx.x; c < last; c += blockDim.x) y[(long long)row * d_model + c] = from_float((float)sum[c - first]);
}
#endif

// sum += the value of lane k's entry times its row of down_t.
__device__ __forceinline__ void add_entry(RowSums& sum, const Entries& e, int k, const value_t* __restrict__ down_t) {
    const float value = __shfl_sync(ALL_LANES, e.value, k);
    const int column = __shfl_sync(ALL_LANES, e.column, k);
    add_scaled(sum, value, load_row(down_t + (long long)column * D_MODEL));
}

// sum += the row's entries, each times its row of down_t.
template <class Walk>
__device__ __forceinline__ void add_entries(RowSums& sum, Walk& walk, const value_t* __restrict__ down_t) {
    Entries e;
    while (walk.next(e)) {
        for (unsigned left = drop(e.lanes, team()); left; left = drop(left, TEAMS))
            add_entry(sum, e, __ffs(left) - 1, down_t);
    }
}

#if defined(HIDDEN)
extern "C" __global__ void ONE_TOKEN_BLOCK
down_v6(const word_t* __restrict__ packed, const word_t* __restrict__ pool, float* __restrict__ hidden,
        float* __restrict__ hidden_pool, const value_t* __restrict__ down_t, const value_t* __restrict__ bias,
        const float* __restrict__ start, value_t* __restrict__ y, unsigned long long* __restrict__ stats, int columns) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    count_rows(stats, hidden, columns);
    const HiddenRow list(hidden, row, columns);
    int2 pair = make_int2(0, 0);  // lane k: pair number at + k. The first are loaded before it is known how many there are
    if (lane < list.room) pair = list.pairs[lane];
    RowSums sum = start_row(bias);
    if (start) add_floats(sum, start + (long long)row * D_MODEL);
    const int head = __shfl_sync(ALL_LANES, pair.x, 0);
    const int became = head & 3, kept = head >> 3;
    if (became == ROW_LISTED) {
        for (int i = 1, at = 0; i <= kept; ++i) {
            if (i == at + WARP) {
                at = i;
                if (at + lane <= kept) pair = list.pairs[at + lane];
            }
            add_entry(sum, {ALL_LANES, __int_as_float(pair.x), pair.y}, i - at, down_t);
        }
    } else if (became == ROW_BESIDE) {
        const Pooled m = {packed, pool, columns};
        PoolWalk walk(m, row);
        Entries e;
        while (walk.next(e)) {
            if (e.lanes >> lane & 1) e.value = *walk.beside(hidden, hidden_pool);
            for (unsigned left = e.lanes; left; left &= left - 1) add_entry(sum, e, __ffs(left) - 1, down_t);
        }
    } else if (became == ROW_LOST) {
        return;
    } else {
        sum = row_of(nanf(""));
    }
    store_row(y + (long long)row * D_MODEL, sum);
}

#elif !defined(POOL)
#if TEAMS == 1
#define DOWN_REGISTER_KERNEL down_v2
#else
#define DOWN_REGISTER_KERNEL down_v3
#endif

extern "C" __global__ void ONE_TOKEN_BLOCK
DOWN_REGISTER_KERNEL(const word_t* __restrict__ packed, const value_t* __restrict__ gate,
                     const long long* __restrict__ tail_pointer, const int* __restrict__ tail_column,
                     const value_t* __restrict__ tail_value, const value_t* __restrict__ down_t,
                     const value_t* __restrict__ bias, value_t* __restrict__ y,
                     int d_model, int columns, int tile, int words) {
    const int row = blockIdx.x;
    RowSums sum = start_row(team() == 0 ? bias : nullptr);
    const Packed m = {packed, gate, tail_pointer, tail_column, tail_value, columns, tile, words};
    RowWalk walk(m, row);
    add_entries(sum, walk, down_t);
    store_teams_row(y + (long long)row * D_MODEL, sum);
}

#else
#if TEAMS == 1
#define DOWN_POOLED_KERNEL down_v4
#else
#define DOWN_POOLED_KERNEL down_v5
#endif

// x is read for the lost rows only.
extern "C" __global__ void ONE_TOKEN_BLOCK
DOWN_POOLED_KERNEL(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
                   const value_t* __restrict__ down_t, const value_t* __restrict__ bias,
                   const float* __restrict__ start, value_t* __restrict__ y, int* __restrict__ lost,
                   value_t* __restrict__ lost_x, unsigned long long* __restrict__ stats, int columns, int most) {
    const int row = blockIdx.x;
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts(most);
    count_row(stats, facts);
    if (facts.lost) return hand_on(load_row(x + (long long)row * D_MODEL), row, facts, lost, lost_x);
    RowSums sum = start_row(team() == 0 ? bias : nullptr);
    if (start && team() == 0) add_floats(sum, start + (long long)row * D_MODEL);
    add_entries(sum, walk, down_t);
    store_teams_row(y + (long long)row * D_MODEL, sum);
}
#endif
