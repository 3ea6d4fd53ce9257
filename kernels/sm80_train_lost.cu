// The first `room` of the rows that a sparse training step does not hold (smxx_train_lost.cu computes the others), on
// tensor cores: gathered products with the dense weights, mma.sync. Only the device knows how many rows there are: each
// kernel has a fixed grid, reads lost[0] and ends at once where it is 0.
//
//   lost_hidden_v1           g and u of a tile of rows and 64 neurons in one product; h, the parts of l1 and kept
//   lost_products_v1         y = h down_t; or dx = dup up + dgate gate. Few rows make few tiles: then several blocks
//                            share one, each with a part of k, and the last to end adds the parts up in a fixed order
//   lost_hidden_gradients_v1 g and u again, then dh, in tiles as the first; h, dup and dgate, rounded
//   lost_weight_products_v1  gradients of the weights += h^T dy, dup^T x, dgate^T x
//
// What bounds it: with few rows, reading the weights; with many, the tensor cores.
// Worklog: docs/kernels/sm80_train_lost.md
#include "ptx_sm80.cuh"
#include "ptx_sm80_turned.cuh"

#define THREADS 256  // 2 x 4 warps
#define BN 128
#define BK 64        // steps along k of a stage
#ifndef NEURONS
#define NEURONS 64  // neurons of a tile of lost_hidden: a row of gate and one of up each
#endif
#define WARP_NEURONS (NEURONS / 4)
#define HIGH 4       // 16-row products of a warp, one below the other, in a tile of 128 rows
#define LOW 2        // and in one of 64
#ifndef SHARED_BYTES
#define SHARED_BYTES 98304  // as many stages as find room: 3 of a high tile, 4 of a low one
#endif
#ifndef RESIDENT
#define RESIDENT 2
#endif
#define FEW 256  // rows up to which lost_weight_products has low tiles: reading the gradients takes longest
#define MOST_SPLITS 16  // blocks that share a tile of lost_products
#define LEAST_STEPS 4   // stages of a block's part of such a tile, at least
#define TILE (32 * HIGH * BN)  // values of the largest tile of lost_products
#ifdef LAUNCH_TILE
static_assert(LAUNCH_TILE == TILE, "ops/train_lost.py has another size");
#endif

struct Layer {
    const value_t *gate, *up, *down_t, *gate_bias, *up_bias;  // gate: null in a plain layer, whose pattern is x up^T
    int d_model, d_ff;
    __device__ __forceinline__ bool gated() const { return gate != nullptr; }
};

// What the kernels of one pass leave for each other. h, dup, dgate: [room][pitch], zero from d_ff to pitch; source:
// [room], the row's number, or -1 where its x is not finite; counters: [blocks of the grid], zero until lost_products,
// for the tiles that its blocks share.
__host__ __device__ __forceinline__ int pitch_of(int d_ff) { return (d_ff + NEURONS - 1) / NEURONS * NEURONS; }
__device__ __forceinline__ int rows_of(const int* lost, int room) { return min(lost[0], room); }
__device__ __forceinline__ int parts_of(int all, int part) { return (all + part - 1) / part; }

__device__ __forceinline__ unsigned char* stages() {
    extern __shared__ __align__(1024) unsigned char memory[];
    return memory;
}

// ---------------------------------------------------------------- from global to shared memory
// An operand of a stage holds ROWS rows or columns of the product and BK steps along k, in 16-byte chunks, swizzled so
// that the eight rows of an ldmatrix lie in different banks. "Along k": [ROWS][BK], as in memory k runs along a row.
// "Turned": [BK][ROWS].
__device__ __forceinline__ unsigned place(int row, int chunk) { return row * (BK * 2) + (chunk ^ row % 8) * 16; }
template <int ROWS> __device__ __forceinline__ unsigned turned_place(int k, int chunk) { return k * (ROWS * 2) + (chunk ^ k % 8) * 16; }

