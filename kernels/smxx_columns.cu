// columns: sorts the survivors of a sparse layer, which lie row by row, by neuron, with what each adds to the
// gradients. This is a sparse transpose: a row of the weights' gradient needs every token that its neuron fired for.
//
// The order is fixed, tokens ascending, so that every sum over it is deterministic. No place is handed out by a race:
// rows are taken in chunks, a histogram of each chunk (integer sums) gives it the places of its records in each list,
// and within a chunk each column has a bit for each of 32 rows: a record's place is the number of bits below its own.
//   columns_count  counts[chunk][column]
//   columns_scan   counts[chunk][column] -> how many of the column's records come from earlier chunks; totals[column]
//   columns_plan   where each list starts, and the plan of columns.cuh
//   columns_fill   the records
//
// What bounds it: latencies, of four dependent launches and of the loads in each that wait for one another; nearly all
// bytes stay in the L2 cache. Worklog: docs/kernels/smxx_columns.md
#include "columns.cuh"
#include "row_walk.cuh"

#ifndef MOST_CHUNKS
#define MOST_CHUNKS 256
#endif
#ifndef COUNT_SLAB
#define COUNT_SLAB 16384  // columns that a block counts at once: 16 bits each in shared memory
#endif
#ifndef COUNT_THREADS
#define COUNT_THREADS 512
#endif
#define SCAN_GROUPS 32
#define PLAN_THREADS 1024
#ifndef FILL_SLAB
#define FILL_SLAB 8192  // columns whose places a block gives at once: 48 bits each in shared memory
#endif
#ifndef FILL_THREADS
#define FILL_THREADS 512
#endif

// The survivors of up to 32 rows, one row a lane, as one list. The whole warp calls it together.
struct RowsList {
    int2 span;
    int through, all;

    __device__ __forceinline__ RowsList(const int2* __restrict__ spans, int first, int last) {
        const int row = first + threadIdx.x % WARP;
        span = row < last ? spans[row] : make_int2(0, 0);
        through = sum_up_to_lane(span.y);
        all = __shfl_sync(ALL_LANES, through, WARP - 1);
    }
    // Where the i-th survivor lies; `row` becomes the number of its row, 0 to 31.
    __device__ __forceinline__ int find(int i, int& row) const {
        row = first_reaching_past(i, through);
        return __shfl_sync(ALL_LANES, span.x + span.y - through, row) + i;
    }
};

// Chunk blockIdx.x of `rows` rows (at most 65535), columns of slab blockIdx.y.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS)
columns_count_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, int* __restrict__ counts, int tokens,
                 int d_ff, int rows) {
    __shared__ unsigned int pairs[COUNT_SLAB / 2];  // the counts of two columns each
    const int first = blockIdx.x * rows, last = min(first + rows, tokens);
    const int column = blockIdx.y * COUNT_SLAB, width = min(COUNT_SLAB, d_ff - column);
    for (int i = threadIdx.x; i < (width + 1) / 2; i += COUNT_THREADS) pairs[i] = 0;
    __syncthreads();
    for (int base = first; base < last; base += WARP) {
        const RowsList list(spans, base, last);
        for (int i = threadIdx.x; i - (int)threadIdx.x % WARP < list.all; i += COUNT_THREADS) {
            int row;
            const int at = list.find(i, row);
            const int c = i < list.all ? word_column(words[at]) - column : -1;
            if (c >= 0 && c < width) atomicAdd(&pairs[c / 2], c % 2 ? 0x10000u : 1u);
        }
    }
    __syncthreads();
    int* out = counts + (long long)blockIdx.x * d_ff + column;
    for (int c = threadIdx.x; c < width; c += COUNT_THREADS) out[c] = c % 2 ? pairs[c / 2] >> 16 : pairs[c / 2] & 0xffffu;
}

// A block: 32 columns, SCAN_GROUPS groups of up to 8 chunks.
extern "C" __global__ void __launch_bounds__(WARP * SCAN_GROUPS)
columns_scan_v2(int* __restrict__ counts, int* __restrict__ totals, int chunks, int d_ff) {
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

// The sum of v over the lanes before this one.
__device__ __forceinline__ int sum_before_lane(int v) { return sum_up_to_lane(v) - v; }

// One block; each warp takes a range of columns, which its lanes take in turn. most_units: the records must make at
// most so many units (see columns.cuh). order [d_ff]: the neurons by class. pieces: of each block of class 0, its
// neuron and the first record of its piece. first_piece [d_ff]: of the lists of class 0, in their order. At most 65,536
// columns.
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
columns_plan_v2(const int* __restrict__ totals, int* __restrict__ starts, int* __restrict__ order, int2* __restrict__ pieces,
                int* __restrict__ first_piece, Plan* __restrict__ plan, int d_ff, int most_units) {
    constexpr int PLAN_WARPS = PLAN_THREADS / WARP;
    __shared__ int records_of[PLAN_WARPS], pieces_here[PLAN_WARPS], lists_of[PLAN_WARPS][CLASSES];
    __shared__ int place[PLAN_WARPS][CLASSES][WARP];  // where each lane's next list of each class goes in `order`
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int steps = (d_ff + PLAN_THREADS - 1) / PLAN_THREADS, first = warp * steps * WARP;
    const auto total = [&](int step) {
        const int c = first + step * WARP + lane;
        return c < d_ff ? totals[c] : -1;
    };

    int sum = 0;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) sum += max(total(step), 0);
    sum = sum_over_lanes(sum);
    if (lane == 0) records_of[warp] = sum;
    __syncthreads();
    const int of_lane = records_of[lane];
    const int records = sum_over_lanes(of_lane);
    int start = __shfl_sync(ALL_LANES, sum_before_lane(of_lane), warp);
    const int unit = max(LEAST_UNIT, (records + most_units - 1) / most_units);

    unsigned long long found = 0;  // this lane's lists of each class, 7 bits a class: a lane has at most 64 columns
    int cut = 0;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
        const int n = total(step), mine = class_of(max(n, 0), unit);
        if (n >= 0) found += 1ull << 7 * mine;
        if (n >= 0 && mine == 0) cut += pieces_of(n, unit);
    }
