// gate_up: h [rows, d_ff] = relu(x Wg^T + bg) * (x Wu^T + bu), the first half of a dense gated feed-forward layer in one GEMM:
// neither product is written to memory. The gate is rounded to 16 bits before the ReLU, as torch's linear does (NaN stays NaN),
// u stays fp32, h is rounded once. A tile has 128 rows of Wg beside the same 128 rows of Wu, so that a thread finds the gate
// of a column in d[i] and its u in d[i + 64].
//
// Floor, 16,384 tokens, d_model 2048, d_ff 5632: 4 * 16384 * 2048 * 5632 = 756 GFLOP, 1.02 ms at the 740 TFLOP/s that the main
// loop alone reaches in long runs (810 when the card is cool). Bytes (x, weights, h: 298 MB) are a tenth of that.
// Measured on an H100 SXM (2026-11-21, medians, all of a line in the same minute; torch: two linears, relu, mul):
//            d_ff        v1      v2   main loop alone   cuBLAS for both   that + compiled relu * mul   torch
//             512    0.0932  0.0905        0.0874            0.0923                0.1087             0.1260 ms
//            1024    0.1818  0.1763        0.1680            0.1787                0.2136             0.2426
//            2048    0.3616  0.3703        0.3585            0.3903                0.4632             0.5034  (v1: cooler card)
//            5632    1.1019  1.0598        1.0155            1.1073                1.2893             1.4464
//   plain,   5632    0.5959  0.5567                                                                   0.6965
//   v1  a row of a tile at a time to the copy engine: 7% over the main loop, found to be the 16 turns that lanes take for it.
//   v2  tensor map stores, two a warp. Predicted 1.04 ms at d_ff 5632, measured 1.06. Of what is left over the main loop, 4%, a
//       quarter is the 192 instructions a thread between two tiles; the rest is not explained.
// The layer with torch's linear after it, as recorded on 2026-11-21 at 09:27: 1.42 ms; torch 1.78, compiled 1.65 (inputs
// of nnz 29; in another run, where these took 1.49, 1.87, 1.75, half dense ones 1.58, 1.96, 1.84).
// Few tokens, d_ff 5632, gate_up and torch: 256 tokens 27 and 31 us, 512: 45 and 47, 1024: 67 and 81, 2048: 147 and 170.
//
// A finished tile waits in 32 registers (64 for plain layers) and is sent while the next one is multiplied.
//
// Macros: VALUE_BF16 | VALUE_FP16, GATED 1 | 0 (a plain layer: h = relu(x Wu^T + bu)), CLUSTER 1 | 2.
#include "twell.cuh"
#include "sm90_rows_out.cuh"
#ifndef GATED
#define GATED 1
#endif

#define H_COLUMNS (GATED ? BN / 2 : BN)  // of h a tile
#define HALVES (H_COLUMNS / OUT_COLUMNS)

// Biases of the columns c and c + 1; d_ff is even.
__device__ __forceinline__ float2 biases(const value_t* __restrict__ bias, int c, int d_ff) {
    return bias && c < d_ff ? two_floats(*(const u32*)(bias + c)) : make_float2(0, 0);
}

// 128 columns of h, from `first`, in the order of the sums. half: which, of a plain layer's tile.
template <bool BIASED>
__device__ __forceinline__ void hidden(u32 (&pairs)[16][2], const float (&d)[128], const value_t* __restrict__ gate_bias,
                                       const value_t* __restrict__ up_bias, int first, int d_ff, int half) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const int c = first + 8 * j + 2 * (threadIdx.x % 4);
        const float2 zero = make_float2(0, 0);
        const float2 bg = BIASED && GATED ? biases(gate_bias, c, d_ff) : zero, bu = BIASED ? biases(up_bias, c, d_ff) : zero;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* s = d + 64 * half + 4 * j + 2 * r;
#if GATED
            float low = s[0], high = s[1], u0 = s[64], u1 = s[65];
            if (BIASED) { low += bg.x; high += bg.y; u0 += bu.x; u1 += bu.y; }
            const float2 g = two_floats(round_pair_relu(low, high));
            pairs[j][r] = round_pair(g.x * u0, g.y * u1);
#else
            pairs[j][r] = BIASED ? round_pair_relu(s[0] + bu.x, s[1] + bu.y) : round_pair_relu(s[0], s[1]);
#endif
        }
    }
}

// x [., d_model], gate and up [d_ff, d_model] by maps of (k, rows), boxes (64, 128); a plain layer passes `up` twice. h: by a
// map of boxes (64, 16).
// lost: null, or the number of rows is lost[0] - first, between 0 and `rows`. Row i of h is made from row first + i of x.
// counters: set to 0 where there are rows, for the kernel that follows.
extern "C" __global__ void HOPPER_GEMM
gate_up(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gate, const __grid_constant__ TensorMap up,
        const __grid_constant__ TensorMap h, const value_t* __restrict__ gate_bias, const value_t* __restrict__ up_bias,
        const int* __restrict__ lost, int first, int rows, int d_model, int d_ff, int* __restrict__ counters, int counted) {
    if (lost) rows = min(rows, lost[0] - first);
    if (rows <= 0) return;
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < counted; i += THREADS) counters[i] = 0;
    const u32 base = start_pipeline();
    const Tiles tiles = tiles_for(rows, (d_ff + H_COLUMNS - 1) / H_COLUMNS);
    const int group = threadIdx.x / 128, k_count = (d_model + BK - 1) / BK;
    if (group == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce(tiles, base, &x, first, k_count, [&](u32 to, u32 barrier, int k, Tile t) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (CLUSTER > 1 && half != cluster_rank()) continue;
                    const int row = GATED ? t.n * 128 : t.n * 256 + half * 128;
                    tma_load_all(to + half * (B_BYTES / 2), half ? &up : &gate, barrier, k, row);
                }
            });
    } else {
        take_registers<232>();
        const int consumer = group - 1, warp = threadIdx.x / 32 - 4;
        const u32 boxes = out_boxes(base, warp);
        Ring ring = {0, 0};
        float d[128];
        u32 pairs[HALVES][16][2];  // the finished tile before this one
        int row = -1, column = 0;  // where it goes
        const auto send = [&](int half) {
            if (row >= 0) send_rows(pairs[half], boxes, &h, column + 128 * half, row);
        };
        Tile t = tile_at(tiles, min(tiles.first, tiles.total - 1)), next = t;
        for (int work = tiles.first; work < tiles.total; work += tiles.step, t = next) {
            const auto look_ahead = [&] { next = tile_at(tiles, min(work + tiles.step, tiles.total - 1)); };
            if (first_row(t) + 64 * consumer >= rows) {
                pass_tile(ring, base, k_count);
                look_ahead();
                continue;
            }
            multiply_tile(d, ring, base, consumer, k_count, max(k_count, HALVES), [&](int k) {
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    if (k == half) send(half);
                if (k == HALVES - 1) look_ahead();  // divisions: not between tiles
            });
            row = first_row(t) + 16 * warp;
            column = t.n * H_COLUMNS;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                if (gate_bias || up_bias) hidden<true>(pairs[half], d, gate_bias, up_bias, column + 128 * half, d_ff, half);
                else hidden<false>(pairs[half], d, nullptr, nullptr, column + 128 * half, d_ff, half);
            }
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) send(half);
        copies_done();
    }
    finish_pipeline();
}
