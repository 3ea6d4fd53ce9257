// The weights' gradients of the lost rows (smxx_train_lost.cu), added in float32 to what is there and rounded once:
// dgate[j] += sum dgate_t x_t, dup[j] += sum dup_t x_t, ddown_t[j] += sum h_t dy_t, over the lost rows t, ascending.
//
// Floor, d_model 2048, d_ff 5632: the gradients, 69 MB read and 69 MB written, 46 us at 3.0 TB/s, however few rows; then for a row a
// share p of whose neurons fire, p times 34.6e6 fma, at p = 0.3 0.36 us at 29e12 fma a second.
// Prediction: a row of x and one of dy serve 8 neurons: 5.8 MB a row through the L2 cache, 0.8 us at 7.4 TB/s.
//
// Versions
//   lost_weights_v1  4 neurons a block, 16 bytes of a row a thread.
//   lost_weights_v2  8 neurons a block, 8 bytes a thread, four rows under way; dgate and dup in one walk over x, ddown_t in one
//                    over dy. h, dup and dgate are those that lost_backward left, for the first `room` rows of the list; past
//                    those they are computed again, once a walk.
#include "lost_rows.cuh"

#define BATCH_ROWS 256  // rows between barriers
#define OWN 8           // neurons of a block
#define PART 4          // columns of a thread
#define AHEAD 4         // rows under way while one is worked on
#define PIECE (THREADS * PART)
static_assert(BATCH_ROWS == WARP * ROWS, "a lane for each tile of rows");

// The entries of the block's neurons in a batch of rows.
struct Entries {
    float4 value[3][BATCH_ROWS][OWN / 4];        // h, dup, dgate
    unsigned fired[OWN / NEURONS][BATCH_ROWS / ROWS];  // bit n * ROWS + r of a tile: not all three are zero
    // The rows in which some neuron fired:
    int count;
    int row[BATCH_ROWS];       // number in the batch << OWN | bits of the neurons
    unsigned start[BATCH_ROWS];  // where the row begins in x and dy, in vectors
    int neurons;               // bits of those that fired in some row
};

