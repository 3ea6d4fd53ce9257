// survivors: from a packed gate and its pool to what a training step keeps of a layer: the kept entries of all rows in one
// list without gaps, each a word `value bits << 16 | column of the matrix`, and for a gated layer u = x . up[column] + up_bias
// beside it, in fp32. A row is a span (start, count) of the list, columns ascending. The packed gate is not needed afterwards.
//
// Three launches, so that nobody races for a place in the list:
//   survivor_counts_v1   a warp a row: how many entries it has, or LOST where its x is not finite or the pool overflowed
//   survivor_places_v1   one block: the prefix sum of the counts, the spans, and the list of the lost rows, ascending
//   survivors_v1         a row a block: words, u, and l1 = sum |g u|; survivors_plain_v1, a warp a row, for h = g
// Rows whose entries would end past `capacity` are lost too, and so are all rows behind the first of them.
//
// Floor, 16,384 tokens, d_model 2048, d_ff 5632, bf16: the counts lie 128 bytes apart, 64 bytes of device memory each:
// 23 MB, 8 us at 3.0 TB/s; 67 MB of x, 22 us, and 4 KB a kept value through the L2 cache, 0.26 ms at nnz 29 and 7.4 TB/s.
//
// x is searched for values that are not finite only where the row is suspect. One infinity or NaN in x makes all products
// with finite weights infinite or NaN, and with them every value of the row's gate: so a row is suspect if it has no entries,
// or if its first one is not finite.
#define LEAN
#include "pool_walk.cuh"

#define LOST (-1)
#define ROWS_A_BLOCK 8  // of the kernels with a warp a row
#define PLACE_THREADS 1024
#define PLACE_ROWS 8  // of one thread, at a time

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

extern "C" __global__ void __launch_bounds__(WARP * ROWS_A_BLOCK)
survivor_counts_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
                   int* __restrict__ counts, int rows, int columns) {
    const int row = blockIdx.x * ROWS_A_BLOCK + threadIdx.x / WARP;
    if (row >= rows) return;
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    const RowFacts facts = walk.facts();
    bool lost = facts.lost;
    if (!lost) {
        Entries e;
        const bool any = walk.next(e);
        const float first = any ? __shfl_sync(ALL_LANES, e.value, 0) : nanf("");
        if (!(fabsf(first) <= 3.4e38f)) lost = row_nonfinite(x + (long long)row * D_MODEL);
    }
    if (threadIdx.x % WARP == 0) counts[row] = lost ? LOST : facts.kept;
}

// Sums of entries stop at the largest int: `a` and `b` and the result are at most that, so that order does not matter.
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

extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
survivor_places_v1(const int* __restrict__ counts, int2* __restrict__ spans, int* __restrict__ lost,
                   int* __restrict__ kept, int rows, int capacity) {
    unsigned placed = 0, lost_before = 0;  // entries and lost rows of the rows before these
    for (int first = 0; first < rows; first += PLACE_THREADS * PLACE_ROWS) {
        const int mine = first + threadIdx.x * PLACE_ROWS;
        int count[PLACE_ROWS];
        unsigned sum = 0, total;
#pragma unroll
        for (int i = 0; i < PLACE_ROWS; ++i) {
            count[i] = mine + i < rows ? counts[mine + i] : LOST;
            sum = add_up(sum, (unsigned)max(count[i], 0));
        }
        unsigned start = add_up(placed, sum_before(sum, total)), without = 0;
        placed = add_up(placed, total);
#pragma unroll
        for (int i = 0; i < PLACE_ROWS; ++i) {
            const unsigned end = add_up(start, (unsigned)max(count[i], 0));
            if (mine + i < rows) {
                if (end > (unsigned)capacity) count[i] = LOST;
                const bool there = count[i] != LOST;
                without += !there;
                spans[mine + i] = there ? make_int2((int)start, count[i]) : make_int2(LOST, 0);
                if (there) kept[mine + i] = count[i];
            }
            start = end;
        }
        unsigned at = lost_before + sum_before(without, total);
        lost_before += total;
        if (without) {
#pragma unroll
            for (int i = 0; i < PLACE_ROWS; ++i)
                if (mine + i < rows && count[i] == LOST) lost[1 + at++] = mine + i;
        }
    }
    if (threadIdx.x == 0) lost[0] = (int)lost_before;
}

__device__ __forceinline__ word_t word_of(const Entries& e) { return make_word(from_float(e.value), e.column); }

extern "C" __global__ void ONE_TOKEN_BLOCK
survivors_v1(const value_t* __restrict__ x, const word_t* __restrict__ packed, const word_t* __restrict__ pool,
             const value_t* __restrict__ up, const value_t* __restrict__ up_bias, const int2* __restrict__ spans,
             word_t* __restrict__ words, float* __restrict__ ups, float* __restrict__ l1, int columns) {
    const int row = blockIdx.x, lane = threadIdx.x % WARP;
    const RowVectors in = load_row_once(x + (long long)row * D_MODEL);
    const int2 span = spans[row];
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    if (span.x == LOST) return;
    float sum = 0;  // of |h| at this lane's entries
    Entries e;
    for (int at = span.x, turn = 0; walk.next(e); at += __popc(e.lanes), turn ^= 1) {
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
            const float u = dot + (up_bias ? to_float(up_bias[e.column]) : 0.0f);
            words[at + lane] = word_of(e);
            ups[at + lane] = u;
            sum += fabsf(e.value * u);
        }
    }
    if (threadIdx.x < WARP) {
        sum = warp_sum(sum);
        if (lane == 0) l1[row] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(WARP * ROWS_A_BLOCK)
survivors_plain_v1(const word_t* __restrict__ packed, const word_t* __restrict__ pool, const int2* __restrict__ spans,
                   word_t* __restrict__ words, float* __restrict__ l1, int rows, int columns) {
    const int row = blockIdx.x * ROWS_A_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int2 span = spans[row];
    if (span.x == LOST) return;
    const Pooled m = {packed, pool, columns};
    PoolWalk walk(m, row);
    float sum = 0;
    Entries e;
    for (int at = span.x; walk.next(e); at += __popc(e.lanes)) {
        if (e.lanes >> lane & 1) {
            words[at + lane] = word_of(e);
            sum += fabsf(e.value);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) l1[row] = sum;
}
