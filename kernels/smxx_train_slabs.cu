// The row kernels of a training step (smxx_train_rows.cu), v2: a slab of columns at a time. blockIdx.y says which slab;
// the GPU takes all tokens of one before those of the next, so that the slabs of neurons that fire often stay in the L1
// cache.
//
// ROW_LANES lanes take a row, 16 bytes of a slab each; WARP_ROWS rows a warp. Sums go into the same columns from the
// first entry to the last; a dot product is cut into as many pieces as there are slabs, kept in fp32, `pieces`
// [slabs][capacity], added up in order.
//   weighted_rows_v2    y  = sum of h down_t[column] + bias; the bits of v1
//   input_gradient_v2   dx = sum of dh u gate[column] + dh g up[column]; plain: dh up[column]
//   pieces_v1           the dot products of x's or dy's rows with rows of a matrix, by slab
//   up_values_v1        u = sum of pieces + up_bias, l1 = sum |g u|
//   hidden_gradient_v2  dh = sum of pieces + dl1 sign(h)
//
// What bounds it: the L2 cache, for what L1 does not hold; and for each row and slab, reading the span and the words
// again. Worklog: docs/kernels/smxx_train_slabs.md
#include "row_walk.cuh"
#include "spans.cuh"

#ifndef ROW_LANES
#define ROW_LANES 16
#endif
#ifndef AT_ONCE
#define AT_ONCE 4
#endif
#define WARP_ROWS (WARP / ROW_LANES)  // rows of a warp
#define SLAB (ROW_LANES * VECTOR)     // columns of a slab
#define TURN WARP                     // entries of a row that are fetched at a time
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#define ROW_BYTES ((unsigned)(D_MODEL * sizeof(value_t)))
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");
static_assert(TURN % AT_ONCE == 0 && ROW_LANES % AT_ONCE == 0, "a turn and a group are cut evenly");

// Blocks that should fit a multiprocessor: as many as leave every thread the registers it needs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define AS_SM90 (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)  // room for 2048 threads
#define SUMS_RESIDENT (AT_ONCE != 8 ? 12 : AS_SM90 && D_MODEL % SLAB == 0 ? 16 : 10)
#define RESIDENT (__CUDA_ARCH__ >= 1000 ? 8 : 10)
#else
#define SUMS_RESIDENT 8
#define RESIDENT 8
#endif
#define WARPS_OF_ROWS(BLOCKS) __launch_bounds__(WARP * BLOCK_WARPS, BLOCKS)

// Where a lane is: its row, and its columns of the row's slab. A row beyond the last counts as lost.
struct Place {
    int lane, part, row, column;  // lane: within the part
    int start, count;             // of the row's entries
    bool lost;
    __device__ __forceinline__ Place(int slab, const int2* spans, int rows)
        : lane(threadIdx.x % ROW_LANES), part(threadIdx.x / ROW_LANES % WARP_ROWS),
          row((blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP) * WARP_ROWS + part), column(slab * SLAB + lane * VECTOR) {
        int2 span = make_int2(LOST, 0);
        if (row < rows) span = __ldcg(spans + row);
        start = span.x, count = span.y, lost = span.x == LOST;
    }
    // Whether this lane has columns: the last slab may be narrower.
    __device__ __forceinline__ bool inside() const { return D_MODEL % SLAB == 0 || column < D_MODEL; }
    // This lane's columns of a matrix. Lanes without columns read what the last lane that has some reads.
    __device__ __forceinline__ const char* of(const value_t* m) const {
        return (const char*)(m + (D_MODEL % SLAB == 0 ? column : min(column, D_MODEL - VECTOR)));
    }
    // The largest of the parts' numbers.
    __device__ __forceinline__ int most(int mine) const {
#pragma unroll
        for (int step = ROW_LANES; step < WARP; step *= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, step));
        return mine;
    }
};

// Element i of a list, read past L1: a slab reads the lists only once, and L1 is needed for the rows of the matrices.
template <class T>
__device__ __forceinline__ T element(const T* list, int i) {
    return __ldcg((const T*)((const char*)list + (size_t)(unsigned)i * sizeof(T)));
}

__device__ __forceinline__ Vector load(const char* m, unsigned offset) {
    Vector v;
    v.raw = __ldg((const uint4*)(m + offset));
    return v;
}

