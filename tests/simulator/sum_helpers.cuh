__device__ float load(const float* p, int i) {
    return p[32 * i + threadIdx.x % 32];
}
