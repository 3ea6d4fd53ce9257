// The rows that a sparse training step cannot hold ("lost" rows, of which a tile overflows the pool), forward and backward,
// from the dense weights. lost[0] is how many there are, lost[1..] their numbers, ascending, known on the device only: each
// kernel is launched with a fixed grid, looks, and ends at once where there are none.
//
// Floor a lost row, d_model 2048, d_ff 5632, a share p of whose neurons fire (an H100's 132 multiprocessors at 1.7 GHz make 29e12
// fma a second): 11.5e6 fma for the gate, 0.4 us; as much times p for each of u, y (forward), u, dh, two for dx, three for the
// weights' gradients (backward). At p = 0.3: 0.64 us forward, 1.2 us backward. With few lost rows the weights' way from
// device memory is longer than that: 69 MB, 23 us at 3.0 TB/s, and in the backward pass 69 MB of weight gradients, read and
// written, another 46 us, however few rows.
// Prediction: 0.65 of the fma rate, since a third of the instructions convert 16-bit values: 1 us and 2 us a row.
//
// Versions
//   lost_forward_v1, lost_finish_v1    8 rows a block; a warp makes 4 x 8 dot products at once, each weight value from L2 serving 8
//                                      rows and each x value from L1 four neurons; then y's columns are dealt to the threads, the
//                                      block's sums lying in global memory (L2) between batches of 64 neurons. Few rows: slices of
//                                      neurons, added up by the second kernel in a fixed order.
//   lost_backward_v1                   the same for dx; it leaves h, dgate and dup of the first `room` lost rows for
//   lost_weights_v1                    the weights' gradients: 4 neurons a block, over all lost rows in ascending order. Past
//                                      `room` it computes them again.
#include "lost_rows.cuh"

#define BATCH 64         // neurons between two barriers
#define AHEAD 4          // rows under way while one is worked on
#define BATCH_ROWS 256   // rows, in lost_weights
#define PIECE (THREADS * VECTOR)  // columns that a block owns at a time: a vector a thread

// A block's group of rows and what it finds about them.
struct Group {
    long long at[ROWS];  // where each row begins
    float slope[ROWS];
    unsigned finite;     // bits of the rows of x without an infinity or NaN
};

// Rows i, i + 1, ... of the list, at most 8; the places past the end repeat the first.
__device__ __forceinline__ void open_group(Group& group, const int* lost, int i, int rows, const value_t* x,
                                           const float* dl1, int d_model) {
    if (threadIdx.x < ROWS) {
        const int row = lost[1 + i + (threadIdx.x < rows ? threadIdx.x : 0)];
        group.at[threadIdx.x] = (long long)row * d_model;
        group.slope[threadIdx.x] = dl1 ? dl1[row] : 0.0f;
    }
    if (threadIdx.x == 0) group.finite = 0;
    __syncthreads();
    bool found = false;  // a warp looks at each row
    for (int c = lane_of() * VECTOR; c < d_model; c += WARP * VECTOR)
        found |= load<false>(x + group.at[warp_of()] + c).nonfinite();
    if (!__any_sync(ALL_LANES, found) && lane_of() == 0) atomicOr(&group.finite, 1u << warp_of());
    __syncthreads();
}
static_assert(WARPS_HERE == ROWS, "a warp for each row");

// The number of the lowest bit, which is cleared.
__device__ __forceinline__ int take_first(unsigned long long& bits) {
    const int k = __ffsll((long long)bits) - 1;
    bits &= bits - 1;
    return k;
}

// sum[r] += coefficient[r] * w for the rows whose bit is set.
__device__ __forceinline__ void add_row(float (&sum)[ROWS][VECTOR], const float* coefficient, unsigned rows, const Vector& v) {
    float w[VECTOR];
    v.to_floats(w);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
        if (rows >> r & 1) {
            const float f = coefficient[r];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) sum[r][i] = fmaf(f, w[i], sum[r][i]);
        }
}

