// decode: a whole sparse feed-forward layer for 1 to 64 tokens, in two launches: `gate` finds who fires and what each
// of them contributes, `down` adds their rows up. Gated: h = g * (x Wu^T + bu) where g = x Wg^T + bg is kept; plain:
// h = g. y = h Wd^T + bd.
#include "ptx_sm80.cuh"
#include "ptx_sm80_decode.cuh"

#ifndef WARPS
#define WARPS 8
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef GROUPS
#define GROUPS 1
#endif
#define TILE 16                // neurons of a block of gate: the rows of one mma
#define TOKENS (8 * GROUPS)    // columns of GROUPS mma
#define SLAB (WARP * VECTOR)   // columns of y of a block of down: 16 bytes a lane
#define DOWN_WARPS 16
#define DOWN_THREADS (DOWN_WARPS * WARP)
#define AT_ONCE 4              // rows of down that a warp has under way
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");

// What `gate` leaves for `down`. Neuron 16 i + b of a token contributes if bit b of mask[token][i] is set; then, and
// only then, hidden[token][i][b] is its h.
struct Hidden {
    unsigned short* __restrict__ mask;
    float* __restrict__ value;
};

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.402823466e38f; }

__device__ __forceinline__ bool row_is_finite(const value_t* row) {
    bool finite = true;
#pragma unroll 1
    for (int c = 0; c < D_MODEL; ++c) finite &= is_finite(to_float(row[c]));
    return finite;
}

// ---- gate, v1: a warp a neuron ----

// This lane's part of x . row
__device__ __forceinline__ float lane_dot(const value_t* x, const value_t* row) {
    const int lane = threadIdx.x % WARP;
    constexpr int chunks = (D_MODEL + SLAB - 1) / SLAB;
    float sum = 0;
#pragma unroll 8
    for (int k = 0; k < chunks; ++k) {
        const int c = k * SLAB + lane * VECTOR;
        if (c >= D_MODEL) break;
        Vector w, v;
        w.raw = load_weights(row + c, true), v.raw = __ldg((const uint4*)(x + c));
        float a[VECTOR], b[VECTOR];
        w.to_floats(a), v.to_floats(b);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum = fmaf(a[i], b[i], sum);
    }
    return sum;
}

