// listed: y = (g * (x up^T + up_bias)) down_t + down_bias over the gate values g that fire, for some hundred tokens. The
// gate is dense, as torch's product left it; nothing is packed. up and down_t are [columns][d_model]. With GATED 0 a
// plain layer: y = g down_t + down_bias.
//
// What bounds it: device memory, from which the rows of up and down_t come that some token needs; then latencies, since
// a token's kept values take a few loads that wait for one another.
//
//   listed_v1  a block a token: its kept values are listed in shared memory; then h of each, a warp two entries at once;
//              then the sum of their rows of down_t, a thread 16 bytes of columns. No barrier between two entries
//   listed_v2  rows with many kept values (HEAVY_ROW), which v1 leaves to one block each, are left to a second launch,
//              listed_heavy, which cuts them into parts of as many columns, one for each block
// Worklog: docs/kernels/smxx_listed.md
#include "row_walk.cuh"

#ifndef GATED
#define GATED 1
#endif
#ifndef HEAVY_ROW
#define HEAVY_ROW 512  // a row with more kept values is cut
#endif
#ifndef MOST_PARTS
#define MOST_PARTS 64  // of a row
#endif
#ifndef MOST_LISTED
#define MOST_LISTED 2048  // tokens of a call
#endif
#define BLOCK 256
#define BLOCK_WARPS (BLOCK / WARP)
#define LIST 512     // entries that a block holds: all of a row that is not heavy, or of so many columns
#define STRIPS 4     // of BLOCK vectors of the gate that are under way at once
#define AT_ONCE 8    // rows of down_t that a thread has under way
#ifndef RESIDENT
#define RESIDENT 2   // blocks on a multiprocessor; 4 where there are more tokens, with fewer registers each
#endif
#define LOADS (RESIDENT > 2 ? 2 : 4)  // of 16 bytes of each row of up that a lane has under way
static_assert(HEAVY_ROW <= LIST && LIST <= BLOCK * VECTOR, "the list has room, and LIST columns are one strip");

struct Layer {
    const value_t *x, *gate, *up, *down_t, *up_bias, *down_bias;
    int d_model, columns;
    __device__ __forceinline__ int vectors() const { return d_model / VECTOR; }
};

struct List {
    float h[LIST];
    int column[LIST];
    int total[STRIPS * BLOCK_WARPS];  // kept values by strip and warp
};

// Lists the kept values of columns first to end of a row, columns ascending, the first LIST of them; how many there are,
// in all threads. Both ends are multiples of VECTOR.
template <int AT_A_TIME>
__device__ __forceinline__ int list_kept(List& s, const value_t* gate, int first, int end) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int listed = 0;
    for (int base = first; base < end; base += AT_A_TIME * BLOCK * VECTOR) {
        Vector v[AT_A_TIME];
        unsigned mine[AT_A_TIME];
        int place[AT_A_TIME];
#pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
            const int c = base + (j * BLOCK + threadIdx.x) * VECTOR;
            v[j].raw = make_uint4(0, 0, 0, 0);
            if (c < end) v[j].raw = __ldg((const uint4*)(gate + c));
        }
#pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
            mine[j] = 0;
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) mine[j] |= (unsigned)fires(v[j].value(i)) << i;
            const int through = sum_up_to_lane(__popc(mine[j]));
            place[j] = through - __popc(mine[j]);
            if (lane == WARP - 1) s.total[j * BLOCK_WARPS + warp] = through;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
            int before = listed;
#pragma unroll
            for (int w = 0; w < BLOCK_WARPS; ++w) {
                const int there = s.total[j * BLOCK_WARPS + w];
                before += w < warp ? there : 0, listed += there;
            }
            int at = before + place[j];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                if (!(mine[j] >> i & 1) || at >= LIST) continue;
                s.h[at] = to_float(v[j].value(i)), s.column[at] = base + (j * BLOCK + threadIdx.x) * VECTOR + i, ++at;
            }
        }
        __syncthreads();
    }
    return listed;
}

