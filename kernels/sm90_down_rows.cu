// down_rows: y[lost[1 + first + i], :] = start[that row, :] + bias + h[i] Wd^T for the slots i of a chunk, the second half of
// the layer for the rows that the packed path gave up. fp32 sums, rounded once, scattered by row.
//
// Macros: VALUE_BF16 | VALUE_FP16, CLUSTER 1 | 2.
#include "twell.cuh"
#include "sm90_rows_out.cuh"

// 128 columns from `first` of the two rows that this lane has sums of, plus bias and what the row starts from (each may be
// null). half: which of the tile's two.
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

// h [slots, d_ff] and down [d_model, d_ff] by maps of (k, rows), boxes (64, 128); a chunk's rows are `lost[0] - first`, between 0
// and `slots`. start: null or fp32 [., d_model].
extern "C" __global__ void HOPPER_GEMM
down_rows(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap down, const value_t* __restrict__ bias,
          const float* __restrict__ start, value_t* __restrict__ y, const int* __restrict__ lost, int first, int slots,
          int d_ff, int d_model) {
    const int rows = min(slots, lost[0] - first);
    if (rows <= 0) return;
    const int* index = lost + 1 + first;
    const u32 base = start_pipeline();
    const Tiles tiles = tiles_for(rows, (d_model + BN - 1) / BN);
    const int group = threadIdx.x / 128, k_count = (d_ff + BK - 1) / BK;
    if (group == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce(tiles, base, &h, 0, k_count, [&](u32 to, u32 barrier, int k, Tile t) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (CLUSTER == 1 || half == cluster_rank())
                        tma_load_all(to + half * (B_BYTES / 2), &down, barrier, k, t.n * BN + half * (BN / 2));
            });
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
            const int slot = first_row(t) + 16 * warp;
            const float* from[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = slot + lane / 4 + 8 * r;
                from[r] = start && i < rows ? start + (long long)index[i] * d_model : nullptr;
            }
            value_t* row = slot + lane % 16 < rows ? y + (long long)index[slot + lane % 16] * d_model : nullptr;
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