// sum += scale * v; products are not rounded before they are added.
__device__ __forceinline__ void add_scaled(float* sum, float scale, const Vector& v) {
    float f[VECTOR];
    v.to_floats(f);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[i] = fmaf(scale, f[i], sum[i]);
}

__device__ __forceinline__ void store_sums(value_t* m, const Place& p, const float* sum) {
    if (!p.lost && p.inside()) __stcs((uint4*)(m + (long long)p.row * D_MODEL + p.column), Vector::of_floats(sum).raw);
}

// A turn's entries lie in shared memory, where the lanes of a part read them, several at a time. After a row's last
// entry the last offset is repeated, with zeros for values: that row of the matrix is in L1 already, and no lane has to
// test whether to load.
extern "C" __global__ void WARPS_OF_ROWS(SUMS_RESIDENT)
weighted_rows_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y, int rows) {
    __shared__ uint2 entries[BLOCK_WARPS * WARP_ROWS][TURN];  // offset of its row, h
    const Place p(blockIdx.y, spans, rows);
    uint2* mine = entries[threadIdx.x / ROW_LANES];
    const char* matrix = p.of(down_t);
    float sum[VECTOR] = {};
    if (bias) load(p.of(bias), 0).to_floats(sum);
    const int most = p.most(p.count);
    for (int at = 0; at < most; at += TURN) {
        word_t word[WARP_ROWS] = {};
        float h[WARP_ROWS] = {};
        if (p.count) {
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const int k = at + i * ROW_LANES + p.lane;
                word[i] = element(words, p.start + min(k, p.count - 1));
                if (k < p.count) h[i] = ups ? element(ups, p.start + k) : 1.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            if (at + i * ROW_LANES + p.lane < p.count) h[i] *= to_float(word_value(word[i]));
            mine[i * ROW_LANES + p.lane] = make_uint2(word_column(word[i]) * ROW_BYTES, __float_as_uint(h[i]));
        }
        __syncwarp();
        const int n = min(TURN, most - at);
        for (int s = 0; s < n; s += AT_ONCE) {
            Vector v[AT_ONCE];
            uint2 e[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) v[i] = load(matrix, e[i].x);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) add_scaled(sum, __uint_as_float(e[i].y), v[i]);
        }
        __syncwarp();
    }
    store_sums(y, p, sum);
}

#if AT_ONCE < 8  // else two matrices want more registers than there are
// ups and gate: both or neither.
extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
input_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                  const float* __restrict__ dh, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                  value_t* __restrict__ dx, int rows) {
    __shared__ uint4 entries[BLOCK_WARPS * WARP_ROWS][TURN];  // offset of its rows, du, dg
    const Place p(blockIdx.y, spans, rows);
    uint4* mine = entries[threadIdx.x / ROW_LANES];
    const char *of_gate = p.of(gate), *of_up = p.of(up);
    float sum[VECTOR] = {};
    const int most = p.most(p.count);
    for (int at = 0; at < most; at += TURN) {
        word_t word[WARP_ROWS] = {};
        float d[WARP_ROWS] = {}, u[WARP_ROWS] = {};
        if (p.count) {
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const int k = at + i * ROW_LANES + p.lane;
                word[i] = element(words, p.start + min(k, p.count - 1));
                if (k < p.count) d[i] = element(dh, p.start + k);
                if (k < p.count && gate) u[i] = element(ups, p.start + k);
            }
        }
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) {
            float du = d[i];
            if (gate && at + i * ROW_LANES + p.lane < p.count) du *= to_float(word_value(word[i]));
            mine[i * ROW_LANES + p.lane] =
                make_uint4(word_column(word[i]) * ROW_BYTES, __float_as_uint(du), __float_as_uint(d[i] * u[i]), 0);
        }
        __syncwarp();
        const int n = min(TURN, most - at);
        for (int s = 0; s < n; s += AT_ONCE) {
            Vector v[AT_ONCE], w[AT_ONCE];
            uint4 e[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) v[i] = load(of_up, e[i].x);
            if (gate) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) w[i] = load(of_gate, e[i].x);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                if (gate) add_scaled(sum, __uint_as_float(e[i].z), w[i]);
                add_scaled(sum, __uint_as_float(e[i].y), v[i]);
            }
        }
        __syncwarp();
    }
    store_sums(dx, p, sum);
}
#endif

