// The row kernels of a training step (smxx_train_rows.cu), v2: a slab of columns at a time. blockIdx.y says which slab;
// the GPU takes all tokens of one before those of the next, so that the slabs of neurons that fire often stay in the L1
// cache.
//
// A group of ROW_LANES lanes takes a row, 16 bytes of a slab each; sums go into the same columns from the first entry
// to the last. A dot product is cut into as many pieces as there are slabs, kept in fp32, `pieces` [slabs][capacity],
// added up in order. Heavy rows (spans.cuh) are cut into tasks, which the first warps take after their own rows.
//   weighted_rows_v2    y  = sum of h down_t[column] + bias; of rows that are not heavy the bits of v1
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
// A task of a heavy row is HEAVY_SLAB columns of all its entries, where they are summed up. Where each entry has a sum of
// its own it is a slab of one of HEAVY_RUNS runs of them.
#define HEAVY_SLAB 16
#define HEAVY_SLABS ((D_MODEL + HEAVY_SLAB - 1) / HEAVY_SLAB)
#define HEAVY_RUNS 8
#define ROW_BYTES ((unsigned)(D_MODEL * sizeof(value_t)))
static_assert(D_MODEL % VECTOR == 0, "D_MODEL must be a multiple of the 16-byte vector");
static_assert(TURN % AT_ONCE == 0 && ROW_LANES % AT_ONCE == 0, "a turn and a group are cut evenly");

// Blocks that should fit a multiprocessor: as many as leave every thread the registers it needs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define AS_SM90 (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)  // 32 registers do, for 2048 threads
#define SUMS_RESIDENT (AT_ONCE != 8 || __CUDA_ARCH__ == 800 ? 12 : AS_SM90 && D_MODEL % SLAB == 0 ? 16 : 10)
#define RESIDENT (__CUDA_ARCH__ >= 1000 ? 8 : 10)
#define HEAVY_AT_ONCE (__CUDA_ARCH__ >= 1000 ? 2 : 4)  // of an entry's lanes; no sum depends on it
#define SHORT_RESIDENT (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 800 ? 12 : RESIDENT)  // for kernels that are over soon
#else
#define SUMS_RESIDENT 8
#define RESIDENT 8
#define SHORT_RESIDENT 8
#define HEAVY_AT_ONCE 4
#endif
#define WARPS_OF_ROWS(BLOCKS) __launch_bounds__(WARP * BLOCK_WARPS, BLOCKS)

// What a group of lanes has to do: which entries of which row, and which columns of the row's slab each lane.
struct Place {
    int lane, row, column;  // lane: within the group
    int start, count;       // of the entries
    bool none;              // nothing to do: the row is lost, heavy, or beyond the last
    // The group's own row.
    __device__ __forceinline__ Place(int slab, const int2* spans, int rows)
        : lane(threadIdx.x % ROW_LANES), row((blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP) * WARP_ROWS + group()),
          column(slab * SLAB + lane * VECTOR) {
        int2 span = make_int2(LOST, 0);
        if (row < rows) span = __ldcg(spans + row);
        none = span.x == LOST || span.y > HEAVY;
        start = span.x, count = none ? 0 : span.y;
    }
    // The group's part of one of HEAVY_RUNS runs of a row.
    __device__ __forceinline__ Place(int slab, int2 span, int row, int run)
        : lane(threadIdx.x % ROW_LANES), row(row), column(slab * SLAB + lane * VECTOR), none(false) {
        const int each = (span.y + HEAVY_RUNS * WARP_ROWS - 1) / (HEAVY_RUNS * WARP_ROWS), before = each * (run * WARP_ROWS + group());
        start = span.x + before, count = max(min(each, span.y - before), 0);
    }
    __device__ __forceinline__ static int group() { return threadIdx.x / ROW_LANES % WARP_ROWS; }
    // Whether this lane has columns: the last slab may be narrower.
    __device__ __forceinline__ bool inside() const { return D_MODEL % SLAB == 0 || column < D_MODEL; }
    // This lane's columns of a matrix. Lanes without columns read what the last lane that has some reads.
    __device__ __forceinline__ const char* of(const value_t* m) const {
        return (const char*)(m + (D_MODEL % SLAB == 0 ? column : min(column, D_MODEL - VECTOR)));
    }
    // The largest of the numbers that the warp's groups have.
    __device__ __forceinline__ int most(int mine) const {
#pragma unroll
        for (int step = ROW_LANES; step < WARP; step *= 2) mine = max(mine, __shfl_xor_sync(ALL_LANES, mine, step));
        return mine;
    }
};

