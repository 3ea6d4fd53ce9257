// How running code finds its own thread: every fiber's stack is aligned to its size, and the thread's address lies in
// the last word of it. No thread-local variable has to be looked up.
#pragma once
#include <stdint.h>

#include "cuda_types.h"

#define SIM_STACK ((uintptr_t)1 << 20)  // a GPU gives a thread up to 512 KiB of its own

struct SimIndex {  // a uint3 that every build passes around in the same way
    unsigned int x, y, z;
    SIM_UNWATCHED operator uint3() const { return uint3{x, y, z}; }
};

struct SimThread {
    SimIndex thread_index, block_index;
    dim3 block_size, grid_size;
};

static inline __attribute__((always_inline)) SimThread* sim_thread() {
    return *(SimThread**)(((uintptr_t)__builtin_frame_address(0) | (SIM_STACK - 1)) - 7);
}
