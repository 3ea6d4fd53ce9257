// Dense arithmetic for a few rows at a time, shared by smxx_train_lost.cu and smxx_lost_weights.cu: dot products of 8
// rows with 4 weight rows a warp, how rows and neurons are dealt to blocks, and the adding up of what blocks have
// found.
//
// The width of the rows is a run-time argument, any multiple of 8.
#pragma once
#include "twell.cuh"

#ifndef THREADS
#define THREADS 256
#endif
#define BLOCK_WARPS (THREADS / WARP)
#ifndef ROWS
#define ROWS 8     // rows that a block takes at once: a weight row that is read serves all of them
#endif
#ifndef NEURONS
#define NEURONS 4  // neurons that a warp takes at once
#endif
#define ALL_ROWS 0xffu
#define AHEAD 4    // rows under way while one is worked on
#define ONE_BY_ONE 5  // of 32 dot products, up to which they are not made together
static_assert(ROWS * NEURONS == WARP, "a lane for each dot product");

// The lost rows from number `first` of the list on: how many there are, and their numbers. list[0]: how many are lost in
// all; list[1..]: their numbers.
struct Lost {
    const int* row;
    int count;
    __device__ __forceinline__ Lost(const int* list, int first) : row(list + 1 + first), count(max(list[0] - first, 0)) {}
};

struct Layer {
    const value_t *gate, *up, *down_t, *gate_bias, *up_bias;  // gate: null in a plain layer, whose pattern is x up^T
    int d_model, d_ff;
    __device__ __forceinline__ bool gated() const { return gate != nullptr; }
    __device__ __forceinline__ const value_t* pattern() const { return gated() ? gate : up; }
    __device__ __forceinline__ const value_t* pattern_bias() const { return gated() ? gate_bias : up_bias; }
};

__device__ __forceinline__ int lane_of() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_of() { return threadIdx.x / WARP; }

// 16 bytes of values. ONCE: nobody on this multiprocessor reads them again soon, so they stay out of the L1 cache.
template <bool ONCE>
__device__ __forceinline__ Vector load(const uint4* p) {
    Vector v;
    v.raw = ONCE ? __ldcg(p) : __ldg(p);
    return v;
}
template <bool ONCE>
__device__ __forceinline__ Vector load(const value_t* p) {
    return load<ONCE>((const uint4*)p);
}

// Whether a row of `width` vectors has an infinity or NaN, which all of the warp learns.
__device__ __forceinline__ bool nonfinite(const uint4* row, int width) {
    bool found = false;
    for (int c = lane_of(); c < width; c += WARP) found |= load<false>(row + c).nonfinite();
    return __any_sync(ALL_LANES, found);
}

// Where lost_backward leaves the entry of the i-th lost row for a neuron, a multiple of 4, and its next three: in each
// plane (h, dup, dgate) float [ceil(d_ff / 4)][room][4].
__device__ __forceinline__ long long plane_of(int d_ff, int room) {
    return (long long)((d_ff + NEURONS - 1) / NEURONS) * room * NEURONS;
}
__device__ __forceinline__ long long place_of(int neuron, int i, int room) {
    return ((long long)(neuron / NEURONS) * room + i) * NEURONS;
}

// The sum over the lanes of each of 32 values: lane i gets the sum of s[i]. 31 shuffles instead of 160. All sums are
// added in the same order, so that the bits of a sum do not depend on its number i.
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

// Lane n * ROWS + r gets the dot product of row r, at `in` + row[r], with weight row n, at `weights` + min(n, last) *
// width, all counted in vectors. A whole warp calls it. WEIGHTS_ONCE: weights are read once and rows often, or the
// other way round.
template <bool WEIGHTS_ONCE>
__device__ __forceinline__ float all_dots(const uint4* __restrict__ in, const unsigned* row, const uint4* __restrict__ weights,
                                          int last, int width) {
    float s[WARP];
#pragma unroll
    for (int i = 0; i < WARP; ++i) s[i] = 0;
    Vector next[NEURONS];  // the weights of the step to come are under way
#pragma unroll
    for (int n = 0; n < NEURONS; ++n)
        if (lane_of() < width) next[n] = load<WEIGHTS_ONCE>(weights + (unsigned)(min(n, last) * width + lane_of()));
#pragma unroll 1
    for (int c = lane_of(); c < width; c += WARP) {
        float w[NEURONS][VECTOR];
#pragma unroll
        for (int n = 0; n < NEURONS; ++n) next[n].to_floats(w[n]);
        if (c + WARP < width)
#pragma unroll
            for (int n = 0; n < NEURONS; ++n)
                next[n] = load<WEIGHTS_ONCE>(weights + (unsigned)(min(n, last) * width + c + WARP));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float x[VECTOR];
            load<!WEIGHTS_ONCE>(in + (row[r] + (unsigned)c)).to_floats(x);
#pragma unroll
            for (int n = 0; n < NEURONS; ++n)
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) s[n * ROWS + r] = fmaf(x[i], w[n][i], s[n * ROWS + r]);
        }
    }
    return sums_by_lane(s);
}

// One dot product, for every lane: the same bits.
template <bool WEIGHTS_ONCE>
__device__ __forceinline__ float one_dot(const uint4* __restrict__ row, const uint4* __restrict__ weights, int width) {
    float s = 0;
#pragma unroll 4
    for (int c = lane_of(); c < width; c += WARP) {
        float x[VECTOR], w[VECTOR];
        load<!WEIGHTS_ONCE>(row + c).to_floats(x), load<WEIGHTS_ONCE>(weights + c).to_floats(w);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) s = fmaf(x[i], w[i], s);
    }
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) s += __shfl_xor_sync(ALL_LANES, s, step);
    return s;
}

