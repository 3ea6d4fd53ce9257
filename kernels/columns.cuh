// The survivors of a sparse layer by neuron, and how the work on them is cut up: what smxx_columns.cu writes and
// smxx_weight_gradients.cu reads.
//
// Survivors come by row: spans int2 [tokens] (first, count), words [capacity], columns ascending and each at most once in a row.
// By neuron they are records [capacity]: those of neuron j are numbers starts[j] to starts[j + 1], tokens ascending.
//
// How often neurons fire differs by orders of magnitude, so a block of BLOCK_WARPS warps takes, by the length of the lists,
//   class 4     a piece of one list, of at most BLOCK_WARPS * unit records; a list of this class has several pieces
//   class k<4   BLOCK_WARPS >> k whole lists, each for a team of 1 << k warps, each warp at most `unit` records
// A block of class 4 leaves partial sums, and partial row b belongs to block b: class 4 comes first, which also starts what takes
// longest first. `unit` is chosen from the number of records so that there are never more blocks or partial rows than the
// caller made room for.
#pragma once
#include "twell.cuh"

#define BLOCK_WARPS 8
#define CLASSES 5
#define PIECES (CLASSES - 1)  // the class of the lists in pieces: log2(BLOCK_WARPS) + 1
#define LEAST_UNIT 32

// What a survivor adds to the gradients of its neuron: dgate += dgate_of * x[token], dup += dup_of * x[token],
// ddown_t += hidden * dy[token]. A plain layer has no dgate_of.
struct alignas(16) Record {
    int token;
    float dgate_of, dup_of, hidden;
};

// Entry k of each array is where class k begins. The order is 4, 3, 2, 1, 0.
struct Plan {
    int records, unit;
    int block[CLASSES];   // the first block of the class
    int listed[CLASSES];  // its first list in `order`
    int blocks, lists;    // of all classes
};

__host__ __device__ __forceinline__ int pieces_of(int count, int unit) {
    return (count + BLOCK_WARPS * unit - 1) / (BLOCK_WARPS * unit);
}
__host__ __device__ __forceinline__ int class_of(int count, int unit) {
    int k = 0;
    while (k < PIECES && count > unit << k) ++k;
    return k;
}