__device__ __forceinline__ float warp_dot(const value_t* x, const value_t* row) {
    float sum = lane_dot(x, row);
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

// The gate value as torch's linear gives it: fp32 sums, one rounding.
__device__ __forceinline__ float gate_value(float sum, const value_t* bias, int neuron) {
    return to_float(from_float(bias ? sum + to_float(bias[neuron]) : sum));
}

// In a row of x that is not finite every up value is infinite or NaN; the dense layer multiplies those of silent neurons
// by zero, which makes the whole row NaN. So such a neuron contributes NaN. Its own sum cannot be finite then.
__device__ __forceinline__ bool spoils(float sum, float g, const value_t* x) {
    return g <= 0.0f && !is_finite(sum) && !row_is_finite(x);
}

__device__ __forceinline__ void count(unsigned long long* stats, int tokens, int kept) {
    if (!stats) return;
    if (blockIdx.x == 0) atomicAdd(stats, (unsigned long long)tokens);
    if (kept) atomicAdd(stats + 1, (unsigned long long)kept);
}

extern "C" __global__ void __launch_bounds__(TILE * WARP)
decode_gate_v1(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ gate_bias,
               const value_t* __restrict__ up, const value_t* __restrict__ up_bias, const value_t* __restrict__ down_t,
               Hidden out, unsigned long long* stats, int tokens, int d_ff) {
    __shared__ unsigned mask;
    __shared__ int kept;
    const int neuron = blockIdx.x * TILE + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) kept = 0;
    for (int token = 0; token < tokens; ++token) {
        const long long tile = (long long)token * gridDim.x + blockIdx.x;
        if (threadIdx.x == 0) mask = 0;
        __syncthreads();
        if (neuron < d_ff) {
            const value_t* in = x + (long long)token * D_MODEL;
            const float sum = warp_dot(in, gate + (long long)neuron * D_MODEL);
            const float g = gate_value(sum, gate_bias, neuron);
            const bool fired = !(g <= 0.0f), spoilt = up && spoils(sum, g, in);
            if (fired || spoilt) {
                float h = spoilt ? nanf("") : g;
                if (up && fired) h = g * (warp_dot(in, up + (long long)neuron * D_MODEL) + (up_bias ? to_float(up_bias[neuron]) : 0.0f));
                if (lane == 0) {
                    atomicOr(&mask, 1u << threadIdx.x / WARP);
                    atomicAdd(&kept, (int)fired);
                    out.value[tile * TILE + threadIdx.x / WARP] = h;
                }
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) out.mask[tile] = mask;
    }
    if (threadIdx.x == 0) count(stats, tokens, kept);
}

// ---- gate, v3: asynchronous copies ----

#ifndef TILES
#define TILES 1                // tiles of a block
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef PIECE_UNROLL
#define PIECE_UNROLL 1
#endif
#ifndef ROWS
#define ROWS TOKENS            // rows of x that are kept: the tokens, rounded up
#endif
#define PIECE 64               // values of a row that are copied at a time: 128 bytes
#define PIECES ((D_MODEL + PIECE * WARPS - 1) / (PIECE * WARPS))  // pieces of a warp
#define NEURONS (TILES * TILE)
#define STAGE_BYTES ((NEURONS + ROWS) * 128)
#define PART_STRIDE (NEURONS + 4)
#define PART_BYTES (WARPS * TOKENS * PART_STRIDE * 4)

struct Wanted {
    unsigned rows[TILES];  // neurons of each tile
    unsigned groups;       // groups of eight tokens
};

// Where 16 bytes number `chunk` of 128-byte row `row` lie: shuffled so that eight rows' same chunk meet in no bank.
__device__ __forceinline__ unsigned swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row) & 7) * 16; }

__device__ __forceinline__ void copy_piece(unsigned stage, const value_t* weights, const Wanted& wanted, const value_t* x, int tokens, int piece) {
    const int lane = threadIdx.x % WARP, chunk = lane % 8;
    const int column = (threadIdx.x / WARP * PIECES + piece) * PIECE + chunk * VECTOR;
    const bool within = column < D_MODEL;
    const long long here = (long long)(lane / 8) * D_MODEL + column;  // what is not to be taken is not read
#pragma unroll
    for (int i = 0; i < NEURONS; i += 4)
        copy_async(stage + swizzled(i + lane / 8, chunk), weights + here + i * D_MODEL, within && (wanted.rows[i / TILE] >> (i % TILE + lane / 8) & 1));
#pragma unroll
    for (int i = 0; i < ROWS; i += 4) {
        const int row = i + lane / 8;
        if (ROWS >= 4 || row < ROWS)
            copy_async(stage + swizzled(NEURONS + row, chunk), x + here + i * D_MODEL, within && row < tokens && (wanted.groups >> row / 8 & 1));
    }
}

__device__ __forceinline__ void multiply_staged(unsigned memory, float* part, const value_t* weights, const Wanted& wanted,
                                                const value_t* x, int tokens) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned stages = memory + warp * STAGES * STAGE_BYTES;
    float sum[TILES][GROUPS][4] = {};
#pragma unroll
    for (int p = 0; p < STAGES; ++p) {
        if (p < PIECES) copy_piece(stages + p * STAGE_BYTES, weights, wanted, x, tokens, p);
        commit_copies();
    }
#pragma unroll PIECE_UNROLL
    for (int p = 0; p < PIECES; ++p) {
        const unsigned stage = stages + p % STAGES * STAGE_BYTES;
        wait_copies<STAGES - 1>();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < PIECE / 16; k += 2) {
            unsigned left[2][TILES][4];
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
                load_matrices(left[0][m], stage + swizzled(m * TILE + lane % 16, k * 2 + lane / 16));
                load_matrices(left[1][m], stage + swizzled(m * TILE + lane % 16, k * 2 + 2 + lane / 16));
            }