// The first `listed` gate values become h.
__device__ __forceinline__ void multiply_up(List& s, int listed, const Layer& m, const value_t* x) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, vectors = m.vectors();
    for (int e = 2 * warp; e < listed; e += 2 * BLOCK_WARPS) {
        const int column[2] = {s.column[e], s.column[min(e + 1, listed - 1)]};
        const uint4* u0 = (const uint4*)(m.up + (long long)column[0] * m.d_model);
        const uint4* u1 = (const uint4*)(m.up + (long long)column[1] * m.d_model);
        float dot[2] = {0, 0};
#pragma unroll 4
        for (int v = lane; v < vectors; v += WARP) {
            Vector a, b0, b1;
            a.raw = __ldg((const uint4*)x + v), b0.raw = __ldg(u0 + v), b1.raw = __ldg(u1 + v);
            float f[VECTOR], g[VECTOR];
            a.to_floats(f);
            b0.to_floats(g);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) dot[0] = fmaf(f[i], g[i], dot[0]);
            b1.to_floats(g);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) dot[1] = fmaf(f[i], g[i], dot[1]);
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            dot[0] += __shfl_xor_sync(ALL_LANES, dot[0], step);
            dot[1] += __shfl_xor_sync(ALL_LANES, dot[1], step);
        }
        if (lane < 2 && e + lane < listed)
            s.h[e + lane] *= (lane ? dot[1] : dot[0]) + (m.up_bias ? to_float(m.up_bias[column[lane]]) : 0.0f);
    }
    __syncthreads();
}

// sum += vector v of the listed rows of down_t, each times its h.
__device__ __forceinline__ void add_down(float (&sum)[VECTOR], const List& s, int listed, const Layer& m, int v) {
    for (int e = 0; e < listed; e += AT_ONCE) {
        Vector w[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (e + j < listed) w[j].raw = __ldg((const uint4*)(m.down_t + (long long)s.column[e + j] * m.d_model) + v);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            if (e + j >= listed) break;
            float f[VECTOR];
            w[j].to_floats(f);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] = fmaf(s.h[e + j], f[i], sum[i]);
        }
    }
}

// Whether this thread's part of x's row has a value that is not finite. If some part has and some neuron is silent, the
// row of y is NaN, see gated_v1.
__device__ __forceinline__ bool has_nonfinite(const Layer& m, int row) {
    bool found = false;
    for (int v = threadIdx.x; GATED && v < m.vectors(); v += BLOCK) {
        Vector in;
        in.raw = __ldg((const uint4*)(m.x + (long long)row * m.d_model) + v);
        found |= in.nonfinite();
    }
    return found;
}

// Vector v of y's row becomes sum + down_bias, or NaN.
__device__ __forceinline__ void put_vector(const Layer& m, value_t* y, int row, int v, float (&sum)[VECTOR], bool nan) {
    if (m.down_bias) {
        Vector b;
        float f[VECTOR];
        b.raw = __ldg((const uint4*)m.down_bias + v), b.to_floats(f);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += f[i];
    }
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = nan ? nanf("") : sum[i];
    __stcs((uint4*)(y + (long long)row * m.d_model) + v, Vector::of_floats(sum).raw);
}

// y's row, by one block, unless more than HEAVY_ROW values are kept; their number.
__device__ __forceinline__ int light_row(List& s, const Layer& m, int row, value_t* y) {
    bool nan = has_nonfinite(m, row);
    const int kept = list_kept<STRIPS>(s, m.gate + (long long)row * m.columns, 0, m.columns);
    if (kept > HEAVY_ROW) return kept;
    nan = __syncthreads_or(nan) && kept < m.columns;
    if (GATED) multiply_up(s, kept, m, m.x + (long long)row * m.d_model);
    for (int v = threadIdx.x; v < m.vectors(); v += BLOCK) {
        float sum[VECTOR] = {};
        add_down(sum, s, kept, m, v);
        put_vector(m, y, row, v, sum, nan);
    }
    return kept;
}

// The sum over the kept values of columns first to end of a row, however many: put(v, sum) is called with each vector of
// it, by some thread.
template <class Put>
__device__ __forceinline__ void sum_columns(List& s, const Layer& m, int row, int first, int end, Put put) {
    for (int base = 0; base < m.vectors(); base += BLOCK) {
        float sum[VECTOR] = {};
        const int v = base + threadIdx.x;
        for (int c = first; c < end; c += LIST) {
            __syncthreads();  // everybody has read the list before
            const int listed = list_kept<1>(s, m.gate + (long long)row * m.columns, c, min(c + LIST, end));
            if (GATED) multiply_up(s, listed, m, m.x + (long long)row * m.d_model);
            if (v < m.vectors()) add_down(sum, s, listed, m, v);
        }
        if (v < m.vectors()) put(v, sum);
    }
}

// y's row, by one block, however many values are kept.
__device__ __forceinline__ void whole_row(List& s, const Layer& m, int row, int kept, value_t* y) {
    const bool nan = __syncthreads_or(has_nonfinite(m, row)) && kept < m.columns;
    sum_columns(s, m, row, 0, m.columns, [&](int v, float(&sum)[VECTOR]) { put_vector(m, y, row, v, sum, nan); });
}

