// gate_up: h [rows, d_ff] = relu(x Wg^T + bg) * (x Wu^T + bu), the first half of a dense gated layer in one GEMM:
// neither product is written to memory. The gate is rounded to 16 bits before the ReLU, as torch's linear does (NaN
// stays NaN), u stays fp32, h is rounded once. A tile has 128 rows of Wg beside the same 128 rows of Wu, so that a
// thread finds the gate of a column in d[i] and its u in d[i + 64]. A finished tile waits in 32 registers (64 in a
// plain layer) and is sent while the next is multiplied.
//
// Few listed rows that the pool holds are computed from their kept values instead: few_rows.cuh, with down_rows.
//
// What bounds it: arithmetic, 4 * rows * d_model * d_ff operations; the bytes of x, the weights and h take a tenth of
// that time.
//
// Macros: VALUE_BF16 | VALUE_FP16, GATED 1 | 0 (a plain layer: h = relu(x Wu^T + bu)), CLUSTER 1 | 2. Worklog:
// docs/kernels/sm90_gate_up.md
#include "twell.cuh"
#include "few_rows.cuh"
#include "ptx_sm80_decode.cuh"
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

// 128 columns of h, from `first`, in the order of the sums. half: which half of a plain layer's tile.
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

// x [., d_model], gate and up [d_ff, d_model] by maps of (k, rows), boxes (64, 128); a plain layer passes `up` twice.
// h: by a map of boxes (64, 16). lost: null, or the number of rows is lost[0] - first, between 0 and `rows`. Row i of h
// is made from row first + i of x. counters: set to 0 where there are rows, for the kernel that follows. packed: null, or
// the gate of all rows with its pool; then `x_rows`, the rows of up and of down_t, and parts are for few rows.
extern "C" __global__ void HOPPER_GEMM
gate_up(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gate, const __grid_constant__ TensorMap up,
        const __grid_constant__ TensorMap h, const value_t* __restrict__ gate_bias, const value_t* __restrict__ up_bias,
        const int* __restrict__ lost, int first, int rows, int d_model, int d_ff, int* __restrict__ counters, int counted,
        const word_t* __restrict__ packed, const word_t* __restrict__ pool, const value_t* __restrict__ x_rows,
        const value_t* __restrict__ up_rows, int up_step, const value_t* __restrict__ down_rows, int down_step,
        void* __restrict__ parts) {
    wait_for_previous();
    let_next_start();
    if (packed && lost[0] > 0) {
        extern __shared__ __align__(1024) unsigned char raw[];
        if (const int few = few_rows(lost, d_ff))
            return sum_run<THREADS>(x_rows, packed, pool, lost, few, Rows{GATED ? up_rows : nullptr, up_step}, up_bias,
                                    Rows{down_rows, down_step}, (float*)parts, d_ff, d_model, raw);
    }
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

#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == OUT_END && LAUNCH_OUT_ROWS == OUT_ROWS, "ops/gate_up.py has other sizes");
#endif