#pragma unroll
    for (int k = 0; k < CLASSES; ++k) {
        const int n = (int)(found >> 7 * k) & 127, through = sum_up_to_lane(n);
        place[warp][k][lane] = through - n;
        if (lane == WARP - 1) lists_of[warp][k] = through;
    }
    cut = sum_over_lanes(cut);
    if (lane == 0) pieces_here[warp] = cut;
    __syncthreads();
    int all = 0, before = 0;  // of lane k: lists of class k, those of the warps before this one
    for (int w = 0; w < PLAN_WARPS; ++w) {
        const int n = lane < CLASSES ? lists_of[w][lane] : 0;
        all += n;
        if (w < warp) before += n;
    }
    const int cut_by_lane = pieces_here[lane], all_cut = sum_over_lanes(cut_by_lane);
    int piece = __shfl_sync(ALL_LANES, sum_before_lane(cut_by_lane), warp);
    const int listed = sum_before_lane(all);
    const int blocks = lane == 0 ? all_cut : (all * team_of(lane) + BLOCK_WARPS - 1) / BLOCK_WARPS;
    const int block = sum_before_lane(blocks);
    if (warp == 0 && lane <= CLASSES) plan->block[lane] = block, plan->listed[lane] = listed;
    if (threadIdx.x == 0) plan->records = records, plan->unit = unit, starts[d_ff] = records;
#pragma unroll
    for (int k = 0; k < CLASSES; ++k) place[warp][k][lane] += __shfl_sync(ALL_LANES, listed + before, k);

#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
        const int c = first + step * WARP + lane, n = total(step), mine = class_of(max(n, 0), unit);
        const int here = start + sum_before_lane(max(n, 0));
        start = __shfl_sync(ALL_LANES, here + max(n, 0), WARP - 1);
        const int at = n >= 0 ? place[warp][mine][lane]++ : 0;  // nobody else's
        if (n >= 0) starts[c] = here, order[at] = c;
        const int many = n > 0 && mine == 0 ? pieces_of(n, unit) : 0;
        if (!__any_sync(ALL_LANES, many)) continue;
        const int from = piece + sum_before_lane(many);
        if (many) first_piece[at] = from;
        for (int p = 0; p < many; ++p) pieces[from + p] = make_int2(c, here + p * BLOCK_WARPS * unit);
        piece = __shfl_sync(ALL_LANES, from + many, WARP - 1);
    }
}

// Chunk blockIdx.x of `rows` rows (at most 65535), columns of slab blockIdx.y. ups: null for a plain layer.
extern "C" __global__ void __launch_bounds__(FILL_THREADS)
columns_fill_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                const float* __restrict__ dh, const int* __restrict__ counts, const int* __restrict__ starts,
                Record* __restrict__ records, int tokens, int d_ff, int rows) {
    __shared__ unsigned int fired[FILL_SLAB];    // of each column: a bit for each of 32 rows
    __shared__ unsigned short placed[FILL_SLAB];  // and how many of the chunk's earlier rows
    const int first = blockIdx.x * rows, last = min(first + rows, tokens);
    const int column = blockIdx.y * FILL_SLAB, width = min(FILL_SLAB, d_ff - column);
    const int* earlier = counts + (long long)blockIdx.x * d_ff + column;
    for (int c = threadIdx.x; c < width; c += FILL_THREADS) fired[c] = 0, placed[c] = 0;
    for (int base = first; base < last; base += WARP) {
        if (base > first) {
            for (int c = threadIdx.x; c < width; c += FILL_THREADS) placed[c] += __popc(fired[c]), fired[c] = 0;
        }
        const RowsList list(spans, base, last);
        __syncthreads();
        for (int i = threadIdx.x; i - (int)threadIdx.x % WARP < list.all; i += FILL_THREADS) {
            int row;
            const int at = list.find(i, row);
            const int c = i < list.all ? word_column(words[at]) - column : -1;
            if (c >= 0 && c < width) atomicOr(&fired[c], 1u << row);
        }
        __syncthreads();
        for (int i = threadIdx.x; i - (int)threadIdx.x % WARP < list.all; i += FILL_THREADS) {
            int row;
            const int at = list.find(i, row);
            if (i >= list.all) continue;
            const word_t word = words[at];
            const int c = word_column(word) - column;
            if (c < 0 || c >= width) continue;
            const int place = starts[column + c] + earlier[c] + placed[c] + __popc(fired[c] & ((1u << row) - 1));
            const float g = to_float(word_value(word)), d = dh[at];
            Record record = {base + row, 0.0f, d, g};
            if (ups) record.dgate_of = d * ups[at], record.dup_of = d * g, record.hidden = g * ups[at];
            *(uint4*)(records + place) = *(const uint4*)&record;
        }
        __syncthreads();
    }
}
