"""Sources that the tests of source.py and toolchain.py share."""

from twell_lab.simulator import toolchain

KERNEL = 'extern "C" __global__ void k(float* x) {\n%s\n}\n'
# Kernels in all spellings; shared variables of equal names, dynamic ones, some in macros and templates.
DECLARES = """
#include "more.cuh"
#define PAD 1
const int ROWS = 4;
constexpr unsigned COLS = ROWS * 8u;
typedef float real; using word = unsigned long long int; typedef const word* words_t;
struct Pair { int a; float b; };
template <int N> __device__ float f(float v) { __shared__ real t[N][2]; t[0][0] = v; return t[N - 1][1]; }
namespace inner { __device__ int g() { __shared__ int part; part = 1; return part; } }
struct S { __device__ int h() { __shared__ short part[2 * sizeof(real)], q[3]; part[0] = q[0]; return part[0]; } };
__shared__ double whole[3];
static __device__ int same(int a) { __shared__ int part[7]; part[0] = a; return part[a]; }
template <class T> __global__ void generic(T* x) { x[0] = 0; }
static __global__ void __launch_bounds__(32)
plain(const word* __restrict__ w, const Pair p, unsigned char, real v[3], long long int n, words_t u,
      float2* const q) {}
__global__ void later(int);
namespace inner { __global__ void hidden(void) {} }
#if PAD == 2
__global__ void inactive() {}
#endif
#define KERNEL(NAME) extern "C" __global__ void NAME(float* x, int n = ROWS) { \\
    __shared__ int part[2]; part[0] = n; x[2] = part[0]; \\
    { __shared__ int part[2]; part[1] = n; x[3] = part[1]; } \\
    extern __shared__ float buffer[]; \\
    __shared__ real tile[ROWS][COLS + PAD]; \\
    __shared__ Pair pairs[5]; \\
    __shared__ float4 four[(1 << 2) / 2]; \\
    float __shared__ odd[2]; \\
    tile[0][0] = odd[0]; pairs[0].a = 1; four[0].x = 2; buffer[threadIdx.x] = f<6>(1) + f<3>(2) + more(1); \\
    S s; x[1] = buffer[0] + inner::g() + s.h() + same(2) + whole[0]; \\
}
KERNEL(k)
"""
MORE = """inline __device__ int more(int a) {
    __shared__ int beside;  // __shared__ int no;
    return beside = a;
}
"""
# name, function -> type, shape
SHARED = {
    ("part", "inner::g"): ("int", ()),
    ("whole", ""): ("double", (3,)),
    ("part", "same"): ("int", (7,)),
    ("tile", "k"): ("float", (4, 33)),
    ("pairs", "k"): ("Pair", (5,)),
    ("four", "k"): ("float4", (2,)),
    ("odd", "k"): ("float", (2,)),
    ("part", "k"): ("int", (2,)),
    ("part", "S::h"): ("short", (8,)),
    ("q", "S::h"): ("short", (3,)),
    ("t", "f<6>"): ("float", (6, 2)),
    ("t", "f<3>"): ("float", (3, 2)),
    ("beside", "more"): ("int", ()),
    ("buffer", ""): ("float", (toolchain.MOST_SHARED // 4,)),
}
