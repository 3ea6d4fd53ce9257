// gate_pack: x [tokens, d_model] x gate [d_ff, d_model]^T (+ bias) -> TwELL words and the pool, on Hopper. The gate itself
// never reaches device memory: what a tile of it keeps is packed while the sums are still in registers.
//
// Floor: 16,384 tokens, d_model 2048, d_ff 5632 are 378 GFLOP, 0.54 ms at the 700 TFLOP/s that cuBLAS makes of this chip (656
// to 745, as the clock goes). x, the weights and the words are 0.10 GB of device memory, 0.03 ms: arithmetic decides. Two more
// limits are near. A tile of 128 x 256 needs 48 KB every 64 steps of k, 8.2 TB/s through the L2 cache in all: with clusters of
// two (sm90_mainloop.cuh) 5.5. And wgmma reads 80 bytes of shared memory a cycle and the copy engine writes 48, of the 128 that
// there are: an epilogue that moves all its values through shared memory takes that from the tensor cores.
//
// How a tile is packed. After wgmma four lanes share a row, and each holds every fourth pair of columns. Were the columns of
// a lane neighbours, the slot of a value would be the counts of the lanes before it plus its own running count. So the weight
// rows are loaded in that order: a tensor map of five dimensions (launch_sm90.py), no data moved, no time. A lane rounds its
// two rows to 64 registers of pairs, finds what fires (two values an instruction), ranks by two shuffles for both rows at
// once, and writes value << 16 | column to shared memory, from where whole sectors leave. A warp owns 16 rows: no barrier.
//
// Versions: ms (TFLOP/s) for the size above, mean nnz 29, on an H100 SXM, 2026-11-21: as recorded at
// 09:27, beside torch's linear, 0.501 (755); then in another run 0.8 s without a pause, where power sets
// the clock, torch 0.576 (656)
//   gate_pack_v1  0.532 (711) | 0.623 (607)  no cluster, packing when a tile is done.
//   gate_pack_v2  0.523 (723) | 0.605 (624)  clusters of two. Cool, it gains little, for the L2 gave more than was thought
//                 (11.3 TB/s into shared memory without a product); under load it gains power, which is clock.
//   gate_pack_v3  0.476 (795) | 0.557 (679)  the packing in pieces between the k-steps of the next tile. The rounded pairs are
//                 64 registers beside the 128 of the sums, and the tensor cores work meanwhile. The same loop without any
//                 epilogue (version 0, packed null) took 0.509 (743) | 0.533 (709) in the other run, v3 in short rounds
//                 0.519 (728): packing costs 2 to 4%.
// Predicted for an epilogue at the tile's end: 1,000 cycles of a tile's 32,768, the other warpgroup's products hiding it.
// Measured with the clock: 4,700. A branch a pair of columns costs 40 to 50 cycles (two instructions of latency each, one
// warp a scheduler), and the warpgroups fall into step, so neither hides the other. Pairs in shared memory and a loop over
// those that fire, for a register can't be picked at run time: 3,300. Only v3 got it out of the way: tile 33,960.
// Other loads, v3 beside torch, from the same record: nnz 8 0.472, 0.497; 60 0.479, 0.501; 131,072 tokens 3.85, 4.15. From the
// other run: nnz 300 0.562, 0.571; half of all 0.73, 0.55 (a warp's loop runs as often as its fullest lane asks; such layers
// are computed densely); 2,048 tokens 0.073, 0.064 and 512 tokens 0.030, 0.022 (graph replays): 2.67 waves of tiles, and 88 of
// 132 blocks. A bias costs 2%.
//
// Overlap: the sparse part of one chunk of tokens beside this kernel at work on the next. Measured, not used. A block takes
// 64,512 of a multiprocessor's 65,536 registers and nearly all its shared memory, so nothing stands beside it there, and the
// multiprocessors have to be divided: this kernel with a smaller grid on a stream of high priority, so that its blocks are
// placed first, the sparse part on the rest. TwELL layer in a graph, 16,384 tokens, exploring runs of 2026-11-21, ms:
//           one chunk   two, no overlap   two, overlapped, best of 132 to 66 multiprocessors   four, best
//   nnz  8     0.632         0.650        0.626 (88; 11,520 + 4,864 tokens), 0.629 (110)          0.668
//   nnz 29     0.936         0.954        0.916 (66), 0.926 (88), 0.956 (132)                     0.976
//   nnz 60     1.377         1.383        1.354 (66), 1.362 (88), 1.405 (132)                     1.495
// On one priority the sparse blocks come first and this kernel's wait for the last of them: 0.930 at best at nnz 29. So 1 to
// 2% at best, with a division to be found for each nnz; a wrong one costs as much and more (nnz 8 on 66: 0.758). Why so
// little: both live on the L2 cache. At nnz 29 the gate moves 2.95 GB through it in 0.48 ms, 6.1 TB/s, the sparse part 4.0 GB
// in 0.46, 8.8 TB/s (some of it found in L1). Half of each, one after the other, take 0.47; beside each other on 66
// multiprocessors each 0.43 to 0.45, 8 TB/s: neither leaves much that the other could use. Four chunks moreover take 24 turns
// of tiles where one takes 22. From nnz 29 on the planned layer is hot/cold; that was not tried in chunks.
//
// Failed, or made no difference
//   - mbarrier.arrive with `.release.cluster` spelled out: a full memory barrier each k-step; 502 TFLOP/s instead of 753.
//   - Letting one warpgroup run two k-steps ahead, so that the other's products hide its packing: four stages are too few.
//   - Bounded loops (8 values, then back to the products) against half-dense tiles: 1.5% slower at nnz 29, and there too.
//   - A piece after every k-step: 3 to 5% slower than every fourth. Pieces of the two warpgroups at different k-steps: 6%
//     slower, with 192 bytes spilled. Waiting for step k - 1 after the piece instead of before, to have two steps queued
//     under it: 0.6 to 1.5% slower, the stage is refilled later.
//   - Skipping what has no place in the words: 0.4% slower at nnz 300; in the pool alone (`room` below) half-dense gates gain
//     10% and others lose nothing.
//   - 240 registers for consumers, 3, 4 or 16 tile rows a group, 256-byte promotion, one arrival a warpgroup: nothing.
//
// Traps. Rows beyond the tokens are zeros, and a positive bias makes them fire: they once wrote past the pool. The next tile's
// place takes four integer divisions (400 cycles): not between two tiles. Sums that nobody uses shrink the products.
#include "twell.cuh"
#ifndef VERSION
#define VERSION 3
#endif
#ifndef BIAS
#define BIAS 0
#endif
#define CLUSTER (VERSION == 1 ? 1 : 2)
#include "sm90_mainloop.cuh"
#define SPACE 4            // k-steps from one piece of packing to the next, at most
#define WORD_PIECES 7      // pieces of packing that fill the words
#define PIECES (WORD_PIECES + 4)  // and those that fill the pool, where a row needs it
// Shared memory after the stages: the words of a tile, a place to pick registers from, the bias of two tiles.
#define STAGING EPILOGUE
#define SCRATCH (STAGING + BM * POOLED_WORDS * 4)
#define BIAS_AT (SCRATCH + CONSUMERS * 128 * 64)

