// spread: y = (g * (x up^T + up_bias)) down_t + down_bias over the gate values g that fire, for some dozen tokens, of which
// each is spread over several blocks. The gate is dense, as torch's product left it. up and down_t are [columns][d_model].
// With GATED 0 a plain layer: y = g down_t + down_bias.
//
// What bounds it: latencies, since a token's kept values take a few loads that wait for one another; with more tokens the
// rows of up and down_t, which come through the L2 cache for each token.
//
//   spread_up    a block lists a part of a token's gate, and a warp computes h of one or two entries
//   spread_down  a block adds up SLAB columns of a token's y
// Worklog: docs/kernels/smxx_spread.md
#include "ptx_sm80_decode.cuh"
#include "row_walk.cuh"

#ifndef GATED
#define GATED 1
#endif
#define BLOCK 256
#define BLOCK_WARPS (BLOCK / WARP)
#define SLAB (WARP * VECTOR)  // columns of y that a block of spread_down adds up
#define ROWS_AT_ONCE 4        // rows of down_t that a warp has under way
#define SPOILT (1 << 30)      // in a count: x has a value that is not finite

// h of COUNT entries, gate values and columns, side by side, by a warp.
template <int COUNT>
__device__ __forceinline__ void hidden_of(int2 (&entry)[COUNT], const value_t* x, const value_t* up,
                                          const value_t* up_bias, int d_model) {
    const int lane = threadIdx.x % WARP;
    float dot[COUNT] = {};
#pragma unroll (8 / COUNT)
    for (int c = lane * VECTOR; c < d_model; c += WARP * VECTOR) {
        Vector a, b[COUNT];
        a.raw = __ldg((const uint4*)(x + c));
#pragma unroll
        for (int n = 0; n < COUNT; ++n) b[n].raw = __ldg((const uint4*)(up + (long long)entry[n].y * d_model + c));
        float f[VECTOR], g[VECTOR];
        a.to_floats(f);
#pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            b[n].to_floats(g);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) dot[n] = fmaf(f[j], g[j], dot[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) dot[n] += __shfl_xor_sync(ALL_LANES, dot[n], step);
        if (up_bias) dot[n] += to_float(up_bias[entry[n].y]);
        entry[n].x = __float_as_int(__int_as_float(entry[n].x) * dot[n]);
    }
}

// A part of row blockIdx.y of the gate, of `width` columns, a multiple of VECTOR and at most one vector a thread:
// entries[row][part][] = (h, column) of what fires there, columns ascending, and counts[row][part] how many.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
spread_up(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ up,
          const value_t* __restrict__ up_bias, int2* __restrict__ entries, int* __restrict__ counts, int d_model,
          int columns, int width) {
    __shared__ int2 list[BLOCK * VECTOR];
    __shared__ int total[BLOCK_WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const long long row = blockIdx.y, part = row * gridDim.x + blockIdx.x;
    const int mine = threadIdx.x * VECTOR, first = blockIdx.x * width;
    wait_for_previous();
    let_next_start();
    Vector v;
    v.raw = make_uint4(0, 0, 0, 0);
    if (mine < min(width, columns - first)) v.raw = __ldg((const uint4*)(gate + row * columns + first + mine));
    x += row * d_model;
    bool spoilt = false;
    for (int c = mine; GATED && blockIdx.x == 0 && c < d_model; c += BLOCK * VECTOR) {
        Vector in;
        in.raw = __ldg((const uint4*)(x + c));
        spoilt |= in.nonfinite();
    }
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) found |= (unsigned)fires(v.value(i)) << i;
    const int through = sum_up_to_lane(__popc(found));
    if (lane == WARP - 1) total[warp] = through;
    spoilt = __syncthreads_or(spoilt);
    int at = through - __popc(found), kept = 0;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) at += w < warp ? total[w] : 0, kept += total[w];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        if (found >> i & 1) list[at++] = make_int2(__float_as_int(to_float(v.value(i))), first + mine + i);
    if (threadIdx.x == 0) counts[part] = kept | (spoilt ? SPOILT : 0);
    __syncthreads();
    entries += part * width;
    for (int e = warp; e < kept; e += 2 * BLOCK_WARPS) {
        if (e + BLOCK_WARPS < kept) {
            int2 two[2] = {list[e], list[e + BLOCK_WARPS]};
            if (GATED) hidden_of<2>(two, x, up, up_bias, d_model);
            if (lane == 0) entries[e] = two[0], entries[e + BLOCK_WARPS] = two[1];
        } else {
            int2 one[1] = {list[e]};
            if (GATED) hidden_of<1>(one, x, up, up_bias, d_model);
            if (lane == 0) entries[e] = one[0];
        }
    }
}