#if RESIDENT == 2
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
listed_v1(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ up,
          const value_t* __restrict__ down_t, const value_t* __restrict__ up_bias,
          const value_t* __restrict__ down_bias, value_t* __restrict__ y, int d_model, int columns) {
    __shared__ List s;
    const Layer m = {x, gate, up, down_t, up_bias, down_bias, d_model, columns};
    const int kept = light_row(s, m, blockIdx.x, y);
    if (kept > HEAVY_ROW) whole_row(s, m, blockIdx.x, kept, y);
}
#endif

// counts[0][row]: how many values of the row fire; counts[1][row] = 0: parts of it that listed_heavy has done.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
listed_v2(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ up,
          const value_t* __restrict__ down_t, const value_t* __restrict__ up_bias,
          const value_t* __restrict__ down_bias, value_t* __restrict__ y, int* __restrict__ counts, int d_model,
          int columns) {
    __shared__ List s;
    const Layer m = {x, gate, up, down_t, up_bias, down_bias, d_model, columns};
    const int kept = light_row(s, m, blockIdx.x, y);
    if (threadIdx.x == 0) counts[blockIdx.x] = kept, counts[gridDim.x + blockIdx.x] = 0;
}

#if RESIDENT == 2
// The heavy rows among `rows` rows, at most MOST_LISTED. parts: [gridDim.x][d_model], for sums of parts of rows. How a row
// is cut follows from how many are heavy alone, and its parts are added up in their order, so the same input gives the
// same bits. More heavy rows than blocks are not cut.
extern "C" __global__ void __launch_bounds__(BLOCK, 2)
listed_heavy(const value_t* __restrict__ x, const value_t* __restrict__ gate, const value_t* __restrict__ up,
             const value_t* __restrict__ down_t, const value_t* __restrict__ up_bias,
             const value_t* __restrict__ down_bias, value_t* __restrict__ y, int* __restrict__ counts,
             float* __restrict__ parts, int rows, int d_model, int columns) {
    __shared__ List s;
    __shared__ int heavy[MOST_LISTED];
    __shared__ int found, last;
    bool any = false;
    for (int r = threadIdx.x; r < rows; r += BLOCK) any |= counts[r] > HEAVY_ROW;
    if (!__syncthreads_or(any)) return;
    if (threadIdx.x < WARP) {
        int n = 0;
        for (int first = 0; first < rows; first += WARP) {
            const int r = first + threadIdx.x;
            const bool mine = r < rows && counts[r] > HEAVY_ROW;
            const unsigned here = __ballot_sync(ALL_LANES, mine);
            if (mine) heavy[n + __popc(here & ((1u << threadIdx.x) - 1))] = r;
            n += __popc(here);
        }
        if (threadIdx.x == 0) found = n;
    }
    __syncthreads();
    const Layer m = {x, gate, up, down_t, up_bias, down_bias, d_model, columns};
    const int each = min(MOST_PARTS, (int)gridDim.x / found), vectors = columns / VECTOR;
    if (!each) {
        for (int i = blockIdx.x; i < found; i += gridDim.x) whole_row(s, m, heavy[i], counts[heavy[i]], y);
        return;
    }
    if (blockIdx.x >= found * each) return;
    const int row = heavy[blockIdx.x % found], part = blockIdx.x / found;
    const int first = (int)((long long)vectors * part / each) * VECTOR;
    const int end = (int)((long long)vectors * (part + 1) / each) * VECTOR;
    const bool nan = __syncthreads_or(has_nonfinite(m, row)) && counts[row] < columns;
    float* sums = parts + (long long)(blockIdx.x % found) * each * d_model;  // of all parts of the row
    sum_columns(s, m, row, first, end, [&](int v, float(&sum)[VECTOR]) {
        float4* to = (float4*)(sums + (long long)part * d_model + v * VECTOR);
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    });
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&counts[rows + row], 1) == each - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int v = threadIdx.x; v < m.vectors(); v += BLOCK) {
        float sum[VECTOR] = {};
#pragma unroll 8
        for (int p = 0; p < each; ++p) {
            const float4* from = (const float4*)(sums + (long long)p * d_model + v * VECTOR);
            const float4 a = __ldcg(from), b = __ldcg(from + 1);
            sum[0] += a.x, sum[1] += a.y, sum[2] += a.z, sum[3] += a.w, sum[4] += b.x, sum[5] += b.y, sum[6] += b.z, sum[7] += b.w;
        }
        put_vector(m, y, row, v, sum, nan);
    }
}
#endif