// sum[r] += coefficient[k][r] * row k of `weights`, in ascending order, for each k whose bit is set in `alive`.
__device__ __forceinline__ void add_rows(float (&sum)[ROWS][VECTOR], const float (*coefficient)[ROWS], const unsigned* rows_of,
                                         unsigned long long alive, const value_t* __restrict__ weights, int d_model) {
    Vector ahead[AHEAD];
    unsigned long long to_load = alive;
#pragma unroll
    for (int q = 0; q < AHEAD; ++q)
        if (to_load) ahead[q] = load<true>(weights + (long long)take_first(to_load) * d_model);
    while (alive) {
#pragma unroll
        for (int q = 0; q < AHEAD; ++q)
            if (alive) {
                const int k = take_first(alive);
                const Vector v = ahead[q];
                if (to_load) ahead[q] = load<true>(weights + (long long)take_first(to_load) * d_model);
                add_row(sum, coefficient[k], rows_of[k], v);
            }
    }
}

__device__ __forceinline__ float4* as_float4(float* p) { return (float4*)p; }

// One block: neurons from..to - 1 for `rows` rows of the list from i on. FORWARD: sums of h * down_t, l1 and kept. BACKWARD:
// sums of dgate * gate + dup * up; entries of list rows below `room` are kept in `entries`.
// sums: the block's float [ROWS][d_model]. whole: these are all neurons, so that the rows of `out` (y or dx) are written,
// with `bias`; otherwise the sums stay. l1, kept: of row r at [l1_at[r]].
template <bool BACKWARD>
__device__ __forceinline__ void take_rows(const Layer& layer, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                                          const float* __restrict__ dl1, const int* __restrict__ lost, int i, int rows,
                                          int from, int to, float* __restrict__ sums, bool whole,
                                          const value_t* __restrict__ bias, value_t* __restrict__ out, float* l1, int* kept,
                                          float* __restrict__ entries, int room) {
    __shared__ Group group;
    __shared__ float first_of[BATCH][ROWS], second_of[BATCH][ROWS];  // h; or dup and dgate
    __shared__ unsigned rows_of[BATCH];                              // bits of the rows in which a neuron of the batch fires
    __shared__ float l1_part[WARPS_HERE][WARP];
    __shared__ int kept_part[WARPS_HERE][WARP];
    open_group(group, lost, i, rows, x, dl1, layer.d_model);
    const unsigned valid = ALL_ROWS >> (ROWS - rows), finite = group.finite & valid;
    const int d = layer.d_model, n = lane_of() / ROWS, r = lane_of() % ROWS;
    float l1_sum = 0;
    int kept_sum = 0;

    for (int first = from; first < to; first += BATCH) {
        const int count = min(BATCH, to - first);
        for (int k = warp_of() * NEURONS; k < count; k += WARPS_HERE * NEURONS) {
            const int here = min(NEURONS, count - k);
            const Entry e = entry<BACKWARD, true>(layer, x, dy, group.at, first + k, here, valid, finite, group.slope[r]);
            l1_sum += fabsf(e.h), kept_sum += e.fires;
            const bool counts = BACKWARD ? e.dup != 0 || e.dgate != 0 : e.h != 0;
            const unsigned fired = __ballot_sync(ALL_LANES, counts);
            first_of[k + n][r] = BACKWARD ? e.dup : e.h;
            if (BACKWARD) second_of[k + n][r] = e.dgate;
            if (r == 0) rows_of[k + n] = fired >> (n * ROWS) & ALL_ROWS;
            if (BACKWARD && i + r < room && r < rows) {  // [plane][d_ff / 4][room][4]: what lost_weights reads in one go
                const long long plane = (long long)((layer.d_ff + NEURONS - 1) / NEURONS) * NEURONS * room;
                float* to_keep = entries + ((long long)((first + k) / NEURONS) * room + i + r) * NEURONS + n;
                to_keep[0] = e.h, to_keep[plane] = e.dup;
                if (layer.gated()) to_keep[2 * plane] = e.dgate;
            }
        }
        __syncthreads();
        const bool begins = first == from, ends = first + BATCH >= to;
        // Every warp finds the same neurons that fire.
        const unsigned long long low = __ballot_sync(ALL_LANES, lane_of() < count && rows_of[lane_of()]),
                                 high = __ballot_sync(ALL_LANES, WARP + lane_of() < count && rows_of[WARP + lane_of()]),
                                 alive = high << WARP | low;
        for (int c = threadIdx.x * VECTOR; c < d; c += PIECE) {
            float sum[ROWS][VECTOR];
#pragma unroll
            for (int q = 0; q < ROWS; ++q)
#pragma unroll
                for (int k = 0; k < VECTOR; k += 4) {
                    const float4 f = begins ? make_float4(0, 0, 0, 0) : *as_float4(sums + (long long)q * d + c + k);
                    sum[q][k] = f.x, sum[q][k + 1] = f.y, sum[q][k + 2] = f.z, sum[q][k + 3] = f.w;
                }
            const long long at = (long long)first * d + c;
            if (!BACKWARD) {
                add_rows(sum, first_of, rows_of, alive, layer.down_t + at, d);
            } else {
                add_rows(sum, first_of, rows_of, alive, layer.up + at, d);
                if (layer.gated()) add_rows(sum, second_of, rows_of, alive, layer.gate + at, d);
            }
#pragma unroll
            for (int q = 0; q < ROWS; ++q) {
                if (q >= rows) continue;
                const bool lives = finite >> q & 1;
                if (ends && !lives)
#pragma unroll
                    for (int k = 0; k < VECTOR; ++k) sum[q][k] = nanf("");
                if (ends && whole) {
                    if (bias) {
                        float b[VECTOR];
                        load<false>(bias + c).to_floats(b);
#pragma unroll
                        for (int k = 0; k < VECTOR; ++k) sum[q][k] += b[k];
                    }
                    *(uint4*)(out + group.at[q] + c) = Vector::of_floats(sum[q]).raw;
                } else {
#pragma unroll
                    for (int k = 0; k < VECTOR; k += 4)
                        *as_float4(sums + (long long)q * d + c + k) =
                            make_float4(sum[q][k], sum[q][k + 1], sum[q][k + 2], sum[q][k + 3]);
                }
            }
        }
        __syncthreads();
    }
    if (BACKWARD) return;
    l1_part[warp_of()][lane_of()] = l1_sum, kept_part[warp_of()][lane_of()] = kept_sum;
    __syncthreads();
    if (threadIdx.x < rows) {
        float total = 0;
        int all = 0;
        for (int w = 0; w < WARPS_HERE; ++w)
            for (int k = 0; k < NEURONS; ++k)
                total += l1_part[w][k * ROWS + threadIdx.x], all += kept_part[w][k * ROWS + threadIdx.x];
        const int place = whole ? lost[1 + i + threadIdx.x] : threadIdx.x;
        l1[place] = finite >> threadIdx.x & 1 ? total : nanf("");
        kept[place] = all;
    }
    __syncthreads();
}