// This thread's part of an operand along k: chunk `chunk` of rows `row`, row + 32 and so on. base: the matrix, which has
// to be readable; width: values in a row; rows: how many of the thread's rows are there, the first of them. Where the
// i-th begins, in vectors: at[i] (GATHERED), or at[0] + i * apart.
template <int ROWS, bool GATHERED>
struct Along {
    static constexpr int APART = THREADS / (BK / 8), COPIES = ROWS / APART;  // 32 rows at a time
    const value_t* base;
    int width, rows;
    unsigned at[GATHERED ? COPIES : 1], apart;
    __device__ __forceinline__ static int row() { return threadIdx.x / (BK / 8); }
    __device__ __forceinline__ static int chunk() { return threadIdx.x % (BK / 8); }
    __device__ __forceinline__ unsigned vectors(int row) const { return (unsigned)row * (unsigned)(width / VECTOR); }
    __device__ __forceinline__ void start(unsigned to, int k) const {
        const int inside_rows = k + chunk() * 8 < width ? rows : 0;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const bool inside = i < inside_rows;
            const unsigned from = GATHERED ? at[GATHERED ? i : 0] : at[0] + i * apart;
            copy_async(to + place(row() + i * APART, chunk()), (const uint4*)base + (inside ? from + k / 8 : 0), inside);
        }
    }
};
// Rows m, m + 1, ... of the list, which has `rows`, as they lie in a matrix.
template <int ROWS>
__device__ __forceinline__ Along<ROWS, true> listed(const value_t* base, int width, const int* lost, int m, int rows) {
    typedef Along<ROWS, true> Rows;
    Rows a = {base, width, parts_of(max(rows - m - Rows::row(), 0), Rows::APART), {}, 0};
#pragma unroll
    for (int i = 0; i < Rows::COPIES; ++i)
        a.at[i] = a.vectors(i < a.rows ? lost[1 + m + Rows::row() + i * Rows::APART] : 0) + Rows::chunk();
    return a;
}
// Rows first, first + apart, ... of a matrix that has `count`, of them at most `most`.
template <int ROWS>
__device__ __forceinline__ Along<ROWS, false> spaced(const value_t* base, int width, int first, int apart, int count, int most) {
    typedef Along<ROWS, false> Rows;
    Rows a = {base, width, min(parts_of(max(count - first, 0), apart), most), {}, 0};
    a.at[0] = a.vectors(first) + Rows::chunk(), a.apart = a.vectors(apart);
    return a;
}
// And of one that is turned: chunk `chunk` of steps k, k + APART and so on. find(i): where the row of the i-th of these
// steps begins, in rows of `width` values from `base`, or -1; first: the product's first row or column in it.
template <int ROWS>
struct Turned {
    static constexpr int CHUNKS = ROWS / 8, APART = THREADS / CHUNKS, COPIES = BK / APART;
    __device__ __forceinline__ static int k() { return threadIdx.x / CHUNKS; }
    template <class Find>
    __device__ __forceinline__ static void start(unsigned to, const value_t* base, int first, int width, Find find) {
        const int chunk = threadIdx.x % CHUNKS, at = first + chunk * 8;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int row = find(i);
            const bool inside = row >= 0 && at < width;
            copy_async(to + turned_place<ROWS>(k() + i * APART, chunk), base + (inside ? (long long)row * width + at : 0), inside);
        }
    }
};

// ---------------------------------------------------------------- products of one stage
// A warp has H products of 16 rows, one below the other, and some of 8 columns side by side.
template <int H>
struct Warp {
    int lane, m, n;  // its first row and column in the tile
    __device__ __forceinline__ Warp()
        : lane(threadIdx.x % WARP), m((int)threadIdx.x / WARP / 4 * (16 * H)), n((int)threadIdx.x / WARP % 4 * 32) {}
    // The tile's row that holds value v (0 to 3) of product i; and which of a product's 8 columns.
    __device__ __forceinline__ int row(int i, int v) const { return m + i * 16 + v / 2 * 8 + lane / 4; }
    __device__ __forceinline__ int column(int v) const { return lane % 4 * 2 + v % 2; }
};

