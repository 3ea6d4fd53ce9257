#include "sum_helpers.cuh"
extern "C" __global__ void block_sum(const float* x, float* y) {
    __shared__ float part[64];
    const float mine = x[threadIdx.x];
    part[threadIdx.x] = mine;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < 2; ++i) total += load(part, i);
    __syncthreads();
    atomicAdd(&y[threadIdx.x % 32], mine);
}