// The block's share of the lost rows. part_l1, part_kept: [blocks][ROWS], of slices.
template <bool BACKWARD>
__device__ __forceinline__ void take_share(const Layer& layer, const value_t* x, const value_t* dy, const float* dl1,
                                           const int* lost, float* sums, const value_t* bias, value_t* out, float* l1,
                                           int* kept, float* part_l1, int* part_kept, float* entries, int room) {
    const int count = lost[0];
    if (count == 0) return;
    const Deal deal(count, gridDim.x, layer.d_ff);
    sums += (long long)blockIdx.x * ROWS * layer.d_model;
    // The groups that are cut come last in the list, and here too.
    for (int g = blockIdx.x; g < deal.whole; g += gridDim.x)
        take_rows<BACKWARD>(layer, x, dy, dl1, lost, g * ROWS, min(ROWS, count - g * ROWS), 0, layer.d_ff, sums, true, bias, out,
                            l1, kept, entries, room);
    if ((int)blockIdx.x >= deal.cut * deal.slices) return;
    const int i = (deal.whole + blockIdx.x / deal.slices) * ROWS, from = blockIdx.x % deal.slices * deal.neurons;
    take_rows<BACKWARD>(layer, x, dy, dl1, lost, i, min(ROWS, count - i), from, min(from + deal.neurons, layer.d_ff), sums,
                        false, bias, out, part_l1 + blockIdx.x * ROWS, part_kept + blockIdx.x * ROWS, entries, room);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_forward_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ gate,
                const value_t* __restrict__ up, const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                const value_t* __restrict__ up_bias, const value_t* __restrict__ down_bias, value_t* __restrict__ y,
                float* __restrict__ l1, int* __restrict__ kept, float* __restrict__ sums, float* __restrict__ part_l1,
                int* __restrict__ part_kept, int d_model, int d_ff) {
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    take_share<false>(layer, x, nullptr, nullptr, lost, sums, down_bias, y, l1, kept, part_l1, part_kept, nullptr, 0);
}

