// Few listed rows (hand_on in pool_walk.cuh) that the pool holds are not worth reading all weights for: their kept
// entries are shared among all blocks of one launch. A block takes a run of one row's entries: h of each, a warp an
// entry, and then the sum of their rows of down_t, a thread 16 bytes of columns. The sums of the runs, fp32, lie in
// `parts`, and the next launch adds them up. Which entries are in a run follows from the number of rows and of blocks
// alone, so the bits are the same each time, in whatever order the rows were listed.
#pragma once
#include "row_walk.cuh"

#ifndef FEW_ROWS
#define FEW_ROWS 24  // more rows are faster as a dense product
#endif
#define FEW_TILES 512   // of a row, at most
#define RUN_ENTRIES 512 // of a run, that a block holds at a time
#define ROWS_AT_ONCE 16 // of down_t that a thread has under way
static_assert(FEW_ROWS <= WARP && RUN_ENTRIES % ROWS_AT_ONCE == 0, "a lane looks at each row, and turns are whole");

// What a block of BLOCK threads holds in shared memory, x's row of d_model values behind it.
template <int BLOCK>
struct FewShared {
    float4 sum[BLOCK / WARP][WARP];
    int through[FEW_TILES];  // entries up to and including a tile
    int pooled[FEW_TILES];   // where the tile's entries begin that lie in the pool
    float h[RUN_ENTRIES];
    int column[RUN_ENTRIES];
    __device__ __forceinline__ uint4* x() { return (uint4*)(this + 1); }
};

// The row of which the list has this: ~row where the pool could not hold it.
__device__ __forceinline__ int row_listed(int listed) { return listed < 0 ? ~listed : listed; }

// How many rows are listed, where they are few and the pool holds all of them; or else 0. The same in all blocks.
__device__ __forceinline__ int few_rows(const int* lost, int columns) {
    const int n = lost[0], lane = threadIdx.x % WARP;
    if (n > min(FEW_ROWS, (int)gridDim.x) || tiles_of(columns, POOLED_TILE) > FEW_TILES) return 0;
    return __any_sync(ALL_LANES, lane < n && lost[1 + lane] < 0) ? 0 : n;
}

// A run: part number `part` of `parts` of the row in slot `slot` of the list.
struct Run {
    int slot, part, parts;
    __device__ __forceinline__ Run(int n) : slot(blockIdx.x % n), part(blockIdx.x / n), parts(gridDim.x / n) {}
    __device__ __forceinline__ float* sums(float* all, int d_model) const {
        return all + ((long long)slot * parts + part) * d_model;
    }
};

// Weights [columns][d_model] with so many values from one row to the next.
struct Rows {
    const value_t* first;
    long long step;
    __device__ __forceinline__ const uint4* operator[](int i) const { return (const uint4*)(first + i * step); }
};

// through, pooled: of all tiles of the row. By all of the block; afterwards it has to meet at a barrier.
template <int BLOCK>
__device__ __forceinline__ void count_tiles(FewShared<BLOCK>& s, const word_t* packed, int row, int tiles) {
    for (int t = threadIdx.x; t < tiles; t += BLOCK) {
        const word_t* words = packed + ((long long)row * tiles + t) * POOLED_WORDS;
        const int count = (int)*words;
        int before = 0;  // what the earlier rows of the group have in the pool
        if (count > SLOTS) {
#pragma unroll
            for (int i = 1; i < POOL_ROWS; ++i)
                if (i <= row % POOL_ROWS) before += max((int)words[-(long long)i * tiles * POOLED_WORDS] - SLOTS, 0);
        }
        s.through[t] = count, s.pooled[t] = before;
    }
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    for (int first = 0, sum = 0; first < tiles; first += WARP) {
        const int t = first + threadIdx.x, through = sum + sum_up_to_lane(t < tiles ? s.through[t] : 0);
        if (t < tiles) s.through[t] = through;
        sum = __shfl_sync(ALL_LANES, through, WARP - 1);
    }
}

// Entry i of the row.
template <int BLOCK>
__device__ __forceinline__ void find_entry(FewShared<BLOCK>& s, const word_t* packed, const word_t* pool, int row, int tiles,
                                           int i, int to) {
    int t = 0, last = tiles - 1;  // the first tile with through > i
    while (t < last) {
        const int middle = (t + last) / 2;
        if (s.through[middle] > i) last = middle;
        else t = middle + 1;
    }
    const int slot = i - (t ? s.through[t - 1] : 0);
    const word_t* from = slot < SLOTS ? packed + ((long long)row * tiles + t) * POOLED_WORDS + 1 + slot
                                      : pool + ((long long)(row / POOL_ROWS) * tiles + t) * POOL_WORDS + s.pooled[t] + slot - SLOTS;
    const word_t word = *from;
    s.h[to] = to_float(word_value(word));
    s.column[to] = t * POOLED_TILE + word_column(word);
}

