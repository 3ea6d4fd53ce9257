"""Kernels that do right what those of test_faults.py do wrong: no fault may be found in them."""

import pytest
import torch

from twell_lab import simulator

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")

CORRECT = r"""
#include <stdlib.h>
#include <new>
#define KERNEL extern "C" __global__ void
#define T threadIdx.x

KERNEL double_buffered(float* out, const float* in, int steps) {
    __shared__ float s[2][64];
    float v = in[T];
    for (int i = 0; i < steps; ++i) {
        s[i % 2][T] = v;
        __syncthreads();  // one barrier a step: who runs ahead writes the other half
        v += s[i % 2][(T + 1) % 64];
    }
    out[T] = v;
}
KERNEL exchange_in_a_warp(float* out, const float* in, int) {
    __shared__ float s[64];
    s[T] = in[T];
    __syncwarp();
    const float v = s[T ^ 1];
    __syncwarp();
    s[T] = v;
    __syncwarp();
    out[T] = s[T ^ 1] + v;
}
KERNEL exchange_of_half_a_warp(float* out, const float* in, int) {
    __shared__ float s[64];
    const unsigned half = T % 32 < 16 ? 0xffffu : 0xffff0000u;
    s[T] = in[T];
    __syncwarp(half);
    out[T] = s[T ^ 8] + __popc(__ballot_sync(half, T % 3 == 0));
}
KERNEL chain_of_syncwarps(float* out, const float* in, int) {  // 0 to 1 to 2: order is passed on
    __shared__ float s[1];
    if (T == 0) s[0] = in[0];
    if (T < 2) __syncwarp(3u);
    if (T == 1 || T == 2) __syncwarp(6u);
    if (T == 2) out[0] = s[0];
}
KERNEL early_exit(float* out, const float* in, int n) {
    __shared__ float s[64];
    if (T >= n) return;
    s[T] = in[T];
    __syncthreads();
    out[T] = s[n - 1 - T];
}
KERNEL writer_after_readers(float* out, const float* in, int) {
    __shared__ float s;
    for (int i = 0; i < 3; ++i) {
        if (T == i) s = in[i];
        __syncthreads();
        out[T] = s + i;
        __syncthreads();
    }
}
KERNEL own_element(float* out, const float* in, int n) {
    __shared__ float s[64];
    s[T] = 0;
    for (int i = 0; i < n; ++i) s[T] += in[i], out[T] = s[T];
}
KERNEL atomics(float* out, const float* in, int n) {
    __shared__ int histogram[4];
    if (T < 4) histogram[T] = 0;
    __syncthreads();
    atomicAdd(histogram + (T + blockIdx.x) % 4, 1);
    __syncthreads();
    if (T < 4) atomicAdd(out + T, (float)histogram[T]);
    atomicMax((int*)out + 8, (int)T);
}
KERNEL last_block_adds_up(float* out, const float* in, int n) {  // as CUDA's sample threadFenceReduction does
    __shared__ bool last;
    if (T == 0) {
        out[8 + blockIdx.x] = in[blockIdx.x];
        __threadfence();
        last = atomicAdd((unsigned*)out, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && T == 0) {
        out[1] = 0;
        for (int b = 0; b < gridDim.x; ++b) out[1] += out[8 + b];
    }
}
KERNEL through_global_memory(float* out, const float* in, int) {
    out[T] = in[T];
    __syncthreads();
    const float v = out[63 - T];
    __syncthreads();
    out[T] = v + 1;
}
KERNEL vote_before_exit(float* out, const float* in, int n) {
    if (__syncthreads_or(T >= n && in[T] < 0)) return;
    if (T % 32 >= n % 32) return;
    out[T] = __shfl_sync(0xffffffffu, in[T], 0);  // lanes that have left need not come
}
KERNEL takes_and_gives_back(float* out, const float* in, int n) {
    for (int i = 0; i < n; ++i) {
        void* volatile all[] = {malloc(16 * i), calloc(i, 40), new float[i + 1], new (std::nothrow) double, aligned_alloc(64, 64), nullptr};
        all[1] = realloc(all[1], 100000 * (i % 3 + 1));
        bool there = true;
        for (int k = 0; k < 5; ++k) there = there && all[k] && (size_t)all[k] % 16 == 0;
        free(all[0]), free(all[1]), delete[] (float*)all[2], delete (double*)all[3], free(all[4]), free(all[5]);
        out[T] = there ? i : -2;
    }
}
KERNEL uses_what_it_took(float* out, const float* in, int n) {
    int* own = (int*)calloc(n, 4);
    for (int i = 0; i < n; ++i) out[T] = own[i] == 0 ? out[T] : -2, own[i] = T + i;
    own = (int*)realloc(own, 400000);
    __syncthreads();
    out[T] = 0;
    for (int i = 0; i < n; ++i) out[T] += own[i];
    free(own);
}
"""