// sums += the stage's product: the warp's rows, and COLUMNS columns from column n on.
template <bool LEFT_TURNED, bool RIGHT_TURNED, int H, int COLUMNS>
__device__ __forceinline__ void multiply(float (&sums)[H][COLUMNS / 8][4], unsigned stage, const Warp<H>& w, int n) {
    constexpr int ROWS = 32 * H;
    const unsigned second = stage + ROWS * BK * 2;
    const int l = w.lane;
#pragma unroll
    for (int k = 0; k < BK; k += 16) {
        unsigned left[H][4], right[COLUMNS / 16][4];
#pragma unroll
        for (int i = 0; i < H; ++i) {
            const int m = w.m + i * 16;
            if (LEFT_TURNED) load_matrices_turned(left[i], stage + turned_place<ROWS>(k + l / 16 * 8 + l % 8, m / 8 + l / 8 % 2));
            else load_matrices(left[i], stage + place(m + l % 16, k / 8 + l / 16));
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
            const int column = n + j * 16;
            if (RIGHT_TURNED) load_matrices_turned(right[j], second + turned_place<BN>(k + l / 8 % 2 * 8 + l % 8, column / 8 + l / 16));
            else load_matrices(right[j], second + place(column + l / 16 * 8 + l % 8, k / 8 + l / 8 % 2));
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j)
#pragma unroll
            for (int i = 0; i < H; ++i) {
                multiply_add(sums[i][2 * j], left[i], right[j][0], right[j][1]);
                multiply_add(sums[i][2 * j + 1], left[i], right[j][2], right[j][3]);
            }
    }
}

// start(stage's address, number) of each of `steps` stages, several ahead, and use(stage's address) of each, in order.
template <int H, class Start, class Use>
__device__ __forceinline__ void pipeline(int steps, Start start, Use use) {
    constexpr int STAGE_BYTES = (32 * H + BN) * BK * 2, STAGES = SHARED_BYTES / STAGE_BYTES;
    const unsigned base = shared_address(stages());
    __syncthreads();  // everybody is done with what the stages held
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) start(base + s * STAGE_BYTES, s);
        commit_copies();
    }
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this stage is there for all warps, and all have read the one before, which is filled anew
        const int free = slot == 0 ? STAGES - 1 : slot - 1;
        if (step + STAGES - 1 < steps) start(base + free * STAGE_BYTES, step + STAGES - 1);
        commit_copies();
        use(base + slot * STAGE_BYTES);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
    }
}

// A lane has two neighbouring columns of each of four products; afterwards all eight of the one whose number is the
// lane's in its group of four.
__device__ __forceinline__ void gather_columns(float (&f)[4][2], int lane) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2)
#pragma unroll
        for (int low = 0; low < 4; ++low) {
            if (low & step) continue;
            const bool upper = lane & step;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float got = __shfl_xor_sync(ALL_LANES, upper ? f[low][e] : f[low + step][e], step);
                f[low][e] = upper ? got : f[low][e], f[low + step][e] = upper ? f[low + step][e] : got;
            }
        }
}

// ---------------------------------------------------------------- hidden values

// A tile of 32 H rows and NEURONS neurons: what this thread copies of its operands.
template <int H>
struct HiddenTile {
    int m, n, rows;  // its first row of the list and its first neuron; rows of the list
    __device__ __forceinline__ HiddenTile(int number, int rows) : rows(rows) {
        const int high = parts_of(rows, 32 * H);
        m = number % high * (32 * H), n = number / high * NEURONS;
    }
    // The rows of x.
    __device__ __forceinline__ Along<32 * H, true> rows_of(const value_t* x, const int* lost, int d_model) const {
        return listed<32 * H>(x, d_model, lost, m, rows);
    }
    // Rows of `first` and `second`: a warp's 32 rows of the operand are 16 neurons' of the one, then the same neurons' of
    // the other. second null: zeros. Two matrices have no common base, so each thread copies rows of one of them.
    __device__ __forceinline__ Along<BN, false> both(const value_t* first, const value_t* second, const Layer& layer) const {
        const int row = Along<BN, false>::row();
        const bool other = row >= WARP_NEURONS;
        return spaced<BN>(other && second ? second : first, layer.d_model, n + row % WARP_NEURONS, WARP_NEURONS, layer.d_ff,
                          other && !second ? 0 : BN);
    }
    // Rows of one matrix, in the operand's first half; zeros in the second.
    __device__ __forceinline__ Along<BN, false> one(const value_t* weights, const Layer& layer) const {
        typedef Along<BN, false> Rows;
        return spaced<BN>(weights, layer.d_model, n + Rows::row(), Rows::APART, layer.d_ff, NEURONS / Rows::APART);
    }
    // Finds the source of this tile's share of its rows: each tile of these rows has others.
    __device__ __forceinline__ void look(const value_t* x, const int* lost, const Layer& layer, int* source) const {
        const int lane = threadIdx.x % WARP, tiles = pitch_of(layer.d_ff) / NEURONS;
        for (int r = n / NEURONS + threadIdx.x / WARP * tiles; r < 32 * H && m + r < rows; r += tiles * (THREADS / WARP)) {
            const int number = lost[1 + m + r];
            const uint4* row = (const uint4*)(x + (long long)number * layer.d_model);
            bool found = false;
            for (int c = lane; c < layer.d_model / VECTOR; c += WARP) {
                Vector v;
                v.raw = __ldg(row + c);
                found |= v.nonfinite();
            }
            found = __any_sync(ALL_LANES, found);
            if (lane == 0) source[m + r] = found ? -1 : number;
        }
    }
};