// ---------------------------------------------------------------- packing one tile
// Which words a lane writes, and where: the kept value of rank s (from 0) in its row goes to `to + 4 s` if low <= s < high.
struct Window { u32 to; int low, high; };
// Write the firing ones among 16 neighbouring pairs of columns; returns the rank after them. mask: bit j the even column of
// pair j, bit 16 + j the odd one. A register can't be picked by a run-time index, so the pairs go through shared memory,
// where each thread reads back only what it wrote itself; and only what will be read: the tensor cores need the bandwidth.
__device__ __forceinline__ int emit(const u32* v, u32 mask, u32 column, int rank, const Window& out, u32 scratch) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_shared_4_if(mask & 0xf000fu << 4 * i, scratch + i * 2048, v + 4 * i);
    const u32 span = out.high - out.low;
    u32 left = (mask | mask >> 16) & 0xffff;
#pragma unroll 1
    while (left) {
        const int j = __ffs(left) - 1;
        left &= left - 1;
        const u32 pair = load_shared(scratch + (j >> 2) * 2048 + (j & 3) * 4), at = column + 2 * j, bits = mask >> j;
        const u32 even = bits & 1, odd = bits >> 16 & 1;
        store_shared_if(even & ((u32)(rank - out.low) < span), out.to + 4 * rank, pair << 16 | at);
        rank += even;
        store_shared_if(odd & ((u32)(rank - out.low) < span), out.to + 4 * rank, (pair & 0xffff0000u) | (at + 1));
        rank += odd;
    }
    return rank;
}

