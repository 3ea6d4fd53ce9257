// transpose: to[j][i] = from[i][j], 16-bit values, rows and columns multiples of 8. A training step needs the down
// projection transposed on the way in, and its gradient transposed back on the way out.
//
// What bounds it: device memory; each value is read and written once.
//
//   transpose_v1  SIDE x SIDE values through shared memory, 16 bytes a thread on either side. Rows in shared memory are
//                 33 words apart, so that the eight rows from which a thread reads the values of its column lie in
//                 different banks
// Worklog: docs/kernels/smxx_transpose.md
#include "twell.cuh"

#ifndef SIDE
#define SIDE 64
#endif
#ifndef THREADS
#define THREADS 256
#endif
#define PER_ROW (SIDE / 8)  // vectors

extern "C" __global__ void __launch_bounds__(THREADS)
transpose_v1(const value_t* __restrict__ from, value_t* __restrict__ to, int rows, int columns) {
    __shared__ unsigned tile[SIDE][SIDE / 2 + 1];
    const int row = blockIdx.y * SIDE, column = blockIdx.x * SIDE;
    for (int i = threadIdx.x; i < SIDE * PER_ROW; i += THREADS) {
        const int r = i / PER_ROW, c = i % PER_ROW * 8;
        if (row + r < rows && column + c < columns) {
            const uint4 v = __ldg((const uint4*)(from + (long long)(row + r) * columns + column + c));
            unsigned* place = &tile[r][c / 2];
            place[0] = v.x, place[1] = v.y, place[2] = v.z, place[3] = v.w;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SIDE * PER_ROW; i += THREADS) {
        const int c = i / PER_ROW, r = i % PER_ROW * 8, shift = c % 2 * 16;
        if (column + c < columns && row + r < rows) {
            unsigned v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const unsigned low = tile[r + 2 * k][c / 2] >> shift & 0xffffu, high = tile[r + 2 * k + 1][c / 2] >> shift & 0xffffu;
                v[k] = low | high << 16;
            }
            *(uint4*)(to + (long long)(column + c) * rows + row + r) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}
