// survivors: from a packed gate and its pool to what a training step keeps of a layer (spans.cuh): the kept entries of
// all rows in one list without gaps. Three launches, so that nobody races for a place in the list:
//   survivor_counts  a warp a row: how many entries it has, or LOST where its x is not finite or the pool overflowed;
//                    and the sums over the BLOCK_ROWS rows of a block
//   survivor_places  one block: prefix sums of those sums
//   survivor_words   the blocks of the first again: spans, words, lost and heavy rows; l1 of a plain layer. A warp
//                    walks a row; all warps of the block share a heavy one, a tile a warp
// Lost too: rows whose entries would end past `capacity`, and all rows behind the first of these; and heavy rows where
// there are more than `few` of them, and no more than `most` with the lost ones: then a dense product costs less.
//
// What bounds it: launches, and the counts, which lie 128 bytes apart, so that each costs 64 bytes of device memory.
//
// x is searched for values that are not finite only where the row is suspect. One infinity or NaN in x makes every
// value of the row's gate infinite or NaN: a row is suspect if it has no entries, or if its first one is not finite.
// Worklog: docs/kernels/smxx_survivors.md
#include "pool_walk.cuh"
#include "spans.cuh"

#ifndef BLOCK_ROWS
#define BLOCK_ROWS 16
#endif
#ifndef PLACE_THREADS
#define PLACE_THREADS 1024
#endif

// Of a block's rows; from survivor_places on, of all rows before the block's.
struct Totals {
    int entries, lost, heavy;  // of the rows that are not lost; how many are; how many of the others are heavy
    int more;  // entries of the heavy rows; from survivor_places on, whether all heavy rows are lost
};

// The true count of a row's tile.
__device__ __forceinline__ int count_of(const word_t* packed, int tiles, int row, int t) {
    return (int)packed[((long long)row * tiles + t) * POOLED_WORDS];
}

// How many words of tile t's pool the earlier rows of the row's group take.
__device__ __forceinline__ int pooled_before(const word_t* packed, int tiles, int row, int t) {
    const int first = row / POOL_ROWS * POOL_ROWS;
    int taken = 0;
#pragma unroll 5
    for (int k = 0; k < POOL_ROWS - 1; ++k)
        if (first + k < row) taken += max(count_of(packed, tiles, first + k, t) - SLOTS, 0);
    return taken;
}

// Whether a value of x's row is not finite, which every lane learns. The whole warp calls it.
__device__ __forceinline__ bool row_nonfinite(const value_t* row) {
    bool found = false;
    for (int c = threadIdx.x % WARP * VECTOR; c < D_MODEL; c += WARP * VECTOR) {
        Vector v;
        v.raw = __ldg((const uint4*)(row + c));
        found |= v.nonfinite();
    }
    return __any_sync(ALL_LANES, found);
}

