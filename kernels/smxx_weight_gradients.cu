// weight_gradients: for every neuron j, over the tokens t that it fired for (records of columns.cuh),
//   dgate[j] = sum dgate_of * x[t],  dup[j] = sum dup_of * x[t],  ddown_t[j] = sum hidden * dy[t]
// and the biases' gradients, the sums of dgate_of and dup_of. float32 sums in a fixed order, rounded once. GATED 0: no
// dgate.
//
// What bounds it: the L2 cache, through which each survivor reads a row of x and one of dy. Rows that are read again
// have to be still in the cache, and x and dy together are too large for it: so columns are taken in slabs of SLAB, one
// after another.
//
//   weight_gradients_v1  a block a neuron and 128 columns, its threads a column each: no work shared, no vectors. Any
//                        d_model
//   weight_gradients_v2  a warp takes up to `unit` records and a slab, 16-byte loads, AT_ONCE records' rows under way;
//                        teams of warps share longer lists and add up in shared memory; the longest are cut in pieces
//                        over several blocks, which leave partial sums for weight_gradients_finish_v2
// Worklog: docs/kernels/smxx_weight_gradients.md
#include "columns.cuh"

#define THREADS (WARP * BLOCK_WARPS)
#define SLAB (WARP * VECTOR)  // of a slab
#ifdef LAUNCH_SLAB
static_assert(LAUNCH_SLAB == SLAB, "ops/columns.py has another size");
#endif
#ifndef AT_ONCE
#define AT_ONCE 4  // records whose rows a warp has under way at once
#endif
#ifndef RESIDENT
#define RESIDENT 3  // a multiprocessor
#endif
static_assert(WARP % AT_ONCE == 0, "records are fetched by the warp");
#ifndef GATED
#define GATED 1
#endif
#define SUMS (GATED ? 3 : 2)  // dup, ddown_t, and in a gated layer dgate

struct Outputs {
    value_t *dgate, *dup, *ddown_t, *dgate_bias, *dup_bias;
    // The gradient that the s-th of SUMS sums belongs to.
    __device__ __forceinline__ value_t* row(int s) const { return s == 0 ? dup : s == 1 ? ddown_t : dgate; }
};

extern "C" __global__ void __launch_bounds__(128)
weight_gradients_v1(const value_t* __restrict__ x, const value_t* __restrict__ dy, const int* __restrict__ starts,
                    const Record* __restrict__ records, value_t* dgate, value_t* dup, value_t* ddown_t, value_t* dgate_bias,
                    value_t* dup_bias, int d_model) {
    const int neuron = blockIdx.x, c = blockIdx.y * 128 + threadIdx.x;
    float sum[3] = {0, 0, 0}, bias[2] = {0, 0};
    for (int i = starts[neuron]; i < starts[neuron + 1]; ++i) {
        const Record r = records[i];
        bias[0] += r.dgate_of, bias[1] += r.dup_of;
        if (c >= d_model) continue;
        const long long at = (long long)r.token * d_model + c;
        sum[0] = fmaf(r.dgate_of, to_float(x[at]), sum[0]);
        sum[1] = fmaf(r.dup_of, to_float(x[at]), sum[1]);
        sum[2] = fmaf(r.hidden, to_float(dy[at]), sum[2]);
    }
    if (c == 0 && dgate_bias) dgate_bias[neuron] = from_float(bias[0]);
    if (c == 0 && dup_bias) dup_bias[neuron] = from_float(bias[1]);
    if (c >= d_model) return;
    const long long at = (long long)neuron * d_model + c;
    if (dgate) dgate[at] = from_float(sum[0]);
    dup[at] = from_float(sum[1]), ddown_t[at] = from_float(sum[2]);
}

// What a warp has summed up: VECTOR columns a lane, and each lane's share of the biases' sums.
struct Sums {
    float f[SUMS][VECTOR], dgate_bias, dup_bias;
};

