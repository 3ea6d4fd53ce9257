// gate_pack: x [tokens, d_model] x gate [d_ff, d_model]^T (+ bias) -> TwELL words and the pool, on Hopper. The gate
// itself never reaches device memory: what a tile of it keeps is packed while the sums are still in registers.
//
// What bounds it: arithmetic, 2 * tokens * d_model * d_ff operations on the tensor cores. Two limits are near: what
// comes through the L2 cache, and the bandwidth of shared memory, which wgmma and the copy engine nearly fill: packing
// must not use much of it.
//
//   gate_pack_v0  no packing: the gate itself is stored, for checks; or nothing, to time the main loop
//   gate_pack_v1  no cluster; a tile is packed when it is done
//   gate_pack_v2  clusters of two blocks share the rows of the weights that they fetch
//   gate_pack_v3  packing goes between the k-steps of the next tile, while the tensor cores work
//
// One version is compiled at a time: VERSION 0 to 3; BIAS 1 | 0. The drawing below shows where wgmma leaves the sums,
// and why neighbouring columns end up in one lane. Worklog: docs/kernels/sm90_gate_pack.md
#include "twell.cuh"
#ifndef VERSION
#define VERSION 3
#endif
#ifndef BIAS
#define BIAS 0
#endif
#define CLUSTER (VERSION == 1 ? 1 : 2)
#include "sm90_mainloop.cuh"
// Shared memory after the stages: the words of a tile, a place to pick registers from, the bias of two tiles.
#define STAGING EPILOGUE
#define SCRATCH (STAGING + BM * POOLED_WORDS * 4)
#define BIAS_AT (SCRATCH + CONSUMERS * 128 * 64)
#define SHARED_BYTES (BIAS_AT + CONSUMERS * 2 * BN * 2)  // that a launch asks for

// Where the sums of a tile are. A warp has 16 of the tile's 128 rows; four lanes, a quad, share a row, q = lane % 4. In
// each cell: the lane that holds these two places of a row. Eight places, number j, are in d[4 j] to d[4 j + 3] of each
// lane: the first two of these are of the upper row (r = 0), the others of the row 8 below (r = 1).
//
//   place     0,1    2,3    4,5    6,7  |  8,9  10,11  12,13  14,15 | ... | 248,249 ... 254,255
//   row  0      0      1      2      3  |    0      1      2      3 |     |       0           3
//   row  1      4      5      6      7  |    4      5      6      7 |     |       4           7    r = 0:
//    ...                                |                           |     |                 d[4 j], d[4 j + 1]
//   row  7     28     29     30     31  |   28     29     30     31 |     |      28          31
//   row  8      0      1      2      3  |    0      1      2      3 |     |       0           3    r = 1:
//    ...                                |                           |     |                 d[4 j + 2], d[4 j + 3]
//   row 15     28     29     30     31  |   28     29     30     31 |     |      28          31
//                     j = 0                        j = 1                         j = 31
//
// The order of the weight rows is free to choose: place 8 j + 2 q + e gets the row of neuron span * q + 2 j + e. A
// tensor map of five dimensions reads them in this order (_gate_maps in ops/hopper_pack.py). So lane q of a quad holds
// `span` neighbouring neurons in order, 64 in a whole tile:
//
//   row of neurons   [ q = 0: 0 .. 63 ][ q = 1: 64 .. 127 ][ q = 2: 128 .. 191 ][ q = 3: 192 .. 255 ]