// blocks: the grid of lost_forward.
extern "C" __global__ void __launch_bounds__(THREADS)
lost_finish_v1(const int* __restrict__ lost, const value_t* __restrict__ down_bias, value_t* __restrict__ y,
               float* __restrict__ l1, int* __restrict__ kept, const float* __restrict__ sums,
               const float* __restrict__ part_l1, const int* __restrict__ part_kept, int d_model, int d_ff, int blocks) {
    const int count = lost[0];
    if (count == 0) return;
    const Deal deal(count, blocks, d_ff);
    add_slices(deal, lost, sums, down_bias, y, d_model);
    // A warp a row.
    const int rest = count - deal.whole * ROWS;
    for (int i = blockIdx.x * WARPS_HERE + warp_of(); i < rest; i += gridDim.x * WARPS_HERE) {
        float total = 0;
        int all = 0;
        for (int s = lane_of(); s < deal.slices; s += WARP) {
            const int at = (i / ROWS * deal.slices + s) * ROWS + i % ROWS;
            total += part_l1[at], all += part_kept[at];
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) {
            total += __shfl_xor_sync(ALL_LANES, total, step);
            all += __shfl_xor_sync(ALL_LANES, all, step);
        }
        const int row = lost[1 + deal.whole * ROWS + i];
        if (lane_of() == 0) l1[row] = total, kept[row] = all;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_backward_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                 const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                 const value_t* __restrict__ up_bias, value_t* __restrict__ dx, float* __restrict__ sums,
                 float* __restrict__ entries, int room, int d_model, int d_ff) {
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    take_share<true>(layer, x, dy, dl1, lost, sums, nullptr, dx, nullptr, nullptr, nullptr, nullptr, entries, room);
}

// ---- the weights' gradients ----

// The entries of 4 neurons in a batch of rows.
struct Entries {
    float value[3][BATCH_ROWS][NEURONS];  // h, dup, dgate
    unsigned fired[BATCH_ROWS / ROWS];    // bit n * ROWS + r of a tile of rows: not all three are zero
    // The rows in which some neuron fired:
    int count;
    int row[BATCH_ROWS];          // number in the batch << NEURONS | bits of the neurons
    long long start[BATCH_ROWS];  // where the row begins in x and dy
    int neurons;                  // bits of those that fired in some row
};

// Fills in rows i..i + count - 1 of the list for neurons first..first + here - 1.
__device__ __forceinline__ void fill(Entries& batch, const Layer& layer, const value_t* x, const value_t* dy, const float* dl1,
                                     const int* lost, int i, int count, int first, int here, const float* entries, int room) {
    __shared__ long long at[WARPS_HERE][ROWS];
    const int n = lane_of() / ROWS, r = lane_of() % ROWS;
    for (int t = warp_of(); t * ROWS < count; t += WARPS_HERE) {
        const int begin = i + t * ROWS, rows = min(ROWS, i + count - begin);
        Entry e = {0, 0, 0, false};
        if (begin + rows <= room) {  // lost_backward has left them
            if (n < here && r < rows) {
                const long long plane = (long long)((layer.d_ff + NEURONS - 1) / NEURONS) * NEURONS * room;
                const float* kept = entries + ((long long)(first / NEURONS) * room + begin + r) * NEURONS + n;
                e.h = kept[0], e.dup = kept[plane];
                if (layer.gated()) e.dgate = kept[2 * plane];
            }
        } else {
            const int row = lost[1 + begin + (r < rows ? r : 0)];
            __syncwarp();
            if (n == 0) at[warp_of()][r] = (long long)row * layer.d_model;
            __syncwarp();
            const unsigned valid = ALL_ROWS >> (ROWS - rows);
            unsigned finite = 0;
            for (int q = 0; q < rows; ++q) {
                bool found = false;
                for (int c = lane_of() * VECTOR; c < layer.d_model; c += WARP * VECTOR)
                    found |= load<false>(x + at[warp_of()][q] + c).nonfinite();
                if (!__any_sync(ALL_LANES, found)) finite |= 1u << q;
            }
            e = entry<true, false>(layer, x, dy, at[warp_of()], first, here, valid, finite, dl1 ? dl1[row] : 0.0f);
        }
        const bool counts = e.h != 0 || e.dup != 0 || e.dgate != 0;
        const unsigned fired = __ballot_sync(ALL_LANES, counts);
        if (lane_of() == 0) batch.fired[t] = fired;
        batch.value[0][t * ROWS + r][n] = e.h;
        batch.value[1][t * ROWS + r][n] = e.dup;
        batch.value[2][t * ROWS + r][n] = e.dgate;
    }
}

// Lists the rows of a filled batch in which some neuron fired. One warp calls it.
__device__ __forceinline__ void list_rows(Entries& batch, const int* lost, int i, int count, int d_model) {
    const unsigned fired = lane_of() * ROWS < count ? batch.fired[lane_of()] : 0;
    const unsigned both = fired | fired >> 2 * ROWS;
    unsigned rows = (both | both >> ROWS) & ALL_ROWS;
    int at = 0;
    for (unsigned before = 0; before < WARP; ++before) {
        const int theirs = __popc(__shfl_sync(ALL_LANES, rows, before));
        if ((int)before < lane_of()) at += theirs;
    }
    if (lane_of() == WARP - 1) batch.count = at + __popc(rows);
    int neurons = 0;
#pragma unroll
    for (int n = 0; n < NEURONS; ++n) neurons |= __any_sync(ALL_LANES, fired >> (n * ROWS) & ALL_ROWS) ? 1 << n : 0;
    if (lane_of() == 0) batch.neurons = neurons;
    for (; rows; rows &= rows - 1, ++at) {
        const int r = __ffs(rows) - 1, k = lane_of() * ROWS + r;
        int bits = 0;
#pragma unroll
        for (int n = 0; n < NEURONS; ++n) bits |= (fired >> (n * ROWS + r) & 1) << n;
        batch.row[at] = k << NEURONS | bits;
        batch.start[at] = (long long)lost[1 + i + k] * d_model;
    }
}
static_assert(BATCH_ROWS == WARP * ROWS, "a lane for each tile of rows");

// sums[m][n] of MATRICES weight rows of each of 4 neurons += the batch's entries times rows of `in` (x or dy), this block's columns
// piece by piece. plane: of the first matrix. begins, ends: the batch is the first, the last; at the end the sums
// are added to the gradients, of neurons that fired.
template <int MATRICES>
__device__ __forceinline__ void add_batch(const Entries& batch, int plane, const value_t* __restrict__ in,
                                          float* __restrict__ sums, bool begins, bool ends, int fired_ever,
                                          value_t* __restrict__ (&gradient)[MATRICES], int d) {
    for (int c = threadIdx.x * VECTOR; c < d; c += PIECE) {
        float sum[MATRICES][NEURONS][VECTOR];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int n = 0; n < NEURONS; ++n)
#pragma unroll
                for (int k = 0; k < VECTOR; k += 4) {
                    const float4 f = begins ? make_float4(0, 0, 0, 0)
                                            : *as_float4(sums + (long long)(m * NEURONS + n) * d + c + k);
                    sum[m][n][k] = f.x, sum[m][n][k + 1] = f.y, sum[m][n][k + 2] = f.z, sum[m][n][k + 3] = f.w;
                }
        const value_t* here = in + c;
        Vector ahead[AHEAD];
#pragma unroll
        for (int q = 0; q < AHEAD; ++q)
            if (q < batch.count) ahead[q] = load<true>(here + batch.start[q]);
        for (int k = 0; k < batch.count; k += AHEAD)
#pragma unroll
            for (int q = 0; q < AHEAD; ++q)
                if (k + q < batch.count) {
                    float v[VECTOR];
                    ahead[q].to_floats(v);
                    if (k + q + AHEAD < batch.count) ahead[q] = load<true>(here + batch.start[k + q + AHEAD]);
                    const int row = batch.row[k + q] >> NEURONS, fired = batch.row[k + q];
#pragma unroll
                    for (int n = 0; n < NEURONS; ++n)
                        if (fired >> n & 1)
#pragma unroll
                            for (int m = 0; m < MATRICES; ++m) {
                                const float f = batch.value[plane + m][row][n];
#pragma unroll
                                for (int j = 0; j < VECTOR; ++j) sum[m][n][j] = fmaf(f, v[j], sum[m][n][j]);
                            }
                }
        if (ends) {
            Vector old[MATRICES][NEURONS];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int n = 0; n < NEURONS; ++n)
                    if (fired_ever >> n & 1) old[m][n].raw = __ldcs((const uint4*)(gradient[m] + (long long)n * d + c));
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int n = 0; n < NEURONS; ++n)
                    if (fired_ever >> n & 1) {
                        float f[VECTOR];
                        old[m][n].to_floats(f);
#pragma unroll
                        for (int k = 0; k < VECTOR; ++k) f[k] += sum[m][n][k];
                        __stcs((uint4*)(gradient[m] + (long long)n * d + c), Vector::of_floats(f).raw);
                    }
        } else {
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int n = 0; n < NEURONS; ++n)
#pragma unroll
                    for (int k = 0; k < VECTOR; k += 4)
                        *as_float4(sums + (long long)(m * NEURONS + n) * d + c + k) =
                            make_float4(sum[m][n][k], sum[m][n][k + 1], sum[m][n][k + 2], sum[m][n][k + 3]);
        }
    }
}