__device__ __forceinline__ void add_record(Sums& sum, const Record& r, const Vector& x, const Vector& dy) {
    float a[VECTOR], b[VECTOR];
    x.to_floats(a), dy.to_floats(b);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        sum.f[0][i] = fmaf(r.dup_of, a[i], sum.f[0][i]);
        sum.f[1][i] = fmaf(r.hidden, b[i], sum.f[1][i]);
#if SUMS > 2
        sum.f[2][i] = fmaf(r.dgate_of, a[i], sum.f[2][i]);
#endif
    }
}

__device__ __forceinline__ Record record_at(const Record* __restrict__ records, int i, int last) {
    Record r = {0, 0.0f, 0.0f, 0.0f};
    if (i < last) *(uint4*)&r = __ldg((const uint4*)(records + i));
    return r;
}

// The sums over records [first, last) of this lane's columns, from c on. staged: 32 records of the warp's own.
__device__ __forceinline__ Sums sum_records(const value_t* __restrict__ x, const value_t* __restrict__ dy,
                                            const Record* __restrict__ records, int first, int last, int c, int d_model,
                                            Record* staged) {
    const int lane = threadIdx.x % WARP;
    Sums sum = {};
    Record next = record_at(records, first + lane, last);
    for (int base = first; base < last; base += WARP) {
        __syncwarp();  // everybody has read the last ones
        staged[lane] = next;
        sum.dgate_bias += next.dgate_of, sum.dup_bias += next.dup_of;
        next = record_at(records, base + WARP + lane, last);
        __syncwarp();
        const int count = min(WARP, last - base);
        for (int i = 0; i < count; i += AT_ONCE) {
            Vector a[AT_ONCE], b[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                a[k].raw = b[k].raw = make_uint4(0, 0, 0, 0);
                const long long at = (long long)staged[i + k].token * d_model + c;
                if (i + k < count && c < d_model) {
                    a[k].raw = __ldg((const uint4*)(x + at));
                    b[k].raw = __ldg((const uint4*)(dy + at));
                }
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) add_record(sum, staged[i + k], a[k], b[k]);  // past the count all is zero
        }
    }
    return sum;
}

__device__ __forceinline__ float warp_total(float v) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// The team's sums, in its first warp: halves are added, in a fixed order. The whole block calls it, with one `team` for
// all.
__device__ __forceinline__ void add_team(Sums& sum, int team) {
    __shared__ float parts[BLOCK_WARPS / 2][SUMS * VECTOR + 2][WARP];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, member = warp & (team - 1);
    for (int half = team / 2; half; half /= 2) {
        const bool gives = member >= half && member < 2 * half, takes = member < half;
        float(*part)[WARP] = parts[warp / team * (team / 2) + member % half];
        if (gives) {
#pragma unroll
            for (int i = 0; i < SUMS * VECTOR; ++i) part[i][lane] = sum.f[i / VECTOR][i % VECTOR];
            part[SUMS * VECTOR][lane] = sum.dgate_bias, part[SUMS * VECTOR + 1][lane] = sum.dup_bias;
        }
        __syncthreads();
        if (takes) {
#pragma unroll
            for (int i = 0; i < SUMS * VECTOR; ++i) sum.f[i / VECTOR][i % VECTOR] += part[i][lane];
            sum.dgate_bias += part[SUMS * VECTOR][lane], sum.dup_bias += part[SUMS * VECTOR + 1][lane];
        }
        __syncthreads();
    }
}