// ---------------------------------------------------------------- packing one tile
// Write the firing ones among 16 neighbouring pairs of columns as words to shared memory, from `to` on; returns where the
// next one goes. mask: bit j the even column of pair j, bit 16 + j the odd one. A register can't be picked by a run-time
// index, so the pairs go through shared memory, where each thread reads back only what it wrote itself; and only what
// will be read: the tensor cores need the bandwidth. The loop runs as often as the fullest lane of the warp needs.
__device__ __forceinline__ u32 emit(const u32* v, u32 mask, u32 column, u32 to, u32 scratch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared_4_if(mask & 0xf000fu << 4 * i, scratch + i * 2048, v + 4 * i);
    u32 left = (mask | mask >> 16) & 0xffff;
#pragma unroll 1
    while (left) {
        const int j = __ffs(left) - 1;
        left &= left - 1;
        const u32 pair = load_shared(scratch + (j >> 2) * 2048 + (j & 3) * 4), at = column + 2 * j, bits = mask >> j;
        const u32 even = bits & 1, odd = bits >> 16 & 1;
        store_shared_if(even, to, pair << 16 | at);
        to += 4 * even;
        store_shared_if(odd, to, (pair & 0xffff0000u) | (at + 1));
        to += 4 * odd;
    }
    return to;
}

// What a lane keeps of a finished tile: two rows of one quarter of its columns, rounded.
struct Packing {
    u32 v[2][32];    // pairs of columns of the two rows
    u32 mask[2][2];  // of 16 pairs each, as in emit
    u32 total;       // kept values of the whole rows: first row in the low half, second in the high half
    u32 to[2];       // where the lane's next word of either row goes, in shared memory
    int row0, n;     // the warp's first token, the tile
};
// How many columns a lane holds: the narrow last tile is dealt evenly, by a tensor map of its own.
__device__ __forceinline__ int span_of(int width) { return width == BN ? BN / 4 : (width + 7) / 8 * 2; }

__device__ __forceinline__ void round_tile(Packing& p, const float (&d)[128], u32 bias) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        float2 b = make_float2(0, 0);
        if (BIAS) b = two_floats(load_shared(bias + (4 * j + threadIdx.x % 4) * 4));
#pragma unroll
        for (int r = 0; r < 2; ++r)
            p.v[r][j] = BIAS ? round_pair(d[4 * j + 2 * r] + b.x, d[4 * j + 2 * r + 1] + b.y)
                             : round_pair(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
    }
}
template <int R> __device__ __forceinline__ void find_firing(Packing& p, int tokens, int width, int first, int span) {
    p.mask[R][0] = p.mask[R][1] = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) p.mask[R][j / 16] |= fires_pair(p.v[R][j]) & 0x10001u << j % 16;
    if (width < BN) {  // what lies beyond the matrix is 0, or NaN where the row of x is not finite
        const int mine = max(0, min(span, width - first));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int evens = max(0, min(16, (mine + 1) / 2 - 16 * h)), odds = max(0, min(16, mine / 2 - 16 * h));
            p.mask[R][h] &= ((1u << evens) - 1) | ((1u << odds) - 1) << 16;
        }
    }
    // Rows beyond the tokens are zeros, which a bias may make fire; they have no words and no place in the pool.
    if (p.row0 + threadIdx.x % 32 / 4 + 8 * R >= tokens) p.mask[R][0] = p.mask[R][1] = 0;
}
// Where each lane's words go; staging: where those of the warp's 16 rows lie, each row's after its number of values. A row
// with more values than words has none here: overfull_rows writes it.
__device__ __forceinline__ void rank_lanes(Packing& p, u32 staging) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    const u32 count =
        (__popc(p.mask[0][0]) + __popc(p.mask[0][1])) | (__popc(p.mask[1][0]) + __popc(p.mask[1][1])) << 16;
    u32 through = count;  // both rows' prefix sums over the quad, in one register
    u32 below = __shfl_up_sync(ALL_LANES, through, 1, 4);
    if (q >= 1) through += below;
    below = __shfl_up_sync(ALL_LANES, through, 2, 4);
    if (q >= 2) through += below;
    p.total = __shfl_sync(ALL_LANES, through, 3, 4);
    const u32 upper = staging + lane / 4 * (POOLED_WORDS * 4), lower = upper + 8 * POOLED_WORDS * 4;
    p.to[0] = upper + 4 + 4 * ((through - count) & 0xffff);
    p.to[1] = lower + 4 + 4 * ((through - count) >> 16);
    if ((p.total & 0xffff) > SLOTS) p.mask[0][0] = p.mask[0][1] = 0;
    if (p.total >> 16 > SLOTS) p.mask[1][0] = p.mask[1][1] = 0;
    __syncwarp();  // the last tile's words have been read
    if (q == 0) { store_shared(upper, p.total & 0xffff); store_shared(lower, p.total >> 16); }
}
// 16 rows of 128 bytes: 8 lanes a row. Only sectors (32 bytes) that hold a word in use are written, and of overfull rows
// none.
__device__ __forceinline__ void store_words(const Packing& p, u32 staging, word_t* __restrict__ packed, int tokens,
                                            int n_count) {
    const int row = threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
    word_t* to = packed + ((long long)(p.row0 + row) * n_count + p.n) * POOLED_WORDS + chunk * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 kept[2];
        uint4 words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 from = staging + (row + 4 * (2 * half + i)) * (POOLED_WORDS * 4);
            kept[i] = load_shared(from);
            words[i] = load_shared_4(from + chunk * 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (p.row0 + row + 4 * (2 * half + i) < tokens && kept[i] <= SLOTS && chunk / 2 * 8 <= kept[i])
                *(uint4*)(to + (long long)(2 * half + i) * 4 * n_count * POOLED_WORDS) = words[i];
    }
}
// What packing needs to know besides the tile: where its warp's shared memory is (words of 16 rows; the thread's own to
// pick registers from; of that, a row for the whole warp), and where words go.
struct Output {
    u32 staging, scratch, row;
    word_t *__restrict__ packed, *__restrict__ pool;
    int tokens, d_ff, n_count;
};

