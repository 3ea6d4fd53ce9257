// kept_inputs: a product that reads the weights of kept inputs alone, for 1 to 4 tokens, GPUs from sm_80. An input is
// kept unless |x| < threshold or x is zero: what TEAL's thresholds spare. y[t][n] = sum over kept k of x[t][k] *
// first_t[k][n]; with ACTIVATED through the activation (activation.cuh); with PAIRED also times the same sum of second_t:
// h of gate and up. Weights are [inputs][outputs], so that an input's are a row; 16-bit; sums are fp32; the same bits on
// every run.
//
// What bounds it: device memory; with few tokens each row of a kept input has to come from there once.
//
//   kept_inputs_v1  a thread an output: walks all inputs, and the weights are read 2 bytes a thread
//   kept_inputs_v2  a block lists the kept inputs, then reads 16 bytes a lane of SLAB columns of their rows, AT_ONCE rows
//                   a lane under way; a row that several tokens keep is read once
//   kept_inputs_v3  a warp lists its own inputs, 32 at a time, and reads their rows as soon as it has a batch: no barrier
//                   before the last sums. A slab has 64 columns; 128 (wide) where those are blocks enough for the GPU,
//                   or 32 (narrow) where 64 are not
//   kept_inputs_v3_each  up to three products of the same inputs, their results side by side
// Worklog: docs/kernels/sm80_kept_inputs.md
#include "activation.cuh"
#include "ptx_sm80_decode.cuh"

#ifndef TOKENS
#define TOKENS 1  // rounded up to 1 or 4
#endif
#ifndef PAIRED
#define PAIRED 1
#endif
#ifndef ACTIVATED
#define ACTIVATED PAIRED
#endif
#ifndef ROW_LANES
#define ROW_LANES 4
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
#define MATRICES (1 + PAIRED)
#define SUMS (TOKENS * MATRICES)
#define THREADS (BLOCK_WARPS * WARP)
#define SLAB (ROW_LANES * VECTOR)
#define WARP_ROWS (WARP / ROW_LANES)
#define READERS (BLOCK_WARPS * WARP_ROWS)  // groups of lanes, each with a row at a time
#define LISTED (TOKENS == 1 ? 8192 : 4096)  // inputs of which a list is made at a time
#ifndef AT_ONCE
#define AT_ONCE (PAIRED ? 4 : 8)
#endif
#ifndef RESIDENT
#define RESIDENT (SUMS > 4 ? 1 : 16 / BLOCK_WARPS)
#endif
#define V1_THREADS 256
#define V3_WARPS 16
#define V3_AHEAD 2  // pieces of 32 inputs that a warp has read before it needs them
static_assert(ACTIVATED || !PAIRED, "what is multiplied goes through the activation");
static_assert(TOKENS * SLAB <= THREADS, "a thread writes one output");

struct alignas(2 * TOKENS) Inputs {
    unsigned short bits[TOKENS];  // of one input, for each token; zero where it is not kept
};

struct List {
    Inputs value[LISTED];
    unsigned short input[LISTED];
};

union Memory {
    List list;
    float part[BLOCK_WARPS][SUMS][SLAB];
};

__device__ __forceinline__ bool keeps(value_t x, float threshold) {
    const float v = to_float(x);
    return !(fabsf(v) < threshold) && v != 0.0f;
}

// An output from its sums: rounded, through the activation and rounded again, as torch does; then times up.
__device__ __forceinline__ value_t output(float first, float second, const value_t* first_bias,
                                          const value_t* second_bias, int n) {
    if (first_bias) first += to_float(first_bias[n]);
#if ACTIVATED
    const Activated a = activated(from_float(first), 0.0f);
    const float value = FALLS_BACK || a.fires ? a.value : 0.0f;
#if PAIRED
    return from_float(value * (second_bias ? second + to_float(second_bias[n]) : second));
#else
    return from_float(value);
#endif
#else
    return from_float(first);
#endif
}

// ---- v1: a thread an output ----

extern "C" __global__ void __launch_bounds__(V1_THREADS)
kept_inputs_v1(const value_t* __restrict__ x, const value_t* __restrict__ first_t, const value_t* __restrict__ second_t,
               const value_t* __restrict__ first_bias, const value_t* __restrict__ second_bias, value_t* __restrict__ y,
               int tokens, int inputs, int outputs, float threshold) {
    const int n = blockIdx.x * V1_THREADS + threadIdx.x;
    const long long token = blockIdx.y;
    wait_for_previous();
    if (n >= outputs) return;
    float first = 0, second = 0;
#pragma unroll 4
    for (int k = 0; k < inputs; ++k) {
        const value_t v = x[token * inputs + k];
        if (!keeps(v, threshold)) continue;
        first = fmaf(to_float(v), to_float(first_t[(long long)k * outputs + n]), first);
        if (PAIRED) second = fmaf(to_float(v), to_float(second_t[(long long)k * outputs + n]), second);
    }
    y[token * outputs + n] = output(first, second, first_bias, second_bias, n);
}