// Of one neuron and row: g, rounded as torch's linear rounds what the ReLU gets, and u. kept: whether the neuron fires.
struct Hidden {
    value_t g;
    float u;
    bool kept;
    __device__ __forceinline__ float h(bool gated) const { return kept ? (gated ? to_float(g) * u : to_float(g)) : 0.0f; }
};
// g, u: sums of products; a plain layer's u is 1.
__device__ __forceinline__ Hidden hidden_of(float g, float u, const Layer& layer, int neuron) {
    const value_t* bias = layer.gated() ? layer.gate_bias : layer.up_bias;
    const bool inside = neuron < layer.d_ff;
    const value_t rounded = from_float(g + (bias && inside ? to_float(bias[neuron]) : 0.0f));
    if (layer.gated() && layer.up_bias && inside) u += to_float(layer.up_bias[neuron]);
    return {rounded, layer.gated() ? u : 1.0f, inside && fires(rounded)};
}

__device__ __forceinline__ void put_pair(value_t* to, int pitch, int row, int neuron, float low, float high) {
    *(unsigned*)(to + (long long)row * pitch + neuron) = pair_of(low, high);
}

// The operands of the product that makes g and u; x and the weights of a tile, from its first stage on.
template <int H>
struct GateAndUp {
    Along<32 * H, true> left;
    Along<BN, false> right;
    __device__ __forceinline__ GateAndUp(const HiddenTile<H>& tile, const value_t* x, const int* lost, const Layer& layer)
        : left(tile.rows_of(x, lost, layer.d_model)),
          right(layer.gated() ? tile.both(layer.gate, layer.up, layer) : tile.both(layer.up, nullptr, layer)) {}
    __device__ __forceinline__ void start(unsigned stage, int step) const {
        left.start(stage, step * BK), right.start(stage + 32 * H * BK * 2, step * BK);
    }
};

struct Hiddens {  // what lost_hidden writes
    value_t* h;
    int* source;
    float* parts_l1;  // and parts_kept: [pitch / WARP_NEURONS][room]
    int *parts_kept, room;
};

