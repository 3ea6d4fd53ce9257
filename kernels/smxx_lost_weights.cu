// The weights' gradients of the lost rows (smxx_train_lost.cu), added in float32 to what is there and rounded once:
// dgate[j] += sum dgate_t x_t, dup[j] += sum dup_t x_t, ddown_t[j] += sum h_t dy_t, over the lost rows t, ascending.
//
// A block has BLOCK_NEURONS neurons and walks over the lost rows twice: once over x for dgate and dup, once over dy for
// ddown_t. A thread has THREAD_COLUMNS columns of a row, and AHEAD rows are loaded in advance. h, dup and dgate are
// those that lost_backward left; where there was no room for them, they are computed again for each batch of rows, and
// the sums stay in memory meanwhile.
//
// What bounds it: with few rows, reading and writing the gradients, however few they are; then the rows of x and dy,
// which each block of neurons reads again through the L2 cache. Worklog: docs/kernels/smxx_lost_weights.md
#include "lost_rows.cuh"

#define BATCH_ROWS 256  // rows between barriers
#ifndef BLOCK_NEURONS
#define BLOCK_NEURONS 8  // neurons of a block
#endif
#define THREAD_COLUMNS 4  // columns of a thread
#define SLAB (THREADS * THREAD_COLUMNS)
#ifdef LAUNCH_SLAB
static_assert(LAUNCH_SLAB == SLAB, "ops/train_lost.py has another size");
#endif
static_assert(BATCH_ROWS == WARP * ROWS, "a lane for each tile of rows");

// The entries of the block's neurons in a batch of rows.
struct Entries {
    float4 value[3][BATCH_ROWS][BLOCK_NEURONS / 4];        // h, dup, dgate
    unsigned fired[BLOCK_NEURONS / NEURONS][BATCH_ROWS / ROWS];  // bit n * ROWS + r of a tile: not all three are zero
    // The rows in which some neuron fired:
    int count;
    int row[BATCH_ROWS];       // number in the batch << BLOCK_NEURONS | bits of the neurons
    unsigned start[BATCH_ROWS];  // where the row begins in x and dy, in vectors
    int neurons;               // bits of those that fired in some row
};

// Fills in rows i..i + count - 1 of the list for neurons first..first + here - 1. AGAIN: they are computed again.
template <bool AGAIN>
__device__ __forceinline__ void fill(Entries& batch, const Layer& layer, const value_t* x, const value_t* dy, const float* dl1,
                                     const Lost& lost, int i, int count, int first, int here, const float* entries, int room) {
    __shared__ unsigned at[BLOCK_WARPS][ROWS];
    const int n = lane_of() / ROWS, r = lane_of() % ROWS;
    const long long plane = plane_of(layer.d_ff, room);
    for (int tile = warp_of(); tile / 2 * ROWS < count; tile += BLOCK_WARPS) {
        const int t = tile / 2, half = tile % 2, begin = i + t * ROWS, rows = min(ROWS, i + count - begin);
        const int neuron = first + half * NEURONS, left = min(NEURONS, here - half * NEURONS);
        Entry e = {0, 0, 0, false};
        if (!AGAIN && left > 0) {  // lost_backward has left them
            if (n < left && r < rows) {
                const float* kept = entries + place_of(neuron, begin + r, room) + n;
                e.h = kept[0], e.dup = kept[plane];
                if (layer.gated()) e.dgate = kept[2 * plane];
            }
        } else if (AGAIN && left > 0) {
            const int row = lost.row[begin + (r < rows ? r : 0)];
            __syncwarp();
            if (n == 0) at[warp_of()][r] = (unsigned)row * (unsigned)(layer.d_model / VECTOR);
            __syncwarp();
            unsigned finite = 0;
            for (int q = 0; q < rows; ++q)
                if (!nonfinite((const uint4*)x + at[warp_of()][q], layer.d_model / VECTOR)) finite |= 1u << q;
            e = entry<true, false>(layer, x, dy, at[warp_of()], neuron, left, ALL_ROWS >> (ROWS - rows), finite,
                                   dl1 ? dl1[row] : 0.0f);
        }
        const bool counts = e.h != 0 || e.dup != 0 || e.dgate != 0;
        const unsigned fired = __ballot_sync(ALL_LANES, counts);
        if (lane_of() == 0) batch.fired[half][t] = fired;
        ((float*)batch.value[0][t * ROWS + r])[half * NEURONS + n] = e.h;
        ((float*)batch.value[1][t * ROWS + r])[half * NEURONS + n] = e.dup;
        ((float*)batch.value[2][t * ROWS + r])[half * NEURONS + n] = e.dgate;
    }
}
static_assert(BLOCK_NEURONS == 2 * NEURONS, "two halves");

