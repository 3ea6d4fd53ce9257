// Dense arithmetic for a few rows at a time, shared by the kernels of smxx_train_lost.cu: dot products of 8 rows with 4
// weight rows a warp, how rows and neurons are dealt to blocks, and the adding up of what blocks have found.
//
// The width of the rows is a run-time argument, any multiple of 8.
#pragma once
#include "twell.cuh"

#define THREADS 256
#define WARPS_HERE (THREADS / WARP)
#define ROWS 8     // rows that a block takes at once: a weight row that is read serves all of them
#define NEURONS 4  // neurons that a warp takes at once
#define ALL_ROWS 0xffu
#define EVERY_NEURON 0x01010101u  // the bit of row 0 for each of the four neurons
static_assert(ROWS * NEURONS == WARP, "a lane for each dot product");

struct Layer {
    const value_t *gate, *up, *down_t, *gate_bias, *up_bias;  // gate: null in a plain layer, whose pattern is x up^T
    int d_model, d_ff;
    __device__ __forceinline__ bool gated() const { return gate != nullptr; }
    __device__ __forceinline__ const value_t* pattern() const { return gated() ? gate : up; }
    __device__ __forceinline__ const value_t* pattern_bias() const { return gated() ? gate_bias : up_bias; }
};

__device__ __forceinline__ int lane_of() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_of() { return threadIdx.x / WARP; }

// Reads weights once and rows often (or the other way round): what is read once stays out of the L1 cache.
template <bool ONCE>
__device__ __forceinline__ Vector load(const value_t* p) {
    Vector v;
    v.raw = ONCE ? __ldcg((const uint4*)p) : __ldg((const uint4*)p);
    return v;
}

// The sum over the lanes of each of 32 values: lane i gets the sum of s[i]. 31 shuffles instead of 160. Every sum is made by
// the same tree, so that it does not matter for its bits which i it has.
template <int STEP>
__device__ __forceinline__ void halve(float (&s)[WARP]) {
    const bool upper = lane_of() & STEP;
#pragma unroll
    for (int i = 0; i < STEP; ++i) {
        const float keep = upper ? s[i + STEP] : s[i], give = upper ? s[i] : s[i + STEP];
        s[i] = keep + __shfl_xor_sync(ALL_LANES, give, STEP);
    }
}
__device__ __forceinline__ float sums_by_lane(float (&s)[WARP]) {
    halve<16>(s), halve<8>(s), halve<4>(s), halve<2>(s), halve<1>(s);
    return s[0];
}

// Lane n * ROWS + r gets the dot product of row r, at `in` + row[r], with weight row n, at `weights` + min(n, last) * d_model.
// A whole warp calls it. ALL: every one; otherwise only those whose bit in `wanted` is set, 0 elsewhere.
// The bits of a dot product depend on its two rows alone.
template <bool ALL, bool WEIGHTS_ONCE>
__device__ __forceinline__ float dots(const value_t* __restrict__ in, const long long* row,
                                      const value_t* __restrict__ weights, int last, int d_model, unsigned wanted) {
    float s[WARP];
#pragma unroll
    for (int i = 0; i < WARP; ++i) s[i] = 0;
    Vector next[NEURONS];  // the weights of the step to come are under way
    const int from = lane_of() * VECTOR;
#pragma unroll
    for (int n = 0; n < NEURONS; ++n)
        if (from < d_model) next[n] = load<WEIGHTS_ONCE>(weights + (long long)min(n, last) * d_model + from);
#pragma unroll 1
    for (int c = from; c < d_model; c += WARP * VECTOR) {
        float w[NEURONS][VECTOR];
#pragma unroll
        for (int n = 0; n < NEURONS; ++n) next[n].to_floats(w[n]);
        const int ahead = c + WARP * VECTOR;
#pragma unroll
        for (int n = 0; n < NEURONS; ++n)
            if (ahead < d_model) next[n] = load<WEIGHTS_ONCE>(weights + (long long)min(n, last) * d_model + ahead);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (ALL || (wanted & EVERY_NEURON << r)) {
                float x[VECTOR];
                load<!WEIGHTS_ONCE>(in + row[r] + c).to_floats(x);
#pragma unroll
                for (int n = 0; n < NEURONS; ++n)
                    if (ALL || (wanted >> (n * ROWS + r) & 1)) {
#pragma unroll
                        for (int i = 0; i < VECTOR; ++i) s[n * ROWS + r] = fmaf(x[i], w[n][i], s[n * ROWS + r]);
                    }
            }
    }
    return sums_by_lane(s);
}

// What one neuron does in one row: h = g * u (plain: g), and the gradients of h, of the gate and of u (plain: of what
// the ReLU gets). All zero where the neuron does not fire.
struct Entry {
    float h, dgate, dup;
    bool fires;
};

