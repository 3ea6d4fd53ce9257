// How the Hopper GEMMs write finished rows. A warp's 16 rows x 128 columns go through shared memory, where wgmma's
// order becomes rows again: two boxes of 16 rows x 64 columns, 128 bytes a row, under the 128-byte swizzle (16-byte
// piece p of row r lies at p ^ r % 8), so that neither the writes of stmatrix nor reads along a row meet in a bank.
// From there either the copy engine writes them, which costs the warp one instruction a box, or the warp itself, each
// row where it likes.
//
// A warp has its own 4 KB, so nothing here waits for another warp. Tried first: 272 bytes a row without swizzle, and a
// contiguous copy of the engine for each row (cp.async.bulk by 16 lanes). Its addresses are uniform registers, so that
// the 16 lanes take turns: docs/kernels/sm90_gate_up.md
#pragma once
#include "sm90_mainloop.cuh"

#ifndef OUT_COLUMNS
#define OUT_COLUMNS 128
#endif
#define OUT_ROWS 16               // of a warp
#define OUT_BOX (OUT_ROWS * 128)  // bytes
#define OUT ((EPILOGUE + 1023) / 1024 * 1024)  // the swizzle needs it
#define OUT_END (OUT + CONSUMERS * 4 * 2 * OUT_BOX)  // bytes of shared memory that a launch asks for

// The boxes of consumer warp `warp` (0 to 7).
__device__ __forceinline__ u32 out_boxes(u32 base, int warp) { return base + OUT + warp * 2 * OUT_BOX; }

// By a whole warp. pairs[j][r]: the columns 8 j + 2 * (lane % 4) + {0, 1} of row lane / 4 + 8 r, as wgmma leaves its
// sums.
__device__ __forceinline__ void stage_rows(const u32 (&pairs)[16][2], u32 boxes) {
    const u32 row = threadIdx.x % 16, odd = threadIdx.x / 16 % 2;  // of the 16 bytes that this lane names in each stmatrix
#pragma unroll
    for (int j = 0; j < 16; j += 2)
        store_matrices(boxes + j / 8 * OUT_BOX + row * 128 + ((j % 8 + odd) ^ row % 8) * 16,
                       pairs[j][0], pairs[j][1], pairs[j + 1][0], pairs[j + 1][1]);
}

// By a whole warp: the copy engine writes the rows at (column, row) of a map with boxes (64, 16), clipped to its
// matrix.
__device__ __forceinline__ void send_rows(const u32 (&pairs)[16][2], u32 boxes, const TensorMap* map, int column, int row) {
    const bool first = threadIdx.x % 32 == 0;
    if (first) copies_have_read();  // the engine is done with what was sent last
    __syncwarp();
    stage_rows(pairs, boxes);
    copies_may_read();
    __syncwarp();
    if (first) {
        tma_store(map, boxes, column, row);
        tma_store(map, boxes + OUT_BOX, column + 64, row);
        copies_commit();
    }
}

// By a whole warp: the warp writes each row to an address of its own. Lane i of the first 16 names where row i goes
// (null: nowhere), on 16 bytes; columns: how many of the 128, a multiple of 8.
__device__ __forceinline__ void scatter_rows(const u32 (&pairs)[16][2], u32 boxes, value_t* to, int columns) {
    const int lane = threadIdx.x % 32, piece = lane % 16;
    __syncwarp();  // every lane has read what was staged last
    stage_rows(pairs, boxes);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const int row = i + lane / 16;
        const u64 there = __shfl_sync(ALL_LANES, (u64)to, row);
        const uint4 v = load_shared_4(boxes + piece / 8 * OUT_BOX + row * 128 + (piece % 8 ^ row % 8) * 16);
        if (there && 8 * piece < columns) *(uint4*)((value_t*)there + 8 * piece) = v;
    }
}