#pragma unroll
            for (int n = 0; n < GROUPS; ++n) {
                unsigned right[4];
                load_matrices(right, stage + swizzled(NEURONS + (n * 8 + lane % 8) % ROWS, k * 2 + lane / 8));
#pragma unroll
                for (int m = 0; m < TILES; ++m) {
                    multiply_add(sum[m][n], left[0][m], right[0], right[1]);
                    multiply_add(sum[m][n], left[1][m], right[2], right[3]);
                }
            }
        }
        __syncwarp();
        if (p + STAGES < PIECES) copy_piece(stage, weights, wanted, x, tokens, p + STAGES);
        commit_copies();
    }
    wait_copies<0>();
    __syncthreads();  // the parts lie where the stages were
    float* mine = part + warp * TOKENS * PART_STRIDE;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mine[(n * 8 + lane % 4 * 2 + i % 2) * PART_STRIDE + m * TILE + lane / 4 + i / 2 * 8] = sum[m][n][i];
        }
    }
    __syncthreads();
}

__device__ __forceinline__ float total_staged(const float* part, int token, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += part[(w * TOKENS + token) * PART_STRIDE + row];
    return sum;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, RESIDENT)
decode_gate_v3(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ gate_bias,
               const value_t* __restrict__ up, const value_t* __restrict__ up_bias, const value_t* __restrict__ down_t,
               Hidden out, unsigned long long* stats, int tokens, int d_ff) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ unsigned found[TILES + 1];  // neurons that fire for some token, tile by tile; groups of tokens with one
    __shared__ float gates[ROWS * NEURONS];
    __shared__ int kept;
    constexpr int THREADS = WARPS * WARP, PAIRS = (ROWS * NEURONS + THREADS - 1) / THREADS;
    const int first = blockIdx.x * NEURONS, tiles = (d_ff + TILE - 1) / TILE;
    float* part = (float*)memory;
    if (threadIdx.x <= TILES) found[threadIdx.x] = 0;
    if (threadIdx.x == 0) kept = 0;
    let_next_start();
    Wanted wanted;
#pragma unroll
    for (int m = 0; m < TILES; ++m) wanted.rows[m] = (1u << max(0, min(TILE, d_ff - first - m * TILE))) - 1;
    wanted.groups = ~0u;
    multiply_staged(shared_address(memory), part, gate + (long long)first * D_MODEL, wanted, x, tokens);

    // Pair number i * THREADS + threadIdx.x: neurons of a tile first, then tiles, then tokens.
    unsigned fired = 0;  // bit i: pair i of this thread
#pragma unroll 1
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * THREADS + threadIdx.x, row = pair % NEURONS, token = pair / NEURONS;
        bool fires = false, spoilt = false;
        float g = 0;
        if (token < tokens && first + row < d_ff) {
            const float sum = total_staged(part, token, row);
            g = gate_value(sum, gate_bias, first + row);
            fires = !(g <= 0.0f);
            spoilt = up && spoils(sum, g, x + (long long)token * D_MODEL);
            gates[pair] = g;
        }
        fired |= (unsigned)fires << i;
        const long long place = (long long)token * tiles * TILE + first + row;
        const unsigned here = __ballot_sync(ALL_LANES, fires) >> (threadIdx.x & 16) & 0xffffu;
        const unsigned listed = __ballot_sync(ALL_LANES, spoilt) >> (threadIdx.x & 16) & 0xffffu | here;
        if (token < tokens && row % TILE == 0 && first + row < d_ff) {
            out.mask[place / TILE] = (unsigned short)listed;
            if (here) {
                atomicOr(&found[row / TILE], here);
                atomicOr(&found[TILES], 1u << token / 8);
                atomicAdd(&kept, __popc(here));
            }
        }
        if (spoilt) out.value[place] = nanf("");
        if (!up && fires) out.value[place] = g;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < TILES; ++m) wanted.rows[m] = found[m];
    wanted.groups = found[TILES];
    if (threadIdx.x == 0) count(stats, tokens, kept);
    if (!wanted.groups) return;

    // The rows of down_t will be read by the next launch: have them fetched while up is being read.
    constexpr int LINES = (D_MODEL * (int)sizeof(value_t) + 127) / 128;
    for (int i = threadIdx.x; i < NEURONS * LINES; i += THREADS) {
        const int row = i / LINES;
        if (found[row / TILE] >> row % TILE & 1)
            prefetch_to_l2((const char*)(down_t + (long long)(first + row) * D_MODEL) + i % LINES * 128);
    }
    if (!up) return;
    multiply_staged(shared_address(memory), part, up + (long long)first * D_MODEL, wanted, x, tokens);
