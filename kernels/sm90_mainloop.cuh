// The main loop of the Hopper GEMMs: out [rows][columns] = a [rows][d_model] x b [columns][d_model]^T, 16-bit values,
// fp32 sums, in tiles of 128 x 256. What b is, and what becomes of a tile's sums, is the includer's. With B_ALONG_N b is
// stored transposed, [d_model][columns].
//
// A block is one producer warpgroup and two consumer warpgroups, and there is one block a multiprocessor. One thread of
// the producer has the copy engine fill a ring of STAGES stages, each a step of 64 along k; a consumer multiplies its
// 64 rows of a stage with the stage's 256 rows of b. Two barriers a stage: `full` (the bytes have come) and `empty`
// (every consumer that reads this copy is done). Blocks walk the tiles with a stride, so nothing is ever allotted at
// run time, and the producer runs ahead into the next tile while the consumers finish this one.
//
// CLUSTER 2: two blocks at work on two tiles one above the other need the same 256 rows of b. Each fetches half and the
// copy engine delivers it to both. Per 64 steps of k a block then reads 32 KB through the L2 cache instead of 48.
//
// An includer's kernel, in order: stop if there are no tiles; start_pipeline; in warpgroup 0 give_registers and, in one
// thread, produce; in the others take_registers and for each tile multiply_tile and its own epilogue; finish_pipeline.
// Shared memory is dynamic, starts on 1024 bytes (nothing static beside it); from EPILOGUE on it is the includer's.
#pragma once
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef B_ALONG_N
#define B_ALONG_N 0
#endif
#include "ptx_sm90.cuh"

#ifndef BM
#define BM 128
#endif
#ifndef BN
#define BN 256
#endif
#ifndef BK
#define BK 64
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#define THREADS (128 * (CONSUMERS + 1))
#define GROUP 8  // tile rows walked together
#define A_BYTES (BM * BK * 2)
#define B_BYTES (BN * BK * 2)
#define STAGE_BYTES (A_BYTES + B_BYTES)
#define FULL (STAGES * STAGE_BYTES)
#define EMPTY (FULL + 8 * STAGES)
#define EPILOGUE (FULL + 128)
#if CLUSTER > 1
#define HOPPER_GEMM __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
#else
#define HOPPER_GEMM __launch_bounds__(THREADS, 1)
#endif

// The tiles of one launch, and those of this cluster: first, first + step, ... below total.
struct Tiles { int m_count, n_count, total, first, step; };
struct Tile { int m, n; };  // n: its column of tiles; m: its row of tiles, CLUSTER * BM rows high
__device__ __forceinline__ Tiles tiles_for(int rows, int n_count) {
    const int m_count = (rows + BM * CLUSTER - 1) / (BM * CLUSTER);
    return {m_count, n_count, m_count * n_count, (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER};
}
// Tiles are walked in groups of GROUP tile rows, row fastest: the blocks at work together share few tiles of b and few
// of a, all of which fit into the L2 cache.
__device__ __forceinline__ Tile tile_at(const Tiles& tiles, int work) {
    const int per_group = GROUP * tiles.n_count;
    const int first = work / per_group * GROUP, in_group = work % per_group;
    const int height = min(GROUP, tiles.m_count - first);
    return {first + in_group % height, in_group / height};
}
// The first of the 128 rows of a tile that are this block's.
__device__ __forceinline__ int first_row(Tile t) { return (t.m * CLUSTER + (int)cluster_rank()) * BM; }

// Where a producer or consumer is in the ring.
struct Ring {
    int stage;
    u32 phase;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
};

// By all threads; the address of the block's shared memory.
__device__ __forceinline__ u32 start_pipeline() {
    extern __shared__ __align__(1024) unsigned char raw[];
    const u32 base = shared_address(raw);
    if (base & 1023) __trap();  // the swizzle needs it
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(base + FULL + 8 * s, 1);
            barrier_init(base + EMPTY + 8 * s, CONSUMERS * 4 * CLUSTER);  // the consumers' warps
        }
        barrier_init_done();
    }
    cluster_sync();
    return base;
}
// By all threads: no block leaves while another may still write into its shared memory.
__device__ __forceinline__ void finish_pipeline() { cluster_sync(); }