// Lists the rows of a filled batch in which some neuron fired. One warp calls it.
__device__ __forceinline__ void list_rows(Entries& batch, const Lost& lost, int i, int count, int d_model) {
    unsigned fired[2];
    fired[0] = lane_of() * ROWS < count ? batch.fired[0][lane_of()] : 0;
    fired[1] = lane_of() * ROWS < count ? batch.fired[1][lane_of()] : 0;
    const unsigned any = fired[0] | fired[1], both = any | any >> 2 * ROWS;
    unsigned rows = (both | both >> ROWS) & ALL_ROWS;
    int at = 0, neurons = 0;
    for (int before = 0; before < WARP; ++before) {
        const int theirs = __popc(__shfl_sync(ALL_LANES, rows, before));
        if (before < lane_of()) at += theirs;
    }
    if (lane_of() == WARP - 1) batch.count = at + __popc(rows);
#pragma unroll
    for (int n = 0; n < BLOCK_NEURONS; ++n)
        neurons |= __any_sync(ALL_LANES, fired[n / NEURONS] >> (n % NEURONS * ROWS) & ALL_ROWS) ? 1 << n : 0;
    if (lane_of() == 0) batch.neurons = neurons;
    for (; rows; rows &= rows - 1, ++at) {
        const int r = __ffs(rows) - 1, k = lane_of() * ROWS + r;
        int bits = 0;
#pragma unroll
        for (int n = 0; n < BLOCK_NEURONS; ++n) bits |= (fired[n / NEURONS] >> (n % NEURONS * ROWS + r) & 1) << n;
        batch.row[at] = k << BLOCK_NEURONS | bits;
        batch.start[at] = (unsigned)lost.row[i + k] * (unsigned)(d_model / VECTOR);
    }
}

// 8 bytes of values.
struct Half {
    uint2 raw;
    __device__ __forceinline__ void to_floats(float (&f)[THREAD_COLUMNS]) const {
        const float2 a = two_floats(raw.x), b = two_floats(raw.y);
        f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y;
    }
    __device__ __forceinline__ static Half of_floats(const float (&f)[THREAD_COLUMNS]) {
        return {make_uint2(pair_of(f[0], f[1]), pair_of(f[2], f[3]))};
    }
};

// sum[m][n] += entry * this thread's part of the batch's rows, which begin at `in`; plane: of the first of the
// matrices.
template <int MATRICES>
__device__ __forceinline__ void add_batch(float (&sum)[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS], const Entries& batch,
                                          int plane, const uint2* __restrict__ in) {
    Half ahead[AHEAD];
#pragma unroll
    for (int q = 0; q < AHEAD; ++q)
        if (q < batch.count) ahead[q].raw = __ldcg(in + 2 * (long long)batch.start[q]);
    for (int k = 0; k < batch.count; k += AHEAD)
#pragma unroll
        for (int q = 0; q < AHEAD; ++q)
            if (k + q < batch.count) {
                float v[THREAD_COLUMNS];
                ahead[q].to_floats(v);
                if (k + q + AHEAD < batch.count) ahead[q].raw = __ldcg(in + 2 * (long long)batch.start[k + q + AHEAD]);
                const int row = batch.row[k + q] >> BLOCK_NEURONS, fired = batch.row[k + q];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (fired >> (half * NEURONS) & ((1 << NEURONS) - 1))
#pragma unroll
                        for (int m = 0; m < MATRICES; ++m) {
                            const float4 four = batch.value[plane + m][row][half];
                            const float f[NEURONS] = {four.x, four.y, four.z, four.w};
#pragma unroll
                            for (int n = 0; n < NEURONS; ++n)  // without asking which of the four are 0
#pragma unroll
                                for (int j = 0; j < THREAD_COLUMNS; ++j)
                                    sum[m][half * NEURONS + n][j] = fmaf(f[n], v[j], sum[m][half * NEURONS + n][j]);
                        }
            }
}

// gradient rows of the neurons whose bit is set += sum
template <int MATRICES>
__device__ __forceinline__ void add_to(value_t* const (&gradient)[MATRICES],
                                       const float (&sum)[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS], int neurons,
                                       int d) {
    Half old[MATRICES][BLOCK_NEURONS];
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < BLOCK_NEURONS; ++n)
            if (neurons >> n & 1) old[m][n].raw = __ldcs((const uint2*)(gradient[m] + n * d));
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < BLOCK_NEURONS; ++n)
            if (neurons >> n & 1) {
                float f[THREAD_COLUMNS];
                old[m][n].to_floats(f);
#pragma unroll
                for (int k = 0; k < THREAD_COLUMNS; ++k) f[k] += sum[m][n][k];
                __stcs((uint2*)(gradient[m] + n * d), Half::of_floats(f).raw);
            }
}