// Entries of neurons first, first + 1, ... (4 of them, or fewer: `count`) in 8 rows: lane n * ROWS + r gets that of neuron n
// in row r. row: where each row begins in x and dy. valid: bits of the rows that are there; finite: of those whose x is.
// slope: dl1 of this lane's row. `fires` is told of every valid row, the rest is zero unless it is finite.
template <bool BACKWARD, bool WEIGHTS_ONCE>
__device__ __forceinline__ Entry entry(const Layer& layer, const value_t* x, const value_t* dy, const long long* row,
                                       int first, int count, unsigned valid, unsigned finite, float slope) {
    const int n = lane_of() / ROWS, r = lane_of() % ROWS, last = count - 1, d = layer.d_model;
    const int neuron = first + min(n, last);
    const long long at = (long long)first * d;
    float g = dots<true, WEIGHTS_ONCE>(x, row, layer.pattern() + at, last, d, 0);
    if (layer.pattern_bias()) g += to_float(layer.pattern_bias()[neuron]);
    const value_t rounded = from_float(g);  // torch's linear gives the ReLU a rounded value
    g = to_float(rounded);
    Entry e = {0, 0, 0, n < count && (valid >> r & 1) && fires(rounded)};
    const bool mine = e.fires && (finite >> r & 1);
    const unsigned wanted = __ballot_sync(ALL_LANES, mine);
    if (!wanted) return e;
    float u = 1;
    if (layer.gated()) {
        u = dots<false, WEIGHTS_ONCE>(x, row, layer.up + at, last, d, wanted);
        if (layer.up_bias) u += to_float(layer.up_bias[neuron]);
    }
    float dh = 0;
    if (BACKWARD) dh = dots<false, WEIGHTS_ONCE>(dy, row, layer.down_t + at, last, d, wanted);
    if (!mine) return e;
    e.h = layer.gated() ? g * u : g;
    if (BACKWARD) {
        dh += slope * (float)((e.h > 0) - (e.h < 0));
        e.dgate = layer.gated() ? dh * u : 0;
        e.dup = layer.gated() ? dh * g : dh;
    }
    return e;
}

// How `count` lost rows are dealt to a grid of `blocks`: by groups of ROWS. As many groups as fill the grid evenly get a
// block each, for all neurons; the rest are cut into slices of neurons, so that the grid is as full as can be.
struct Deal {
    int whole;    // groups with a block each, `blocks` at a time
    int cut;      // groups that are cut, fewer than `blocks`: cut * slices <= blocks
    int slices;
    int neurons;  // of a slice
    __device__ __forceinline__ Deal(int count, int blocks, int d_ff) {
        const int groups = (count + ROWS - 1) / ROWS;
        whole = groups / blocks * blocks;
        cut = groups - whole;
        const int most = cut ? blocks / cut : 1;
        const int least = NEURONS * WARPS_HERE;  // else some warps have nothing
        neurons = max((d_ff + most - 1) / most + NEURONS - 1, least) / NEURONS * NEURONS;
        slices = (d_ff + neurons - 1) / neurons;
    }
};

// out rows = bias + the sums of their slices, in ascending order, for the groups that were cut. sums: float
// [group][slice][ROWS][d_model]. Blocks take 128 columns of a row each.
__device__ __forceinline__ void add_slices(const Deal& deal, const int* __restrict__ lost, const float* __restrict__ sums,
                                           const value_t* __restrict__ bias, value_t* __restrict__ out, int d_model) {
    __shared__ float4 part[WARPS_HERE][WARP];
    const int chunks = (d_model + 4 * WARP - 1) / (4 * WARP), first = deal.whole * ROWS;
    const long long items = (long long)max(lost[0] - first, 0) * chunks;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const int i = (int)(item / chunks), c = ((int)(item % chunks) * WARP + lane_of()) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (c < d_model)
#pragma unroll 4
            for (int s = warp_of(); s < deal.slices; s += WARPS_HERE) {
                const long long row = ((long long)(i / ROWS) * deal.slices + s) * ROWS + i % ROWS;
                const float4 f = __ldcs((const float4*)(sums + row * d_model + c));
                sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
            }
        part[warp_of()][lane_of()] = sum;
        __syncthreads();
        if (warp_of() == 0 && c < d_model) {
            float f[4] = {0, 0, 0, 0};
            for (int w = 0; w < WARPS_HERE; ++w) {
                const float4 p = part[w][lane_of()];
                f[0] += p.x, f[1] += p.y, f[2] += p.z, f[3] += p.w;
            }
            value_t* y = out + (long long)lost[1 + first + i] * d_model + c;
#pragma unroll
            for (int k = 0; k < 4; ++k) y[k] = from_float(f[k] + (bias ? to_float(bias[c + k]) : 0.0f));
        }
        __syncthreads();
    }
}
