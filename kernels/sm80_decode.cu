// decode: a whole sparse feed-forward layer for 1 to 64 tokens in two launches, GPUs from sm_80. `gate` finds which
// neurons fire and what each contributes; `down` adds their rows up. Gated: h = act(g) * (x Wu^T + bu) where
// g = x Wg^T + bg fires (activation.cuh); plain: h = act(g). y = h Wd^T + bd. Weights are [d_ff][D_MODEL], 16-bit; sums
// are fp32; the same bits on every run.
//
// What bounds it: with so few tokens the gate's weights have to come once from device memory, and nothing makes that
// shorter. Then come two latencies that nothing hides: which rows of up are needed is known only after the gate, and h
// only after up.
//
//   decode_gate_v1  a warp a neuron, plain fused multiply-adds; every further token reads the weights again
//   decode_gate_v2  tensor cores: a block's neurons are multiplied with all tokens at once, each warp taking a part of
//                   every row; then up, as single dot products where few fire, as a second product where many do
//   decode_down     a block for a token and DOWN_COLUMNS columns of y
//
// Worklog: docs/kernels/sm80_decode.md
#include "activation.cuh"
#include "ptx_sm80.cuh"
#include "ptx_sm80_decode.cuh"

// Macros: D_MODEL; TOKENS, the number of tokens rounded up to 1, 8, 16, 32 or 64; for gate_v2 BANDS of a block, its
// BLOCK_WARPS, the STAGES of each warp, the values of a row in a stage (BK), and RESIDENT blocks of a multiprocessor;
// and for down DOWN_LANES, the lanes that read a row of down_t together. Where many neurons fire, few lanes and so few
// columns a block make enough blocks to read with the whole GPU.
#ifndef TOKENS
#define TOKENS 8
#endif
#ifndef BANDS
#define BANDS 1
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef BK
#define BK 64
#endif
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef BAND
#define BAND 16  // neurons of a band: the rows of one product
#endif
#ifndef DOWN_WARPS
#define DOWN_WARPS 16
#endif
#ifndef DOWN_LANES
#define DOWN_LANES WARP
#endif
#define SLAB (WARP * VECTOR)  // columns that a warp reads at a time, 16 bytes a lane
#define DOWN_COLUMNS (DOWN_LANES * VECTOR)  // of y, those of a block of down
#define DOWN_ROWS (WARP / DOWN_LANES)       // rows of down_t that a warp reads at a time
#define DOWN_THREADS (DOWN_WARPS * WARP)
#if DOWN_LANES < 32 || defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define DOWN_RESIDENT 2  // blocks of a multiprocessor; four would spill there
#else
#define DOWN_RESIDENT 4
#endif
#define DOWN_AT_ONCE (DOWN_LANES < 32 ? 8 : 4)  // times DOWN_ROWS, rows of down_t that a warp has under way
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");
static_assert(BK == 64 || BK == 32, "a stage has 128 or 64 bytes of a row");

// What gate leaves for down. Neuron b of band i contributes to a token if bit b of mask[token][i] is set; then, and
// only then, value[token][i][b] is its h. Fixed places: nothing to count, nothing that could overflow.
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

// The gate value as torch's linear gives it: fp32 sums, one rounding.
__device__ __forceinline__ value_t gate_value(float sum, const value_t* bias, int neuron) {
    return from_float(bias ? sum + to_float(bias[neuron]) : sum);
}

// In a row of x that is not finite every up value is infinite or NaN; the dense layer multiplies those of silent
// neurons by zero, which makes the whole row NaN. So such a neuron contributes NaN. Its gate's sum cannot be finite
// then either: the row is searched only where this sum is not finite. In a plain layer only what falls back to zero far
// below it, as silu does, is NaN there.
__device__ __forceinline__ bool spoils(float sum, const Activated& a, bool gated, const value_t* x) {
    return (gated || FALLS_BACK) && !a.fires && !is_finite(sum) && !row_is_finite(x);
}

// What a neuron is in find_firing and gate_v1. With a ReLU on up, what a silent neuron of a row that is not finite
// contributes depends on up: it is taken for one that fires with zero.
__device__ __forceinline__ Activated activated_or_spoilt(float sum, const value_t* bias, int neuron, bool gated,
                                                         const value_t* x, float threshold, bool& spoilt) {
    Activated a = activated(gate_value(sum, bias, neuron), threshold);
    spoilt = spoils(sum, a, gated, x);
#if defined(BOTH)
    if (spoilt) a.fires = true, a.value = 0.0f, spoilt = false;
#endif
    return a;
}

