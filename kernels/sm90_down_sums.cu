// down_sums: sums [rows, d_model] = h [rows, d_ff] Wd^T in fp32, not rounded: what the hot neurons of a hot/cold layer
// add to y. The kernels of the cold neurons start from it, so that y is rounded once.
//
// What bounds it: writing the sums, 4 bytes each, of which there are so many for each step along k that the products
// take no longer.
//
// Macros: VALUE_BF16 | VALUE_FP16, CLUSTER 1 | 2. Worklog: docs/kernels/sm90_down_sums.md
#define B_ALONG_N 1  // the rows of down_t run along the columns of the sums
#include "twell.cuh"
#include "sm90_mainloop.cuh"

// h by a map of (k, rows), boxes (64, 128); down_t [d_ff, d_model] by one of (columns, k), boxes (64, 64). sums: on 8
// bytes; d_model is even.
extern "C" __global__ void HOPPER_GEMM
down_sums(const __grid_constant__ TensorMap h, const __grid_constant__ TensorMap down_t, float* __restrict__ sums, int rows,
          int d_ff, int d_model) {
    const u32 base = start_pipeline();
    const Tiles tiles = tiles_for(rows, (d_model + BN - 1) / BN);
    const int k_count = (d_ff + BK - 1) / BK, group = threadIdx.x / 128;
    if (group == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce(tiles, base, &h, 0, k_count,
                    [&](u32 to, u32 barrier, int k, Tile t) { load_along_n(to, &down_t, barrier, k, t); });
    } else {
        take_registers<232>();
        const int consumer = group - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
        Ring ring = {0, 0};
        float d[128];
        for (int work = tiles.first; work < tiles.total; work += tiles.step) {
            const Tile t = tile_at(tiles, work);
            multiply_tile(d, ring, base, consumer, k_count, k_count, [](int) {});
            const int column = t.n * BN + 2 * (lane % 4);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = first_row(t) + 16 * warp + lane / 4 + 8 * r;
                if (row >= rows) continue;
                float* to = sums + (long long)row * d_model;
#pragma unroll
                for (int j = 0; j < BN / 8; ++j)  // four lanes write the 32 bytes of a sector
                    if (column + 8 * j < d_model)
                        *(float2*)(to + column + 8 * j) = make_float2(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
            }
        }
    }
    finish_pipeline();
}

#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == EPILOGUE, "ops/down_sums.py has another size");
#endif