// What a lane keeps of a finished tile: two rows of one quarter of its columns, rounded.
struct Packing {
    u32 v[2][32];    // pairs of columns of the two rows
    u32 mask[2][2];  // of 16 pairs each, as in emit
    u32 total;       // kept values of the whole rows: first row in the low half, second in the high half
    int rank[2];     // of the lane's next value in its row
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
            p.v[r][j] = BIAS ? round_pair(d[4 * j + 2 * r] + b.x, d[4 * j + 2 * r + 1] + b.y) : round_pair(d[4 * j + 2 * r], d[4 * j + 2 * r + 1]);
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
__device__ __forceinline__ void rank_lanes(Packing& p) {
    const int q = threadIdx.x % 4;
    const u32 count = (__popc(p.mask[0][0]) + __popc(p.mask[0][1])) | (__popc(p.mask[1][0]) + __popc(p.mask[1][1])) << 16;
    u32 through = count;  // both rows' prefix sums over the quad, in one register
    u32 below = __shfl_up_sync(ALL_LANES, through, 1, 4);
    if (q >= 1) through += below;
    below = __shfl_up_sync(ALL_LANES, through, 2, 4);
    if (q >= 2) through += below;
    p.total = __shfl_sync(ALL_LANES, through, 3, 4);
    p.rank[0] = (through - count) & 0xffff;
    p.rank[1] = (through - count) >> 16;
}
// 16 rows of 128 bytes: 8 lanes a row. Only sectors (32 bytes) that hold a word in use are written.
__device__ __forceinline__ void store_words(const Packing& p, u32 staging, word_t* __restrict__ packed, int tokens, int n_count) {
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
            if (p.row0 + row + 4 * (2 * half + i) < tokens && chunk / 2 * 8 <= min(kept[i], (u32)SLOTS))
                *(uint4*)(to + (long long)(2 * half + i) * 4 * n_count * POOLED_WORDS) = words[i];
    }
}
// What the words could not hold goes to the pool. Each part writes one half row of every lane; the last stores them all.
__device__ __forceinline__ void spill(int part, const Packing& p, u32 staging, u32 scratch, word_t* __restrict__ pool,
                                      int n_count, int first) {
    const int lane = threadIdx.x % 32, low = SLOTS;
    const u32 excess = max(0, (int)(p.total & 0xffff) - low) | max(0, (int)(p.total >> 16) - low) << 16;
    if (!__any_sync(ALL_LANES, excess)) return;
    u32 sum = excess;  // of the quads up to this one, both halves of the 16 rows at once
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    const u32 all = __shfl_sync(ALL_LANES, sum, 31);
    const u32 start = part < 2 ? (sum - excess) & 0xffff : ((sum - excess) >> 16) + (all & 0xffff);
    const Window out = {staging + 4 * (start - low), low, max(low, low + POOL_WORDS - (int)start)};
    const u32 room = start < POOL_WORDS ? ~0u : 0;  // without it, nothing of the row has a place
    __syncwarp();  // every lane has read the words that lay here
    // p.rank is by now the rank after the lane's last value
    const int end0 = p.rank[0] - __popc(p.mask[0][1]), end1 = p.rank[1] - __popc(p.mask[1][1]);
    if (part == 0) emit(p.v[0], p.mask[0][0] & room, first, end0 - __popc(p.mask[0][0]), out, scratch);
    if (part == 1) emit(p.v[0] + 16, p.mask[0][1] & room, first + 32, end0, out, scratch);
    if (part == 2) emit(p.v[1], p.mask[1][0] & room, first, end1 - __popc(p.mask[1][0]), out, scratch);
    if (part < 3) return;
    emit(p.v[1] + 16, p.mask[1][1] & room, first + 32, end1, out, scratch);
    __syncwarp();
    const int spilled = min(POOL_WORDS, (all & 0xffff) + (all >> 16));
    word_t* to = pool + ((long long)(p.row0 / POOL_ROWS) * n_count + p.n) * POOL_WORDS;
    for (int i = lane; i < spilled; i += 32) to[i] = load_shared(staging + 4 * i);
}
// The packing of a tile in PIECES parts, to be run in order.
__device__ __forceinline__ void piece(int i, Packing& p, u32 staging, u32 scratch, word_t* __restrict__ packed,
                                      word_t* __restrict__ pool, int tokens, int d_ff, int n_count) {
    const int lane = threadIdx.x % 32, q = lane % 4;
    const int width = min(BN, d_ff - p.n * BN), span = span_of(width), first = span * q;
    const u32 line = staging + lane / 4 * (POOLED_WORDS * 4);
    const Window out[2] = {{line + 4, 0, SLOTS}, {line + 8 * POOLED_WORDS * 4 + 4, 0, SLOTS}};
    if (i == 0) find_firing<0>(p, tokens, width, first, span);
    else if (i == 1) { find_firing<1>(p, tokens, width, first, span); rank_lanes(p); }
    else if (i == 2) {
        __syncwarp();  // the last tile's words have been read
        if (q == 0) { store_shared(line, p.total & 0xffff); store_shared(line + 8 * POOLED_WORDS * 4, p.total >> 16); }
        p.rank[0] = emit(p.v[0], p.mask[0][0], first, p.rank[0], out[0], scratch);
    }
    else if (i == 3) p.rank[0] = emit(p.v[0] + 16, p.mask[0][1], first + 32, p.rank[0], out[0], scratch);
    else if (i == 4) p.rank[1] = emit(p.v[1], p.mask[1][0], first, p.rank[1], out[1], scratch);
    else if (i == 5) p.rank[1] = emit(p.v[1] + 16, p.mask[1][1], first + 32, p.rank[1], out[1], scratch);
    else if (i == 6) { __syncwarp(); store_words(p, staging, packed, tokens, n_count); }
    else spill(i - WORD_PIECES, p, staging, scratch, pool, n_count, first);
}
// This tile's bias, in the order of the accumulators; two buffers, so that no warp overwrites what another still reads.
__device__ __forceinline__ void stage_bias(u32 at, const value_t* __restrict__ bias, int n, int d_ff) {
    const int width = min(BN, d_ff - n * BN), span = span_of(width);
    const int i = threadIdx.x % 128, in = i / 4 * 2, c = i % 4 * span + in;
    const value_t* from = bias + n * BN + c;
    const u32 low = in < span && c < width ? bits_of(from[0]) : 0, high = in < span && c + 1 < width ? bits_of(from[1]) : 0;
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

// ---------------------------------------------------------------- the kernel
// gate: the weights as (k, 2, 4, 32, full tiles), gate_last: the narrow last tile as (k, 2, 4, span / 2, 1); see launch_sm90.py.
#define KERNEL_OF(version) gate_pack_v##version
#define KERNEL(version) KERNEL_OF(version)
extern "C" __global__ void HOPPER_GEMM
KERNEL(VERSION)(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gate, const __grid_constant__ TensorMap gate_last,
                word_t* __restrict__ packed, const value_t* __restrict__ bias, word_t* __restrict__ pool, int* __restrict__ lost,
                int tokens, int d_model, int d_ff) {
    const int group = threadIdx.x / 128, k_count = (d_model + BK - 1) / BK;
    const Tiles tiles = tiles_for(tokens, tiles_of(d_ff, BN));
    const u32 base = start_pipeline();
    if (lost && blockIdx.x == 0 && threadIdx.x == 0) *lost = 0;  // for the kernels that follow: no launch of its own

    if (group == 0) {
        give_registers<40>();
        if (threadIdx.x == 0)
            produce(tiles, base, &x, 0, k_count, [&](u32 to, u32 full, int k, Tile t) {
                const bool last = (t.n + 1) * BN > d_ff;
                const int half = cluster_rank() * (32 / CLUSTER);
                tma_load_all(to + half * (BN / 32) * 128, last ? &gate_last : &gate, full, k, 0, 0, half, last ? 0 : t.n);
            });
    } else {
        take_registers<232>();
        const int consumer = group - 1, warp = threadIdx.x / 32 % 4;
        const u32 staging = base + STAGING + (consumer * 4 + warp) * 16 * POOLED_WORDS * 4;
        const u32 scratch = base + SCRATCH + consumer * 8192 + threadIdx.x % 128 * 16;
        const int space = max(1, min(SPACE, (k_count - (PIECES - WORD_PIECES)) / WORD_PIECES));
        float d[128];
        Packing p;
        Ring ring = {0, 0};
        bool pending = false;
        int parity = 0;
        Tile t, next = tile_at(tiles, min(tiles.first, tiles.total - 1));
        for (int work = tiles.first; work < tiles.total; work += tiles.step, parity ^= 1) {
            t = next;
            const u32 bias_at = base + BIAS_AT + (consumer * 2 + parity) * BN * 2;
            if (BIAS) stage_bias(bias_at, bias, t.n, d_ff);
            int due = space - 1, part = 0;  // the k-step after which the next piece is packed
            multiply_tile(d, ring, base, consumer, k_count, VERSION == 3 ? max(k_count, PIECES) : k_count, [&](int k) {
                if (VERSION == 3 && pending && k == due && part < PIECES) {
                    piece(part, p, staging, scratch, packed, pool, tokens, d_ff, tiles.n_count);
                    due += ++part < WORD_PIECES ? space : 1;
                }
                if (k == 0) next = tile_at(tiles, min(work + tiles.step, tiles.total - 1));  // divisions: not between tiles
            });
            if (BIAS) warpgroup_sync(2 + consumer);
            round_tile(p, d, bias_at);
            p.row0 = first_row(t) + consumer * 64 + warp * 16;
            p.n = t.n;
            pending = true;
#if VERSION == 0
            if (packed) store_dense(p, (value_t*)packed, tokens, d_ff);
#elif VERSION < 3
#pragma unroll 1
            for (int i = 0; i < PIECES; ++i) piece(i, p, staging, scratch, packed, pool, tokens, d_ff, tiles.n_count);
#endif
        }
#if VERSION == 3
        if (pending)
#pragma unroll 1
            for (int i = 0; i < PIECES; ++i) piece(i, p, staging, scratch, packed, pool, tokens, d_ff, tiles.n_count);
#endif
    }
    finish_pipeline();
}