template <int H>
__device__ __forceinline__ void hidden(const int* lost, int rows, const value_t* x, const Layer& layer, const Hiddens& to) {
    const int pitch = pitch_of(layer.d_ff), steps = parts_of(layer.d_model, BK);
    const Warp<H> w;
    for (int number = blockIdx.x; number < parts_of(rows, 32 * H) * (pitch / NEURONS); number += gridDim.x) {
        const HiddenTile<H> tile(number, rows);
        tile.look(x, lost, layer, to.source);
        const GateAndUp<H> operands(tile, x, lost, layer);
        float sums[H][4][4] = {};
        pipeline<H>(steps, [&](unsigned stage, int step) { operands.start(stage, step); },
                    [&](unsigned stage) { multiply<false, false, H, 32>(sums, stage, w, w.n); });
        const int first = tile.n + w.n / 32 * WARP_NEURONS;
#pragma unroll
        for (int i = 0; i < H; ++i)
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const int row = tile.m + w.row(i, half);
                float l1 = 0;
                int kept = 0;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int neuron = first + j * 8 + w.column(0);
                    const Hidden a = hidden_of(sums[i][j][half], sums[i][j + 2][half], layer, neuron);
                    const Hidden b = hidden_of(sums[i][j][half + 1], sums[i][j + 2][half + 1], layer, neuron + 1);
                    const float low = a.h(layer.gated()), high = b.h(layer.gated());
                    l1 += fabsf(low) + fabsf(high), kept += a.kept + b.kept;
                    if (row < rows) put_pair(to.h, pitch, row, neuron, low, high);
                }
#pragma unroll
                for (int step = 1; step <= 2; step *= 2) {
                    l1 += __shfl_xor_sync(ALL_LANES, l1, step);
                    kept += __shfl_xor_sync(ALL_LANES, kept, step);
                }
                const long long at = (long long)(first / WARP_NEURONS) * to.room + row;
                if (w.lane % 4 == 0 && row < rows) to.parts_l1[at] = l1, to.parts_kept[at] = kept;
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
lost_hidden_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ gate,
               const value_t* __restrict__ up, const value_t* __restrict__ gate_bias, const value_t* __restrict__ up_bias,
               value_t* __restrict__ h, int* __restrict__ source, int* __restrict__ counters, float* __restrict__ parts_l1,
               int* __restrict__ parts_kept, int room, int d_model, int d_ff) {
    const int rows = rows_of(lost, room);
    if (rows <= 0) return;
    const Layer layer = {gate, up, nullptr, gate_bias, up_bias, d_model, d_ff};
    const Hiddens to = {h, source, parts_l1, parts_kept, room};
    if (threadIdx.x == 0) counters[blockIdx.x] = 0;
    if (rows <= 32 * LOW) hidden<LOW>(lost, rows, x, layer, to);
    else hidden<HIGH>(lost, rows, x, layer, to);
}

struct Gradients {  // what lost_hidden_gradients writes
    value_t *h, *dup, *dgate;
    int* source;
};

template <int H>
__device__ __forceinline__ void hidden_gradients(const int* lost, int rows, const value_t* x, const value_t* dy,
                                                 const float* dl1, const Layer& layer, const Gradients& to) {
    const int pitch = pitch_of(layer.d_ff), steps = parts_of(layer.d_model, BK);
    const Warp<H> w;
    for (int number = blockIdx.x; number < parts_of(rows, 32 * H) * (pitch / NEURONS); number += gridDim.x) {
        const HiddenTile<H> tile(number, rows);
        tile.look(x, lost, layer, to.source);
        const int first = tile.n + w.n / 32 * WARP_NEURONS;
        GateAndUp<H> operands(tile, x, lost, layer);
        const auto start = [&](unsigned stage, int step) { operands.start(stage, step); };
        unsigned packed[H][2][4];  // g, and u rounded as torch's linear gives it; 0 where the neuron does not fire
        {
            float sums[H][4][4] = {};
            pipeline<H>(steps, start, [&](unsigned stage) { multiply<false, false, H, 32>(sums, stage, w, w.n); });
#pragma unroll
            for (int i = 0; i < H; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j)
#pragma unroll
                    for (int v = 0; v < 4; ++v) {
                        const Hidden a = hidden_of(sums[i][j][v], sums[i][j + 2][v], layer, first + j * 8 + w.column(v));
                        packed[i][j][v] = a.kept ? bits_of(a.g) | bits_of(from_float(a.u)) << 16 : 0;
                    }
        }
        float sums[H][2][4] = {};
        operands.left.base = dy, operands.right = tile.one(layer.down_t, layer);
        pipeline<H>(steps, start, [&](unsigned stage) { multiply<false, false, H, 16>(sums, stage, w, w.n / 2); });
#pragma unroll
        for (int i = 0; i < H; ++i)
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                const int row = tile.m + w.row(i, half);
                if (row >= rows) continue;
                const float slope = dl1 ? dl1[lost[1 + row]] : 0.0f;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float of_h[2], of_dup[2], of_dgate[2];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const unsigned both = packed[i][j][half + e];
                        const float g = to_float(value_of_bits(both & 0xffffu)), u = to_float(value_of_bits(both >> 16));
                        const bool kept = (both & 0xffffu) != 0;  // what fires is not zero
                        const float value = layer.gated() ? g * u : g;
                        const float dh = sums[i][j][half + e] + slope * (float)((value > 0) - (value < 0));
                        of_h[e] = kept ? value : 0.0f;
                        of_dup[e] = kept ? (layer.gated() ? dh * g : dh) : 0.0f;
                        of_dgate[e] = kept ? dh * u : 0.0f;
                    }
                    const int neuron = first + j * 8 + w.column(0);
                    put_pair(to.h, pitch, row, neuron, of_h[0], of_h[1]);
                    put_pair(to.dup, pitch, row, neuron, of_dup[0], of_dup[1]);
                    if (layer.gated()) put_pair(to.dgate, pitch, row, neuron, of_dgate[0], of_dgate[1]);
                }
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
lost_hidden_gradients_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                         const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                         const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                         const value_t* __restrict__ up_bias, value_t* __restrict__ h, value_t* __restrict__ dup,
                         value_t* __restrict__ dgate, int* __restrict__ source, int* __restrict__ counters, int room,
                         int d_model, int d_ff) {
    const int rows = rows_of(lost, room);
    if (rows <= 0) return;
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    const Gradients to = {h, dup, dgate, source};
    if (threadIdx.x == 0) counters[blockIdx.x] = 0;
    if (rows <= 32 * LOW) hidden_gradients<LOW>(lost, rows, x, dy, dl1, layer, to);
    else hidden_gradients<HIGH>(lost, rows, x, dy, dl1, layer, to);
}

