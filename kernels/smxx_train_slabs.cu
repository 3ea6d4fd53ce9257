// The row kernels of a training step (smxx_train_rows.cu), a slab of columns at a time.
//
// The kernels with whole rows in registers read 4 KB through the L2 cache for a kept value (d_model 2048), and that is what
// binds them. But neurons fire unevenly: half of the kept values come from the tenth that fires most. The L1 cache of a
// multiprocessor, 256 KB, holds 60 whole rows of a matrix, or 960 slabs of 128 columns. So blockIdx.y says which slab, the GPU
// takes all tokens of one before those of the next, and most reads of a matrix end in L1.
//
// GROUP lanes take an entry, 16 bytes each, and WARP / GROUP entries are under way in a warp, each of AT_ONCE in turn. A warp
// takes one token. What is added goes into the same column sums from slab to slab, but a dot product is cut into as many
// pieces as there are slabs: they are kept in fp32, `pieces` [slabs][capacity], and added up in order by a kernel of their own.
//
//   weighted_rows_v2    y  = sum of h down_t[column] + bias
//   input_gradient_v2   dx = sum of dh u gate[column] + dh g up[column]; plain: dh up[column]
//   pieces_v1           the dot products of x's or dy's rows with rows of a matrix, by slab
//   up_values_v1        u = sum of pieces + up_bias, l1 = sum |g u|
//   hidden_gradient_v2  dh = sum of pieces + dl1 sign(h)
#include "row_walk.cuh"

#ifndef GROUP
#define GROUP 16
#endif
#ifndef AT_ONCE
#define AT_ONCE 4
#endif
#define PARTS (WARP / GROUP)
#define WIDTH (GROUP * VECTOR)  // columns of a slab
#ifndef ROWS_A_BLOCK
#define ROWS_A_BLOCK 4
#endif
#define LOST (-1)
#define ROW_BYTES ((unsigned)(D_MODEL * sizeof(value_t)))
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");
static_assert(WARP % (AT_ONCE * PARTS) == 0, "a turn of 32 entries is cut evenly");

#define ONE_WARP_A_ROW __launch_bounds__(WARP * ROWS_A_BLOCK)

// Where a warp is: its row, its slab, this lane's part of both.
struct Place {
    int row, lane, part, column;
    __device__ __forceinline__ Place(int slab)
        : row(blockIdx.x * ROWS_A_BLOCK + threadIdx.x / WARP), lane(threadIdx.x % WARP), part(lane / GROUP),
          column(slab * WIDTH + lane % GROUP * VECTOR) {}
    // Whether this lane has columns: the last slab may be narrower.
    __device__ __forceinline__ bool inside() const { return D_MODEL % WIDTH == 0 || column < D_MODEL; }
};

// 16 bytes of the row that lies `offset` bytes behind m, or zeros.
__device__ __forceinline__ Vector load_if(bool wanted, const value_t* m, unsigned offset) {
    Vector v;
    v.raw = make_uint4(0, 0, 0, 0);
    if (wanted) v.raw = __ldg((const uint4*)((const char*)m + offset));
    return v;
}

// sum += scale * v; products are not rounded before they are added.
__device__ __forceinline__ void add_scaled(float* sum, float scale, const Vector& v) {
    float f[VECTOR];
    v.to_floats(f);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = fmaf(scale, f[i], sum[i]);
}

// The parts' sums, added up, to the row: GROUP lanes write.
__device__ __forceinline__ void store_sums(value_t* m, const Place& p, float* sum) {
#pragma unroll
    for (int step = GROUP; step < WARP; step *= 2) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
    }
    if (p.part == 0 && p.inside()) __stcs((uint4*)(m + (long long)p.row * D_MODEL + p.column), Vector::of_floats(sum).raw);
}