// Rows with more values than words, of which the pool takes what it has room for. One after the other goes through shared
// memory, so that every lane of the warp gets eight neighbouring columns of it: by themselves the row's four lanes would
// have some dozen values each to go through, while 28 wait. From there words go out directly.
__device__ __forceinline__ void overfull_rows(const Packing& p, const Output& o) {
    const int lane = threadIdx.x % 32;
    const u32 excess = max(0, (int)(p.total & 0xffff) - SLOTS) | max(0, (int)(p.total >> 16) - SLOTS) << 16;
    // One bit a row: bit 4 i row i, bit 4 i + 1 the row 8 below it.
    const u32 upper = __ballot_sync(ALL_LANES, excess & 0xffff), lower = __ballot_sync(ALL_LANES, excess >> 16);
    u32 left = (upper & 0x11111111) | (lower & 0x22222222);
    if (!left) return;
    u32 sum = excess;  // of the quads up to this one, both halves of the 16 rows at once
#pragma unroll
    for (int by = 4; by < 32; by *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, by);
        if (lane >= by) sum += other;
    }
    sum -= excess;
    sum += __shfl_sync(ALL_LANES, sum + excess, 31) << 16;  // the lower rows come after the upper ones
    const int width = min(BN, o.d_ff - p.n * BN), span = span_of(width);
    const int in = lane % 8 * 8, column = span * (lane / 8) + in;  // the lane's first of eight, from its quarter and its tile
    const int there = max(0, min(8, min(span - in, width - column)));
    const u32 valid = ((1u << (there + 1) / 2) - 1) | ((1u << there / 2) - 1) << 16;