// ---------------------------------------------------------------- rows of the result

// out rows = first [rows][pitch] x first_weights [d_ff][d_model] (+ second x second_weights) (+ bias); NaN where the row
// is not finite. parts: float [blocks of the grid][TILE], where blocks share tiles.
struct Products {
    const value_t *first, *first_weights, *second, *second_weights, *bias;
    const int* source;
    int* counters;
    float4* parts;
    value_t* out;
    int d_model, d_ff;
};

template <int H>
__device__ __forceinline__ void products(const int* lost, int rows, const Products& p) {
    __shared__ bool last;
    const int pitch = pitch_of(p.d_ff), high = parts_of(rows, 32 * H), tiles = high * parts_of(p.d_model, BN);
    const int own_steps = pitch / BK, steps = own_steps * (p.second ? 2 : 1);
    const int splits = max(1, min(min((int)gridDim.x / tiles, MOST_SPLITS), steps / LEAST_STEPS));
    const Warp<H> w;
    for (int item = blockIdx.x; item < tiles * splits; item += gridDim.x) {
        const int number = item % tiles, split = item / tiles, m = number % high * (32 * H), n = number / high * BN;
        const int begin = steps * split / splits, end = steps * (split + 1) / splits;
        typedef Along<32 * H, false> Rows;
        Rows left = spaced<32 * H>(p.first, pitch, m + Rows::row(), Rows::APART, rows, Rows::COPIES);
        float sums[H][4][4] = {};
        pipeline<H>(end - begin,
                    [&](unsigned stage, int step) {
                        const bool behind = begin + step >= own_steps;  // in the second product
                        const int k = (begin + step - (behind ? own_steps : 0)) * BK;
                        left.base = behind ? p.second : p.first;
                        left.start(stage, k);
                        Turned<BN>::start(stage + 32 * H * BK * 2, behind ? p.second_weights : p.first_weights, n, p.d_model,
                                          [&](int i) {
                                              const int neuron = k + Turned<BN>::k() + i * Turned<BN>::APART;
                                              return neuron < p.d_ff ? neuron : -1;
                                          });
                    },
                    [&](unsigned stage) { multiply<false, true, H, 32>(sums, stage, w, w.n); });
        if (splits > 1) {
            // Part `split` of the tile; each thread keeps its own values, four at a time.
            const auto part = [&](int split) { return p.parts + (long long)(number + split * tiles) * (TILE / 4) + threadIdx.x; };
#pragma unroll
            for (int i = 0; i < H; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    __stcg(part(split) + (i * 4 + j) * THREADS, make_float4(sums[i][j][0], sums[i][j][1], sums[i][j][2], sums[i][j][3]));
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) last = atomicAdd(p.counters + number, 1) == splits - 1;
            __syncthreads();
            if (!last) continue;
            __threadfence();
#pragma unroll
            for (int i = 0; i < H; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
                    for (int s = 0; s < splits; ++s) {
                        const float4 f = __ldcg(part(s) + (i * 4 + j) * THREADS);
                        sum.x += f.x, sum.y += f.y, sum.z += f.z, sum.w += f.w;
                    }
                    sums[i][j][0] = sum.x, sums[i][j][1] = sum.y, sums[i][j][2] = sum.z, sums[i][j][3] = sum.w;
                }
        }
        const int column = n + w.n + w.lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < H; ++i)
#pragma unroll
            for (int half = 0; half < 4; half += 2) {
                float f[4][2];
#pragma unroll
                for (int j = 0; j < 4; ++j) f[j][0] = sums[i][j][half], f[j][1] = sums[i][j][half + 1];
                gather_columns(f, w.lane);
                const int row = m + w.row(i, half);
                if (row >= rows || column >= p.d_model) continue;
                const bool there = p.source[row] >= 0;
                float all[VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; ++k)
                    all[k] = there ? f[k / 2][k % 2] + (p.bias ? to_float(p.bias[column + k]) : 0.0f) : nanf("");
                *(uint4*)(p.out + (long long)lost[1 + row] * p.d_model + column) = Vector::of_floats(all).raw;
            }
    }
}

