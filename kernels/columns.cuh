// The survivors of a sparse layer by neuron, and how the work on them is cut up: what smxx_columns.cu writes and
// smxx_weight_gradients.cu reads.
//
// Survivors come by row (spans.cuh). By neuron they are records [capacity]: those of neuron j are numbers starts[j] to
// starts[j + 1], tokens ascending. How often neurons fire differs by orders of magnitude, so a block of BLOCK_WARPS
// warps takes, by the length of the lists,
//   class 0      a piece of one list, of at most BLOCK_WARPS * unit records; a list of this class has several pieces
//   class 1 2 3  one, two or four whole lists, each for a team of 8, 4 or 2 warps, each warp at most `unit` records
//   class 4 to 8 eight lists, a warp each: of up to unit, unit / 2, unit / 4 and unit / 8 records, and empty ones: lists
//                of about the same length, because a block ends only when its longest list is done.
// A block of class 0 leaves partial sums: block b writes partial row b. What takes longest is started first. `unit` is
// chosen from the number of records so that there are never more blocks or partial rows than the caller has room for.
#pragma once
#include "twell.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
#ifndef CLASSES
#define CLASSES 9
#endif
#define LEAST_UNIT 128

// What a survivor adds to the gradients of its neuron: dgate += dgate_of * x[token], dup += dup_of * x[token],
// ddown_t += hidden * dy[token]. A plain layer has no dgate_of.
struct alignas(16) Record {
    int token;
    float dgate_of, dup_of, hidden;
};

struct Plan {
    int records, unit;
    int block[CLASSES + 1];   // the first block of each class; the last entry: how many there are
    int listed[CLASSES + 1];  // its first list in `order`; likewise
};

__host__ __device__ __forceinline__ int pieces_of(int count, int unit) {
    return (count + BLOCK_WARPS * unit - 1) / (BLOCK_WARPS * unit);
}

__host__ __device__ __forceinline__ int class_of(int count, int unit) {
    int k = 0;
#pragma unroll
    for (int i = 0; i < CLASSES - 2; ++i) k += count <= BLOCK_WARPS * unit >> i;
    return count == 0 ? CLASSES - 1 : k;
}

// How many warps share a list of class k.
__host__ __device__ __forceinline__ int team_of(int k) { return k <= 1 ? BLOCK_WARPS : max(BLOCK_WARPS >> (k - 1), 1); }
