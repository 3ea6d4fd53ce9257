// The rows that a sparse training step does not hold ("lost" rows: smxx_survivors.cu says which), forward and
// backward, from the dense weights; from number `first` of their list on, since sm80_train_lost.cu computes the first of
// them where there are tensor cores. lost[0] is how many there are, lost[1..] their numbers, ascending. Only the device
// knows them: each kernel is launched with a fixed grid and ends at once where there are none.
//
// What bounds it: with few rows, reading the weights; with many, instructions: fused multiply-adds on 16-bit values
// that have to be converted, without tensor cores. A weight row that is read serves 8 lost rows.
//
//   lost_forward_v1, lost_finish_v1  8 rows a block; a warp makes 4 x 8 dot products at once; then y's columns are
//                                    dealt to the threads. Few rows: slices of neurons, added up by the second kernel
//                                    in a fixed order
//   lost_backward_v1                 the same for dx; it leaves h, dgate and dup for lost_weights, unless more than
//                                    `room` rows are lost
// Worklog: docs/kernels/smxx_train_lost.md
#include "lost_rows.cuh"

#define BATCH_NEURONS 64         // neurons between two barriers
#define SLAB (THREADS * VECTOR)  // columns that a block owns at a time: a vector a thread

// A block's group of rows and what it finds about them.
struct Group {
    unsigned at[ROWS];  // where each row begins, in vectors
    float slope[ROWS];
    unsigned finite;    // bits of the rows of x without an infinity or NaN
};

// Rows i, i + 1, ... of the list, at most 8; the places past the end repeat the first.
__device__ __forceinline__ void open_group(Group& group, const Lost& lost, int i, int rows, const value_t* x,
                                           const float* dl1, int d_model) {
    if (threadIdx.x < ROWS) {
        const int row = lost.row[i + (threadIdx.x < rows ? threadIdx.x : 0)];
        group.at[threadIdx.x] = (unsigned)row * (unsigned)(d_model / VECTOR);
        group.slope[threadIdx.x] = dl1 ? dl1[row] : 0.0f;
    }
    if (threadIdx.x == 0) group.finite = 0;
    __syncthreads();
    const bool found = nonfinite((const uint4*)x + group.at[warp_of()], d_model / VECTOR);  // a warp looks at each row
    if (!found && lane_of() == 0) atomicOr(&group.finite, 1u << warp_of());
    __syncthreads();
}
static_assert(BLOCK_WARPS == ROWS, "a warp for each row");

// sum[r] += coefficient[k][r] * row k of `weights` for each k of the list, which has `count` and goes on for AHEAD more
// that are loaded for nothing.
__device__ __forceinline__ void add_rows(float (&sum)[ROWS][VECTOR], const float4 (*coefficient)[ROWS / 4],
                                         const unsigned char* list, int count, const uint4* __restrict__ weights, int width) {
    Vector ahead[AHEAD];
#pragma unroll
    for (int q = 0; q < AHEAD; ++q) ahead[q] = load<true>(weights + (unsigned)(list[q] * width));
    for (int at = 0; at < count; at += AHEAD)
#pragma unroll
        for (int q = 0; q < AHEAD; ++q)
            if (at + q < count) {
                float w[VECTOR];
                ahead[q].to_floats(w);
                ahead[q] = load<true>(weights + (unsigned)(list[at + q + AHEAD] * width));
                const float4* f = coefficient[list[at + q]];
#pragma unroll
                for (int r = 0; r < ROWS; r += 4) {  // without asking which of them are 0
                    const float4 four = f[r / 4];
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        sum[r][i] = fmaf(four.x, w[i], sum[r][i]), sum[r + 1][i] = fmaf(four.y, w[i], sum[r + 1][i]);
                        sum[r + 2][i] = fmaf(four.z, w[i], sum[r + 2][i]), sum[r + 3][i] = fmaf(four.w, w[i], sum[r + 3][i]);
                    }
                }
            }
}

// The numbers of the set places among alive[0..count), ascending, and then AHEAD and more zeros. One warp calls it.
__device__ __forceinline__ void list_alive(const bool* alive, int count, unsigned char* list, int& listed) {
    int total = 0;
    for (int k = lane_of(); k < BATCH_NEURONS; k += WARP) {
        const bool mine = k < count && alive[k];
        const unsigned all = __ballot_sync(ALL_LANES, mine);
        if (mine) list[total + __popc(all & ((1u << lane_of()) - 1))] = k;
        total += __popc(all);
    }
    if (lane_of() < 2 * AHEAD) list[total + lane_of()] = 0;
    if (lane_of() == 0) listed = total;
}

// What a block is to do: neurons from..to - 1 for `rows` rows of the list, from number i on. whole: these are all
// neurons, so that the rows of the output are written; otherwise the sums stay.
struct Task {
    int i, rows, from, to;
    bool whole;
};