// ---- v2: a block a slab of columns ----

// The values of one input; true if some token keeps it.
__device__ __forceinline__ bool read_input(Inputs& found, const value_t* x, int tokens, int inputs, int k, float threshold) {
    bool kept = false;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        found.bits[t] = 0;
        if (k >= inputs || t >= tokens) continue;
        const value_t v = x[(long long)t * inputs + k];
        if (!keeps(v, threshold)) continue;
        found.bits[t] = (unsigned short)bits_of(v);
        kept = true;
    }
    return kept;
}

// Lists the kept ones of the inputs from `first` on, ascending, up to LISTED of them; returns how many there are. Each
// warp counts and then lists its own part of them.
__device__ __forceinline__ int list_kept(List& list, int (&totals)[BLOCK_WARPS], const value_t* x, int tokens,
                                         int inputs, int first, float threshold) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int each = (min(LISTED, inputs - first) + THREADS - 1) / THREADS * WARP;  // inputs of a warp
    const int start = first + warp * each;
    Inputs values;
    int count = 0;
#pragma unroll 4
    for (int i = lane; i < each; i += WARP)
        count += __popc(__ballot_sync(ALL_LANES, read_input(values, x, tokens, inputs, start + i, threshold)));
    if (lane == 0) totals[warp] = count;
    __syncthreads();
    int place = 0, entries = 0;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) {
        if (w == warp) place = entries;
        entries += totals[w];
    }
#pragma unroll 4
    for (int i = lane; i < each; i += WARP) {
        const bool kept = read_input(values, x, tokens, inputs, start + i, threshold);
        const unsigned found = __ballot_sync(ALL_LANES, kept);
        if (kept) {
            const int at = place + __popc(found & ((1u << lane) - 1));
            list.value[at] = values;
            list.input[at] = (unsigned short)(start + i - first);
        }
        place += __popc(found);
    }
    __syncthreads();
    return entries;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
kept_inputs_v2(const value_t* __restrict__ x, const value_t* __restrict__ first_t, const value_t* __restrict__ second_t,
               const value_t* __restrict__ first_bias, const value_t* __restrict__ second_bias, value_t* __restrict__ y,
               int tokens, int inputs, int outputs, float threshold) {
    __shared__ Memory memory;
    __shared__ int totals[BLOCK_WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column = blockIdx.x * SLAB + lane % ROW_LANES * VECTOR;
    const int reader = warp * WARP_ROWS + lane / ROW_LANES;
    const value_t* const weights[] = {first_t + column, second_t + column};
    float sum[SUMS][VECTOR] = {};
    wait_for_previous();
    for (int first = 0; first < inputs; first += LISTED) {
        const int entries = list_kept(memory.list, totals, x, tokens, inputs, first, threshold);
        let_next_start();
        for (int e = reader; e < entries; e += READERS * AT_ONCE) {
            Vector w[AT_ONCE][MATRICES];
            Inputs values[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int at = e + i * READERS;
                const bool there = at < entries;
                const long long row = (long long)(first + (there ? memory.list.input[at] : 0)) * outputs;
                values[i] = there ? memory.list.value[at] : Inputs{};
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) {
                    w[i][m].raw = make_uint4(0, 0, 0, 0);
                    if (there && column < outputs) w[i][m].raw = __ldg((const uint4*)(weights[m] + row));
                }
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                for (int m = 0; m < MATRICES; ++m) {
                    float f[VECTOR];
                    w[i][m].to_floats(f);
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        const float v = to_float(value_of_bits(values[i].bits[t]));
#pragma unroll
                        for (int j = 0; j < VECTOR; ++j) sum[t * MATRICES + m][j] = fmaf(v, f[j], sum[t * MATRICES + m][j]);
                    }
                }
            }
        }
        __syncthreads();  // the list and the totals are free again
    }
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
#pragma unroll
            for (int step = WARP / 2; step >= ROW_LANES; step /= 2)
                sum[s][j] += __shfl_xor_sync(ALL_LANES, sum[s][j], step);
            if (lane < ROW_LANES) memory.part[warp][s][lane * VECTOR + j] = sum[s][j];
        }
    }
    __syncthreads();
    const int token = threadIdx.x / SLAB, c = threadIdx.x % SLAB, n = blockIdx.x * SLAB + c;
    if (token >= min(TOKENS, tokens) || n >= outputs) return;
    float all[MATRICES] = {};
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) all[m] += memory.part[w][token * MATRICES + m][c];
    }
    y[(long long)token * outputs + n] = output(all[0], all[MATRICES - 1], first_bias, second_bias, n);
}