extern "C" __global__ void ONE_WARP_A_ROW
weighted_rows_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y, int rows) {
    const Place p(blockIdx.y);
    if (p.row >= rows) return;
    const int2 span = __ldcg(spans + p.row);
    if (span.x == LOST) return;
    float sum[VECTOR] = {};
    if (bias) add_scaled(sum, 1, load_if(p.part == 0 && p.inside(), bias + p.column, 0));
    const value_t* mine = down_t + p.column;
    for (int at = span.x, end = span.x + span.y; at < end; at += WARP) {
        float value = 0;
        unsigned offset = 0;
        if (at + p.lane < end) {
            const word_t w = __ldcg(words + at + p.lane);
            value = to_float(word_value(w)), offset = word_column(w) * ROW_BYTES;
            if (ups) value *= __ldcg(ups + at + p.lane);
        }
        const int n = min(WARP, end - at);
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE];
            float h[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int k = s + i * PARTS + p.part;
                h[i] = __shfl_sync(ALL_LANES, value, k);
                v[i] = load_if(k < n && p.inside(), mine, __shfl_sync(ALL_LANES, offset, k));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) add_scaled(sum, h[i], v[i]);
        }
    }
    store_sums(y, p, sum);
}

#if AT_ONCE < 8  // else it would spill
// ups and gate: both or neither.
extern "C" __global__ void ONE_WARP_A_ROW
input_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                  const float* __restrict__ dh, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                  value_t* __restrict__ dx, int rows) {
    const Place p(blockIdx.y);
    if (p.row >= rows) return;
    const int2 span = __ldcg(spans + p.row);
    if (span.x == LOST) return;
    float sum[VECTOR] = {};
    const value_t *of_gate = gate + p.column, *of_up = up + p.column;
    for (int at = span.x, end = span.x + span.y; at < end; at += WARP) {
        float dg = 0, du = 0;
        unsigned offset = 0;
        if (at + p.lane < end) {
            const word_t w = __ldcg(words + at + p.lane);
            du = __ldcg(dh + at + p.lane), offset = word_column(w) * ROW_BYTES;
            if (ups) dg = du * __ldcg(ups + at + p.lane), du *= to_float(word_value(w));
        }
        const int n = min(WARP, end - at);
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE], w[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int k = s + i * PARTS + p.part;
                const unsigned from = __shfl_sync(ALL_LANES, offset, k);
                v[i] = load_if(gate && k < n && p.inside(), of_gate, from);
                w[i] = load_if(k < n && p.inside(), of_up, from);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int k = s + i * PARTS + p.part;
                if (gate) add_scaled(sum, __shfl_sync(ALL_LANES, dg, k), v[i]);
                add_scaled(sum, __shfl_sync(ALL_LANES, du, k), w[i]);
            }
        }
    }
    store_sums(dx, p, sum);
}
#endif

// The sum of d over the GROUP lanes of each part, of AT_ONCE values at once: a value has the lanes whose number within the
// part, divided by GROUP / AT_ONCE, is its own. Each step halves the values that a lane is adding up.
__device__ __forceinline__ float sums_over_group(float* d, int lane) {
    int step = GROUP / 2;
#pragma unroll
    for (int half = AT_ONCE / 2; half; half /= 2, step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? d[i] : d[i + half], keep = upper ? d[i + half] : d[i];
            d[i] = keep + __shfl_xor_sync(ALL_LANES, give, step);
        }
    }
#pragma unroll
    for (int rest = GROUP / AT_ONCE / 2; rest; rest /= 2) d[0] += __shfl_xor_sync(ALL_LANES, d[0], rest);
    return d[0];
}
static_assert(GROUP % AT_ONCE == 0, "a lane ends with one value");

