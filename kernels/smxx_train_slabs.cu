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
#define GROUP 32
#endif
#ifndef AT_ONCE
#define AT_ONCE 4
#endif
#ifndef ROWS_A_WARP
#define ROWS_A_WARP 2
#endif
#define PARTS (WARP / GROUP)
#define WIDTH (GROUP * VECTOR)  // columns of a slab
#define WARPS_A_BLOCK 4
#define LOST (-1)
#define ROW_BYTES ((unsigned)(D_MODEL * sizeof(value_t)))
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");
static_assert(WARP % (AT_ONCE * PARTS) == 0, "a turn of 32 entries is cut evenly");
static_assert(GROUP % AT_ONCE == 0, "a lane ends with one value of those whose sums it takes part in");

#define WARPS_OF_ROWS __launch_bounds__(WARP * WARPS_A_BLOCK)

// Where a warp is: its slab, this lane's part of it.
struct Place {
    int lane, part, column;
    __device__ __forceinline__ Place(int slab)
        : lane(threadIdx.x % WARP), part(lane / GROUP), column(slab * WIDTH + lane % GROUP * VECTOR) {}
    // Whether this lane has columns: the last slab may be narrower.
    __device__ __forceinline__ bool inside() const { return D_MODEL % WIDTH == 0 || column < D_MODEL; }
    // This lane's columns of a matrix. Lanes without columns read what the last lane that has some reads.
    __device__ __forceinline__ const char* of(const value_t* m) const {
        return (const char*)(m + (D_MODEL % WIDTH == 0 ? column : min(column, D_MODEL - VECTOR)));
    }
};

// The turns of a warp: up to 32 entries of one row each, ROWS_A_WARP rows one after the other; a row without entries has a
// turn without. What a turn needs is loaded while the one before is worked on.
class Turns {
public:
    int row, at, n;  // of this turn; where its entries begin, and how many there are
    bool last, lost;  // of its row
    __device__ __forceinline__ Turns(const int2* spans, int rows)
        : row((blockIdx.x * WARPS_A_BLOCK + threadIdx.x / WARP) * ROWS_A_WARP) {
        const int mine = row + threadIdx.x % WARP;
        span_ = make_int2(LOST, 0);
        stop_ = min(rows, row + ROWS_A_WARP);
        if (mine < stop_) span_ = __ldcg(spans + mine);
        first_ = row;
        begin();
    }
    __device__ __forceinline__ bool done() const { return row >= stop_; }
    __device__ __forceinline__ void next() {
        if (last) {
            ++row, begin();
        } else {
            at += WARP, cut();
        }
    }

private:
    int2 span_;  // lane k: of the warp's k-th row
    int first_, stop_, end_;
    __device__ __forceinline__ void begin() {
        at = __shfl_sync(ALL_LANES, span_.x, row - first_);
        lost = at == LOST;
        end_ = at + __shfl_sync(ALL_LANES, span_.y, row - first_);
        cut();
    }
    __device__ __forceinline__ void cut() {
        n = min(WARP, end_ - at);
        last = at + WARP >= end_;
    }
};

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

// The parts' sums, added up, to the row: GROUP lanes write.
__device__ __forceinline__ void store_sums(value_t* m, int row, const Place& p, float* sum) {
#pragma unroll
    for (int step = GROUP; step < WARP; step *= 2) {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
    }
    if (p.part == 0 && p.inside()) __stcs((uint4*)(m + (long long)row * D_MODEL + p.column), Vector::of_floats(sum).raw);
}

// A turn's entries lie in shared memory: what a lane would get by shuffles it reads there, several at a time. Behind the
// last entry its offset is repeated, with zeros for values: such rows are in L1, and nobody has to ask whether to load.
extern "C" __global__ void WARPS_OF_ROWS
weighted_rows_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ bias, value_t* __restrict__ y, int rows) {
    __shared__ uint2 entry[WARPS_A_BLOCK][WARP];  // offset of its row, h
    uint2* mine = entry[threadIdx.x / WARP];
    const Place p(blockIdx.y);
    const char* matrix = p.of(down_t);
    Turns turn(spans, rows);
    word_t word = 0;
    float u = 1;
    auto fetch = [&]() {
        if (p.lane < turn.n) {
            word = __ldcg(words + turn.at + p.lane);
            if (ups) u = __ldcg(ups + turn.at + p.lane);
        }
    };
    fetch();
    float sum[VECTOR];
    for (bool fresh = true; !turn.done();) {
        if (fresh) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] = 0;
            if (bias && p.part == 0) add_scaled(sum, 1, load(p.of(bias), 0));
        }
        const int n = turn.n, row = turn.row;
        const unsigned offset = __shfl_sync(ALL_LANES, word_column(word) * ROW_BYTES, min(p.lane, max(n - 1, 0)));
        mine[p.lane] = make_uint2(offset, p.lane < n ? __float_as_uint(to_float(word_value(word)) * u) : 0);
        __syncwarp();
        fresh = turn.last;
        const bool write = fresh && !turn.lost;
        turn.next();
        if (!turn.done()) fetch();
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE];
            uint2 e[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + p.part * AT_ONCE + i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) v[i] = load(matrix, e[i].x);
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) add_scaled(sum, __uint_as_float(e[i].y), v[i]);
        }
        if (write) store_sums(y, row, p, sum);
        __syncwarp();
    }
}