// By one thread. a: map of (k, rows), box (64, 128); row 0 of the tiles is row `row0` of the map. load_b(to, barrier,
// k, tile) starts copies into the BN rows (with B_ALONG_N: BN / 64 boxes of 64 rows) of 128 bytes at `to`, which
// together bring B_BYTES to this block's barrier: with a cluster, this block's half of the rows goes to every block
// (tma_load_all), and the other block's half comes from there. k_first: the step along k that the block starts from.
template <class LoadB>
__device__ __forceinline__ void produce(const Tiles& tiles, u32 base, const TensorMap* a, int row0, int k_count, LoadB load_b,
                                        int k_first = 0) {
    Ring ring = {0, 1};  // a fresh barrier's previous phase counts as over
    for (int work = tiles.first; work < tiles.total; work += tiles.step) {
        const Tile t = tile_at(tiles, work);
        const int row = row0 + first_row(t);
        for (int k = 0; k < k_count; ++k) {
            const u32 at = base + ring.stage * STAGE_BYTES, full = base + FULL + 8 * ring.stage;
            barrier_wait(base + EMPTY + 8 * ring.stage, ring.phase);
            barrier_expect(full, STAGE_BYTES);
            tma_load(at, a, full, (k_first + k) * BK, row);
            load_b(at + A_BYTES, full, (k_first + k) * BK, t);
            ring.next();
        }
    }
}

// What load_b is with B_ALONG_N: b is the map of a matrix [k, n], boxes (64, 64).
__device__ __forceinline__ void load_along_n(u32 to, const TensorMap* b, u32 barrier, int k, Tile t) {
#pragma unroll
    for (int box = 0; box < BN / 64; ++box)
        if (CLUSTER == 1 || box / (BN / 128) == cluster_rank())
            tma_load_all(to + box * (64 * BK * 2), b, barrier, t.n * BN + box * 64, k);
}

// By a whole consumer warpgroup: d = its 64 rows of one tile (for the layout see wgmma_64x256x16). between(k) runs once
// in each of `steps` >= k_count steps, while the tensor cores work on step k; it must not touch d.
template <class Between>
__device__ __forceinline__ void multiply_tile(float (&d)[128], Ring& ring, u32 base, int consumer, int k_count, int steps,
                                              Between between) {
    const int lane = threadIdx.x % 32;
    int before = 0;  // the stage whose reads may still be under way
#pragma unroll 1
    for (int k = 0; k < steps; ++k) {
        if (k < k_count) {
            barrier_wait(base + FULL + 8 * ring.stage, ring.phase);
            const u32 at = base + ring.stage * STAGE_BYTES;
            const u64 a = operand(at + consumer * (64 * BK * 2));
            const u64 b = B_ALONG_N ? operand_along_n(at + A_BYTES) : operand(at + A_BYTES);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BK / 16; ++i) wgmma_64x256x16(d, a + 2 * i, b + (B_ALONG_N ? 128 : 2) * i, k + i != 0);
            wgmma_commit();
            if (k > 0) {
                wgmma_wait<1>();
                if (lane < CLUSTER) barrier_arrive_at(base + EMPTY + 8 * before, lane);
            }
            before = ring.stage;
            ring.next();
        }
        between(k);
    }
    wgmma_wait<0>();
    if (lane < CLUSTER) barrier_arrive_at(base + EMPTY + 8 * before, lane);
}

// By a whole consumer warpgroup that has no rows in a tile: let its stages go by.
__device__ __forceinline__ void pass_tile(Ring& ring, u32 base, int k_count) {
#pragma unroll 1
    for (int k = 0; k < k_count; ++k) {
        barrier_wait(base + FULL + 8 * ring.stage, ring.phase);
        if (threadIdx.x % 32 < CLUSTER) barrier_arrive_at(base + EMPTY + 8 * ring.stage, threadIdx.x % 32);
        ring.next();
    }
}