// in: x or dy. Slabs from `first` on; pieces: [gridDim.y][capacity].
extern "C" __global__ void ONE_WARP_A_ROW
pieces_v1(const value_t* __restrict__ in, const int2* __restrict__ spans, const word_t* __restrict__ words,
          const value_t* __restrict__ matrix, float* __restrict__ pieces, int rows, int capacity, int first) {
    const Place p(first + blockIdx.y);
    if (p.row >= rows) return;
    const int2 span = __ldcg(spans + p.row);
    if (span.x == LOST) return;
    Vector row;
    row.raw = make_uint4(0, 0, 0, 0);
    if (p.inside()) row.raw = __ldcs((const uint4*)(in + (long long)p.row * D_MODEL + p.column));
    float x[VECTOR];
    row.to_floats(x);
    const value_t* mine = matrix + p.column;
    float* to = pieces + (long long)blockIdx.y * capacity;
    const int which = p.lane % GROUP / (GROUP / AT_ONCE);
    for (int at = span.x, end = span.x + span.y; at < end; at += WARP) {
        unsigned offset = 0;
        if (at + p.lane < end) offset = word_column(__ldcg(words + at + p.lane)) * ROW_BYTES;
        const int n = min(WARP, end - at);
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE];
            float d[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                const int k = s + i * PARTS + p.part;
                v[i] = load_if(k < n && p.inside(), mine, __shfl_sync(ALL_LANES, offset, k));
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float f[VECTOR];
                v[i].to_floats(f);
                d[i] = 0;
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) d[i] = fmaf(x[j], f[j], d[i]);
            }
            const float sum = sums_over_group(d, p.lane);
            const int k = s + which * PARTS + p.part;
            if (p.lane % (GROUP / AT_ONCE) == 0 && k < n) to[at + k] = sum;
        }
    }
}

// The pieces of entry i, added up; begin: what of them was added up before.
__device__ __forceinline__ float sum_of_pieces(const float* pieces, int slabs, int capacity, int i, float begin) {
    float sum = begin;
    for (int s = 0; s < slabs; ++s) sum += __ldcs(pieces + (long long)s * capacity + i);
    return sum;
}

// begun: whether earlier slabs' sums are in ups; last: whether these are the last slabs.
extern "C" __global__ void ONE_WARP_A_ROW
up_values_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
             const value_t* __restrict__ up_bias, float* __restrict__ ups, float* __restrict__ l1, int rows, int capacity,
             int slabs, int begun, int last) {
    const Place p(0);
    if (p.row >= rows) return;
    const int2 span = __ldcg(spans + p.row);
    if (span.x == LOST) return;
    float sum = 0;
    for (int i = span.x + p.lane; i < span.x + span.y; i += WARP) {
        float u = sum_of_pieces(pieces, slabs, capacity, i, begun ? ups[i] : 0.0f);
        if (last) {
            const word_t w = words[i];
            if (up_bias) u += to_float(up_bias[word_column(w)]);
            sum += fabsf(to_float(word_value(w)) * u);
        }
        ups[i] = u;
    }
    if (!last) return;
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (p.lane == 0) l1[p.row] = sum;
}

__device__ __forceinline__ float sign_of(float h) { return h > 0 ? 1.0f : h < 0 ? -1.0f : h; }  // zero and NaN are their own

extern "C" __global__ void ONE_WARP_A_ROW
hidden_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
                   const float* __restrict__ ups, const float* __restrict__ dl1, float* __restrict__ dh, int rows, int capacity,
                   int slabs, int begun, int last) {
    const Place p(0);
    if (p.row >= rows) return;
    const int2 span = __ldcg(spans + p.row);
    if (span.x == LOST) return;
    const float slope = dl1 ? dl1[p.row] : 0.0f;
    for (int i = span.x + p.lane; i < span.x + span.y; i += WARP) {
        float d = sum_of_pieces(pieces, slabs, capacity, i, begun ? dh[i] : 0.0f);
        if (last && dl1) {
            const float g = to_float(word_value(words[i]));
            d = fmaf(slope, sign_of(ups ? g * ups[i] : g), d);
        }
        dh[i] = d;
    }
}
