// columns: the survivors of a sparse layer, which lie row by row, brought into order neuron by neuron, with what each adds to the
// gradients. A sparse transpose: what is a row of the weights' gradient has to find every token that its neuron fired for.
//
// The order is fixed, tokens ascending, so that every sum over it is deterministic. No place is handed out by a race: rows are
// taken in chunks, a histogram of each chunk (integer sums, in whatever order) gives each chunk the places of its records in each
// list, and within a chunk one warp goes through the rows in order. The columns of one row differ, so its lanes never meet.
//   columns_count_v1  counts[chunk][column]
//   columns_scan_v1   counts[chunk][column] -> how many of the column's records come from earlier chunks; totals[column]
//   columns_plan_v1   where each list starts, and the plan of columns.cuh
//   columns_fill_v1   the records
//
// Floor: words are read twice, ups and dh once, 16 bytes a record written: 36 bytes a survivor. 16,384 tokens of mean nnz 29 are
// 475,000 of them: 17 MB. counts, 4 bytes for each chunk and column, is written twice and read twice: 23 MB at 256 chunks of
// d_ff 5632. Nearly all of it stays in the L2 cache: 5 us at 7.4 TB/s. What it will take is the latency of four dependent
// launches, and in columns_fill that of 8 turns of 8 rows, each two loads that wait for each other: 25 to 35 us in all.
#include "columns.cuh"
#include "row_walk.cuh"

#define SLAB 16384  // columns that a block counts at once: 16 bits each in shared memory
#define COUNT_THREADS 256
#define SCAN_GROUPS 32
#define MOST_CHUNKS 256
#define PLAN_THREADS 1024
#define PARTS_AT_ONCE 8

// Chunk blockIdx.x of `rows` rows (at most 65535), columns of slab blockIdx.y.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS)
columns_count_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, int* __restrict__ counts, int tokens,
                 int d_ff, int rows) {
    __shared__ unsigned int pairs[SLAB / 2];  // the counts of two columns each
    const int first = blockIdx.x * rows, last = min(first + rows, tokens);
    const int column = blockIdx.y * SLAB, width = min(SLAB, d_ff - column);
    for (int i = threadIdx.x; i < (width + 1) / 2; i += COUNT_THREADS) pairs[i] = 0;
    __syncthreads();
    for (int row = first + threadIdx.x / WARP; row < last; row += COUNT_THREADS / WARP) {
        const int2 span = spans[row];
        for (int i = threadIdx.x % WARP; i < span.y; i += WARP) {
            const int c = word_column(words[span.x + i]) - column;
            if (c >= 0 && c < width) atomicAdd(&pairs[c / 2], c % 2 ? 0x10000u : 1u);
        }
    }
    __syncthreads();
    int* out = counts + (long long)blockIdx.x * d_ff + column;
    for (int c = threadIdx.x; c < width; c += COUNT_THREADS) out[c] = c % 2 ? pairs[c / 2] >> 16 : pairs[c / 2] & 0xffffu;
}

// A block: 32 columns, SCAN_GROUPS groups of up to 8 chunks.
extern "C" __global__ void __launch_bounds__(WARP * SCAN_GROUPS)
columns_scan_v1(int* __restrict__ counts, int* __restrict__ totals, int chunks, int d_ff) {
    constexpr int MOST = MOST_CHUNKS / SCAN_GROUPS;
    __shared__ int sums[SCAN_GROUPS][WARP];
    const int lane = threadIdx.x % WARP, group = threadIdx.x / WARP;
    const int column = blockIdx.x * WARP + lane;
    const int per = (chunks + SCAN_GROUPS - 1) / SCAN_GROUPS, first = group * per;
    int count[MOST], sum = 0;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const bool mine = i < per && first + i < chunks && column < d_ff;
        count[i] = mine ? counts[(long long)(first + i) * d_ff + column] : 0;
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) sum += count[i];
    sums[group][lane] = sum;
    __syncthreads();
    int before = 0;
    for (int g = 0; g < group; ++g) before += sums[g][lane];
    if (column >= d_ff) return;
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i < per && first + i < chunks) counts[(long long)(first + i) * d_ff + column] = before;
        before += count[i];
    }
    if (group == SCAN_GROUPS - 1) totals[column] = before;
}

// The sum of v over the threads before this one; `all` becomes that over all of them. The whole block calls it.
__device__ __forceinline__ int sum_before(int v, int& all) {
    __shared__ int sums[PLAN_THREADS / WARP];
    const int lane = threadIdx.x % WARP;
    int through = v;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through += below;
    }
    if (lane == WARP - 1) sums[threadIdx.x / WARP] = through;
    __syncthreads();
    int before = 0;
    all = 0;
    for (int w = 0; w < PLAN_THREADS / WARP; ++w) {
        if (w < (int)threadIdx.x / WARP) before += sums[w];
        all += sums[w];
    }
    __syncthreads();  // everybody has read the sums before the next call overwrites them
    return before + through - v;
}