__device__ __forceinline__ void count(unsigned long long* stats, int tokens, int kept) {
    if (!stats) return;
    if (blockIdx.x == 0) atomicAdd(stats, (unsigned long long)tokens);
    if (kept) atomicAdd(stats + 1, (unsigned long long)kept);
}

// sum[i] = this lane's part of x[i] . row[i], for COUNT of them side by side
template <int COUNT>
__device__ __forceinline__ void lane_dots(const value_t* const (&x)[COUNT], const value_t* const (&row)[COUNT],
                                          float (&sum)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] = 0;
#pragma unroll (COUNT > 2 ? 4 : 8)
    for (int k = 0; k < (D_MODEL + SLAB - 1) / SLAB; ++k) {
        const int c = k * SLAB + threadIdx.x % WARP * VECTOR;
        if (c >= D_MODEL) break;
        Vector w[COUNT], v[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            w[i].raw = __ldg((const uint4*)(row[i] + c));
            v[i].raw = __ldg((const uint4*)(x[i] + c));
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float a[VECTOR], b[VECTOR];
            w[i].to_floats(a), v[i].to_floats(b);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) sum[i] = fmaf(a[j], b[j], sum[i]);
        }
    }
}

__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

// ---- gate, v1: a warp a neuron ----

__device__ __forceinline__ float warp_dot(const value_t* x, const value_t* row) {
    const value_t *in[] = {x}, *weights[] = {row};
    float sum[1];
    lane_dots<1>(in, weights, sum);
    return warp_sum(sum[0]);
}