// ups and gate: both or neither.
extern "C" __global__ void WARPS_OF_ROWS
input_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ ups,
                  const float* __restrict__ dh, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                  value_t* __restrict__ dx, int rows) {
    __shared__ uint4 entry[WARPS_A_BLOCK][WARP];  // offset of its rows, du, dg
    uint4* mine = entry[threadIdx.x / WARP];
    const Place p(blockIdx.y);
    const char *of_gate = p.of(gate), *of_up = p.of(up);
    Turns turn(spans, rows);
    word_t word = 0;
    float u = 0, d = 0;
    auto fetch = [&]() {
        if (p.lane < turn.n) {
            word = __ldcg(words + turn.at + p.lane);
            d = __ldcg(dh + turn.at + p.lane);
            if (gate) u = __ldcg(ups + turn.at + p.lane);
        }
    };
    fetch();
    float sum[VECTOR];
    for (bool fresh = true; !turn.done();) {
        if (fresh) {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[i] = 0;
        }
        const int n = turn.n, row = turn.row;
        const unsigned offset = __shfl_sync(ALL_LANES, word_column(word) * ROW_BYTES, min(p.lane, max(n - 1, 0)));
        const float du = gate ? d * to_float(word_value(word)) : d;
        mine[p.lane] = make_uint4(offset, p.lane < n ? __float_as_uint(du) : 0, p.lane < n ? __float_as_uint(d * u) : 0, 0);
        __syncwarp();
        fresh = turn.last;
        const bool write = fresh && !turn.lost;
        turn.next();
        if (!turn.done()) fetch();
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE], w[AT_ONCE];
            uint4 e[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + p.part * AT_ONCE + i];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) v[i] = load(of_up, e[i].x);
            if (gate) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) w[i] = load(of_gate, e[i].x);
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) add_scaled(sum, __uint_as_float(e[i].y), v[i]);
            if (gate) {
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) add_scaled(sum, __uint_as_float(e[i].z), w[i]);
            }
        }
        if (write) store_sums(dx, row, p, sum);
        __syncwarp();
    }
}

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

// in: x or dy. Slabs from `first` on; pieces: [gridDim.y][capacity].
extern "C" __global__ void WARPS_OF_ROWS
pieces_v1(const value_t* __restrict__ in, const int2* __restrict__ spans, const word_t* __restrict__ words,
          const value_t* __restrict__ matrix, float* __restrict__ pieces, int rows, int capacity, int first) {
    __shared__ unsigned entry[WARPS_A_BLOCK][WARP];  // offset of its row
    unsigned* mine = entry[threadIdx.x / WARP];
    const Place p(first + blockIdx.y);
    const char* rows_at = p.of(matrix);
    float* to = pieces + (long long)blockIdx.y * capacity;
    const int which = p.part * AT_ONCE + p.lane % GROUP / (GROUP / AT_ONCE);
    const bool writes = p.lane % (GROUP / AT_ONCE) == 0;
    Turns turn(spans, rows);
    word_t word = 0;
    Vector in_row;
    in_row.raw = make_uint4(0, 0, 0, 0);
    auto fetch = [&](bool fresh) {
        if (p.lane < turn.n) word = __ldcg(words + turn.at + p.lane);
        if (fresh && p.inside()) in_row.raw = __ldcs((const uint4*)(in + (long long)turn.row * D_MODEL + p.column));
    };
    if (!turn.done()) fetch(true);
    float x[VECTOR];
    for (bool fresh = true; !turn.done();) {
        if (fresh) in_row.to_floats(x);
        const int n = turn.n, at = turn.at;
        mine[p.lane] = __shfl_sync(ALL_LANES, word_column(word) * ROW_BYTES, min(p.lane, max(n - 1, 0)));
        __syncwarp();
        fresh = turn.last;
        turn.next();
        if (!turn.done()) fetch(fresh);
        for (int s = 0; s < n; s += AT_ONCE * PARTS) {
            Vector v[AT_ONCE];
            unsigned e[AT_ONCE];
            float d[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) e[i] = mine[s + p.part * AT_ONCE + i];
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
            if (writes && s + which < n) to[at + s + which] = sum;
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
extern "C" __global__ void WARPS_OF_ROWS
up_values_v1(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
             const value_t* __restrict__ up_bias, float* __restrict__ ups, float* __restrict__ l1, int rows, int capacity,
             int slabs, int begun, int last) {
    const int row = blockIdx.x * WARPS_A_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
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

__device__ __forceinline__ float sign_of(float h) { return h > 0 ? 1.0f : h < 0 ? -1.0f : h; }  // zero and NaN are their own

extern "C" __global__ void WARPS_OF_ROWS
hidden_gradient_v2(const int2* __restrict__ spans, const word_t* __restrict__ words, const float* __restrict__ pieces,
                   const float* __restrict__ ups, const float* __restrict__ dl1, float* __restrict__ dh, int rows, int capacity,
                   int slabs, int begun, int last) {
    const int row = blockIdx.x * WARPS_A_BLOCK + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int2 span = __ldcg(spans + row);
    if (span.x == LOST) return;
    const float slope = dl1 ? dl1[row] : 0.0f;
    for (int i = span.x + lane; i < span.x + span.y; i += WARP) {
        float d = sum_of_pieces(pieces, slabs, capacity, i, begun ? dh[i] : 0.0f);
        if (last && dl1) {
            const float g = to_float(word_value(words[i]));
            d = fmaf(slope, sign_of(ups ? g * ups[i] : g), d);
        }
        dh[i] = d;
    }
}