extern "C" __global__ void __launch_bounds__(WARP * BLOCK_ROWS)
survivor_counts_v2(const value_t* __restrict__ x, const word_t* __restrict__ packed, int* __restrict__ counts,
                   Totals* __restrict__ totals, int rows, int columns) {
    __shared__ int of_row[BLOCK_ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * BLOCK_ROWS + warp;
    const int tiles = tiles_of(columns, POOLED_TILE);
    if (row < rows) {
        int kept = 0;
        bool lost = false, suspect = true;
        for (int group = 0; group < tiles; group += WARP) {
            uint2 head = make_uint2(0, 0);  // the count, and the first word behind it
            if (group + lane < tiles) head = *(const uint2*)(packed + ((long long)row * tiles + group + lane) * POOLED_WORDS);
            const unsigned some = __ballot_sync(ALL_LANES, head.x > 0);
            if (some && kept == 0) {
                const word_t first = __shfl_sync(ALL_LANES, head.y, __ffs(some) - 1);
                suspect = !(fabsf(to_float(word_value(first))) <= 3.4e38f);  // more than any finite 16-bit value
            }
            kept += sum_over_lanes((int)head.x);
            const int beyond = (int)head.x - SLOTS;  // the tile's words in the pool, if there is room for them
            if (beyond > 0) lost |= pooled_before(packed, tiles, row, group + lane) + beyond > POOL_WORDS;
        }
        lost = __any_sync(ALL_LANES, lost);
        if (suspect && !lost) lost = row_nonfinite(x + (long long)row * D_MODEL);
        if (lane == 0) counts[row] = of_row[warp] = lost ? LOST : kept;
    }
    __syncthreads();
    if (warp == 0) {
        const int count = lane < BLOCK_ROWS && blockIdx.x * BLOCK_ROWS + lane < rows ? of_row[lane] : 0;
        const int entries = sum_over_lanes(max(count, 0));
        const int of_heavy = sum_over_lanes(count > HEAVY ? count : 0);
        const unsigned lost = __ballot_sync(ALL_LANES, count == LOST), heavy = __ballot_sync(ALL_LANES, count > HEAVY);
        if (lane == 0) totals[blockIdx.x] = {entries, __popc(lost), __popc(heavy), of_heavy};
    }
}

// a + b, but at most the largest int, as are `a` and `b`. So the order of several such sums does not matter.
__device__ __forceinline__ unsigned add_up(unsigned a, unsigned b) { return min(a + b, 0x7fffffffu); }

// The sum of v over the threads before this one, in a block of PLACE_THREADS; total: over all of them.
__device__ __forceinline__ unsigned sum_before(unsigned v, unsigned& total) {
    __shared__ unsigned of_warp[PLACE_THREADS / WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    unsigned through = v;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through = add_up(through, below);
    }
    unsigned before = __shfl_up_sync(ALL_LANES, through, 1);
    if (lane == 0) before = 0;
    __syncthreads();  // of_warp of the last call was read
    if (lane == WARP - 1) of_warp[warp] = through;
    __syncthreads();
    unsigned warps = of_warp[lane];
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const unsigned below = __shfl_up_sync(ALL_LANES, warps, step);
        if (lane >= step) warps = add_up(warps, below);
    }
    total = __shfl_sync(ALL_LANES, warps, WARP - 1);
    const unsigned earlier = __shfl_sync(ALL_LANES, warps, max(warp - 1, 0));
    return add_up(before, warp ? earlier : 0);
}

// totals: of each block of rows; after it, of all rows before the block. lost: how many rows are lost and how many are
// heavy in all.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
survivor_places_v2(const int* __restrict__ counts, Totals* __restrict__ totals, int* __restrict__ lost, int rows,
                   int capacity, int few, int most) {
    const int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    unsigned entries_before = 0, lost_before = 0, heavy_before = 0, total, heavy_rows, lost_rows;
    {
        unsigned heavy = 0, lost = 0;
        for (int block = threadIdx.x; block < blocks; block += PLACE_THREADS) heavy += totals[block].heavy, lost += totals[block].lost;
        sum_before(heavy, heavy_rows), sum_before(lost, lost_rows);
    }
    const bool dense = heavy_rows > (unsigned)few && heavy_rows + lost_rows <= (unsigned)most;
    for (int first = 0; first < blocks; first += PLACE_THREADS) {
        const int block = first + threadIdx.x;
        Totals mine = {0, 0, 0, 0};
        if (block < blocks) mine = totals[block];
        if (dense) mine.entries -= mine.more, mine.lost += mine.heavy, mine.heavy = 0;
        const unsigned start = add_up(entries_before, sum_before((unsigned)mine.entries, total));
        entries_before = add_up(entries_before, total);
        if (add_up(start, (unsigned)mine.entries) > (unsigned)capacity) {  // the first such block, and all behind it
            unsigned end = start;
            mine.lost = mine.heavy = 0;
            for (int row = block * BLOCK_ROWS; row < min(rows, (block + 1) * BLOCK_ROWS); ++row) {
                const int count = dense && counts[row] > HEAVY ? LOST : counts[row];
                end = add_up(end, (unsigned)max(count, 0));
                const bool there = count != LOST && end <= (unsigned)capacity;
                mine.lost += !there, mine.heavy += there && count > HEAVY;
            }
        }
        const unsigned at = lost_before + sum_before((unsigned)mine.lost, total);
        lost_before += total;
        const unsigned heavy_at = heavy_before + sum_before((unsigned)mine.heavy, total);
        heavy_before += total;
        if (block < blocks) totals[block] = {(int)start, (int)at, (int)heavy_at, dense};
    }
    if (threadIdx.x == 0) lost[0] = (int)lost_before, lost[rows + 1] = (int)heavy_before;
}

