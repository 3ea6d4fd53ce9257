// kernels/few_rows.cuh in kernels of its own: the Hopper kernels that use it have PTX, which the simulator cannot run.
#include "few_rows.cuh"

#define BLOCK 96
#define MEMORY __shared__ __align__(16) unsigned char memory[sizeof(FewShared<BLOCK>) + 2 * MOST_D_MODEL]

extern "C" __global__ void __launch_bounds__(BLOCK)
sum_runs(const value_t* x, const word_t* packed, const word_t* pool, const int* lost, const value_t* up, int up_step,
         const value_t* up_bias, const value_t* down_t, int down_step, float* parts, int columns, int d_model) {
    MEMORY;
    if (const int n = few_rows(lost, columns))
        sum_run<BLOCK>(x, packed, pool, lost, n, Rows{up, up_step}, up_bias, Rows{down_t, down_step}, parts, columns, d_model, memory);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
add_all_runs(const float* parts, const int* lost, const value_t* bias, const float* start, value_t* y, int columns,
             int d_model) {
    MEMORY;
    if (const int n = few_rows(lost, columns)) add_runs<BLOCK>(parts, lost, n, bias, start, y, d_model, memory);
}
