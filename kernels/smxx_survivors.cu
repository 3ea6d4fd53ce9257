// survivors: from a packed gate and its pool to what a training step keeps of a layer (spans.cuh): the kept entries of
// all rows in one list without gaps. The packed gate is not needed afterwards. Three launches, so that nobody races for
// a place in the list:
//   survivor_counts  a warp a row: how many entries it has, or LOST where its x is not finite or the pool overflowed;
//                    and the sums over the BLOCK_ROWS rows of a block
//   survivor_places  one block: heavy rows become LOST if they are few; prefix sums of those sums
//   survivor_words   the blocks of the first again: spans, words, lost rows, ascending; l1 of a plain layer
// Lost too: rows with more than HEAVY entries, which hold up the warp that walks them, if there are at most FEW_HEAVY;
// then rows whose entries would end past `capacity`, and all rows behind the first of these.
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
#ifndef HEAVY
#define HEAVY 384  // a row with more entries is heavy
#endif
#ifndef FEW_HEAVY
#define FEW_HEAVY 96  // so many heavy rows are lost; if there are more, all of them are walked
#endif

struct Totals {
    int entries, lost, heavy;  // of the rows that are not lost; how many are; how many of the others are heavy
};

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
survivor_counts_v2(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
                   int* __restrict__ counts, Totals* __restrict__ totals, int rows, int columns) {
    __shared__ int of_row[BLOCK_ROWS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * BLOCK_ROWS + warp;
    const int tiles = tiles_of(columns, POOLED_TILE);
    if (row < rows) {
        int kept = 0;
        bool over = false, suspect = true;
        for (int group = 0; group < tiles; group += WARP) {
            uint2 head = make_uint2(0, 0);  // the count, and the first word behind it
            if (group + lane < tiles) head = *(const uint2*)(packed + ((long long)row * tiles + group + lane) * POOLED_WORDS);
            const unsigned some = __ballot_sync(ALL_LANES, head.x > 0);
            if (some && kept == 0) {
                const word_t first = __shfl_sync(ALL_LANES, head.y, __ffs(some) - 1);
                suspect = !(fabsf(to_float(word_value(first))) <= 3.4e38f);  // more than any finite 16-bit value
            }
            over |= __any_sync(ALL_LANES, head.x > SLOTS);
            kept += sum_over_lanes((int)head.x);
        }
        bool lost = suspect && row_nonfinite(x + (long long)row * D_MODEL);
        if (over && !lost) {
            const Pooled m = {packed, pool, columns};
            PoolWalk walk(m, row);
            lost = walk.facts(kept).lost;
        }
        if (lane == 0) counts[row] = of_row[warp] = lost ? LOST : kept;
    }
    __syncthreads();
    if (warp == 0) {
        const int count = lane < BLOCK_ROWS && blockIdx.x * BLOCK_ROWS + lane < rows ? of_row[lane] : 0;
        const int entries = sum_over_lanes(max(count, 0));
        const unsigned lost = __ballot_sync(ALL_LANES, count == LOST), heavy = __ballot_sync(ALL_LANES, count > HEAVY);
        if (lane == 0) totals[blockIdx.x] = {entries, __popc(lost), __popc(heavy)};
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

// totals: of each block of rows; after it, the entries and lost rows before each block. counts: heavy rows become LOST,
// if they are few. lost[0]: how many rows are lost in all.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
survivor_places_v2(int* __restrict__ counts, Totals* __restrict__ totals, int* __restrict__ lost, int rows, int capacity) {
    const int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    unsigned entries_before = 0, lost_before = 0, some_heavy = 0, heavy, total;
    for (int block = threadIdx.x; block < blocks; block += PLACE_THREADS) some_heavy += (unsigned)totals[block].heavy;
    sum_before(some_heavy, heavy);
    for (int first = 0; first < blocks; first += PLACE_THREADS) {
        const int block = first + threadIdx.x;
        Totals mine = {0, 0, 0};
        if (block < blocks) mine = totals[block];
        if (mine.heavy && heavy <= FEW_HEAVY)
            for (int row = block * BLOCK_ROWS; row < min(rows, (block + 1) * BLOCK_ROWS); ++row)
                if (counts[row] > HEAVY) mine.entries -= counts[row], ++mine.lost, counts[row] = LOST;
        const unsigned start = add_up(entries_before, sum_before((unsigned)mine.entries, total));
        entries_before = add_up(entries_before, total);
        if (add_up(start, (unsigned)mine.entries) > (unsigned)capacity) {  // the first such block, and all behind it
            unsigned end = start;
            mine.lost = 0;
            for (int row = block * BLOCK_ROWS; row < min(rows, (block + 1) * BLOCK_ROWS); ++row) {
                end = add_up(end, (unsigned)max(counts[row], 0));
                mine.lost += counts[row] == LOST || end > (unsigned)capacity;
            }
        }
        const unsigned at = lost_before + sum_before((unsigned)mine.lost, total);
        lost_before += total;
        if (block < blocks) totals[block] = {(int)start, (int)at, 0};
    }
    if (threadIdx.x == 0) lost[0] = (int)lost_before;
}

// l1: of a plain layer, sum |g|; null: not wanted.
extern "C" __global__ void __launch_bounds__(WARP * BLOCK_ROWS)
survivor_words_v2(const word_t* __restrict__ packed, const word_t* __restrict__ pool, const int* __restrict__ counts,
                  const Totals* __restrict__ totals, int2* __restrict__ spans, int* __restrict__ kept, int* __restrict__ lost,
                  word_t* __restrict__ words, float* __restrict__ l1, int rows, int columns, int capacity) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = blockIdx.x * BLOCK_ROWS, row = first + warp;
    if (row >= rows) return;
    const Totals before = totals[blockIdx.x];
    const int count = lane < BLOCK_ROWS && first + lane < rows ? counts[first + lane] : 0;
    // Lane k holds the facts of the block's k-th row. The end of a row may exceed the largest int; as an unsigned
    // number it does not wrap around.
    const unsigned end = (unsigned)before.entries + (unsigned)sum_up_to_lane(max(count, 0));
    const bool there = count != LOST && end <= (unsigned)capacity;
    const unsigned rows_there = __ballot_sync(ALL_LANES, there);
    const int start = (int)__shfl_sync(ALL_LANES, end - (unsigned)max(count, 0), warp);
    const int mine = __shfl_sync(ALL_LANES, count, warp);
    if (!(rows_there >> warp & 1)) {
        if (lane == 0) {
            spans[row] = make_int2(LOST, 0);
            lost[1 + before.lost + __popc(~rows_there & ((1u << warp) - 1))] = row;
        }
        return;
    }
    if (lane == 0) spans[row] = make_int2(start, mine), kept[row] = mine;
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
    if (!l1) return;
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane == 0) l1[row] = sum;
}