#pragma unroll 1
    while (left) {
        const int bit = __ffs(left) - 1, quad = bit / 4, row = quad + bit % 4 * 8;
        left &= left - 1;
        __syncwarp();  // what lay here has been read
        const u32 mine = lane / 4 == quad, at = o.row + lane % 4 * 128;
        if (row < 8) {
#pragma unroll
            for (int i = 0; i < 8; ++i) store_shared_4_if(mine, at + 16 * i, p.v[0] + 4 * i);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) store_shared_4_if(mine, at + 16 * i, p.v[1] + 4 * i);
        }
        __syncwarp();
        const uint4 four = load_shared_4(o.row + lane * 16);
        const u32 pairs[4] = {four.x, four.y, four.z, four.w};
        u32 fires = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) fires |= fires_pair(pairs[j]) & 0x10001u << j;
        fires &= valid;
        const int count = __popc(fires);
        int rank = count;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, rank, by);
            if (lane >= by) rank += other;
        }
        rank -= count;  // of the lane's next value in the row
        const int start = __shfl_sync(ALL_LANES, sum, 4 * quad) >> row / 8 * 16 & 0xffff;
        const int high = SLOTS + max(0, POOL_WORDS - start);
        word_t* words = o.packed + ((long long)(p.row0 + row) * o.n_count + p.n) * POOLED_WORDS;
        word_t* pool = o.pool + ((long long)(p.row0 / POOL_ROWS) * o.n_count + p.n) * POOL_WORDS + (start - SLOTS);
        if (lane == 31) words[0] = rank + count;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 pair = pairs[j / 2], word = (j % 2 ? pair & 0xffff0000u : pair << 16) | (column + j);
            const int one = fires >> (j / 2 + j % 2 * 16) & 1;
            store_if(one & (rank < high), (rank < SLOTS ? words + 1 : pool) + rank, word);
            rank += one;
        }
    }
}
// The packing of a tile is cut into steps, to be run in this order. A half is 16 of a lane's 32 pairs of columns in one
// row.
enum Step {
    FIND_ROW_0, FIND_ROW_1,                      // which columns fire, and where each lane's words go
    EMIT_ROW_0_HALF_0, EMIT_ROW_0_HALF_1,        // words of the upper row to shared memory
    EMIT_ROW_1_HALF_0, EMIT_ROW_1_HALF_1,        // of the lower row
    STORE_WORDS,                                 // and out
    OVERFULL_ROWS,                               // rows with more values than words, to the pool, too
    STEPS
};
__device__ __forceinline__ void pack_step(int step, Packing& p, const Output& o) {
    const int width = min(BN, o.d_ff - p.n * BN), span = span_of(width), first = span * (threadIdx.x % 4);
    if (step == FIND_ROW_0) {
        find_firing<0>(p, o.tokens, width, first, span);
    } else if (step == FIND_ROW_1) {
        find_firing<1>(p, o.tokens, width, first, span);
        rank_lanes(p, o.staging);
    } else if (step == EMIT_ROW_0_HALF_0) {
        p.to[0] = emit(p.v[0], p.mask[0][0], first, p.to[0], o.scratch);
    } else if (step == EMIT_ROW_0_HALF_1) {
        emit(p.v[0] + 16, p.mask[0][1], first + 32, p.to[0], o.scratch);
    } else if (step == EMIT_ROW_1_HALF_0) {
        p.to[1] = emit(p.v[1], p.mask[1][0], first, p.to[1], o.scratch);
    } else if (step == EMIT_ROW_1_HALF_1) {
        emit(p.v[1] + 16, p.mask[1][1], first + 32, p.to[1], o.scratch);
    } else if (step == STORE_WORDS) {
        __syncwarp();
        store_words(p, o.staging, o.packed, o.tokens, o.n_count);
    } else {
        overfull_rows(p, o);
    }
}
__device__ __forceinline__ void pack_all(Packing& p, const Output& o) {
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) pack_step(step, p, o);
}
// This tile's bias, in the order of the accumulators; two buffers, so that no warp overwrites what another still reads.
__device__ __forceinline__ void stage_bias(u32 at, const value_t* __restrict__ bias, int n, int d_ff) {
    const int width = min(BN, d_ff - n * BN), span = span_of(width);
    const int i = threadIdx.x % 128, in = i / 4 * 2, c = i % 4 * span + in;
    const value_t* from = bias + n * BN + c;
    const u32 low = in < span && c < width ? bits_of(from[0]) : 0;
    const u32 high = in < span && c + 1 < width ? bits_of(from[1]) : 0;
    store_shared(at + i * 4, low | high << 16);
}
// Version 0: the gate itself [tokens][d_ff], rounded.
__device__ __forceinline__ void store_dense(const Packing& p, value_t* __restrict__ gate, int tokens, int d_ff) {
    const int lane = threadIdx.x % 32, width = min(BN, d_ff - p.n * BN), span = span_of(width);
#pragma unroll
    for (int i = 0; i < 128; ++i) {
        const int row = p.row0 + lane / 4 + i / 64 * 8, in = i % 64, c = span * (lane % 4) + in;
        if (in < span && c < width && row < tokens)
            gate[(long long)row * d_ff + p.n * BN + c] = value_of_bits(p.v[i / 64][in / 2] >> in % 2 * 16 & 0xffff);
    }
}