extern "C" __global__ void __launch_bounds__(BAND * WARP)
decode_gate_v1(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ gate_bias,
               const value_t* __restrict__ up, const value_t* __restrict__ up_bias, const value_t* __restrict__ down_t,
               Hidden out, unsigned long long* stats, int tokens, int d_ff, float threshold) {
    __shared__ unsigned mask;
    __shared__ int kept;
    const int warp = threadIdx.x / WARP, neuron = blockIdx.x * BAND + warp;
    if (threadIdx.x == 0) kept = 0;
    wait_for_previous();
    for (int token = 0; token < tokens; ++token) {
        const long long band = (long long)token * gridDim.x + blockIdx.x;
        if (threadIdx.x == 0) mask = 0;
        __syncthreads();
        if (neuron < d_ff) {
            const value_t* in = x + (long long)token * D_MODEL;
            const float sum = warp_dot(in, gate + (long long)neuron * D_MODEL);
            bool spoilt;
            const Activated a = activated_or_spoilt(sum, gate_bias, neuron, up, in, threshold, spoilt);
            float h = spoilt ? nanf("") : a.value;
            if (up && a.fires)
                h = hidden(h, warp_dot(in, up + (long long)neuron * D_MODEL) + (up_bias ? to_float(up_bias[neuron]) : 0.0f));
            if (threadIdx.x % WARP == 0 && (a.fires || spoilt)) {
                atomicOr(&mask, 1u << warp);
                atomicAdd(&kept, (int)a.fires);
                out.value[band * BAND + warp] = h;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) out.mask[band] = (unsigned short)mask;
    }
    if (threadIdx.x == 0) count(stats, tokens, kept);
}

// ---- gate, v2: tensor cores; each warp takes a part of every row ----

#define BLOCK_NEURONS (BANDS * BAND)
#define TOKEN_GROUPS ((TOKENS + 7) / 8)  // groups of eight tokens: the columns of one product
#define PADDED_TOKENS (8 * TOKEN_GROUPS)
#define WARP_STEPS ((D_MODEL + BK * BLOCK_WARPS - 1) / (BK * BLOCK_WARPS))  // stages that a warp fills in turn
#define STAGE_CHUNKS (BK / VECTOR)       // 16-byte chunks of one row of a stage
#define COPY_ROWS (WARP / STAGE_CHUNKS)  // rows that a warp copies with one instruction
#define STAGE_BYTES ((BLOCK_NEURONS + TOKENS) * BK * 2)
#define PART_STRIDE (BLOCK_NEURONS + 4)  // floats; keeps a warp's writes out of each other's banks
#define THREADS (BLOCK_WARPS * WARP)
#define PAIRS ((TOKENS * BLOCK_NEURONS + THREADS - 1) / THREADS)  // pairs of a token and a neuron, a thread
#define FEW (TOKENS > 16 ? 16 * BLOCK_WARPS : 8 * BLOCK_WARPS)    // that fire, up to which each is a dot product
#define DOTS_AT_ONCE (TOKENS > 16 ? 2 : 1)                        // of them for a warp

struct Wanted {
    unsigned rows[BANDS];  // neurons of each band
    unsigned groups;       // groups of eight tokens
};

// The offset of the 16-byte chunk number `chunk` of row `row` in a stage. Chunks are permuted so that the same chunk of
// eight neighbouring rows lies in different banks.
__device__ __forceinline__ unsigned swizzled(int row, int chunk) {
    return (row * STAGE_CHUNKS + (BK == 64 ? chunk ^ (row & 7) : chunk ^ (row / 2 & 3))) * 16;
}

// Starts the copies of the bands' rows for one stage, then of x's. What is not wanted is not read: there, and past the
// rows' end, zeros are written.
__device__ __forceinline__ void copy_stage(unsigned stage, const value_t* weights, const Wanted& wanted,
                                           const value_t* x, int tokens, int step) {
    const int lane = threadIdx.x % WARP, chunk = lane % STAGE_CHUNKS, row = lane / STAGE_CHUNKS;
    const int column = (threadIdx.x / WARP * WARP_STEPS + step) * BK + chunk * VECTOR;
    const bool within = column < D_MODEL;
    const long long here = (long long)row * D_MODEL + column;
#pragma unroll
    for (int i = 0; i < BLOCK_NEURONS; i += COPY_ROWS) {
        const bool want = wanted.rows[i / BAND] >> (i % BAND + row) & 1;
        copy_async(stage + swizzled(i + row, chunk), weights + here + i * D_MODEL, within && want);
    }
#pragma unroll 2
    for (int i = 0; i < TOKENS; i += COPY_ROWS) {
        if (TOKENS % COPY_ROWS != 0 && i + row >= TOKENS) continue;
        const bool want = i + row < tokens && (wanted.groups >> (i + row) / 8 & 1);
        copy_async(stage + swizzled(BLOCK_NEURONS + i + row, chunk), x + here + i * D_MODEL, within && want);
    }
}

// part[warp][token][neuron] = this warp's part of weights[neuron] . x[token], for what is wanted. Nobody but the warp
// reads what it copies, so the copies need no barrier. `part` lies where the stages were.
__device__ __forceinline__ void multiply(unsigned memory, float* part, const value_t* weights, const Wanted& wanted,
                                         const value_t* x, int tokens) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned stages = memory + warp * STAGES * STAGE_BYTES;
    float sum[BANDS][TOKEN_GROUPS][4] = {};
#pragma unroll
    for (int p = 0; p < STAGES; ++p) {
        if (p < WARP_STEPS) copy_stage(stages + p * STAGE_BYTES, weights, wanted, x, tokens, p);
        commit_copies();
    }
#pragma unroll 1
    for (int p = 0; p < WARP_STEPS; ++p) {
        const unsigned stage = stages + p % STAGES * STAGE_BYTES;
        wait_copies<STAGES - 1>();
        __syncwarp();
#pragma unroll (TOKEN_GROUPS > 4 ? 1 : BK / 32)
        for (int k = 0; k < STAGE_CHUNKS; k += 4) {
            unsigned left[2][BANDS][4];
#pragma unroll
            for (int m = 0; m < BANDS; ++m) {
                load_matrices(left[0][m], stage + swizzled(m * BAND + lane % 16, k + lane / 16));
                load_matrices(left[1][m], stage + swizzled(m * BAND + lane % 16, k + 2 + lane / 16));
            }
#pragma unroll
            for (int n = 0; n < TOKEN_GROUPS; ++n) {
                unsigned right[4];  // with one row of x, the other seven columns repeat it, unread
                load_matrices(right, stage + swizzled(BLOCK_NEURONS + (n * 8 + lane % 8) % TOKENS, k + lane / 8));
#pragma unroll
                for (int half = 0; half < 2; ++half) {  // outermost: neighbouring products do not wait for each other
#pragma unroll
                    for (int m = 0; m < BANDS; ++m)
                        multiply_add(sum[m][n], left[half][m], right[half * 2], right[half * 2 + 1]);
                }
            }
        }
        __syncwarp();
        if (p + STAGES < WARP_STEPS) copy_stage(stage, weights, wanted, x, tokens, p + STAGES);
        commit_copies();
    }
    wait_copies<0>();
    __syncthreads();
    float* mine = part + warp * PADDED_TOKENS * PART_STRIDE;
#pragma unroll
    for (int m = 0; m < BANDS; ++m) {
#pragma unroll
        for (int n = 0; n < TOKEN_GROUPS; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mine[(n * 8 + lane % 4 * 2 + i % 2) * PART_STRIDE + m * BAND + lane / 4 + i / 2 * 8] = sum[m][n][i];
        }
    }
    __syncthreads();
}