// blocks: the grid of lost_backward, whose `sums` become dx first. totals: float [grid][3][4][d_model], between batches.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_weights_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                const value_t* __restrict__ up_bias, value_t* __restrict__ dx, value_t* __restrict__ dgate,
                value_t* __restrict__ dup, value_t* __restrict__ ddown_t, value_t* __restrict__ dgate_bias,
                value_t* __restrict__ dup_bias, const float* __restrict__ sums, float* __restrict__ totals,
                const float* __restrict__ entries, int room, int d_model, int d_ff, int blocks) {
    __shared__ Entries batch;
    const int count = lost[0];
    if (count == 0) return;
    add_slices(Deal(count, blocks, d_ff), lost, sums, nullptr, dx, d_model);
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    totals += (long long)blockIdx.x * 3 * NEURONS * d_model;
    for (int first = blockIdx.x * NEURONS; first < d_ff; first += gridDim.x * NEURONS) {
        const int here = min(NEURONS, d_ff - first);
        const long long at = (long long)first * d_model;
        int fired_ever = 0;
        float bias_sum = 0;
        for (int i = 0; i < count; i += BATCH_ROWS) {
            const int rows = min(BATCH_ROWS, count - i);
            fill(batch, layer, x, dy, dl1, lost, i, rows, first, here, entries, room);
            __syncthreads();
            if (warp_of() == 0) list_rows(batch, lost, i, rows, d_model);
            __syncthreads();
            fired_ever |= batch.neurons;
            // Warp n sums up dup of neuron n, warp NEURONS + n dgate.
            for (int t = lane_of(); t < rows; t += WARP)
                bias_sum += batch.value[1 + warp_of() / NEURONS][t][warp_of() % NEURONS];
            const bool begins = i == 0, ends = i + BATCH_ROWS >= count;
            if (gate) {
                value_t* both[2] = {dup + at, dgate + at};
                add_batch<2>(batch, 1, x, totals, begins, ends, fired_ever, both, d_model);
            } else {
                value_t* one[1] = {dup + at};
                add_batch<1>(batch, 1, x, totals, begins, ends, fired_ever, one, d_model);
            }
            value_t* down[1] = {ddown_t + at};
            add_batch<1>(batch, 0, dy, totals + 2 * NEURONS * (long long)d_model, begins, ends, fired_ever, down,
                         d_model);
            __syncthreads();
        }
#pragma unroll
        for (int step = WARP / 2; step; step /= 2) bias_sum += __shfl_xor_sync(ALL_LANES, bias_sum, step);
        const int n = warp_of() % NEURONS;
        value_t* to = warp_of() < NEURONS ? dup_bias : dgate_bias;
        if (to && lane_of() == 0 && n < here && (fired_ever >> n & 1))
            to[first + n] = from_float(to_float(to[first + n]) + bias_sum);
    }
}
static_assert(WARPS_HERE == 2 * NEURONS, "a warp for each bias");