// ---------------------------------------------------------------- the versions: what a consumer warpgroup does
struct Consumer {
    u32 base, staging, scratch, row;
    const int number, warp;  // of the block's consumers, and of its warps
    __device__ __forceinline__ Consumer(u32 base, int number) : base(base), number(number), warp(threadIdx.x / 32 % 4) {
        staging = base + STAGING + (number * 4 + warp) * 16 * POOLED_WORDS * 4;
        row = base + SCRATCH + number * 8192 + warp * 512;
        scratch = row + threadIdx.x % 32 * 16;
    }
    __device__ __forceinline__ u32 bias_at(int parity) const { return base + BIAS_AT + (number * 2 + parity) * BN * 2; }
    // From the sums of tile t to rounded pairs.
    __device__ __forceinline__ void round_sums(Packing& p, const float (&d)[128], Tile t, u32 bias) const {
        if (BIAS) warpgroup_sync(2 + number);
        round_tile(p, d, bias);
        p.row0 = first_row(t) + number * 64 + warp * 16;
        p.n = t.n;
    }
};

// v0 stores the gate itself (null: nothing), v1 and v2 pack a tile when it is done. Finding the next tile takes
// divisions: they run while the tensor cores work, not between two tiles.
__device__ __forceinline__ void one_after_the_other(u32 base, int number, Tiles tiles, int k_count,
                                                    word_t* __restrict__ packed, const value_t* __restrict__ bias,
                                                    word_t* __restrict__ pool, int tokens, int d_ff) {
    const Consumer me(base, number);
    const Output out = {me.staging, me.scratch, me.row, packed, pool, tokens, d_ff, tiles.n_count};
    float d[128];
    Packing p;
    Ring ring = {0, 0};
    int parity = 0;
    Tile t, next = tile_at(tiles, min(tiles.first, tiles.total - 1));
    for (int work = tiles.first; work < tiles.total; work += tiles.step, parity ^= 1) {
        t = next;
        const u32 bias_at = me.bias_at(parity);
        if (BIAS) stage_bias(bias_at, bias, t.n, d_ff);
        multiply_tile(d, ring, base, me.number, k_count, k_count, [&](int k) {
            if (k == 0) next = tile_at(tiles, min(work + tiles.step, tiles.total - 1));
        });
        me.round_sums(p, d, t, bias_at);
        if (VERSION > 0) pack_all(p, out);
        else if (packed) store_dense(p, (value_t*)packed, tokens, d_ff);
    }
}