// Fills in rows i..i + count - 1 of the list for neurons first..first + here - 1. AGAIN: some may have to be computed again.
template <bool AGAIN>
__device__ __forceinline__ void fill(Entries& batch, const Layer& layer, const value_t* x, const value_t* dy, const float* dl1,
                                     const int* lost, int i, int count, int first, int here, const float* entries, int room) {
    __shared__ unsigned at[WARPS_HERE][ROWS];
    const int n = lane_of() / ROWS, r = lane_of() % ROWS;
    const long long plane = plane_of(layer.d_ff, room);
    for (int tile = warp_of(); tile / 2 * ROWS < count; tile += WARPS_HERE) {
        const int t = tile / 2, half = tile % 2, begin = i + t * ROWS, rows = min(ROWS, i + count - begin);
        const int neuron = first + half * NEURONS, left = min(NEURONS, here - half * NEURONS);
        Entry e = {0, 0, 0, false};
        if (left > 0 && (!AGAIN || begin + rows <= room)) {  // lost_backward has left them
            if (n < left && r < rows) {
                const float* kept = entries + place_of(neuron, begin + r, room) + n;
                e.h = kept[0], e.dup = kept[plane];
                if (layer.gated()) e.dgate = kept[2 * plane];
            }
        } else if (AGAIN && left > 0) {
            const int row = lost[1 + begin + (r < rows ? r : 0)];
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
static_assert(OWN == 2 * NEURONS, "two halves");

// Lists the rows of a filled batch in which some neuron fired. One warp calls it.
__device__ __forceinline__ void list_rows(Entries& batch, const int* lost, int i, int count, int d_model) {
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
    for (int n = 0; n < OWN; ++n)
        neurons |= __any_sync(ALL_LANES, fired[n / NEURONS] >> (n % NEURONS * ROWS) & ALL_ROWS) ? 1 << n : 0;
    if (lane_of() == 0) batch.neurons = neurons;
    for (; rows; rows &= rows - 1, ++at) {
        const int r = __ffs(rows) - 1, k = lane_of() * ROWS + r;
        int bits = 0;
#pragma unroll
        for (int n = 0; n < OWN; ++n) bits |= (fired[n / NEURONS] >> (n % NEURONS * ROWS + r) & 1) << n;
        batch.row[at] = k << OWN | bits;
        batch.start[at] = (unsigned)lost[1 + i + k] * (unsigned)(d_model / VECTOR);
    }
}

// 8 bytes of values.
struct Half {
    uint2 raw;
    __device__ __forceinline__ void to_floats(float (&f)[PART]) const {
        const float2 a = two_floats(raw.x), b = two_floats(raw.y);
        f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y;
    }
    __device__ __forceinline__ static Half of_floats(const float (&f)[PART]) {
        return {make_uint2(pair_of(f[0], f[1]), pair_of(f[2], f[3]))};
    }
};

// sum[m][n] += entry * this thread's part of the batch's rows, which begin at `in`; plane: of the first of the matrices.
template <int MATRICES>
__device__ __forceinline__ void add_batch(float (&sum)[MATRICES][OWN][PART], const Entries& batch, int plane,
                                          const uint2* __restrict__ in) {
    Half ahead[AHEAD];
#pragma unroll
    for (int q = 0; q < AHEAD; ++q)
        if (q < batch.count) ahead[q].raw = __ldcg(in + 2 * (long long)batch.start[q]);
    for (int k = 0; k < batch.count; k += AHEAD)
#pragma unroll
        for (int q = 0; q < AHEAD; ++q)
            if (k + q < batch.count) {
                float v[PART];
                ahead[q].to_floats(v);
                if (k + q + AHEAD < batch.count) ahead[q].raw = __ldcg(in + 2 * (long long)batch.start[k + q + AHEAD]);
                const int row = batch.row[k + q] >> OWN, fired = batch.row[k + q];
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
                                for (int j = 0; j < PART; ++j)
                                    sum[m][half * NEURONS + n][j] = fmaf(f[n], v[j], sum[m][half * NEURONS + n][j]);
                        }
            }
}

// gradient rows of the neurons whose bit is set += sum
template <int MATRICES>
__device__ __forceinline__ void add_to(value_t* const (&gradient)[MATRICES], const float (&sum)[MATRICES][OWN][PART],
                                       int neurons, int d) {
    Half old[MATRICES][OWN];
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (neurons >> n & 1) old[m][n].raw = __ldcs((const uint2*)(gradient[m] + n * d));
#pragma unroll
    for (int m = 0; m < MATRICES; ++m)
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            if (neurons >> n & 1) {
                float f[PART];
                old[m][n].to_floats(f);
#pragma unroll
                for (int k = 0; k < PART; ++k) f[k] += sum[m][n][k];
                __stcs((uint2*)(gradient[m] + n * d), Half::of_floats(f).raw);
            }
}

struct Rows {
    const value_t *x, *dy;
    const float* dl1;
    const int* lost;
    const float* entries;
    int room;
};

// One walk over all lost rows for neurons first, first + 1, ...: gradient[m] += sum of plane + m times the rows of `in`.
// fresh: the batch is not filled yet. Returns the bits of the neurons that fired.
template <bool AGAIN, int MATRICES>
__device__ __forceinline__ int walk(Entries& batch, const Layer& layer, const Rows& rows, int first, bool fresh, int plane,
                                    const value_t* in, value_t* const (&gradient)[MATRICES], float& bias_sum) {
    const int count = rows.lost[0], d = layer.d_model;
    int neurons = 0;
    for (int piece = 0; piece < d; piece += PIECE) {
        float sum[MATRICES][OWN][PART];
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int n = 0; n < OWN; ++n)
#pragma unroll
                for (int k = 0; k < PART; ++k) sum[m][n][k] = 0;
        const int c = piece + threadIdx.x * PART;
        for (int i = 0; i < count; i += BATCH_ROWS) {
            const int here = min(BATCH_ROWS, count - i);
            if (count > BATCH_ROWS || (fresh && piece == 0)) {
                __syncthreads();  // everybody is done with what it held
                fill<AGAIN>(batch, layer, rows.x, rows.dy, rows.dl1, rows.lost, i, here, first, min(OWN, layer.d_ff - first),
                     rows.entries, rows.room);
                __syncthreads();
                if (warp_of() == 0) list_rows(batch, rows.lost, i, here, d);
                __syncthreads();
            }
            neurons |= batch.neurons;
            if (plane == 1 && piece == 0)  // warp n sums up the entries of neuron n for the biases, dgate in the upper lanes
                for (int t = lane_of() % ROWS; t < here; t += ROWS)
                    if (lane_of() < 2 * ROWS) bias_sum += ((const float*)batch.value[1 + lane_of() / ROWS][t])[warp_of()];
            if (c < d) add_batch<MATRICES>(sum, batch, plane, (const uint2*)(in + c));
        }
        if (c < d) {
            value_t* to[MATRICES];
#pragma unroll
            for (int m = 0; m < MATRICES; ++m) to[m] = gradient[m] + (long long)first * d + c;
            add_to<MATRICES>(to, sum, neurons, d);
        }
    }
    return neurons;
}
static_assert(WARPS_HERE == OWN, "a warp for each neuron");

struct Gradients {
    value_t *gate, *up, *down_t, *gate_bias, *up_bias;
};

// All neurons of the block. AGAIN is a variant of its own so that the usual one keeps its sums in registers.
template <bool AGAIN>
__device__ __forceinline__ void take_neurons(Entries& batch, const Layer& layer, const Rows& rows, const Gradients& to) {
    for (int first = blockIdx.x * OWN; first < layer.d_ff; first += gridDim.x * OWN) {
        float bias_sum = 0;
        int neurons;
        if (layer.gated())
            neurons = walk<AGAIN, 2>(batch, layer, rows, first, true, 1, rows.x, {to.up, to.gate}, bias_sum);
        else
            neurons = walk<AGAIN, 1>(batch, layer, rows, first, true, 1, rows.x, {to.up}, bias_sum);
        walk<AGAIN, 1>(batch, layer, rows, first, false, 0, rows.dy, {to.down_t}, bias_sum);
#pragma unroll
        for (int step = ROWS / 2; step; step /= 2) bias_sum += __shfl_xor_sync(ALL_LANES, bias_sum, step);
        value_t* bias = lane_of() == 0 ? to.up_bias : lane_of() == ROWS ? to.gate_bias : nullptr;
        if (bias && neurons >> warp_of() & 1)
            bias[first + warp_of()] = from_float(to_float(bias[first + warp_of()]) + bias_sum);
    }
}

// blocks: the grid of lost_backward, whose `sums` become dx first.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_weights_v2(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                const value_t* __restrict__ up_bias, value_t* __restrict__ dx, value_t* __restrict__ dgate,
                value_t* __restrict__ dup, value_t* __restrict__ ddown_t, value_t* __restrict__ dgate_bias,
                value_t* __restrict__ dup_bias, const float* __restrict__ sums, const float* __restrict__ entries, int room,
                int d_model, int d_ff, int blocks) {
    __shared__ Entries batch;
    if (lost[0] == 0) return;
    add_slices(Deal(lost[0], blocks, d_ff), lost, sums, nullptr, dx, d_model);
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    const Rows rows = {x, dy, dl1, lost, entries, room};
    const Gradients to = {dgate, dup, ddown_t, dgate_bias, dup_bias};
    if (lost[0] <= room)
        take_neurons<false>(batch, layer, rows, to);
    else
        take_neurons<true>(batch, layer, rows, to);
}