// By all blocks of a launch, each of BLOCK threads. x: [n][d_model] by slots. up: null first for a plain layer. memory:
// shared, sizeof(FewShared<BLOCK>) and d_model values.
template <int BLOCK>
__device__ __forceinline__ void sum_run(const value_t* __restrict__ x, const word_t* __restrict__ packed,
                                        const word_t* __restrict__ pool, const int* __restrict__ lost, int n, Rows up,
                                        const value_t* __restrict__ up_bias, Rows down_t, float* __restrict__ parts,
                                        int columns, int d_model, void* memory) {
    FewShared<BLOCK>& s = *(FewShared<BLOCK>*)memory;
    const Run run(n);
    if (run.part >= run.parts) return;
    const int row = lost[1 + run.slot], tiles = tiles_of(columns, POOLED_TILE), vectors = d_model / VECTOR;
    const int lane = threadIdx.x % WARP;
    uint4* x_row = s.x();
    bool nonfinite = false;
    for (int v = threadIdx.x; up.first && v < vectors; v += BLOCK) {
        Vector in;
        in.raw = ((const uint4*)(x + (long long)run.slot * d_model))[v];
        nonfinite |= in.nonfinite();
        x_row[v] = in.raw;
    }
    count_tiles(s, packed, row, tiles);
    nonfinite = __syncthreads_or(nonfinite);
    const int kept = s.through[tiles - 1];
    const int begin = (int)((long long)kept * run.part / run.parts), end = (int)((long long)kept * (run.part + 1) / run.parts);
    const bool spoilt = nonfinite && kept < columns;  // see gated_v1
    float* to = run.sums(parts, d_model);
    int first = begin;
    do {
        const int count = min(RUN_ENTRIES, end - first);
        for (int i = threadIdx.x; i < count; i += BLOCK) find_entry(s, packed, pool, row, tiles, first + i, i);
        // After the last entry zeros, so that no load needs a condition; they repeat a row that is read anyway.
        const int whole = (count + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
        __syncthreads();
        if (threadIdx.x < whole - count)
            s.h[count + threadIdx.x] = 0, s.column[count + threadIdx.x] = count ? s.column[count - 1] : 0;
        if (!up.first) __syncthreads();
        if (up.first) {
            for (int e = threadIdx.x / WARP; e < count; e += BLOCK / WARP) {
                const uint4* u = up[s.column[e]];
                float dot = 0;
#pragma unroll 8
                for (int v = lane; v < vectors; v += WARP) {
                    Vector a, b;
                    float f[VECTOR], g[VECTOR];
                    a.raw = __ldg(u + v), b.raw = x_row[v];
                    a.to_floats(f), b.to_floats(g);
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) dot = fmaf(f[i], g[i], dot);
                }
#pragma unroll
                for (int step = WARP / 2; step; step /= 2) dot += __shfl_xor_sync(ALL_LANES, dot, step);
                if (lane == 0) s.h[e] *= dot + (up_bias ? to_float(up_bias[s.column[e]]) : 0.0f);
            }
            __syncthreads();
        }
        for (int v = threadIdx.x; v < vectors; v += BLOCK) {
            float sum[VECTOR] = {};
            float4* here = (float4*)(to + v * VECTOR);
            if (first > begin) {
                const float4 a = here[0], b = here[1];
                sum[0] = a.x, sum[1] = a.y, sum[2] = a.z, sum[3] = a.w, sum[4] = b.x, sum[5] = b.y, sum[6] = b.z, sum[7] = b.w;
            }
            for (int e = 0; e < whole; e += ROWS_AT_ONCE) {
                Vector w[ROWS_AT_ONCE];
#pragma unroll
                for (int j = 0; j < ROWS_AT_ONCE; ++j) w[j].raw = __ldg(down_t[s.column[e + j]] + v);
#pragma unroll
                for (int j = 0; j < ROWS_AT_ONCE; ++j) {
                    float f[VECTOR];
                    w[j].to_floats(f);
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) sum[i] = fmaf(s.h[e + j], f[i], sum[i]);
                }
            }
            if (spoilt) sum[0] = sum[1] = sum[2] = sum[3] = sum[4] = sum[5] = sum[6] = sum[7] = nanf("");
            here[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), here[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        }
        __syncthreads();
        first += RUN_ENTRIES;
    } while (first < end);
}

// By all blocks of the next launch, as many as those of sum_run: y's rows, from the sums of the runs.
template <int BLOCK>
__device__ __forceinline__ void add_runs(const float* __restrict__ parts, const int* __restrict__ lost, int n,
                                         const value_t* __restrict__ bias, const float* __restrict__ start,
                                         value_t* __restrict__ y, int d_model, void* memory) {
    FewShared<BLOCK>& s = *(FewShared<BLOCK>*)memory;
    const int runs = gridDim.x / n, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int work = blockIdx.x; work < (d_model + 4 * WARP - 1) / (4 * WARP) * n; work += gridDim.x) {
        const int slot = work % n, c = (work / n * WARP + lane) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        const auto add = [&sum](float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };
        if (c < d_model) {
#pragma unroll 4
            for (int run = warp; run < runs; run += BLOCK / WARP)
                add(__ldcg((const float4*)(parts + ((long long)slot * runs + run) * d_model + c)));
        }
        s.sum[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < d_model) {
            const long long at = (long long)lost[1 + slot] * d_model + c;
#pragma unroll
            for (int w = 1; w < BLOCK / WARP; ++w) add(s.sum[w][lane]);
            if (start) add(*(const float4*)(start + at));
            if (bias) {
                const float2 low = two_floats(*(const unsigned*)(bias + c)), high = two_floats(*(const unsigned*)(bias + c + 2));
                add(make_float4(low.x, low.y, high.x, high.y));
            }
            *(uint2*)(y + at) = make_uint2(pair_of(sum.x, sum.y), pair_of(sum.z, sum.w));
        }
        __syncthreads();
    }
}