// l1, kept: null, or of each row the sum of the parts that lost_hidden left.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
lost_products_v1(const int* __restrict__ lost, const value_t* __restrict__ first, const value_t* __restrict__ first_weights,
                 const value_t* __restrict__ second, const value_t* __restrict__ second_weights,
                 const value_t* __restrict__ bias, const int* __restrict__ source, int* __restrict__ counters,
                 float4* __restrict__ parts, value_t* __restrict__ out, const float* __restrict__ parts_l1,
                 const int* __restrict__ parts_kept, float* __restrict__ l1, int* __restrict__ kept, int room, int d_model,
                 int d_ff) {
    const int rows = rows_of(lost, room);
    if (rows <= 0) return;
    const Products p = {first, first_weights, second, second_weights, bias, source, counters, parts, out, d_model, d_ff};
    if (rows <= 32 * LOW) products<LOW>(lost, rows, p);
    else products<HIGH>(lost, rows, p);
    if (!l1) return;
    const int warps = THREADS / WARP, lane = threadIdx.x % WARP;  // a warp a row
    for (int row = blockIdx.x * warps + threadIdx.x / WARP; row < rows; row += gridDim.x * warps) {
        float sum = 0;
        int all = 0;
        for (int t = lane; t < pitch_of(d_ff) / WARP_NEURONS; t += WARP)
            sum += parts_l1[(long long)t * room + row], all += parts_kept[(long long)t * room + row];
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            sum += __shfl_xor_sync(ALL_LANES, sum, step);
            all += __shfl_xor_sync(ALL_LANES, all, step);
        }
        if (lane == 0) l1[lost[1 + row]] = source[row] >= 0 ? sum : nanf(""), kept[lost[1 + row]] = all;
    }
}

// ---------------------------------------------------------------- gradients of the weights

// The gradient of a neuron's bias += its column of `entries` [rows][pitch]. A block takes 32 neurons at a time, a warp
// every eighth row.
__device__ __forceinline__ void add_bias(value_t* bias, const value_t* entries, const int* source, int rows, int pitch, int d_ff) {
    __shared__ float of_warp[THREADS / WARP][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int first = blockIdx.x * WARP; first < d_ff; first += gridDim.x * WARP) {
        const int neuron = first + lane;
        float sum = 0;
        if (neuron < d_ff)
#pragma unroll 4
            for (int row = warp; row < rows; row += THREADS / WARP) {
                const float f = to_float(entries[(long long)row * pitch + neuron]);
                sum += source[row] >= 0 ? f : 0.0f;
            }
        __syncthreads();
        of_warp[warp][lane] = sum;
        __syncthreads();
        if (warp || neuron >= d_ff) continue;
        float total = 0;
#pragma unroll
        for (int k = 0; k < THREADS / WARP; ++k) total += of_warp[k][lane];
        if (total != 0) bias[neuron] = from_float(to_float(bias[neuron]) + total);
    }
}

struct Added {  // to which gradients what is added
    const value_t *h, *dup, *dgate, *x, *dy;
    value_t *to_gate, *to_up, *to_down_t;
    const int* source;
    int rows, d_model, d_ff;
};

