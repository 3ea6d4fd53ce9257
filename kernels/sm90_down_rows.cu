// down_rows: y[lost[1 + first + i], :] = start[that row, :] + bias + h[i] Wd^T for the slots i of a chunk: the second
// half of the layer for the rows that the packed path lost (gate_up computes h), where lost[] may hold ~row. fp32 sums,
// rounded once, scattered by row. Few rows are finished from the sums of few_rows.cuh that gate_up leaves. The host does
// not know how many rows there are: the launch is for `slots` rows, and ends at once where there are none.
//
// What bounds it: with no row lost, the launch. With few, the weights, which have to be read once, and how much one
// multiprocessor can take in: so up to SPLITS clusters share a tile, each with a part of k, and add up in a fixed
// order. With many, arithmetic.
//
// Macros: VALUE_BF16 | VALUE_FP16, CLUSTER 1 | 2. Worklog: docs/kernels/sm90_down_rows.md
#define B_ALONG_N 1  // the rows of down_t run along the columns of y
#include "twell.cuh"
#include "few_rows.cuh"
#include "ptx_sm80_decode.cuh"
#include "sm90_rows_out.cuh"
#ifndef SPLITS
#define SPLITS 4  // clusters that share a tile, at most
#endif
#define PART_BYTES (32 * 128 * 4)  // what a consumer warp adds to a tile that clusters share: 128 sums a lane

// 128 columns from `first` of the two rows that this lane has sums of, plus bias and what the row starts from (each may
// be null). half: which of the tile's two.
__device__ __forceinline__ void finish(u32 (&pairs)[16][2], const float (&d)[128], const float* const (&start)[2],
                                       const value_t* __restrict__ bias, int first, int d_model, int half) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const int c = first + 8 * j + 2 * (threadIdx.x % 4);
        const bool inside = c < d_model;
        const float2 b = bias && inside ? two_floats(*(const u32*)(bias + c)) : make_float2(0, 0);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float2 s = start[r] && inside ? *(const float2*)(start[r] + c) : make_float2(0, 0);
            const float* sums = d + 64 * half + 4 * j + 2 * r;
            pairs[j][r] = round_pair(sums[0] + (s.x + b.x), sums[1] + (s.y + b.y));
        }
    }
}

// Where a tile is shared by `splits` clusters, each with a part of k: the warp's sums of its part go to `parts`, and
// the last of the warps with the same rows and columns adds all up, in the order of the parts, so that the result is
// the same each time. True for that warp, which then has the whole sums. item: the number of the warp's rows and
// columns; counter: of item, from 0.
__device__ __forceinline__ bool join_parts(float (&d)[128], float4* __restrict__ parts, int* counter, int item, int split, int splits) {
    const int lane = threadIdx.x % 32;
    float4* to = parts + ((long long)item * splits + split) * (PART_BYTES / 16) + lane;
#pragma unroll
    for (int i = 0; i < 32; ++i) to[32 * i] = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(counter, 1);
    if (__shfl_sync(ALL_LANES, before, 0) != splits - 1) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0;
#pragma unroll 1
    for (int s = 0; s < splits; ++s) {
        const float4* from = parts + ((long long)item * splits + s) * (PART_BYTES / 16) + lane;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const float4 v = __ldcg(from + 32 * i);
            d[4 * i] += v.x; d[4 * i + 1] += v.y; d[4 * i + 2] += v.z; d[4 * i + 3] += v.w;
        }
    }
    return true;
}

// h [slots, d_ff] by a map of (k, rows), boxes (64, 128); down_t [d_ff, d_model] by one of (columns, k), boxes (64, 64).
// A chunk's rows are `lost[0] - first`, between 0 and `slots`. start: null or fp32 [., d_model]. counters: 0, one for
// each consumer warp of the grid; parts: 16 KB for each. few_apart: whether gate_up took few rows apart.
extern "C" __global__ void HOPPER_GEMM
down_rows(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap down_t, const value_t* __restrict__ bias,
          const float* __restrict__ start, value_t* __restrict__ y, const int* __restrict__ lost, int first, int slots,
          int d_ff, int d_model, int* __restrict__ counters, float4* __restrict__ parts, int few_apart) {
    wait_for_previous();
    let_next_start();
    if (few_apart && lost[0] > 0) {
        extern __shared__ __align__(1024) unsigned char raw[];
        if (const int few = few_rows(lost, d_ff))
            return add_runs<THREADS>((const float*)parts, lost, few, bias, start, y, d_model, raw);
    }
    const int rows = min(slots, lost[0] - first);
    if (rows <= 0) return;
    const int* index = lost + 1 + first;
    const u32 base = start_pipeline();
    Tiles tiles = tiles_for(rows, (d_model + BN - 1) / BN);
    // Few tiles leave most of the GPU idle: then several clusters share a tile, and each has only that one. Not where
    // there are several chunks: which rows are in which chunk differs from run to run, and every row has to be summed
    // in the same order.
    const bool alone = first == 0 && lost[0] <= slots;
    const int k_all = (d_ff + BK - 1) / BK, shares = min(min(SPLITS, tiles.step / tiles.total), k_all / 8);
    const int splits = alone ? max(1, shares) : 1;
    const int split = tiles.first % splits, k_first = k_all * split / splits, k_count = k_all * (split + 1) / splits - k_first;
    tiles.first /= splits;
    const int group = threadIdx.x / 128;
    if (group == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce(tiles, base, &h, 0, k_count,
                    [&](u32 to, u32 barrier, int k, Tile t) { load_along_n(to, &down_t, barrier, k, t); }, k_first);
    } else {
        take_registers<232>();
        const int consumer = group - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
        const u32 boxes = out_boxes(base, warp);
        Ring ring = {0, 0};
        float d[128];
        for (int work = tiles.first; work < tiles.total; work += tiles.step) {
            const Tile t = tile_at(tiles, work);
            if (first_row(t) + 64 * consumer >= rows) {
                pass_tile(ring, base, k_count);
                continue;
            }
            multiply_tile(d, ring, base, consumer, k_count, k_count, [](int) {});
            if (splits > 1) {
                const int item = (work * CLUSTER + (int)cluster_rank()) * CONSUMERS * 4 + warp;
                if (!join_parts(d, parts, counters + item, item, split, splits)) continue;
            }
            const int slot = first_row(t) + 16 * warp;
            const float* from[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = slot + lane / 4 + 8 * r;
                from[r] = start && i < rows ? start + (long long)row_listed(index[i]) * d_model : nullptr;
            }
            value_t* row = slot + lane % 16 < rows ? y + (long long)row_listed(index[slot + lane % 16]) * d_model : nullptr;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = t.n * BN + 128 * half;
                if (column >= d_model) break;
                u32 pairs[16][2];
                finish(pairs, d, from, bias, column, d_model, half);
                scatter_rows(pairs, boxes, row ? row + column : nullptr, d_model - column);
            }
        }
    }
    finish_pipeline();
}

#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == OUT_END && LAUNCH_PART_BYTES == PART_BYTES, "ops/down_rows.py has other sizes");
#endif