// The warps' parts, in their order
__device__ __forceinline__ float total(const float* part, int token, int row) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) sum += part[(w * PADDED_TOKENS + token) * PART_STRIDE + row];
    return sum;
}

// What the gate's product says of the block's neurons, in shared memory.
struct Firing {
    unsigned found[BANDS + 1];  // neurons of each band that fire for some token; groups of tokens with one
    float gates[TOKENS * BLOCK_NEURONS];  // of what fires, after the activation
    unsigned short list[FEW];   // pairs that fire, in any order: each has a place of its own in the end
    int kept;
};

// A pair is a token and a neuron of the block. Pairs are numbered by token, then band, then neuron of the band, which
// changes fastest. Thread t has the pairs i * THREADS + t. find_firing returns bit i for each of them that fires, and
// writes the masks and the values that need no up.
__device__ __forceinline__ unsigned find_firing(Firing& f, const float* part, const value_t* x,
                                                const value_t* gate_bias, bool gated, const Hidden& out, int first,
                                                int tokens, int d_ff, float threshold) {
    const int bands = (d_ff + BAND - 1) / BAND;
    unsigned fired = 0;
#pragma unroll 1
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * THREADS + threadIdx.x, row = pair % BLOCK_NEURONS, token = pair / BLOCK_NEURONS;
        const long long place = (long long)token * bands * BAND + first + row;
        const bool inside = token < tokens && first + row < d_ff;
        bool fires = false, spoilt = false;
        if (inside) {
            const Activated a = activated_or_spoilt(total(part, token, row), gate_bias, first + row, gated,
                                                    x + (long long)token * D_MODEL, threshold, spoilt);
            fires = a.fires;
            f.gates[pair] = a.value;
            if (spoilt || (!gated && fires)) out.value[place] = spoilt ? nanf("") : a.value;
        }
        fired |= (unsigned)fires << i;
        const unsigned here = __ballot_sync(ALL_LANES, fires) >> (threadIdx.x & 16) & 0xffffu;
        const unsigned spoil = __ballot_sync(ALL_LANES, spoilt) >> (threadIdx.x & 16) & 0xffffu;
        if (inside && row % BAND == 0) {
            out.mask[place / BAND] = (unsigned short)(here | spoil);
            if (here) {
                atomicOr(&f.found[row / BAND], here);
                atomicOr(&f.found[BANDS], 1u << token / 8);
                int n = atomicAdd(&f.kept, __popc(here));
                for (unsigned left = here; left && n < FEW; left &= left - 1)
                    f.list[n++] = (unsigned short)(pair + __ffs(left) - 1);
            }
        }
    }
    return fired;
}

// The next launch will read these rows of down_t: fetch them into the L2 cache while up is being read. With a ReLU on up
// it is not known yet which of them.
#if defined(BOTH)
#define FETCHES false
#else
#define FETCHES (TOKENS <= 16)
#endif
__device__ __forceinline__ void fetch_down_rows(const Firing& f, const value_t* down_t, int first) {
    constexpr int LINES = (D_MODEL * (int)sizeof(value_t) + 127) / 128;
    for (int i = threadIdx.x; i < BLOCK_NEURONS * LINES && FETCHES; i += THREADS)
        if (f.found[i / LINES / BAND] >> i / LINES % BAND & 1)
            prefetch_to_l2((const char*)(down_t + (long long)(first + i / LINES) * D_MODEL) + i % LINES * 128);
}