// all_dots for the lanes whose bit is set in `wanted`; the results of other lanes are undefined. Up to ONE_BY_ONE of
// them are computed one by one.
template <bool WEIGHTS_ONCE>
__device__ __forceinline__ float dots(const uint4* __restrict__ in, const unsigned* row, const uint4* __restrict__ weights,
                                      int last, int width, unsigned wanted) {
    if (__popc(wanted) > ONE_BY_ONE) return all_dots<WEIGHTS_ONCE>(in, row, weights, last, width);
    float mine = 0;
    for (; wanted; wanted &= wanted - 1) {
        const int i = __ffs(wanted) - 1;
        const float s = one_dot<WEIGHTS_ONCE>(in + row[i % ROWS], weights + (unsigned)(i / ROWS * width), width);
        if (i == lane_of()) mine = s;
    }
    return mine;
}

// What one neuron does in one row: h = g * u (plain: g), and the gradients of h, of the gate and of u (plain: of what
// the ReLU gets). All zero where the neuron does not fire.
struct Entry {
    float h, dgate, dup;
    bool fires;
};

// Entries of neurons first, first + 1, ... (4 of them, or fewer: `count`) in 8 rows: lane n * ROWS + r gets that of
// neuron n in row r. row: where each row begins in x and dy, in vectors. valid: bits of the rows that are there;
// finite: of those whose x is. slope: dl1 of this lane's row. `fires` is told of every valid row, the rest is zero
// unless it is finite. The bits of an entry depend on its rows alone.
template <bool BACKWARD, bool WEIGHTS_ONCE>
__device__ __forceinline__ Entry entry(const Layer& layer, const value_t* x, const value_t* dy, const unsigned* row,
                                       int first, int count, unsigned valid, unsigned finite, float slope) {
    const int n = lane_of() / ROWS, r = lane_of() % ROWS, last = count - 1, width = layer.d_model / VECTOR;
    const int neuron = first + min(n, last);
    const long long at = (long long)first * width;
    const uint4 *in = (const uint4*)x, *up = (const uint4*)layer.up + at;
    float g = all_dots<WEIGHTS_ONCE>(in, row, (const uint4*)layer.pattern() + at, last, width);
    if (layer.pattern_bias()) g += to_float(layer.pattern_bias()[neuron]);
    const value_t rounded = from_float(g);  // torch's linear gives the ReLU a rounded value
    g = to_float(rounded);
    Entry e = {0, 0, 0, n < count && (valid >> r & 1) && fires(rounded)};
    const bool mine = e.fires && (finite >> r & 1);
    const unsigned wanted = __ballot_sync(ALL_LANES, mine);
    if (!wanted) return e;
    float u = 1, dh = 0;
    if (layer.gated()) {
        u = dots<WEIGHTS_ONCE>(in, row, up, last, width, wanted);
        if (layer.up_bias) u += to_float(layer.up_bias[neuron]);
    }
    if (BACKWARD) dh = dots<WEIGHTS_ONCE>((const uint4*)dy, row, (const uint4*)layer.down_t + at, last, width, wanted);
    if (!mine) return e;
    e.h = layer.gated() ? g * u : g;
    if (BACKWARD) {
        dh += slope * (float)((e.h > 0) - (e.h < 0));
        e.dgate = layer.gated() ? dh * u : 0;
        e.dup = layer.gated() ? dh * g : dh;
    }
    return e;
}

// How `count` lost rows are distributed over a grid of `blocks`, in groups of ROWS. As many groups as fill the grid
// evenly get a block each, for all neurons; the other groups are cut into slices of neurons, one for a block, so that
// as few blocks as possible are idle.
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
        const int least = NEURONS * BLOCK_WARPS;  // else some warps have nothing
        neurons = max((d_ff + most - 1) / most + NEURONS - 1, least) / NEURONS * NEURONS;
        slices = (d_ff + neurons - 1) / neurons;
    }
};

// out rows = bias + the sums of their slices, in ascending order, for the groups that were cut. sums: float
// [group][slice][ROWS][d_model]. Blocks take 128 columns of a row each.
__device__ __forceinline__ void add_slices(const Deal& deal, const Lost& lost, const float* __restrict__ sums,
                                           const value_t* __restrict__ bias, value_t* __restrict__ out, int d_model) {
    __shared__ float4 part[BLOCK_WARPS][WARP];
    const int chunks = (d_model + 4 * WARP - 1) / (4 * WARP), first = deal.whole * ROWS;
    const long long items = (long long)max(lost.count - first, 0) * chunks;
    for (long long item = blockIdx.x; item < items; item += gridDim.x) {
        const int i = (int)(item / chunks), c = ((int)(item % chunks) * WARP + lane_of()) * 4;
        float4 sum = make_float4(0, 0, 0, 0);
        if (c < d_model)
#pragma unroll 4
            for (int s = warp_of(); s < deal.slices; s += BLOCK_WARPS) {
                const long long row = ((long long)(i / ROWS) * deal.slices + s) * ROWS + i % ROWS;
                const float4 f = __ldcs((const float4*)(sums + row * d_model + c));
                sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
            }
        part[warp_of()][lane_of()] = sum;
        __syncthreads();
        if (warp_of() == 0 && c < d_model) {
            float f[4] = {0, 0, 0, 0};
            for (int w = 0; w < BLOCK_WARPS; ++w) {
                const float4 p = part[w][lane_of()];
                f[0] += p.x, f[1] += p.y, f[2] += p.z, f[3] += p.w;
            }
            value_t* y = out + (long long)lost.row[first + i] * d_model + c;
#pragma unroll
            for (int k = 0; k < 4; ++k) y[k] = from_float(f[k] + (bias ? to_float(bias[c + k]) : 0.0f));
        }
        __syncthreads();
    }
}