// Block blockIdx.x of the plan, columns of slab blockIdx.y. partials: float [most pieces][SUMS][d_model], bias_partials
// [most pieces][2]; blocks past the plan's have nothing to do.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
weight_gradients_v2(const value_t* __restrict__ x, const value_t* __restrict__ dy, const int* __restrict__ starts,
                    const int* __restrict__ order, const int2* __restrict__ pieces, const Plan* __restrict__ plan,
                    const Record* __restrict__ records, float* __restrict__ partials, float* __restrict__ bias_partials,
                    value_t* dgate, value_t* dup, value_t* ddown_t, value_t* dgate_bias, value_t* dup_bias, int d_model) {
    __shared__ Record staged[BLOCK_WARPS][WARP];
    const int block = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (block >= plan->block[CLASSES]) return;
    const bool piece = block < plan->block[1];
    int team = BLOCK_WARPS, neuron = -1, first = 0, last = 0;
    if (piece) {
        neuron = pieces[block].x, first = pieces[block].y;
        last = min(first + BLOCK_WARPS * plan->unit, starts[neuron + 1]);
    } else {
        int k = 1;
        while (block >= plan->block[k + 1]) ++k;
        team = team_of(k);
        const int list = plan->listed[k] + ((block - plan->block[k]) * BLOCK_WARPS + warp) / team;
        if (list < plan->listed[k + 1]) {
            neuron = order[list];
            first = starts[neuron], last = starts[neuron + 1];
        }
    }
    const int each = (last - first + team - 1) / team, member = warp & (team - 1);
    const int c = blockIdx.y * SLAB + lane * VECTOR;
    Sums sum = sum_records(x, dy, records, min(first + member * each, last), min(first + (member + 1) * each, last), c, d_model,
                           staged[warp]);
    if (team > 1) add_team(sum, team);
    if (member != 0 || neuron < 0) return;
    if (blockIdx.y == 0 && dup_bias) {
        const float of_gate = warp_total(sum.dgate_bias), of_up = warp_total(sum.dup_bias);
        if (piece && lane == 0) bias_partials[2 * block] = of_gate, bias_partials[2 * block + 1] = of_up;
        if (!piece && lane == 0 && dgate_bias) dgate_bias[neuron] = from_float(of_gate);
        if (!piece && lane == 0) dup_bias[neuron] = from_float(of_up);
    }
    if (c >= d_model) return;
    const Outputs out = {dgate, dup, ddown_t, dgate_bias, dup_bias};
#pragma unroll
    for (int s = 0; s < SUMS; ++s) {
        if (piece) {
            float4* to = (float4*)(partials + ((long long)block * SUMS + s) * d_model + c);
#pragma unroll
            for (int i = 0; i < VECTOR; i += 4) to[i / 4] = make_float4(sum.f[s][i], sum.f[s][i + 1], sum.f[s][i + 2], sum.f[s][i + 3]);
        } else {
            __stcs((uint4*)(out.row(s) + (long long)neuron * d_model + c), Vector::of_floats(sum.f[s]).raw);
        }
    }
}

// Of the blockIdx.x-th list in pieces: adds the pieces' sums up, in their order. Four columns a thread.
extern "C" __global__ void __launch_bounds__(THREADS)
weight_gradients_finish_v2(const int* __restrict__ starts, const int* __restrict__ order, const int* __restrict__ first_piece,
                           const Plan* __restrict__ plan, const float* __restrict__ partials,
                           const float* __restrict__ bias_partials, value_t* dgate, value_t* dup, value_t* ddown_t,
                           value_t* dgate_bias, value_t* dup_bias, int d_model) {
    if ((int)blockIdx.x >= plan->listed[1]) return;
    const int neuron = order[blockIdx.x], first = first_piece[blockIdx.x];
    const int count = pieces_of(starts[neuron + 1] - starts[neuron], plan->unit);
    const Outputs out = {dgate, dup, ddown_t, dgate_bias, dup_bias};
    const int i = (blockIdx.y * THREADS + threadIdx.x) * 4, row = SUMS * d_model;
    if (i < row) {
        const float* from = partials + (long long)first * row + i;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int p = 0; p < count; ++p) {
            const float4 part = __ldcs((const float4*)(from + (long long)p * row));
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        value_t* to = out.row(i / d_model) + (long long)neuron * d_model + i % d_model;
        *(uint2*)to = make_uint2(pair_of(sum.x, sum.y), pair_of(sum.z, sum.w));
    }
    if (blockIdx.y == 0 && threadIdx.x < 2 && dup_bias) {
        float sum = 0;
        for (int p = 0; p < count; ++p) sum += bias_partials[2 * (first + p) + threadIdx.x];
        value_t* bias = threadIdx.x ? dup_bias : dgate_bias;
        if (bias) bias[neuron] = from_float(sum);
    }
}