struct Rows {
    const value_t *x, *dy;
    const float* dl1;
    Lost lost;
    float* entries;
    int room;
};
struct Gradients {
    value_t *gate, *up, *down_t, *gate_bias, *up_bias;
};

// Fills and lists rows i.. of the list, at most BATCH_ROWS; returns how many.
template <bool AGAIN>
__device__ __forceinline__ int open_batch(Entries& batch, const Layer& layer, const Rows& rows, int i, int first) {
    const int here = min(BATCH_ROWS, rows.lost.count - i);
    __syncthreads();  // everybody is done with what it held
    fill<AGAIN>(batch, layer, rows.x, rows.dy, rows.dl1, rows.lost, i, here, first,
                min(BLOCK_NEURONS, layer.d_ff - first), rows.entries, rows.room);
    __syncthreads();
    if (warp_of() == 0) list_rows(batch, rows.lost, i, here, layer.d_model);
    __syncthreads();
    return here;
}

// Warp n's part of the sums for the biases of neuron n: dup in lanes 0 to 7, dgate in the next 8.
__device__ __forceinline__ float bias_part(const Entries& batch, int here) {
    float sum = 0;
    if (lane_of() < 2 * ROWS)
        for (int t = lane_of() % ROWS; t < here; t += ROWS)
            sum += ((const float*)batch.value[1 + lane_of() / ROWS][t])[warp_of()];
    return sum;
}
static_assert(BLOCK_WARPS == BLOCK_NEURONS, "a warp for each neuron");

__device__ __forceinline__ void add_biases(const Gradients& to, float sum, int first, int neurons) {
#pragma unroll
    for (int step = ROWS / 2; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    value_t* bias = lane_of() == 0 ? to.up_bias : lane_of() == ROWS ? to.gate_bias : nullptr;
    if (bias && neurons >> warp_of() & 1) bias[first + warp_of()] = from_float(to_float(bias[first + warp_of()]) + sum);
}

template <int MATRICES>
__device__ __forceinline__ void set(float (&sum)[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS], const float* from) {
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < BLOCK_NEURONS; ++n) {
            const unsigned at = ((m * BLOCK_NEURONS + n) * THREADS + threadIdx.x) * THREAD_COLUMNS;
            const float4 f = from ? *(const float4*)(from + at) : make_float4(0, 0, 0, 0);
            sum[m][n][0] = f.x, sum[m][n][1] = f.y, sum[m][n][2] = f.z, sum[m][n][3] = f.w;
        }
}
template <int MATRICES>
__device__ __forceinline__ void keep(const float (&sum)[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS], float* to) {
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < BLOCK_NEURONS; ++n)
            *(float4*)(to + ((m * BLOCK_NEURONS + n) * THREADS + threadIdx.x) * THREAD_COLUMNS) =
                make_float4(sum[m][n][0], sum[m][n][1], sum[m][n][2], sum[m][n][3]);
}

// One walk over the lost rows for neurons first, first + 1, ...: gradient[m] += sum of plane + m times the rows of
// `in`, with the entries that lost_backward has left. The sums stay in registers. The batch is open if it is the only
// one.
template <int MATRICES>
__device__ __forceinline__ void walk(Entries& batch, const Layer& layer, const Rows& rows, int first, int& neurons,
                                     float& bias_sum, int plane, const value_t* in, value_t* const (&gradient)[MATRICES]) {
    const int count = rows.lost.count, d = layer.d_model;
    for (int slab = 0; slab < d; slab += SLAB) {
        float sum[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS];
        set<MATRICES>(sum, nullptr);
        const int c = slab + threadIdx.x * THREAD_COLUMNS;
        for (int i = 0; i < count; i += BATCH_ROWS) {
            int here = count;
            if (count > BATCH_ROWS) here = open_batch<false>(batch, layer, rows, i, first);
            neurons |= batch.neurons;
            if (plane == 1 && slab == 0) bias_sum += bias_part(batch, here);
            if (c < d) add_batch<MATRICES>(sum, batch, plane, (const uint2*)(in + c));
        }
        if (c < d) {
            value_t* to[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) to[m] = gradient[m] + (long long)first * d + c;
            add_to<MATRICES>(to, sum, neurons, d);
        }
    }
}