// SLAB columns of row blockIdx.y of y. The row's entries lie in `parts` lists, one behind the other. Warp w takes those
// numbered w, w + BLOCK_WARPS and so on; the warps' sums are added up in their order.
extern "C" __global__ void __launch_bounds__(BLOCK, 4)
spread_down(const int2* __restrict__ entries, const int* __restrict__ counts, const value_t* __restrict__ down_t,
            const value_t* __restrict__ bias, value_t* __restrict__ y, int d_model, int columns, int parts, int width) {
    __shared__ float sums[BLOCK_WARPS][SLAB];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, column = blockIdx.x * SLAB + lane * VECTOR;
    const long long row = blockIdx.y;
    float sum[VECTOR] = {};
    int kept = 0;
    bool spoilt = false;
    wait_for_previous();
    let_next_start();
    for (int group = 0; group < parts; group += WARP) {
        const int count = group + lane < parts ? counts[row * parts + group + lane] : 0, mine = count & ~SPOILT;
        const int through = sum_up_to_lane(mine), listed = __shfl_sync(ALL_LANES, through, WARP - 1);
        spoilt |= __any_sync(ALL_LANES, count & SPOILT);
        kept += listed;
        for (int base = warp; base < listed; base += BLOCK_WARPS * WARP) {
            const int i = base + lane * BLOCK_WARPS, owner = first_reaching_past(i, through);
            const int before = __shfl_sync(ALL_LANES, through - mine, owner);
            int2 entry = make_int2(0, 0);
            if (i < listed) entry = entries[(row * parts + group + owner) * width + i - before];
            const int turns = min(WARP, (listed - base + BLOCK_WARPS - 1) / BLOCK_WARPS);
            for (int e = 0; e < turns; e += ROWS_AT_ONCE) {
                Vector w[ROWS_AT_ONCE];
#pragma unroll
                for (int j = 0; j < ROWS_AT_ONCE; ++j) {
                    const int from = __shfl_sync(ALL_LANES, entry.y, e + j);
                    w[j].raw = make_uint4(0, 0, 0, 0);
                    if (e + j < turns && column < d_model)
                        w[j].raw = __ldg((const uint4*)(down_t + (long long)from * d_model + column));
                }
#pragma unroll
                for (int j = 0; j < ROWS_AT_ONCE; ++j) {
                    const float h = __int_as_float(__shfl_sync(ALL_LANES, entry.x, e + j));
                    if (e + j >= turns) continue;
                    float f[VECTOR];
                    w[j].to_floats(f);
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) sum[k] = fmaf(h, f[k], sum[k]);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < VECTOR; ++k) sums[warp][lane * VECTOR + k] = sum[k];
    __syncthreads();
    const int c = blockIdx.x * SLAB + threadIdx.x;
    if (c >= d_model) return;
    float all = bias ? to_float(bias[c]) : 0.0f;
#pragma unroll
    for (int w = 0; w < BLOCK_WARPS; ++w) all += sums[w][threadIdx.x];
    y[row * d_model + c] = from_float(spoilt && kept < columns ? nanf("") : all);
}
static_assert(SLAB == BLOCK, "a thread writes one column");
static_assert(WARP % ROWS_AT_ONCE == 0, "a lane holds each entry");