// A worker's tasks: each is one of `parts` parts of a heavy row. Workers are numbered in the order in which the GPU
// starts them. No row's result depends on who takes its tasks.
struct Heavy {
    const int* rows_end;  // where the numbers of the heavy rows begin, backwards
    unsigned count, tasks, at;
    __device__ __forceinline__ Heavy(const int* lost, int rows, int parts, unsigned worker)
        : rows_end(lost + rows), count(__ldg(rows_end + 1)), tasks(count * parts), at(worker) {}
    __device__ __forceinline__ bool more() const { return at < tasks; }
    __device__ __forceinline__ int row() const { return rows_end[-(int)(at % count)]; }
    __device__ __forceinline__ int part() const { return at / count; }
};
__device__ __forceinline__ unsigned all_warps() { return gridDim.x * gridDim.y * BLOCK_WARPS; }
__device__ __forceinline__ unsigned this_warp() {
    return (blockIdx.y * gridDim.x + blockIdx.x) * BLOCK_WARPS + threadIdx.x / WARP;
}

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

// Half a vector.
struct Half {
    uint2 raw;
};
__device__ __forceinline__ Half load_half(const char* m, unsigned offset) { return {__ldg((const uint2*)(m + offset))}; }
__device__ __forceinline__ void add_scaled(float* sum, float scale, Half half) {
    const uint2 v = half.raw;
    const float2 a = two_floats(v.x), b = two_floats(v.y);
    sum[0] = fmaf(scale, a.x, sum[0]), sum[1] = fmaf(scale, a.y, sum[1]);
    sum[2] = fmaf(scale, b.x, sum[2]), sum[3] = fmaf(scale, b.y, sum[3]);
}

__device__ __forceinline__ void store_sums(value_t* m, const Place& p, const float* sum) {
    if (!p.none && p.inside()) __stcs((uint4*)(m + (long long)p.row * D_MODEL + p.column), Vector::of_floats(sum).raw);
}