// h of few pairs: a dot product for each, a warp's DOTS_AT_ONCE side by side.
__device__ __forceinline__ void up_of_few(const Firing& f, const value_t* x, const value_t* up, const value_t* up_bias,
                                          const Hidden& out, int first, int bands) {
    const int kept = f.kept;
#pragma unroll 1
    for (int n = threadIdx.x / WARP; n < kept; n += BLOCK_WARPS * DOTS_AT_ONCE) {
        const value_t *in[DOTS_AT_ONCE], *row_of_up[DOTS_AT_ONCE];
        float u[DOTS_AT_ONCE];
#pragma unroll
        for (int i = 0; i < DOTS_AT_ONCE; ++i) {
            const int pair = f.list[min(n + i * BLOCK_WARPS, kept - 1)];
            in[i] = x + (long long)(pair / BLOCK_NEURONS) * D_MODEL;
            row_of_up[i] = up + (long long)(first + pair % BLOCK_NEURONS) * D_MODEL;
        }
        lane_dots<DOTS_AT_ONCE>(in, row_of_up, u);
#pragma unroll
        for (int i = 0; i < DOTS_AT_ONCE; ++i) {
            const int pair = f.list[min(n + i * BLOCK_WARPS, kept - 1)], row = pair % BLOCK_NEURONS;
            const float sum = warp_sum(u[i]) + (up_bias ? to_float(up_bias[first + row]) : 0.0f);
            if (threadIdx.x % WARP == 0 && n + i * BLOCK_WARPS < kept)
                out.value[(long long)(pair / BLOCK_NEURONS) * bands * BAND + first + row] = hidden(f.gates[pair], sum);
        }
    }
}

// h of this thread's pairs that fired, from a second product.
__device__ __forceinline__ void up_of_many(const Firing& f, const float* part, const value_t* up_bias,
                                           const Hidden& out, int first, int bands, unsigned fired) {
#pragma unroll 1
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = i * THREADS + threadIdx.x, row = pair % BLOCK_NEURONS, token = pair / BLOCK_NEURONS;
        if (!(fired >> i & 1)) continue;
        const float u = total(part, token, row) + (up_bias ? to_float(up_bias[first + row]) : 0.0f);
        out.value[(long long)token * bands * BAND + first + row] = hidden(f.gates[pair], u);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
decode_gate_v2(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ gate_bias,
               const value_t* __restrict__ up, const value_t* __restrict__ up_bias, const value_t* __restrict__ down_t,
               Hidden out, unsigned long long* stats, int tokens, int d_ff, float threshold) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Firing f;
    const int first = blockIdx.x * BLOCK_NEURONS, bands = (d_ff + BAND - 1) / BAND;
    float* part = (float*)memory;
    if (threadIdx.x <= BANDS) f.found[threadIdx.x] = 0;
    if (threadIdx.x == 0) f.kept = 0;
    wait_for_previous();
    if (threadIdx.x == 0 && gate_bias) prefetch_to_l2(gate_bias + first);
    if (threadIdx.x == 0 && up_bias) prefetch_to_l2(up_bias + first);
    Wanted wanted;
#pragma unroll
    for (int m = 0; m < BANDS; ++m) wanted.rows[m] = (1u << max(0, min(BAND, d_ff - first - m * BAND))) - 1;
    wanted.groups = ~0u;
    unsigned fired = 0;
    const value_t* weights = gate;
    // The first turn computes the gate's product; the second one, where many neurons fire, up's. (A loop, because the
    // product written out twice would take more registers than there are.)
#pragma unroll 1
    for (bool of_up = false;; of_up = true) {
        multiply(shared_address(memory), part, weights + (long long)first * D_MODEL, wanted, x, tokens);
        if (of_up) break;
        let_next_start();
        fired = find_firing(f, part, x, gate_bias, up != nullptr, out, first, tokens, d_ff, threshold);
        __syncthreads();
        if (threadIdx.x == 0) count(stats, tokens, f.kept);
        if (f.kept == 0) return;
        fetch_down_rows(f, down_t, first);
        if (!up) return;
        if (f.kept <= FEW) return up_of_few(f, x, up, up_bias, out, first, bands);
        weights = up;
#pragma unroll
        for (int m = 0; m < BANDS; ++m) wanted.rows[m] = f.found[m];  // of rows of up, those that fire for some token
        wanted.groups = f.found[BANDS];
    }
    up_of_many(f, part, up_bias, out, first, bands, fired);
}