// The same for one batch that was computed again: sums lie in `between`, float [slabs][MATRICES][BLOCK_NEURONS][SLAB].
template <int MATRICES>
__device__ __forceinline__ void walk_batch(const Entries& batch, int neurons, int first, bool begins, bool ends, int plane,
                                           const value_t* in, value_t* const (&gradient)[MATRICES], float* between, int d) {
    for (int slab = 0; slab < d; slab += SLAB, between += MATRICES * BLOCK_NEURONS * SLAB) {
        const int c = slab + threadIdx.x * THREAD_COLUMNS;
        if (c >= d) continue;
        float sum[MATRICES][BLOCK_NEURONS][THREAD_COLUMNS];
        set<MATRICES>(sum, begins ? nullptr : between);
        add_batch<MATRICES>(sum, batch, plane, (const uint2*)(in + c));
        if (!ends) {
            keep<MATRICES>(sum, between);
            continue;
        }
        value_t* to[MATRICES];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) to[m] = gradient[m] + (long long)first * d + c;
        add_to<MATRICES>(to, sum, neurons, d);
    }
}

template <bool GATED>
__device__ __forceinline__ void take_neurons(Entries& batch, const Layer& layer, const Rows& rows, const Gradients& to) {
    for (int first = blockIdx.x * BLOCK_NEURONS; first < layer.d_ff; first += gridDim.x * BLOCK_NEURONS) {
        int neurons = 0;
        float bias_sum = 0;
        if (rows.lost.count <= BATCH_ROWS) open_batch<false>(batch, layer, rows, 0, first);
        if (GATED) walk<2>(batch, layer, rows, first, neurons, bias_sum, 1, rows.x, {to.up, to.gate});
        if (!GATED) walk<1>(batch, layer, rows, first, neurons, bias_sum, 1, rows.x, {to.up});
        walk<1>(batch, layer, rows, first, neurons, bias_sum, 0, rows.dy, {to.down_t});
        add_biases(to, bias_sum, first, neurons);
    }
}

// Where there was no room for the entries they are computed again, and `entries`, of `bytes`, is where the sums lie
// meanwhile: as many blocks work as find room there.
template <bool GATED>
__device__ __forceinline__ void take_neurons_again(Entries& batch, const Layer& layer, const Rows& rows, const Gradients& to) {
    const int d = layer.d_model, slabs = (d + SLAB - 1) / SLAB, count = rows.lost.count;
    const long long own = (long long)slabs * (GATED ? 3 : 2) * BLOCK_NEURONS * SLAB,
                    have = plane_of(layer.d_ff, rows.room) * (GATED ? 3 : 2);
    const int blocks = (int)min(max(have / own, 1LL), (long long)gridDim.x);
    float* between = rows.entries + own * blockIdx.x;
    if ((int)blockIdx.x >= blocks) return;
    for (int first = blockIdx.x * BLOCK_NEURONS; first < layer.d_ff; first += blocks * BLOCK_NEURONS) {
        int neurons = 0;
        float bias_sum = 0;
        for (int i = 0; i < count; i += BATCH_ROWS) {
            const bool begins = i == 0, ends = i + BATCH_ROWS >= count;
            const int here = open_batch<true>(batch, layer, rows, i, first);
            neurons |= batch.neurons;
            bias_sum += bias_part(batch, here);
            float* down = between + own - (long long)slabs * BLOCK_NEURONS * SLAB;
            if (GATED) walk_batch<2>(batch, neurons, first, begins, ends, 1, rows.x, {to.up, to.gate}, between, d);
            if (!GATED) walk_batch<1>(batch, neurons, first, begins, ends, 1, rows.x, {to.up}, between, d);
            walk_batch<1>(batch, neurons, first, begins, ends, 0, rows.dy, {to.down_t}, down, d);
        }
        add_biases(to, bias_sum, first, neurons);
    }
}

// The lost rows from number `first` on. blocks: the grid of lost_backward, whose `sums` become dx first. entries: see lost_rows.cuh; in all at least 24 rows.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_weights_v2(const int* __restrict__ list, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                const value_t* __restrict__ up_bias, value_t* __restrict__ dx, value_t* __restrict__ dgate,
                value_t* __restrict__ dup, value_t* __restrict__ ddown_t, value_t* __restrict__ dgate_bias,
                value_t* __restrict__ dup_bias, const float* __restrict__ sums, float* __restrict__ entries, int first,
                int room, int d_model, int d_ff, int blocks) {
    __shared__ Entries batch;
    const Lost lost(list, first);
    if (lost.count == 0) return;
    add_slices(Deal(lost.count, blocks, d_ff), lost, sums, nullptr, dx, d_model);
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    const Rows rows = {x, dy, dl1, lost, entries, room};
    const Gradients to = {dgate, dup, ddown_t, dgate_bias, dup_bias};
    const bool again = lost.count > room;
    if (gate && !again) take_neurons<true>(batch, layer, rows, to);
    if (gate && again) take_neurons_again<true>(batch, layer, rows, to);
    if (!gate && !again) take_neurons<false>(batch, layer, rows, to);
    if (!gate && again) take_neurons_again<false>(batch, layer, rows, to);
}