// ---- v3: a warp its own list ----

template <int LANES>
struct Own {
    static constexpr int ROWS = WARP / LANES, BATCH = ROWS * AT_ONCE, LISTED_BY_WARP = BATCH + WARP;
    Inputs value[LISTED_BY_WARP];
    int input[LISTED_BY_WARP];
};

template <int LANES>
union OwnMemory {
    Own<LANES> own[V3_WARPS];
    float part[V3_WARPS][SUMS][LANES * VECTOR];
};

// Adds the rows of up to BATCH entries of a warp's list, from `first` on, to its sums.
template <int LANES>
__device__ __forceinline__ void add_rows(float (&sum)[SUMS][VECTOR], const Own<LANES>& own, int first, int count,
                                         const value_t* const (&weights)[2], bool inside, int outputs) {
    const int row = threadIdx.x % WARP / LANES;
    Vector w[AT_ONCE][MATRICES];
    Inputs values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
        const int at = i * Own<LANES>::ROWS + row;
        const bool there = at < count;
        values[i] = there ? own.value[first + at] : Inputs{};
        const long long input = there ? own.input[first + at] : 0;
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            w[i][m].raw = make_uint4(0, 0, 0, 0);
            if (there && inside) w[i][m].raw = __ldg((const uint4*)(weights[m] + input * outputs));
        }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) {
            float f[VECTOR];
            w[i][m].to_floats(f);
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const float v = to_float(value_of_bits(values[i].bits[t]));
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) sum[t * MATRICES + m][j] = fmaf(v, f[j], sum[t * MATRICES + m][j]);
            }
        }
    }
}

// slab() is the number of this block's slab, and a row of y is `row` long. It is a function so that the compiler reads
// blockIdx.x where it is needed: read ahead it makes the kernels spill on sm_100.
template <int LANES, class Slab>
__device__ __forceinline__ void product_of_kept(OwnMemory<LANES>& memory, const value_t* x, const value_t* first_t,
                                                const value_t* second_t, const value_t* first_bias,
                                                const value_t* second_bias, value_t* y, int tokens, int inputs,
                                                int outputs, float threshold, Slab slab, int row) {
    constexpr int COLUMNS = LANES * VECTOR, BATCH = Own<LANES>::BATCH;
    static_assert(TOKENS * COLUMNS <= V3_WARPS * WARP, "a thread writes one output");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int column = slab() * COLUMNS + lane % LANES * VECTOR;
    const bool inside = column < outputs;
    const value_t* const weights[] = {first_t + column, second_t + column};
    Own<LANES>& own = memory.own[warp];
    float sum[SUMS][VECTOR] = {};
    wait_for_previous();
    let_next_start();
    int listed = 0;
    for (int piece = warp; piece * WARP < inputs; piece += V3_WARPS * V3_AHEAD) {
        Inputs ahead[V3_AHEAD];
        bool kept[V3_AHEAD];
#pragma unroll
        for (int i = 0; i < V3_AHEAD; ++i)
            kept[i] = read_input(ahead[i], x, tokens, inputs, (piece + i * V3_WARPS) * WARP + lane, threshold);
#pragma unroll
        for (int i = 0; i < V3_AHEAD; ++i) {
            const unsigned found = __ballot_sync(ALL_LANES, kept[i]);
            if (kept[i]) {
                const int at = listed + __popc(found & ((1u << lane) - 1));
                own.value[at] = ahead[i];
                own.input[at] = (piece + i * V3_WARPS) * WARP + lane;
            }
            listed += __popc(found);
            __syncwarp();
            while (listed >= BATCH) {  // the last ones first, so that the others stay where they are
                listed -= BATCH;
                add_rows<LANES>(sum, own, listed, BATCH, weights, inside, outputs);
            }
            __syncwarp();
        }
    }
    add_rows<LANES>(sum, own, 0, listed, weights, inside, outputs);
    __syncthreads();  // the lists are free
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
#pragma unroll
            for (int step = WARP / 2; step >= LANES; step /= 2)
                sum[s][j] += __shfl_xor_sync(ALL_LANES, sum[s][j], step);
            if (lane < LANES) memory.part[warp][s][lane * VECTOR + j] = sum[s][j];
        }
    }
    __syncthreads();
    const int token = threadIdx.x / COLUMNS, c = threadIdx.x % COLUMNS, n = slab() * COLUMNS + c;
    if (token >= min(TOKENS, tokens) || n >= outputs) return;
    float all[MATRICES] = {};