// One block. most_units: room for partial rows, see columns.cuh. order [d_ff]: the neurons by class. pieces: of each block of
// class 4, its neuron and the first record of its piece. first_piece [d_ff]: of the lists of class 4, in their order.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
columns_plan_v1(const int* __restrict__ totals, int* __restrict__ starts, int* __restrict__ order, int2* __restrict__ pieces,
                int* __restrict__ first_piece, Plan* __restrict__ plan, int d_ff, int most_units) {
    const int per = (d_ff + PLAN_THREADS - 1) / PLAN_THREADS;
    const int first = min((int)threadIdx.x * per, d_ff), last = min(first + per, d_ff);
    int sum = 0, records;
    for (int c = first; c < last; ++c) sum += totals[c];
    int start = sum_before(sum, records);
    const int begin = start;
    for (int c = first; c < last; ++c) starts[c] = start, start += totals[c];
    const int unit = max(LEAST_UNIT, (records + most_units - 1) / most_units);

    int lists = 0, blocks = 0, mine[CLASSES], piece = 0;
#pragma unroll
    for (int k = PIECES; k >= 0; --k) {
        int n = 0, p = 0, all, all_pieces;
        for (int c = first; c < last; ++c) {
            if (class_of(totals[c], unit) != k) continue;
            ++n;
            if (k == PIECES) p += pieces_of(totals[c], unit);
        }
        mine[k] = lists + sum_before(n, all);
        if (threadIdx.x == 0) plan->block[k] = blocks, plan->listed[k] = lists;
        lists += all;
        if (k == PIECES) {
            piece = sum_before(p, all_pieces);
            blocks = all_pieces;
        } else {
            blocks += ((all << k) + BLOCK_WARPS - 1) / BLOCK_WARPS;
        }
    }
    if (threadIdx.x == 0) {
        plan->records = records, plan->unit = unit, plan->blocks = blocks, plan->lists = lists;
        starts[d_ff] = records;
    }
    start = begin;
    for (int c = first; c < last; start += totals[c], ++c) {
        const int k = class_of(totals[c], unit);
#pragma unroll
        for (int i = 0; i < CLASSES; ++i) {  // so that `mine` stays in registers
            if (i != k) continue;
            if (i == PIECES) {
                first_piece[mine[i]] = piece;
                for (int p = 0; p < pieces_of(totals[c], unit); ++p) pieces[piece++] = make_int2(c, start + p * BLOCK_WARPS * unit);
            }
            order[mine[i]++] = c;
        }
    }
}

// One warp: the rows of chunk blockIdx.x in order, columns of slab blockIdx.y. ups: null for a plain layer.
// Rows are taken in parts of up to 32 survivors, one a lane. What PARTS_AT_ONCE parts need is fetched together; the places are then
// given part by part.
extern "C" __global__ void __launch_bounds__(WARP)
columns_fill_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                const float* __restrict__ dh, const int* __restrict__ counts, const int* __restrict__ starts,
                Record* __restrict__ records, int tokens, int d_ff, int rows) {
    __shared__ uint4 cleared[SLAB / 8];
    unsigned short* used = (unsigned short*)cleared;  // how many records of each column this chunk has placed
    const int first = blockIdx.x * rows, last = min(first + rows, tokens), lane = threadIdx.x;
    const int column = blockIdx.y * SLAB, width = min(SLAB, d_ff - column);
    for (int i = lane; i < (width + 7) / 8; i += WARP) cleared[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
    const int* earlier = counts + (long long)blockIdx.x * d_ff + column;
    for (int base = first; base < last; base += WARP) {
        const int2 span = base + lane < last ? spans[base + lane] : make_int2(0, 0);
        const int parts = (span.y + WARP - 1) / WARP, through = sum_up_to_lane(parts);
        const int all = __shfl_sync(ALL_LANES, through, WARP - 1);
        for (int part = 0; part < all; part += PARTS_AT_ONCE) {
            int token[PARTS_AT_ONCE], c[PARTS_AT_ONCE], place[PARTS_AT_ONCE];
            float g[PARTS_AT_ONCE], u[PARTS_AT_ONCE], d[PARTS_AT_ONCE];
#pragma unroll
            for (int p = 0; p < PARTS_AT_ONCE; ++p) {
                const int owner = first_reaching_past(part + p, through);
                const int within = part + p - __shfl_sync(ALL_LANES, through - parts, owner);
                const int i = within * WARP + lane;
                const bool mine = part + p < all && i < __shfl_sync(ALL_LANES, span.y, owner);
                const int at = __shfl_sync(ALL_LANES, span.x, owner) + i;
                const word_t word = mine ? words[at] : 0;
                d[p] = mine ? dh[at] : 0.0f;
                u[p] = mine && ups ? ups[at] : 0.0f;
                g[p] = to_float(word_value(word));
                token[p] = base + owner;
                c[p] = mine ? word_column(word) - column : -1;
                if (c[p] >= width) c[p] = -1;
            }
#pragma unroll
            for (int p = 0; p < PARTS_AT_ONCE; ++p) place[p] = c[p] >= 0 ? starts[column + c[p]] + earlier[c[p]] : 0;
#pragma unroll
            for (int p = 0; p < PARTS_AT_ONCE; ++p) {
                if (c[p] >= 0) place[p] += used[c[p]]++;
                __syncwarp();
            }
#pragma unroll
            for (int p = 0; p < PARTS_AT_ONCE; ++p) {
                const Record record = ups ? Record{token[p], d[p] * u[p], d[p] * g[p], g[p] * u[p]} : Record{token[p], 0.0f, d[p], g[p]};
                if (c[p] >= 0) *(uint4*)(records + place[p]) = *(const uint4*)&record;
            }
        }
    }
}
