"""What CUDA's language lets a kernel do, and what compile and launch take: results against NumPy, in both builds."""

from unittest.mock import call

import numpy as np
import pytest
import torch

from twell_lab import simulator
from twell_lab.core import CompileError, InputError

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")

SOURCE = r"""
#define KERNEL extern "C" __global__ void
#define ALL 0xffffffffu
#include <cuda_bf16.h>
#include "cuda_fp16.h"

__device__ __forceinline__ int thread() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
__device__ __forceinline__ int block() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

KERNEL places(int* out) {  // in blocks and grids of any dimension
    const int size = blockDim.x * blockDim.y * blockDim.z;
    out[block() * size + thread()] = threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * blockIdx.x +
                                     10000 * blockIdx.y + 100000 * blockIdx.z;
}

extern __shared__ unsigned char raw[];
KERNEL dynamic_shared(double* out, const double* in, int n) {
    double* s = (double*)raw;
    for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = s[n - 1 - i];
}

KERNEL block_votes(int* out, const int* in) {
    const int p = in[threadIdx.x];
    int* mine = out + 3 * threadIdx.x;
    mine[0] = __syncthreads_or(p > 60);
    mine[1] = __syncthreads_and(p >= 0);
    mine[2] = __syncthreads_count(p % 3 == 0);
}

KERNEL passed_on(int* out) {  // each thread waits in a loop for the one after it
    __shared__ int next;
    if (threadIdx.x == 0) next = blockDim.x - 1;
    __syncthreads();
    while (atomicAdd(&next, 0) != threadIdx.x) __nanosleep(20);
    out[threadIdx.x] = blockDim.x - threadIdx.x;
    atomicSub(&next, 1);
}

KERNEL shuffles(long long* out, const int* in, int by, int width) {
    const int v = in[threadIdx.x];
    long long* mine = out + 6 * threadIdx.x;
    mine[0] = __shfl_sync(ALL, v, by, width);
    mine[1] = __shfl_up_sync(ALL, v, by, width);
    mine[2] = __shfl_down_sync(ALL, v, by, width);
    mine[3] = __shfl_xor_sync(ALL, v, by, width);
    mine[4] = __shfl_sync(ALL, (long long)v << 40, by, width);
    mine[5] = (long long)(__shfl_sync(ALL, 0.5 * v, by, width) * 2 + __shfl_sync(ALL, (unsigned char)(v % 7), by, width) +
                          __shfl_sync(ALL, 0.25f * v, by, width) * 4);
}

KERNEL warp_wide(unsigned* out, const int* in, unsigned mask) {
    const int lane = threadIdx.x % warpSize, v = in[threadIdx.x];
    if (!(mask >> lane & 1)) return;
    unsigned* mine = out + 12 * threadIdx.x;
    mine[0] = __ballot_sync(mask, v % 3 == 0);
    mine[1] = __any_sync(mask, v == 40);
    mine[2] = __all_sync(mask, v < 32);
    mine[3] = __match_any_sync(mask, v % 5);
    mine[4] = __reduce_add_sync(mask, v);
    mine[5] = __reduce_min_sync(mask, v - 20);
    mine[6] = __reduce_max_sync(mask, v - 20);
    mine[7] = __reduce_min_sync(mask, (unsigned)(v - 20));
    mine[8] = __reduce_max_sync(mask, (unsigned)(v - 20));
    mine[9] = __reduce_and_sync(mask, (unsigned)v | 64u);
    mine[10] = __reduce_or_sync(mask, (unsigned)v);
    mine[11] = __reduce_xor_sync(mask, (unsigned)v);
    __syncwarp(mask);
}

KERNEL atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d, int* tickets) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(i, n), atomicSub(i + 1, n), atomicMax(i + 2, n - 50), atomicMin(i + 3, n - 50);
    atomicAnd(i + 4, ~(1 << n % 5)), atomicOr(i + 5, 1 << n % 7), atomicXor(i + 6, n);
    atomicAdd(u, 3u), atomicSub(u + 1, 1u), atomicMax(u + 2, (unsigned)n), atomicMin(u + 3, (unsigned)n + 5);
    atomicAnd(u + 4, ~(1u << n % 5)), atomicOr(u + 5, 1u << n % 7), atomicXor(u + 6, (unsigned)n);
    atomicAdd(l, 1ull << 33), atomicMax(l + 1, (unsigned long long)n << 40), atomicOr(l + 2, 1ull << n % 60);
    atomicAdd(f, 1.0f), atomicAdd(d, 0.5);
    tickets[atomicAdd(i + 7, 1)] = n;  // every ticket once
    for (int seen = u[8], now;; seen = now)  // adding with a compare-and-swap
        if ((now = (int)atomicCAS(u + 7, (unsigned)seen, (unsigned)seen + 2)) == seen) break;
    if (n == 0) atomicExch(f + 1, 7.0f), i[8] = atomicExch(i + 9, 5), l[4] = atomicCAS(l + 3, 9ull, 4ull);
}

__device__ float4 doubled(float4 v) { return make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w); }
KERNEL vectors(float4* out4, const float4* in4, int2* pairs, uint4* quads, const __nv_bfloat162* halves, float2* sums) {
    const int i = threadIdx.x;
    out4[i] = doubled(in4[i]);
    out4[i].w = 0.5f * in4[i].y;
    pairs[i] = make_int2(i, -i);
    const int2 p = pairs[i];
    quads[i] = make_uint4(p.x, p.y, __popc(i), __ffs(i));
    sums[i] = __bfloat1622float2(halves[i]);
    __shared__ float4 s[32];
    s[i] = in4[i];
    __syncthreads();
    const float4 other = s[i ^ 1];
    sums[i].x += other.x;
}

__constant__ int squares[6] = {0, 1, 4, 9, 16, 25};
__constant__ float weights[2][3] = {{0.5f, 1.5f, 2.5f}, {-1, -2, -3}};
struct Item {
    int key;
    double value[2];
    __device__ double sum() const { return value[0] + value[1]; }
};
template <class T, int N>
struct Ring {
    T at[N];
    __device__ T& operator[](int i) { return at[i % N]; }
};
template <int N>
__device__ int power(int base) { return base * power<N - 1>(base); }
template <>
__device__ int power<0>(int) { return 1; }
namespace inner {
template <class F>
__device__ double applied(F f, double x) { return f(f(x)); }
}
KERNEL language(double* out, const Item* items, long long* big, bool flag, unsigned char small, float scale, long long offset) {
    const int i = threadIdx.x;
    Ring<int, 3> ring;
    for (int k = 0; k < 5; ++k) ring[k] = squares[k];
    double* mine = out + 6 * i;
    mine[0] = ring[0] + 10 * ring[1] + 100 * ring[2];
    mine[1] = items[i].sum() * items[i].key;
    mine[2] = power<3>(i) + weights[i % 2][i % 3];
    mine[3] = inner::applied([=](double x) { return x * scale + small; }, i);
    mine[4] = flag ? min(i, 5) : max(i, 5);
    mine[5] = sqrt((double)i) + fabsf(-0.5f * i) + __fmaf_rn(2.0f, i, 1.0f);
    big[i] = offset + (long long)i * (1ll << 35);
}

struct Holds {
    __half few[3];
    float2 pair;
};
KERNEL shared_types(float* out) {
    static __shared__ Holds structs[32];
    __shared__ __align__(128) float4 tile[2][16];
    __shared__ __nv_bfloat16 last[32];
    const int i = threadIdx.x;
    for (int k = 0; k < 3; ++k) structs[i].few[k] = __float2half(k + i);
    structs[i].pair = make_float2(i, -i);
    tile[i / 16][i % 16] = make_float4(1, 2, 3, i);
    last[i] = __float2bfloat16(i * 0.5f);
    __syncthreads();
    const Holds other = structs[31 - i];
    out[i] = __half2float(other.few[2]) + 100 * other.pair.x + tile[1 - i / 16][i % 16].w * 10000 + __bfloat162float(last[i]);
}

__device__ int counter;
KERNEL device_variable(int* out) {
    if (threadIdx.x == 0) counter = 5;
    __syncthreads();
    out[threadIdx.x] = counter + threadIdx.x;
}
KERNEL many_blocks(int* out, int n) {
    __shared__ int part[33];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x] = i < n ? i : 0;
    __syncthreads();
    for (int step = 32; step; step /= 2) {  // 33 threads: the last one is left over
        if (threadIdx.x < step && threadIdx.x + step < blockDim.x) part[threadIdx.x] += part[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> simulator.Program:
    path = tmp_path_factory.mktemp("language") / "language.cu"
    path.write_text(SOURCE)
    return simulator.compile(path)


@pytest.fixture(params=[None, "faults", "counts"])
def launch(request, program):
    """Launches a kernel in the fast or the watched build."""
    return lambda *arguments, **options: program.launch(*arguments, watch=request.param, **options)


@pytest.mark.parametrize(
    "grid,block", [(1, 1), (3, 33), ((2, 3), (5, 4)), ((2, 2, 3), (3, 2, 5)), ((1, 1, 4), (1, 1, 31)), (7, (8, 8, 2))]
)
def test_every_thread_knows_its_place(grid, block, launch):
    three = lambda size: ((size,) if isinstance(size, int) else size) + (1,) * (3 - len(np.atleast_1d(size)))  # noqa: E731
    (gx, gy, gz), (bx, by, bz) = three(grid), three(block)
    out = np.full(gx * gy * gz * bx * by * bz, -1, np.int32)
    run = launch("places", grid, block, (out,))
    z, y, x, tz, ty, tx = np.indices((gz, gy, gx, bz, by, bx))
    assert np.array_equal(out, (tx + 10 * ty + 100 * tz + 1000 * x + 10000 * y + 100000 * z).reshape(-1))
    assert (run.grid, run.block, run.kernel) == ((gx, gy, gz), (bx, by, bz), "places") and run.seconds > 0


@pytest.mark.parametrize("n", [1, 100, 29_056])
def test_dynamic_shared_memory(n, launch):
    given, out = np.arange(n, dtype=np.float64), np.zeros(n)
    launch("dynamic_shared", 1, 64, (out, given, n), shared_bytes=8 * n)
    assert np.array_equal(out, given[::-1])


@pytest.mark.parametrize("threads", [1, 31, 61, 64, 100])
def test_votes_of_a_block(threads, launch):
    given, out = np.arange(threads, dtype=np.int32), np.zeros((threads, 3), np.int32)
    launch("block_votes", 1, threads, (out, given))
    assert np.array_equal(out, [[threads > 61, 1, -(-threads // 3)]] * threads)


@pytest.mark.parametrize("threads", [1, 32, 100])
def test_threads_of_a_block_wait_for_each_other_in_loops(threads, launch):
    out = np.zeros(threads, np.int32)
    launch("passed_on", 1, threads, (out,))
    assert np.array_equal(out, np.arange(threads, 0, -1))


@pytest.mark.parametrize("width", [32, 16, 8, 4, 2, 1])
@pytest.mark.parametrize("by", [0, 1, 3, 17, 31])
def test_shuffles(by, width, launch):
    given, out = np.random.default_rng(by).integers(0, 1000, 64).astype(np.int32), np.zeros((64, 6), np.int64)
    launch("shuffles", 1, 64, (out, given, by, width))
    lane = np.arange(32)
    first = lane // width * width
    sources = [
        first + by % width,
        np.where(lane - by < first, lane, lane - by),
        np.where(lane + by >= first + width, lane, lane + by),
        np.where((lane ^ by) >= first + width, lane, lane ^ by),
    ]
    for column, source in enumerate(sources):
        assert np.array_equal(out[:, column].reshape(2, 32), given.reshape(2, 32)[:, source]), column
    taken = given.reshape(2, 32)[:, sources[0]].reshape(-1).astype(np.int64)
    assert np.array_equal(out[:, 4], taken << 40) and np.array_equal(out[:, 5], 2 * taken + taken % 7)


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FFFF, 0x80000001, 0x00F0F00F, 0x00000010])
def test_operations_of_a_warp(mask, launch):
    threads = 50  # the second warp is not whole, and its lanes that are not there need not be waited for
    given, out = np.arange(threads, dtype=np.int32), np.full((threads, 12), 77, np.uint32)
    launch("warp_wide", 1, threads, (out, given, mask))
    for warp in (0, 1):
        lanes = [lane for lane in range(32) if mask >> lane & 1 and 32 * warp + lane < threads]
        v = np.array([32 * warp + lane for lane in lanes], np.int64)
        bits = lambda keep: int(sum(1 << lane for lane, kept in zip(lanes, keep) if kept))  # noqa: E731
        shifted = (v - 20) % 2**32
        signed = [(v - 20).min() % 2**32, (v - 20).max() % 2**32]
        logical = [np.bitwise_and.reduce(v | 64), np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v)]
        for lane, own in zip(lanes, v):
            votes = [bits(v % 3 == 0), 40 in v, all(v < 32), bits(v % 5 == own % 5)]
            expected = [*votes, v.sum(), *signed, shifted.min(), shifted.max(), *logical]
            assert out[32 * warp + lane].tolist() == [int(e) for e in expected]
    silent = [t for t in range(threads) if not mask >> t % 32 & 1]
    assert (out[silent] == 77).all()


def test_atomics_of_many_blocks(launch):
    blocks, threads = 30, 40
    n = np.arange(blocks * threads)
    i, u, l = np.zeros(10, np.int32), np.zeros(9, np.uint32), np.zeros(5, np.uint64)  # noqa: E741
    f, d, tickets = np.zeros(2, np.float32), np.zeros(1), np.full(len(n), -1, np.int32)
    i[3:5], u[1], u[3:5], l[3] = [99, -1], 5000, [99, 2**32 - 1], 9
    launch("atomics", blocks, threads, (i, u, l, f, d, tickets))
    assert i[:7].tolist() == [n.sum(), -n.sum(), n.max() - 50, -50, -32, 127, np.bitwise_xor.reduce(n)]
    assert u[:8].tolist() == [3 * len(n), 5000 - len(n), n.max(), 5, 2**32 - 32, 127, i[6], 2 * len(n)]
    assert l.tolist() == [len(n) << 33, int(n.max()) << 40, 2**60 - 1, 4, 9]
    assert f.tolist() == [len(n), 7] and d[0] == len(n) / 2 and i[7:].tolist() == [len(n), 0, 5]
    assert np.array_equal(np.sort(tickets), n)


def test_vector_types(launch):
    given = torch.randn(32, 4)
    halves = torch.randn(32, 2).bfloat16()
    out, sums = torch.zeros(32, 4), torch.zeros(32, 2)
    pairs, quads = np.zeros((32, 2), np.int32), np.zeros((32, 4), np.uint32)
    launch("vectors", 1, 32, (out, given, pairs, quads, halves, sums))
    assert torch.equal(out[:, :3], 2 * given[:, :3]) and torch.equal(out[:, 3], given[:, 1] / 2)
    i = np.arange(32)
    assert np.array_equal(pairs, np.stack([i, -i], 1))
    ffs = [(k & -k).bit_length() for k in range(32)]
    assert np.array_equal(quads, np.stack([i, -i % 2**32, [k.bit_count() for k in range(32)], ffs], 1))
    expected = halves.float()
    expected[:, 0] += given[i ^ 1, 0]
    assert torch.equal(sums, expected)


def test_structs_templates_constants_and_every_kind_of_number(launch):
    items = np.zeros(20, np.dtype([("key", "i4"), ("value", "f8", 2)], align=True))
    items["key"], items["value"] = np.arange(20), np.random.default_rng(0).random((20, 2))
    out, big = np.zeros((20, 6)), np.zeros(20, np.int64)
    launch("language", 1, 20, (out, items, big, True, 200, 0.5, -(2**40)))
    i = np.arange(20)
    weights = np.array([[0.5, 1.5, 2.5], [-1, -2, -3]])
    columns = [np.full(20, 9 + 160 + 400), items["value"].sum(1) * items["key"], i**3 + weights[i % 2, i % 3]]
    columns += [(i * 0.5 + 200) * 0.5 + 200, np.minimum(i, 5), np.sqrt(i) + 0.5 * i + 2 * i + 1]
    assert np.allclose(out, np.stack(columns, 1), rtol=1e-15)
    assert np.array_equal(big, -(2**40) + i * 2**35)


def test_types_in_shared_memory(launch):
    out, i = np.zeros(32, np.float32), np.arange(32)
    launch("shared_types", 1, 32, (out,))
    assert np.array_equal(out, 33 - i + 100 * (31 - i) + 10000 * (i ^ 16) + i / 2)


def test_a_variable_of_the_device(launch):
    out = np.zeros(40, np.int32)
    launch("device_variable", 1, 40, (out,))
    assert np.array_equal(out, np.arange(40) + 5)


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_more_blocks_than_cores(cores, launch):
    out = np.zeros(1000, np.int32)
    launch("many_blocks", 1000, 33, (out, 32_990), cores=cores)
    n = np.arange(33_000)
    assert np.array_equal(out, np.where(n < 32_990, n, 0).reshape(1000, 33).sum(1))


# ---- what is refused


def test_arrays_that_share_memory_still_do(program):
    both = np.arange(100, dtype=np.float64)
    program.launch("dynamic_shared", 1, 32, (both[:50], both[50:], 50), shared_bytes=400)
    assert np.array_equal(both[:50], np.arange(99, 49, -1)) and np.array_equal(both[50:], np.arange(50, 100))
    both = np.arange(10, dtype=np.float64)
    program.launch("dynamic_shared", 1, 32, (both, both, 10), shared_bytes=80)
    assert np.array_equal(both, np.arange(10)[::-1])


ITEMS, DOUBLES, LONGS = np.zeros(4, np.int32), np.zeros(4), np.zeros(4, np.int64)
OUT = (ITEMS,)
REFUSED = {
    "has no kernel 'place'": call("place", 1, 1, OUT),
    r"places takes 1 arguments \(out\); 2": call("places", 1, 1, (ITEMS, 3)),
    "out of places is of type list": call("places", 1, 1, ([1, 2],)),
    "out of places is a NumPy array with strides": call("places", 1, 1, (np.zeros((4, 4), np.int32)[:, 0],)),
    "out of places is not contiguous": call("places", 1, 1, (torch.zeros(4, 4).t()[:, :2],)),
    "out of places is meta": call("places", 1, 1, (torch.zeros(4, device="meta"),)),
    "n of many_blocks is 2.5": call("many_blocks", 1, 33, (ITEMS, 2.5)),
    "n of many_blocks is 2147483648; -2147483648 to 2147483647": call("many_blocks", 1, 33, (ITEMS, 2**31)),
    "small of language is -1; 0 to 255": call("language", 1, 1, (DOUBLES, ITEMS, LONGS, True, -1, 1.0, 0)),
    "scale of language is 'a'": call("language", 1, 1, (DOUBLES, ITEMS, LONGS, True, 1, "a", 0)),
    r"out of language is int32; the kernel takes double\*": call(
        "language", 1, 1, (ITEMS, ITEMS, LONGS, True, 1, 1.0, 0)
    ),
    "block is .*1025": call("places", 1, 1025, OUT),
    r"block is \(33, 32, 1\)": call("places", 1, (33, 32), OUT),
    r"grid is \(1, 0\)": call("places", (1, 0), 1, OUT),
    "watch is 'everything'": call("places", 2, 2, OUT, watch="everything"),
    "trace is 2; a block number from 0 to 1": call("places", 2, 2, OUT, trace=2),
    "shared_bytes is 1000000": call("places", 2, 2, OUT, shared_bytes=10**6),
    "cores is 0": call("places", 2, 2, OUT, cores=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_launches_that_cannot_be(message, program):
    with pytest.raises(InputError, match=message):
        program.launch(*REFUSED[message].args, **REFUSED[message].kwargs)
    assert not ITEMS.any()


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(CompileError, match="no_such.cu"):
        simulator.compile("no_such.cu")
    path = tmp_path / "mistake.cu"
    path.write_text('extern "C" __global__ void k(int* out) {\n    out[0] = undeclared;\n}\n')
    with pytest.raises(CompileError, match=r"mistake.cu:2.*undeclared"):
        simulator.compile(path).launch("k", 1, 1, (np.zeros(1, np.int32),))
    path.write_text("__device__ int nothing_to_launch;\n")
    program = simulator.compile(path)
    assert program.kernels == {}
    with pytest.raises(InputError, match="has no kernel 'k'"):
        program.launch("k", 1, 1, ())