// Of the columns of a heavy row's task, the sum over its entries of factors.x * a row of `first` + factors.y * a row of
// `second` (null: nothing) + bias (null: nothing); factors: (word, its place) -> float2. A lane has COLUMNS columns, 8 or
// 4; each group of lanes that have the task's columns takes every so many-th entry, N at once, and the groups' sums are
// added up at the end.
template <int COLUMNS, int N, class Factors>
__device__ __forceinline__ void store_heavy(value_t* m, const Heavy& task, const int2* __restrict__ spans,
                                            const word_t* __restrict__ words, const value_t* __restrict__ first,
                                            const value_t* __restrict__ second, const value_t* __restrict__ bias,
                                            Factors factors) {
    const auto loaded = [](const char* from, unsigned offset) {
        if constexpr (COLUMNS == VECTOR) return load(from, offset);
        else return load_half(from, offset);
    };
    typedef decltype(loaded(nullptr, 0)) Loaded;
    constexpr int LANES = HEAVY_SLAB / COLUMNS, APART = WARP / LANES;
    const int row = task.row(), column = task.part() * HEAVY_SLAB + threadIdx.x % LANES * COLUMNS;
    const int2 span = spans[row];
    const bool inside = D_MODEL % HEAVY_SLAB == 0 || column < D_MODEL;
    const unsigned offset = (inside ? column : 0) * (unsigned)sizeof(value_t);
    float sum[COLUMNS] = {};
    for (int k = threadIdx.x % WARP / LANES; k < span.y; k += APART * N) {
        Loaded v[N], w[N];
        float2 f[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int at = span.x + min(k + i * APART, span.y - 1);
            const word_t word = element(words, at);
            const unsigned from = word_column(word) * ROW_BYTES + offset;
            f[i] = factors(word, at);
            if (k + i * APART >= span.y) f[i] = make_float2(0, 0);
            v[i] = loaded((const char*)first, from);
            if (second) w[i] = loaded((const char*)second, from);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (second) add_scaled(sum, f[i].y, w[i]);
            add_scaled(sum, f[i].x, v[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
#pragma unroll
        for (int step = LANES; step < WARP; step *= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], step);
    if (threadIdx.x % WARP >= LANES || !inside) return;
    if (bias) add_scaled(sum, 1.0f, loaded((const char*)(bias + column), 0));
    value_t* to = m + (long long)row * D_MODEL + column;
    if constexpr (COLUMNS == VECTOR) __stcs((uint4*)to, Vector::of_floats(sum).raw);
    else __stcs((uint2*)to, make_uint2(pair_of(sum[0], sum[1]), pair_of(sum[2], sum[3])));
}

// A turn's entries lie in shared memory, where the lanes of a group read them, several at a time. After a row's last
// entry the last offset is repeated, with zeros for values: that row of the matrix is in L1 already, and no lane has to
// test whether to load.
// entries: the group's; of each, the offset of its row, and h.
__device__ __forceinline__ void add_weighted(const Place& p, const word_t* __restrict__ words, const float* __restrict__ ups,
                                             const value_t* __restrict__ down_t, uint2* mine, float* sum) {
    const char* matrix = p.of(down_t);
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
}

extern "C" __global__ void WARPS_OF_ROWS(SUMS_RESIDENT)
weighted_rows_v2(const int2* __restrict__ spans, const int* __restrict__ lost, const word_t* __restrict__ words,
                 const float* __restrict__ ups, const value_t* __restrict__ down_t, const value_t* __restrict__ bias,
                 value_t* __restrict__ y, int rows) {
    __shared__ uint2 entries[BLOCK_WARPS * WARP_ROWS][TURN];
    uint2* mine = entries[threadIdx.x / ROW_LANES];
    const Place p(blockIdx.y, spans, rows);
    float sum[VECTOR] = {};
    if (bias) load(p.of(bias), 0).to_floats(sum);
    add_weighted(p, words, ups, down_t, mine, sum);
    store_sums(y, p, sum);
    for (Heavy heavy(lost, rows, HEAVY_SLABS, this_warp()); heavy.more(); heavy.at += all_warps())
        store_heavy<4, HEAVY_AT_ONCE>(y, heavy, spans, words, down_t, nullptr, bias, [&](word_t word, int at) {
            return make_float2(hidden_value(to_float(word_value(word)), ups, at), 0.0f);
        });
}

#if AT_ONCE < 8  // else two matrices want more registers than there are
// ups and gate: both or neither. entries: the group's; of each, the offset of its rows, du and dg.
__device__ __forceinline__ void add_gradients(const Place& p, const word_t* __restrict__ words, const float* __restrict__ ups,
                                              const float* __restrict__ dh, const value_t* __restrict__ gate,
                                              const value_t* __restrict__ up, uint4* mine, float* sum) {
    const char *of_gate = p.of(gate), *of_up = p.of(up);
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
}

extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
input_gradient_v2(const int2* __restrict__ spans, const int* __restrict__ lost, const word_t* __restrict__ words,
                  const float* __restrict__ ups, const float* __restrict__ dh, const value_t* __restrict__ gate,
                  const value_t* __restrict__ up, value_t* __restrict__ dx, int rows) {
    __shared__ uint4 entries[BLOCK_WARPS * WARP_ROWS][TURN];
    Heavy heavy(lost, rows, HEAVY_SLABS, this_warp());
    uint4* mine = entries[threadIdx.x / ROW_LANES];
    const Place p(blockIdx.y, spans, rows);
    float sum[VECTOR] = {};
    add_gradients(p, words, ups, dh, gate, up, mine, sum);
    store_sums(dx, p, sum);
    for (; heavy.more(); heavy.at += all_warps())
        store_heavy<8, 2>(dx, heavy, spans, words, up, gate, nullptr, [&](word_t word, int at) {
            const float d = element(dh, at);
            return gate ? make_float2(d * to_float(word_value(word)), d * element(ups, at)) : make_float2(d, 0.0f);
        });
}
#endif

// The sums of N values over the ROW_LANES lanes of a group, all at once. Lane l of the group gets the sum of value
// l / (ROW_LANES / N). Each step halves the number of values that a lane adds up.
template <int N>
__device__ __forceinline__ float sums_over_group(float* d, int lane) {
    int step = ROW_LANES / 2;
#pragma unroll
    for (int half = N / 2; half; half /= 2, step /= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float give = upper ? d[i] : d[i + half], keep = upper ? d[i + half] : d[i];
            d[i] = keep + __shfl_xor_sync(ALL_LANES, give, step);
        }
    }
#pragma unroll
    for (int rest = ROW_LANES / N / 2; rest; rest /= 2) d[0] += __shfl_xor_sync(ALL_LANES, d[0], rest);
    return d[0];
}

// entries: the group's; of each, the offset of its row. pieces: of the slab.
template <int N>
__device__ __forceinline__ void write_pieces(const Place& p, const value_t* __restrict__ in, const word_t* __restrict__ words,
                                             const value_t* __restrict__ matrix, unsigned* mine, float* __restrict__ pieces) {
    const char* rows_at = p.of(matrix);
    float x[VECTOR];
    Vector in_row;
    in_row.raw = make_uint4(0, 0, 0, 0);
    if (!p.none && p.inside()) in_row.raw = __ldcs((const uint4*)(in + (long long)p.row * D_MODEL + p.column));
    in_row.to_floats(x);
    float* to = pieces + p.start;
    const int which = p.lane / (ROW_LANES / N), most = p.most(p.count);
    const bool writes = p.lane % (ROW_LANES / N) == 0;
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
        for (int s = 0; s < n; s += N) {
            Vector v[N];
            unsigned e[N];
            float d[N];
#pragma unroll
            for (int i = 0; i < N; ++i) e[i] = mine[s + i];
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = load(rows_at, e[i]);
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float f[VECTOR];
                v[i].to_floats(f);
                d[i] = 0;
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) d[i] = fmaf(x[j], f[j], d[i]);
            }
            const float sum = sums_over_group<N>(d, p.lane);
            const int k = at + s + which;
            if (writes && k < p.count) to[k] = sum;
        }
        __syncwarp();
    }
}