// Forward: out is y, the sum of h * down_t; l1 and kept of row r of the group go to [r], or, if the task is whole, to
// [number of the row]. Backward: out is dx, the sum of dgate * gate + dup * up; if there is room for the entries of all
// rows of the list, they are kept. sums: the block's float [ROWS][d_model].
template <bool BACKWARD>
__device__ __forceinline__ void take_rows(const Layer& layer, const Task& task, const value_t* __restrict__ x,
                                          const value_t* __restrict__ dy, const float* __restrict__ dl1,
                                          const Lost& lost, float* __restrict__ sums, const value_t* __restrict__ bias,
                                          value_t* __restrict__ out, float* l1, int* kept,
                                          float* __restrict__ entries, int room) {
    __shared__ Group group;
    __shared__ float4 first_of[BATCH_NEURONS][ROWS / 4], second_of[BATCH_NEURONS][ROWS / 4];  // h; or dup and dgate
    __shared__ bool alive[BATCH_NEURONS];     // whether a neuron of the batch counts in some row
    __shared__ unsigned char list[BATCH_NEURONS + 2 * AHEAD];  // those that do, ascending
    __shared__ int listed;
    __shared__ float l1_part[BLOCK_WARPS][WARP];
    __shared__ int kept_part[BLOCK_WARPS][WARP];
    open_group(group, lost, task.i, task.rows, x, dl1, layer.d_model);
    const unsigned valid = ALL_ROWS >> (ROWS - task.rows), finite = group.finite & valid;
    const int d = layer.d_model, n = lane_of() / ROWS, r = lane_of() % ROWS;
    const bool keep = lost.count <= room;
    float l1_sum = 0;
    int kept_sum = 0;

    for (int first = task.from; first < task.to; first += BATCH_NEURONS) {
        const int count = min(BATCH_NEURONS, task.to - first);
        for (int k = warp_of() * NEURONS; k < count; k += BLOCK_WARPS * NEURONS) {
            const int here = min(NEURONS, count - k);
            const Entry e = entry<BACKWARD, true>(layer, x, dy, group.at, first + k, here, valid, finite, group.slope[r]);
            l1_sum += fabsf(e.h), kept_sum += e.fires;
            const bool counts = BACKWARD ? e.dup != 0 || e.dgate != 0 : e.h != 0;
            const unsigned fired = __ballot_sync(ALL_LANES, counts);
            ((float*)first_of[k + n])[r] = BACKWARD ? e.dup : e.h;
            if (BACKWARD) ((float*)second_of[k + n])[r] = e.dgate;
            if (r == 0) alive[k + n] = fired >> (n * ROWS) & ALL_ROWS;
            if (BACKWARD && keep && r < task.rows) {
                const long long plane = plane_of(layer.d_ff, room);
                float* to_keep = entries + place_of(first + k, task.i + r, room) + n;
                to_keep[0] = e.h, to_keep[plane] = e.dup;
                if (layer.gated()) to_keep[2 * plane] = e.dgate;
            }
        }
        __syncthreads();
        const bool begins = first == task.from, ends = first + BATCH_NEURONS >= task.to;
        if (warp_of() == 0) list_alive(alive, count, list, listed);
        __syncthreads();
        for (int c = threadIdx.x * VECTOR; c < d; c += SLAB) {
            float sum[ROWS][VECTOR];
#pragma unroll
            for (int q = 0; q < ROWS; ++q)
#pragma unroll
                for (int k = 0; k < VECTOR; k += 4) {
                    const float4 f = begins ? make_float4(0, 0, 0, 0) : *(const float4*)(sums + q * d + c + k);
                    sum[q][k] = f.x, sum[q][k + 1] = f.y, sum[q][k + 2] = f.z, sum[q][k + 3] = f.w;
                }
            const long long at = ((long long)first * d + c) / VECTOR;
            add_rows(sum, first_of, list, listed, (const uint4*)(BACKWARD ? layer.up : layer.down_t) + at, d / VECTOR);
            if (BACKWARD && layer.gated()) add_rows(sum, second_of, list, listed, (const uint4*)layer.gate + at, d / VECTOR);
#pragma unroll
            for (int q = 0; q < ROWS; ++q)
                if (q < task.rows) {
                    if (ends && !(finite >> q & 1))
#pragma unroll
                        for (int k = 0; k < VECTOR; ++k) sum[q][k] = nanf("");
                    if (ends && task.whole) {
                        if (bias) {
                            float b[VECTOR];
                            load<false>(bias + c).to_floats(b);
#pragma unroll
                            for (int k = 0; k < VECTOR; ++k) sum[q][k] += b[k];
                        }
                        ((uint4*)out)[group.at[q] + (unsigned)c / VECTOR] = Vector::of_floats(sum[q]).raw;
                    } else {
#pragma unroll
                        for (int k = 0; k < VECTOR; k += 4)
                            *(float4*)(sums + q * d + c + k) =
                                make_float4(sum[q][k], sum[q][k + 1], sum[q][k + 2], sum[q][k + 3]);
                    }
                }
        }
        __syncthreads();
    }
    if (BACKWARD) return;
    l1_part[warp_of()][lane_of()] = l1_sum, kept_part[warp_of()][lane_of()] = kept_sum;
    __syncthreads();
    if (threadIdx.x < task.rows) {
        float total = 0;
        int all = 0;
        for (int w = 0; w < BLOCK_WARPS; ++w)
            for (int k = 0; k < NEURONS; ++k)
                total += l1_part[w][k * ROWS + threadIdx.x], all += kept_part[w][k * ROWS + threadIdx.x];
        const int place = task.whole ? lost.row[task.i + threadIdx.x] : threadIdx.x;
        l1[place] = finite >> threadIdx.x & 1 ? total : nanf("");
        kept[place] = all;
    }
    __syncthreads();
}