// v3: the finished tile's rounded pairs stay in registers, and its packing goes between the k-steps of the next one.
__device__ __forceinline__ void packing_beside_the_products(u32 base, int number, Tiles tiles, int k_count,
                                                            word_t* __restrict__ packed,
                                                            const value_t* __restrict__ bias,
                                                            word_t* __restrict__ pool, int tokens, int d_ff) {
    constexpr int MOST_SPACE = 4;  // k-steps from one step of packing to the next
    const Consumer me(base, number);
    const Output out = {me.staging, me.scratch, me.row, packed, pool, tokens, d_ff, tiles.n_count};
    const int space = max(1, min(MOST_SPACE, k_count / STEPS));
    float d[128];
    Packing p;
    Ring ring = {0, 0};
    bool pending = false;  // whether p holds a tile
    int parity = 0;
    Tile t, next = tile_at(tiles, min(tiles.first, tiles.total - 1));
    for (int work = tiles.first; work < tiles.total; work += tiles.step, parity ^= 1) {
        t = next;
        const u32 bias_at = me.bias_at(parity);
        if (BIAS) stage_bias(bias_at, bias, t.n, d_ff);
        int due = space - 1, step = 0;  // the k-step after which the next step of packing is made
        multiply_tile(d, ring, base, me.number, k_count, max(k_count, (int)STEPS), [&](int k) {
            if (pending && k == due && step < STEPS) {
                pack_step(step++, p, out);
                due += space;
            }
            if (k == 0) next = tile_at(tiles, min(work + tiles.step, tiles.total - 1));
        });
        me.round_sums(p, d, t, bias_at);
        pending = true;
    }
    if (pending) pack_all(p, out);
}

// ---------------------------------------------------------------- the kernel
// gate: map of the weights as (k, 2, 4, 32, whole tiles); gate_last: of the narrow last tile as (k, 2, 4, span / 2, 1).
// See _gate_maps in ops/hopper_pack.py.
#define GATE_PACK_KERNEL(NAME, CONSUME)                                                                             \
    extern "C" __global__ void HOPPER_GEMM NAME(                                                                    \
        const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gate,                                \
        const __grid_constant__ TensorMap gate_last, word_t* __restrict__ packed, const value_t* __restrict__ bias, \
        word_t* __restrict__ pool, int* __restrict__ lost, int tokens, int d_model, int d_ff) {                     \
        const int group = threadIdx.x / 128, k_count = (d_model + BK - 1) / BK;                                     \
        const Tiles tiles = tiles_for(tokens, tiles_of(d_ff, BN));                                                  \
        const u32 base = start_pipeline();                                                                          \
        if (lost && blockIdx.x == 0 && threadIdx.x == 0) *lost = 0; /* for the kernels that follow */               \
        if (group == 0) {                                                                                           \
            give_registers<40>();                                                                                   \
            if (threadIdx.x == 0)                                                                                   \
                produce(tiles, base, &x, 0, k_count, [&](u32 to, u32 full, int k, Tile t) {                         \
                    const bool last = (t.n + 1) * BN > d_ff;                                                        \
                    const int half = cluster_rank() * (32 / CLUSTER);                                               \
                    tma_load_all(to + half * (BN / 32) * 128, last ? &gate_last : &gate, full, k, 0, 0, half,       \
                                 last ? 0 : t.n);                                                                   \
                });                                                                                                 \
        } else {                                                                                                    \
            take_registers<232>();                                                                                  \
            CONSUME(base, group - 1, tiles, k_count, packed, bias, pool, tokens, d_ff);                             \
        }                                                                                                           \
        finish_pipeline();                                                                                          \
    }

#if VERSION == 0  // the gate unpacked, for checks
GATE_PACK_KERNEL(gate_pack_v0, one_after_the_other)
#elif VERSION == 1  // blocks on their own
GATE_PACK_KERNEL(gate_pack_v1, one_after_the_other)
#elif VERSION == 2  // two blocks share their rows of the weights: CLUSTER 2
GATE_PACK_KERNEL(gate_pack_v2, one_after_the_other)
#else
GATE_PACK_KERNEL(gate_pack_v3, packing_beside_the_products)
#endif

#ifdef LAUNCH_SHARED
static_assert(LAUNCH_SHARED == SHARED_BYTES, "ops/gate_pack.py has another size");
#endif