// What this warp does of a row that the block's warps share: the entries of every BLOCK_ROWS-th tile become words of the
// list, in which the row begins at `start`. Returns the lane's part of the sum of |g|.
__device__ __forceinline__ float share_row(const word_t* __restrict__ packed, const word_t* __restrict__ pool, int row,
                                           int start, word_t* __restrict__ words, int columns) {
    const int lane = threadIdx.x % WARP, tiles = tiles_of(columns, POOLED_TILE);
    float sum = 0;
    for (int t = threadIdx.x / WARP; t < tiles; t += BLOCK_ROWS) {
        const int count = count_of(packed, tiles, row, t), earlier = row / POOL_ROWS * POOL_ROWS + lane;
        int before = 0;  // entries of the row
        for (int k = lane; k < t; k += WARP) before += count_of(packed, tiles, row, k);
        int pooled = count > SLOTS && earlier < row ? max(count_of(packed, tiles, earlier, t) - SLOTS, 0) : 0;
        const int at = start + sum_over_lanes(before);
        pooled = sum_over_lanes(pooled);
        const word_t* in_tile = packed + ((long long)row * tiles + t) * POOLED_WORDS + 1;
        const word_t* in_pool = pool + ((long long)(row / POOL_ROWS) * tiles + t) * POOL_WORDS + pooled;
        for (int i = lane; i < count; i += WARP) {
            const word_t w = i < SLOTS ? in_tile[i] : in_pool[i - SLOTS];
            words[at + i] = make_word(word_value(w), t * POOLED_TILE + word_column(w));
            sum += fabsf(to_float(word_value(w)));
        }
    }
    return sum;
}

// l1: of a plain layer, sum |g|; null: not wanted.
extern "C" __global__ void __launch_bounds__(WARP * BLOCK_ROWS)
survivor_words_v2(const word_t* __restrict__ packed, const word_t* __restrict__ pool, const int* __restrict__ counts,
                  const Totals* __restrict__ totals, int2* __restrict__ spans, int* __restrict__ kept, int* __restrict__ lost,
                  word_t* __restrict__ words, float* __restrict__ l1, int rows, int columns, int capacity) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = blockIdx.x * BLOCK_ROWS, row = first + warp;
    const Totals before = totals[blockIdx.x];
    int count = lane < BLOCK_ROWS && first + lane < rows ? counts[first + lane] : 0;
    if (before.more && count > HEAVY) count = LOST;
    // Lane k holds the facts of the block's k-th row. The end of a row may exceed the largest int; as an unsigned
    // number it does not wrap around.
    const unsigned end = (unsigned)before.entries + (unsigned)sum_up_to_lane(max(count, 0));
    const bool there = count != LOST && end <= (unsigned)capacity;
    const unsigned rows_there = __ballot_sync(ALL_LANES, there), heavy = __ballot_sync(ALL_LANES, there && count > HEAVY);
    const int begin = (int)(end - (unsigned)max(count, 0));
    const int start = __shfl_sync(ALL_LANES, begin, warp), mine = __shfl_sync(ALL_LANES, count, warp);
    const unsigned earlier = (1u << warp) - 1;
    const bool here = rows_there >> warp & 1, shared = heavy >> warp & 1;
    if (lane == 0 && row < rows) {
        spans[row] = here ? make_int2(start, mine) : make_int2(LOST, 0);
        if (here) kept[row] = mine;
        else lost[1 + before.lost + __popc(~rows_there & earlier)] = row;
        if (shared) lost[rows - before.heavy - __popc(heavy & earlier)] = row;
    }
    if (row < rows && here && !shared) {
        const Pooled m = {packed, pool, columns};
        PoolWalk walk(m, row);
        float sum = 0;
        Entries e;
        for (int at = start; walk.next(e); at += __popc(e.lanes)) {
            if (e.lanes >> lane & 1) {
                words[at + lane] = make_word(from_float(e.value), e.column);
                sum += fabsf(e.value);
            }
        }
        if (l1) {
            sum = warp_sum(sum);
            if (lane == 0) l1[row] = sum;
        }
    }
    for (unsigned left = heavy; left; left &= left - 1) {  // the same in all warps
        __shared__ float of_warp[BLOCK_ROWS];
        const int k = __ffs(left) - 1;
        const float part = share_row(packed, pool, first + k, __shfl_sync(ALL_LANES, begin, k), words, columns);
        if (!l1) continue;
        const float all = warp_sum(part);
        if (lane == 0) of_warp[warp] = all;
        __syncthreads();
        if (warp == k) {
            const float sum = warp_sum(lane < BLOCK_ROWS ? of_warp[lane] : 0.0f);
            if (lane == 0) l1[first + k] = sum;
        }
        __syncthreads();  // of_warp was read
    }
}