// The sums of AT_ONCE values over the ROW_LANES lanes of a part, all at once. Lane l of the part gets the sum of value
// l / (ROW_LANES / AT_ONCE). Each step halves the number of values that a lane adds up.
__device__ __forceinline__ float sums_over_group(float* d, int lane) {
    int step = ROW_LANES / 2;
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
    for (int rest = ROW_LANES / AT_ONCE / 2; rest; rest /= 2) d[0] += __shfl_xor_sync(ALL_LANES, d[0], rest);
    return d[0];
}

// in: x or dy. Slabs from `first` on; pieces: [gridDim.y][capacity].
extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
pieces_v1(const value_t* __restrict__ in, const int2* __restrict__ spans, const word_t* __restrict__ words,
          const value_t* __restrict__ matrix, float* __restrict__ pieces, int rows, int capacity, int first) {
    __shared__ unsigned entries[BLOCK_WARPS * WARP_ROWS][TURN];  // offset of its row
    const Place p(first + blockIdx.y, spans, rows);
    unsigned* mine = entries[threadIdx.x / ROW_LANES];
    const char* rows_at = p.of(matrix);
    float x[VECTOR];
    Vector in_row;
    in_row.raw = make_uint4(0, 0, 0, 0);
    if (!p.lost && p.inside()) in_row.raw = __ldcs((const uint4*)(in + (long long)p.row * D_MODEL + p.column));
    in_row.to_floats(x);
    float* to = pieces + (long long)blockIdx.y * capacity + p.start;
    const int which = p.lane / (ROW_LANES / AT_ONCE), most = p.most(p.count);
    const bool writes = p.lane % (ROW_LANES / AT_ONCE) == 0;
    for (int at = 0; at < most; at += TURN) {
        word_t word[WARP_ROWS] = {};
        if (p.count) {
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i)
                word[i] = element(words, p.start + min(at + i * ROW_LANES + p.lane, p.count - 1));
        }
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) mine[i * ROW_LANES + p.lane] = word_column(word[i]) * ROW_BYTES;
        __syncwarp();
        const int n = min(TURN, most - at);
        for (int s = 0; s < n; s += AT_ONCE) {
            Vector v[AT_ONCE];
            unsigned e[AT_ONCE];
            float d[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) v[i] = load(rows_at, e[i]);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                float f[VECTOR];
                v[i].to_floats(f);
                d[i] = 0;
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) d[i] = fmaf(x[j], f[j], d[i]);
            }
            const float sum = sums_over_group(d, p.lane);
            const int k = at + s + which;
            if (writes && k < p.count) to[k] = sum;
        }
        __syncwarp();
    }
}

// The pieces of entry i, added up; begin: what of them was added up before.
__device__ __forceinline__ float sum_of_pieces(const float* pieces, int slabs, int capacity, int i, float begin) {
    float sum = begin;
    for (int s = 0; s < slabs; ++s) sum += __ldcs(pieces + (long long)s * capacity + i);
    return sum;
}

// begun: whether earlier slabs' sums are in ups; last: whether these are the last slabs.
extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
up_values_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
             const value_t* __restrict__ up_bias, float* __restrict__ ups, float* __restrict__ l1, int rows, int capacity,
             int slabs, int begun, int last) {
    const int row = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int2 span = __ldcg(spans + row);
    if (span.x == LOST) return;
    float sum = 0;
    for (int i = span.x + lane; i < span.x + span.y; i += WARP) {
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
    if (lane == 0) l1[row] = sum;
}

extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
hidden_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
                   const float* __restrict__ ups, const float* __restrict__ dl1, float* __restrict__ dh, int rows, int capacity,
                   int slabs, int begun, int last) {
    const int row = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int2 span = __ldcg(spans + row);
    if (span.x == LOST) return;
    const float slope = dl1 ? dl1[row] : 0.0f;
    for (int i = span.x + lane; i < span.x + span.y; i += WARP) {
        float d = sum_of_pieces(pieces, slabs, capacity, i, begun ? dh[i] : 0.0f);
        if (last && dl1) {
            const float g = to_float(word_value(words[i]));
            d = fmaf(slope, sign_of(hidden_value(g, ups, i)), d);
        }
        dh[i] = d;
    }
}