// The block's share of the lost rows. part_l1, part_kept: [blocks][ROWS], of slices.
template <bool BACKWARD>
__device__ __forceinline__ void take_share(const Layer& layer, const value_t* x, const value_t* dy, const float* dl1,
                                           const Lost& lost, float* sums, const value_t* bias, value_t* out, float* l1,
                                           int* kept, float* part_l1, int* part_kept, float* entries, int room) {
    const int count = lost.count;
    if (count == 0) return;
    const Deal deal(count, gridDim.x, layer.d_ff);
    const int b = blockIdx.x;
    sums += (long long)b * ROWS * layer.d_model;
    // Whole groups first; the groups that are cut come last, in the list and here.
    for (int g = b;; g += gridDim.x) {
        Task task = {g * ROWS, ROWS, 0, layer.d_ff, g < deal.whole};
        if (!task.whole) {
            if (b >= deal.cut * deal.slices) return;
            task.i = (deal.whole + b / deal.slices) * ROWS;
            task.from = b % deal.slices * deal.neurons;
            task.to = min(task.from + deal.neurons, layer.d_ff);
        }
        task.rows = min(ROWS, count - task.i);
        take_rows<BACKWARD>(layer, task, x, dy, dl1, lost, sums, bias, out, task.whole ? l1 : part_l1 + b * ROWS,
                            task.whole ? kept : part_kept + b * ROWS, entries, room);
        if (!task.whole) return;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_forward_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ gate,
                const value_t* __restrict__ up, const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                const value_t* __restrict__ up_bias, const value_t* __restrict__ down_bias, value_t* __restrict__ y,
                float* __restrict__ l1, int* __restrict__ kept, float* __restrict__ sums, float* __restrict__ part_l1,
                int* __restrict__ part_kept, int first, int d_model, int d_ff) {
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    take_share<false>(layer, x, nullptr, nullptr, Lost(lost, first), sums, down_bias, y, l1, kept, part_l1, part_kept, nullptr, 0);
}

// blocks: the grid of lost_forward.
extern "C" __global__ void __launch_bounds__(THREADS)
lost_finish_v1(const int* __restrict__ list, const value_t* __restrict__ down_bias, value_t* __restrict__ y,
               float* __restrict__ l1, int* __restrict__ kept, const float* __restrict__ sums,
               const float* __restrict__ part_l1, const int* __restrict__ part_kept, int first, int d_model, int d_ff, int blocks) {
    const Lost lost(list, first);
    const int count = lost.count;
    if (count == 0) return;
    const Deal deal(count, blocks, d_ff);
    add_slices(deal, lost, sums, down_bias, y, d_model);
    // A warp a row.
    const int rest = count - deal.whole * ROWS;
    for (int i = blockIdx.x * BLOCK_WARPS + warp_of(); i < rest; i += gridDim.x * BLOCK_WARPS) {
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
        const int row = lost.row[deal.whole * ROWS + i];
        if (lane_of() == 0) l1[row] = total, kept[row] = all;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
lost_backward_v1(const int* __restrict__ lost, const value_t* __restrict__ x, const value_t* __restrict__ dy,
                 const float* __restrict__ dl1, const value_t* __restrict__ gate, const value_t* __restrict__ up,
                 const value_t* __restrict__ down_t, const value_t* __restrict__ gate_bias,
                 const value_t* __restrict__ up_bias, value_t* __restrict__ dx, float* __restrict__ sums,
                 float* __restrict__ entries, int first, int room, int d_model, int d_ff) {
    const Layer layer = {gate, up, down_t, gate_bias, up_bias, d_model, d_ff};
    take_share<true>(layer, x, dy, dl1, Lost(lost, first), sums, nullptr, dx, nullptr, nullptr, nullptr, nullptr, entries, room);
}
