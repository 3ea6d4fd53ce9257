// spmm: sparse A [rows, columns] x dense B [columns, n] -> C [rows, n], A as CSR or ELL. Zeros that A does not store are
// skipped, whatever stands in B.
//
// What bounds it: the L2 cache, which serves a row of B for each entry of A.
//
//   v1  one thread an element of C; neighbouring threads take neighbouring rows, and read B far apart
//   v2  neighbouring threads take neighbouring columns: a warp reads 32 neighbours of one row of B. Any n, any
//       alignment
//   v3  a warp takes a slab of a row of C, 16 bytes a lane; it loads 32 entries of A at once and passes them round
//   v4  for a few rows that are much longer than the others: rows sorted by length, so that the warps of a block end
//       together; each of the first `heavy` rows has a block to itself, whose warps share its entries
//
// As csr_v1 .. csr_v4 and ell_v1 .. ell_v4. Worklog: docs/kernels/smxx_spmm.md
#include "spmm.cuh"

struct Span {
    long long first, last;  // entries first to last - 1
};
struct Csr {
    const long long* pointer;
    __device__ __forceinline__ Span row(int r) const { return {pointer[r], pointer[r + 1]}; }
};
struct Ell {
    const int* count;
    int slots;
    __device__ __forceinline__ Span row(int r) const {
        const long long first = (long long)r * slots;
        return {first, first + count[r]};
    }
};
struct Operands {
    const int* column;
    const value_t *value, *b;
    value_t* c;
    int rows, n;
};

template <bool DOWN, class Rows>
__device__ __forceinline__ void one_element(const Rows& a, const Operands& o) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= (long long)o.rows * o.n) return;
    const int r = (int)(DOWN ? at % o.rows : at / o.n), j = (int)(DOWN ? at / o.rows : at % o.n);
    const Span span = a.row(r);
    sum_t sum = 0;
    for (long long i = span.first; i < span.last; ++i)
        sum = fma((sum_t)to_float(o.value[i]), (sum_t)to_float(o.b[(long long)o.column[i] * o.n + j]), sum);
    o.c[(long long)r * o.n + j] = from_float((float)sum);
}

// Row r, or none where it is negative.
template <class Rows>
__device__ __forceinline__ void one_row(const Rows& a, const Operands& o, int r) {
    const Span span = r < 0 ? Span{0, 0} : a.row(r);
    const int j = slab_column();
    SlabSums sums = {};
    add_entries(sums, o.column, o.value, span.first, (int)(span.last - span.first), o.b, o.n, j);
    if (r >= 0 && j < o.n) sums.store(o.c + (long long)r * o.n + j);
}

template <class Rows>
__device__ __forceinline__ void row_of_a_warp(const Rows& a, const Operands& o) {
    const int r = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP;
    one_row(a, o, r < o.rows ? r : -1);
}

template <class Rows>
__device__ __forceinline__ void sorted_rows(const Rows& a, const Operands& o, const int* order, int heavy) {
    constexpr int SLAB = WARP * VECTOR;
    __shared__ sum_t part[BLOCK_WARPS][SLAB];
    const int place = threadIdx.x / WARP;
    if ((int)blockIdx.x >= heavy) {
        const int at = heavy + (blockIdx.x - heavy) * BLOCK_WARPS + place;
        one_row(a, o, at < o.rows ? order[at] : -1);
        return;
    }
    const int r = order[blockIdx.x];
    const Span span = a.row(r);
    const int many = (int)(span.last - span.first);
    const int share = (many + BLOCK_WARPS * AT_ONCE - 1) / (BLOCK_WARPS * AT_ONCE) * AT_ONCE;
    const int first = min(place * share, many);
    SlabSums sums = {};
    add_entries(sums, o.column, o.value, span.first + first, min(share, many - first), o.b, o.n, slab_column());
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) part[place][threadIdx.x % WARP * VECTOR + i] = sums.f[i];
    __syncthreads();
    const int k = threadIdx.x, column = blockIdx.y * SLAB + k;
    if (k >= SLAB || column >= o.n) return;
    sum_t sum = 0;
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; ++i) sum += part[i][k];
    o.c[(long long)r * o.n + column] = from_float((float)sum);
}

#define OPERANDS                                                                                            \
    const int *__restrict__ column, const value_t *__restrict__ value, const value_t *__restrict__ b,       \
        value_t *__restrict__ c, int rows, int n
#define CSR_KERNEL(NAME, RUN)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME(const long long* __restrict__ pointer, OPERANDS) { \
        RUN(Csr{pointer}, Operands{column, value, b, c, rows, n});                                          \
    }
#define ELL_KERNEL(NAME, RUN)                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) NAME(const int* __restrict__ count, int slots, OPERANDS) { \
        RUN(Ell{count, slots}, Operands{column, value, b, c, rows, n});                                     \
    }
CSR_KERNEL(csr_v1, one_element<true>)
CSR_KERNEL(csr_v2, one_element<false>)
CSR_KERNEL(csr_v3, row_of_a_warp)
ELL_KERNEL(ell_v1, one_element<true>)
ELL_KERNEL(ell_v2, one_element<false>)
ELL_KERNEL(ell_v3, row_of_a_warp)
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
csr_v4(const long long* __restrict__ pointer, OPERANDS, const int* __restrict__ order, int heavy) {
    sorted_rows(Csr{pointer}, Operands{column, value, b, c, rows, n}, order, heavy);
}
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
ell_v4(const int* __restrict__ count, int slots, OPERANDS, const int* __restrict__ order, int heavy) {
    sorted_rows(Ell{count, slots}, Operands{column, value, b, c, rows, n}, order, heavy);
}