#pragma unroll 1
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * THREADS + threadIdx.x, row = pair % NEURONS, token = pair / NEURONS;
        if (!(fired >> i & 1)) continue;
        const float u = total_staged(part, token, row) + (up_bias ? to_float(up_bias[first + row]) : 0.0f);
        out.value[(long long)token * tiles * TILE + first + row] = gates[pair] * u;
    }
}

// ---- down ----

extern "C" __global__ void __launch_bounds__(DOWN_THREADS)
decode_down(Hidden in, const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y, int tiles) {
    __shared__ unsigned short list[DOWN_THREADS * TILE];  // who contributes, of as many tiles as there are threads
    __shared__ int totals[DOWN_WARPS];
    __shared__ float part[DOWN_WARPS][SLAB];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column = blockIdx.x * SLAB + lane * VECTOR;
    const long long token = blockIdx.y;
    const bool inside = column < D_MODEL;
    float sum[VECTOR] = {};
    wait_for_previous();
    for (int first = 0; first < tiles; first += DOWN_THREADS) {
        const int tile = first + threadIdx.x;
        unsigned mask = tile < tiles ? in.mask[token * tiles + tile] : 0;
        int before = __popc(mask);
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, before, step);
            if (lane >= step) before += other;
        }
        if (lane == WARP - 1) totals[warp] = before;
        before -= __popc(mask);
        __syncthreads();
        int entries = 0;
#pragma unroll
        for (int w = 0; w < DOWN_WARPS; ++w) {
            if (w == warp) before += entries;
            entries += totals[w];
        }
        for (; mask; mask &= mask - 1) list[before++] = (unsigned short)(threadIdx.x * TILE + __ffs(mask) - 1);
        __syncthreads();
        const float* value = in.value + (token * tiles + first) * TILE;
        const value_t* rows = down_t + (long long)first * TILE * D_MODEL + column;
        for (int e = warp; e < entries; e += DOWN_WARPS * AT_ONCE) {
            Vector w[AT_ONCE];
            float h[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const bool there = e + i * DOWN_WARPS < entries;
                const int neuron = there ? list[e + i * DOWN_WARPS] : 0;
                w[i].raw = make_uint4(0, 0, 0, 0);
                if (there && inside) w[i].raw = __ldg((const uint4*)(rows + (long long)neuron * D_MODEL));
                h[i] = there ? value[neuron] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float f[VECTOR];
                w[i].to_floats(f);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sum[j] = fmaf(h[i], f[j], sum[j]);
            }
        }
        __syncthreads();  // the list and the totals are free again
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) part[warp][lane * VECTOR + j] = sum[j];
    __syncthreads();
    const int c = blockIdx.x * SLAB + threadIdx.x;
    if (threadIdx.x >= SLAB || c >= D_MODEL) return;
    float all = 0;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; ++w) all += part[w][threadIdx.x];
    y[token * D_MODEL + c] = from_float(bias ? all + to_float(bias[c]) : all);
}