#pragma unroll
    for (int w = 0; w < V3_WARPS; ++w) {
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) all[m] += memory.part[w][token * MATRICES + m][c];
    }
    y[(long long)token * row + n] = output(all[0], all[MATRICES - 1], first_bias, second_bias, n);
}

#if TOKENS == 1  // the sums of several tokens have no room in shared memory
extern "C" __global__ void __launch_bounds__(V3_WARPS * WARP, SUMS > 2 ? 1 : 2)
kept_inputs_v3_wide(const value_t* __restrict__ x, const value_t* __restrict__ first_t,
                    const value_t* __restrict__ second_t, const value_t* __restrict__ first_bias,
                    const value_t* __restrict__ second_bias, value_t* __restrict__ y, int tokens, int inputs,
                    int outputs, float threshold) {
    __shared__ OwnMemory<16> memory;
    product_of_kept<16>(memory, x, first_t, second_t, first_bias, second_bias, y, tokens, inputs, outputs, threshold,
                       [] { return blockIdx.x; }, outputs);
}
#endif

extern "C" __global__ void __launch_bounds__(V3_WARPS * WARP, SUMS > 2 ? 1 : 2)
kept_inputs_v3(const value_t* __restrict__ x, const value_t* __restrict__ first_t, const value_t* __restrict__ second_t,
               const value_t* __restrict__ first_bias, const value_t* __restrict__ second_bias, value_t* __restrict__ y,
               int tokens, int inputs, int outputs, float threshold) {
    __shared__ OwnMemory<8> memory;
    product_of_kept<8>(memory, x, first_t, second_t, first_bias, second_bias, y, tokens, inputs, outputs, threshold,
                       [] { return blockIdx.x; }, outputs);
}

extern "C" __global__ void __launch_bounds__(V3_WARPS * WARP, SUMS > 2 ? 1 : 2)
kept_inputs_v3_narrow(const value_t* __restrict__ x, const value_t* __restrict__ first_t,
                      const value_t* __restrict__ second_t, const value_t* __restrict__ first_bias,
                      const value_t* __restrict__ second_bias, value_t* __restrict__ y, int tokens, int inputs,
                      int outputs, float threshold) {
    __shared__ OwnMemory<4> memory;
    product_of_kept<4>(memory, x, first_t, second_t, first_bias, second_bias, y, tokens, inputs, outputs, threshold,
                       [] { return blockIdx.x; }, outputs);
}

#if !PAIRED && !ACTIVATED
// y: [tokens][a + b + c], x's products with weights of a, b and c outputs.
extern "C" __global__ void __launch_bounds__(V3_WARPS * WARP, SUMS > 2 ? 1 : 2)
kept_inputs_v3_each(const value_t* __restrict__ x, const value_t* __restrict__ a_t, const value_t* __restrict__ b_t,
                    const value_t* __restrict__ c_t, const value_t* __restrict__ a_bias,
                    const value_t* __restrict__ b_bias, const value_t* __restrict__ c_bias, value_t* __restrict__ y,
                    int tokens, int inputs, int a, int b, int c) {
    __shared__ OwnMemory<EACH_LANES> memory;
    const value_t *weight = a_t, *bias = a_bias;
    int slab = blockIdx.x, outputs = a, first = 0;
    const int of_a = (a + EACH_LANES * VECTOR - 1) / (EACH_LANES * VECTOR);
    const int of_b = (b + EACH_LANES * VECTOR - 1) / (EACH_LANES * VECTOR);
    if (slab >= of_a + of_b) {
        weight = c_t, bias = c_bias, outputs = c, first = a + b, slab -= of_a + of_b;
    } else if (slab >= of_a) {
        weight = b_t, bias = b_bias, outputs = b, first = a, slab -= of_a;
    }
    product_of_kept<EACH_LANES>(memory, x, weight, nullptr, bias, nullptr, y + first, tokens, inputs, outputs, 0,
                                [=] { return slab; }, a + b + c);
}
#endif