// ---- down: a block a token and DOWN_COLUMNS columns of y ----

extern "C" __global__ void __launch_bounds__(DOWN_THREADS, DOWN_RESIDENT)
decode_down(Hidden in, const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y,
            int bands) {
    __shared__ unsigned short list[DOWN_THREADS * BAND];  // who contributes, of as many bands as there are threads
    __shared__ int totals[DOWN_WARPS];
    __shared__ float part[DOWN_WARPS][DOWN_COLUMNS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column = blockIdx.x * DOWN_COLUMNS + lane % DOWN_LANES * VECTOR;
    const int reader = warp * DOWN_ROWS + lane / DOWN_LANES;  // of DOWN_WARPS * DOWN_ROWS, each with a row at a time
    const long long token = blockIdx.y;
    float sum[VECTOR] = {};
    wait_for_previous();
    let_next_start();
    for (int first = 0; first < bands; first += DOWN_THREADS) {
        const int band = first + threadIdx.x;
        unsigned mask = band < bands ? in.mask[token * bands + band] : 0;
#if defined(BOTH)
        for (unsigned left = mask; left; left &= left - 1)  // what up silenced
            if (in.value[(token * bands + band) * BAND + __ffs(left) - 1] == 0.0f) mask ^= left & -left;
#endif
        int place = __popc(mask);
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, place, step);
            if (lane >= step) place += other;
        }
        if (lane == WARP - 1) totals[warp] = place;
        place -= __popc(mask);
        __syncthreads();
        int entries = 0;
#pragma unroll
        for (int w = 0; w < DOWN_WARPS; ++w) {
            if (w == warp) place += entries;
            entries += totals[w];
        }
        for (; mask; mask &= mask - 1) list[place++] = (unsigned short)(threadIdx.x * BAND + __ffs(mask) - 1);
        __syncthreads();
        const float* value = in.value + (token * bands + first) * BAND;
        const value_t* rows = down_t + (long long)first * BAND * D_MODEL + column;
        for (int e = reader; e < entries; e += DOWN_WARPS * DOWN_ROWS * DOWN_AT_ONCE) {
            Vector w[DOWN_AT_ONCE];
            float h[DOWN_AT_ONCE];
#pragma unroll
            for (int i = 0; i < DOWN_AT_ONCE; ++i) {
                const bool there = e + i * DOWN_WARPS * DOWN_ROWS < entries;
                const int neuron = there ? list[e + i * DOWN_WARPS * DOWN_ROWS] : 0;
                w[i].raw = make_uint4(0, 0, 0, 0);
                if (there && column < D_MODEL) w[i].raw = __ldg((const uint4*)(rows + (long long)neuron * D_MODEL));
                h[i] = there ? value[neuron] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < DOWN_AT_ONCE; ++i) {
                float f[VECTOR];
                w[i].to_floats(f);
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sum[j] = fmaf(h[i], f[j], sum[j]);
            }
        }
        __syncthreads();  // the list and the totals are free again
    }
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
#pragma unroll
        for (int step = WARP / 2; step >= DOWN_LANES; step /= 2) sum[j] += __shfl_xor_sync(ALL_LANES, sum[j], step);
        if (lane < DOWN_LANES) part[warp][lane * VECTOR + j] = sum[j];
    }
    __syncthreads();
    const int c = blockIdx.x * DOWN_COLUMNS + threadIdx.x;
    if (threadIdx.x >= DOWN_COLUMNS || c >= D_MODEL) return;
    float all = 0;
#pragma unroll
    for (int w = 0; w < DOWN_WARPS; ++w) all += part[w][threadIdx.x];
    y[token * D_MODEL + c] = from_float(bias ? all + to_float(bias[c]) : all);
}

#ifdef LAUNCH_SHARED  // what decode_gate_v2 needs
#define PIPELINE_BYTES (BLOCK_WARPS * STAGES * STAGE_BYTES)
#define SUM_BYTES (BLOCK_WARPS * PADDED_TOKENS * PART_STRIDE * 4)
static_assert(LAUNCH_SHARED == (PIPELINE_BYTES > SUM_BYTES ? PIPELINE_BYTES : SUM_BYTES), "ops/decode.py has another size");
#endif