// Rows whose x is not finite add nothing. A tile of 64 neurons leaves a thread registers for what the gradients hold,
// which is loaded before the product.
template <int H>
__device__ __forceinline__ void add_products(const Added& p) {
    typedef Turned<32 * H> Left;
    typedef Turned<BN> Right;
    const Warp<H> w;
    const int pitch = pitch_of(p.d_ff), steps = parts_of(p.rows, BK);
    const int high = parts_of(p.d_ff, 32 * H), tiles = high * parts_of(p.d_model, BN);
    int left[Left::COPIES], right[Right::COPIES];  // of the next stage: the rows of the entries, and of x or dy
    const auto look = [&](int step) {
        const auto source = [&](int k) { return k < p.rows ? p.source[k] : -1; };
#pragma unroll
        for (int i = 0; i < Left::COPIES; ++i) {
            const int k = step * BK + Left::k() + i * Left::APART;
            left[i] = source(k) < 0 ? -1 : k;
        }
#pragma unroll
        for (int i = 0; i < Right::COPIES; ++i) right[i] = source(step * BK + Right::k() + i * Right::APART);
    };
    look(0);
    for (int item = blockIdx.x; item < tiles * (p.to_gate ? 3 : 2); item += gridDim.x) {
        const int matrix = item / tiles, number = item % tiles, m = number % high * (32 * H), n = number / high * BN;
        const value_t *entries = matrix == 0 ? p.h : matrix == 1 ? p.dup : p.dgate, *in = matrix == 0 ? p.dy : p.x;
        value_t* const to = matrix == 0 ? p.to_down_t : matrix == 1 ? p.to_up : p.to_gate;
        const int column = n + w.n + w.lane % 4 * 8;
        const auto place = [&](int i, int half) -> uint4* {
            const int neuron = m + w.row(i, 2 * half);
            return neuron < p.d_ff && column < p.d_model ? (uint4*)(to + (long long)neuron * p.d_model + column) : nullptr;
        };
        Vector old[H][2];
        const auto load_old = [&](int i, int half) { old[i][half].raw = place(i, half) ? __ldcs(place(i, half)) : make_uint4(0, 0, 0, 0); };
        if (H == LOW)
#pragma unroll
            for (int i = 0; i < H; ++i) load_old(i, 0), load_old(i, 1);
        float sums[H][4][4] = {};
        pipeline<H>(steps,
                    [&](unsigned stage, int step) {
                        Left::start(stage, entries, m, pitch, [&](int i) { return left[i]; });
                        Right::start(stage + 32 * H * BK * 2, in, n, p.d_model, [&](int i) { return right[i]; });
                        look(step + 1 < steps ? step + 1 : 0);
                    },
                    [&](unsigned stage) { multiply<true, true, H, 32>(sums, stage, w, w.n); });
#pragma unroll
        for (int i = 0; i < H; ++i) {
            if (H != LOW) load_old(i, 0), load_old(i, 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float f[4][2], all[VECTOR];
#pragma unroll
                for (int j = 0; j < 4; ++j) f[j][0] = sums[i][j][half * 2], f[j][1] = sums[i][j][half * 2 + 1];
                gather_columns(f, w.lane);
                if (!place(i, half)) continue;
                old[i][half].to_floats(all);
#pragma unroll
                for (int k = 0; k < VECTOR; ++k) all[k] = f[k / 2][k % 2] != 0 ? all[k] + f[k / 2][k % 2] : all[k];
                __stcs(place(i, half), Vector::of_floats(all).raw);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
lost_weight_products_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                        const value_t* __restrict__ h, const value_t* __restrict__ dup, const value_t* __restrict__ dgate,
                        const int* __restrict__ source, value_t* __restrict__ to_gate, value_t* __restrict__ to_up,
                        value_t* __restrict__ to_down_t, value_t* __restrict__ to_gate_bias,
                        value_t* __restrict__ to_up_bias, int room, int d_model, int d_ff) {
    const int rows = rows_of(lost, room), pitch = pitch_of(d_ff);
    if (rows <= 0) return;
    const Added p = {h, dup, dgate, x, dy, to_gate, to_up, to_down_t, source, rows, d_model, d_ff};
    if (rows <= FEW) add_products<LOW>(p);
    else add_products<HIGH>(p);
    if (to_up_bias) add_bias(to_up_bias, dup, source, rows, pitch, d_ff);
    if (to_gate_bias) add_bias(to_gate_bias, dgate, source, rows, pitch, d_ff);
}