// in: x or dy. Slabs from `first` on; pieces: [gridDim.y][capacity].
extern "C" __global__ void WARPS_OF_ROWS(RESIDENT)
pieces_v1(const value_t* __restrict__ in, const int2* __restrict__ spans, const int* __restrict__ lost,
          const word_t* __restrict__ words, const value_t* __restrict__ matrix, float* __restrict__ pieces, int rows,
          int capacity, int first) {
    __shared__ unsigned entries[BLOCK_WARPS * WARP_ROWS][TURN];
    Heavy heavy(lost, rows, HEAVY_RUNS * gridDim.y, this_warp());
    unsigned* mine = entries[threadIdx.x / ROW_LANES];
    const Place p(first + blockIdx.y, spans, rows);
    write_pieces<AT_ONCE>(p, in, words, matrix, mine, pieces + (long long)blockIdx.y * capacity);
    for (; heavy.more(); heavy.at += all_warps()) {
        const int slab = heavy.part() / HEAVY_RUNS, row = heavy.row();
        const Place task(first + slab, spans[row], row, heavy.part() % HEAVY_RUNS);
        write_pieces<(AT_ONCE < 4 ? AT_ONCE : 4)>(task, in, words, matrix, mine, pieces + (long long)slab * capacity);
    }
}

// What the kernels below do for every STEP-th entry of a row, from number `from` on, N of them at once: the pieces of
// each are added up. begun: whether earlier slabs' sums are in ups, or dh; last: whether these are the last slabs.
// use(place, sum) is called for each entry.
template <int STEP, int N, class Use>
__device__ __forceinline__ void add_pieces(int2 span, int from, const float* __restrict__ pieces, int capacity, int slabs,
                                           const float* begun, Use use) {
    const int end = span.x + span.y;
    for (int i = span.x + from; i < end; i += N * STEP) {
        float sum[N];
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = begun ? begun[min(i + k * STEP, end - 1)] : 0.0f;
#pragma unroll 4
        for (int s = 0; s < slabs; ++s)
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += __ldcs(pieces + (long long)s * capacity + min(i + k * STEP, end - 1));
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (k == 0 || i + k * STEP < end) use(i + k * STEP, sum[k]);
    }
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// A warp a row, a block a heavy row.
extern "C" __global__ void WARPS_OF_ROWS(SHORT_RESIDENT)
up_values_v1(const int2* __restrict__ spans, const int* __restrict__ lost, const word_t* __restrict__ words,
             const float* __restrict__ pieces, const value_t* __restrict__ up_bias, float* __restrict__ ups,
             float* __restrict__ l1, int rows, int capacity, int slabs, int begun, int last) {
    __shared__ float of_warp[BLOCK_WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, row = blockIdx.x * BLOCK_WARPS + warp;
    float sum = 0;  // of |h|
    const auto use = [&](int i, float u) {
        if (last) {
            const word_t w = words[i];
            if (up_bias) u += to_float(up_bias[word_column(w)]);
            sum += fabsf(to_float(word_value(w)) * u);
        }
        ups[i] = u;
    };
    const float* earlier = begun ? ups : nullptr;
    int2 span = make_int2(LOST, 0);
    if (row < rows) span = __ldcg(spans + row);
    if (span.x != LOST && span.y <= HEAVY) {
        add_pieces<WARP, 1>(span, lane, pieces, capacity, slabs, earlier, use);
        sum = warp_sum(sum);
        if (last && lane == 0) l1[row] = sum;
    }
    for (Heavy heavy(lost, rows, 1, blockIdx.x); heavy.more(); heavy.at += gridDim.x) {
        sum = 0;
        add_pieces<WARP * BLOCK_WARPS, HEAVY_AT_ONCE>(spans[heavy.row()], threadIdx.x, pieces, capacity, slabs, earlier, use);
        sum = warp_sum(sum);
        if (lane == 0) of_warp[warp] = sum;
        __syncthreads();
        if (last && threadIdx.x == 0) {
            float all = 0;
#pragma unroll
            for (int w = 0; w < BLOCK_WARPS; ++w) all += of_warp[w];
            l1[heavy.row()] = all;
        }
        __syncthreads();
    }
}

// A warp a row, a block one of HEAVY_RUNS parts of a heavy row.
extern "C" __global__ void WARPS_OF_ROWS(SHORT_RESIDENT)
hidden_gradient_v2(const int2* __restrict__ spans, const int* __restrict__ lost, const word_t* __restrict__ words,
                   const float* __restrict__ pieces, const float* __restrict__ ups, const float* __restrict__ dl1,
                   float* __restrict__ dh, int rows, int capacity, int slabs, int begun, int last) {
    const int row = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool add_slope = last && dl1;
    float slope = add_slope && row < rows ? dl1[row] : 0.0f;
    const auto use = [&](int i, float d) {
        if (add_slope) d = fmaf(slope, sign_of(hidden_value(to_float(word_value(words[i])), ups, i)), d);
        dh[i] = d;
    };
    const float* earlier = begun ? dh : nullptr;
    int2 span = make_int2(LOST, 0);
    if (row < rows) span = __ldcg(spans + row);
    if (span.x != LOST && span.y <= HEAVY) add_pieces<WARP, 1>(span, lane, pieces, capacity, slabs, earlier, use);
    constexpr int THREADS = WARP * BLOCK_WARPS;
    for (Heavy heavy(lost, rows, HEAVY_RUNS, blockIdx.x); heavy.more(); heavy.at += gridDim.x) {
        slope = add_slope ? dl1[heavy.row()] : 0.0f;
        add_pieces<HEAVY_RUNS * THREADS, 2>(spans[heavy.row()], heavy.part() * THREADS + threadIdx.x, pieces, capacity, slabs,
                                            earlier, use);
    }
}