@pytest.fixture(scope="module")
def correct(tmp_path_factory) -> simulator.Program:
    path = tmp_path_factory.mktemp("correct") / "correct.cu"
    path.write_text(CORRECT)
    return simulator.compile(path)


def pyramid(steps: int) -> torch.Tensor:
    v = torch.arange(64.0)
    for _ in range(steps):
        v = v + v.roll(-1)
    return v


COUNT = torch.arange(64.0)
RIGHT = {
    "double_buffered": (1, 5, lambda out: torch.equal(out, pyramid(5))),
    "exchange_in_a_warp": (1, 0, lambda out: torch.equal(out, COUNT + COUNT.view(-1, 2).flip(1).reshape(-1))),
    "exchange_of_half_a_warp": (1, 0, lambda out: out[3] == 11 + 6 and out[17] == 25 + 5),
    "chain_of_syncwarps": (1, 0, lambda out: out[0] == 0),
    "early_exit": (1, 37, lambda out: torch.equal(out[:37], COUNT[:37].flip(0)) and (out[37:] == -1).all()),
    "writer_after_readers": (1, 0, lambda out: (out == 4).all()),
    "own_element": (1, 6, lambda out: (out == 15).all()),
    "atomics": (50, 0, lambda out: (out[:4] == 800 - 1).all() and out.view(torch.int32)[8] == 63),
    "last_block_adds_up": (30, 0, lambda out: out[1] == COUNT[:30].sum()),
    "through_global_memory": (1, 0, lambda out: torch.equal(out, COUNT.flip(0) + 1)),
    "takes_and_gives_back": (1, 9, lambda out: (out == 8).all()),
    "vote_before_exit": (
        1,
        40,
        lambda out: (out[:8] == 0).all() and (out[32:40] == 32).all() and (out[40:] == -1).all(),
    ),
}


def test_memory_that_an_unwatched_kernel_takes(correct):
    for _ in range(3):
        out = torch.full((64,), -1.0)
        correct.launch("uses_what_it_took", 50, 64, (out, COUNT.clone(), 10), watch=None)
        assert torch.equal(out, 10 * COUNT + 45)


@pytest.mark.parametrize("kernel", RIGHT)
def test_what_is_correct_is_not_blamed(kernel, correct):
    blocks, number, right = RIGHT[kernel]
    for watch in ("faults", "counts", None):
        out = torch.full((64,), -1.0)
        if kernel == "atomics":
            out.view(torch.int32)[8] = 0
        if kernel == "last_block_adds_up":
            out.view(torch.int32)[0] = 0
        correct.launch(kernel, blocks, 64, (out, COUNT.clone(), number), watch=watch)
        assert right(out), (watch, out)


def test_a_trace_names_the_lanes_that_had_left_before_an_operation_that_names_them(tmp_path):
    """No fault: a lane that has left votes no. Lanes of a partial mask, and lanes that a narrow block has not, are none."""
    file = tmp_path / "votes.cu"
    file.write_text(
        'extern "C" __global__ void votes(int* out, int n, unsigned mask) {\n'
        "    if (threadIdx.x % 32 < n) out[threadIdx.x] = __popc(__ballot_sync(mask, 1));\n}\n"
    )

    def absent(threads: int, n: int, mask: int) -> list[tuple[int, ...]]:
        out = torch.zeros(threads, dtype=torch.int32)
        trace = simulator.compile(file).launch("votes", 1, threads, (out, n, mask), trace=0).trace
        return [step.absent for step in trace if step.kind == "warp"]

    every = 2**32 - 1
    assert absent(64, 30, every) == [(30, 31), (62, 63)] and absent(64, 32, every) == [(), ()]
    assert absent(32, 5, 0b11111) == [()] and absent(32, 5, 0b1011111) == [(6,)] and absent(20, 20, every) == [()]
