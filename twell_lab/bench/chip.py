"""Latencies and rates of a Hopper GPU, few of which its datasheet has: how long a memory takes to answer, and how many
bytes of it can be read in a second.

A latency is that of a pointer chase: one thread loads, each time from where the load before said. Where it ends, and
what is read, is compared with what torch computes before anything is timed."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from .. import core
from ..ops import clock
from . import rows

SOURCE = """
__device__ __forceinline__ void walk(const volatile char* ring, int steps, unsigned* end) {
    unsigned at = 0;
    for (int i = 0; i < steps; ++i) at = *(const volatile unsigned*)(ring + at);  // volatile: not from the L1 cache
    *end = at;
}
// Each word of a ring is the place of the next one, in bytes. where: 0 as it is given, 1 copied to shared memory, 2 the
// same in the other block of the cluster.
extern "C" __global__ void __cluster_dims__(2) chase(const unsigned* ring, int where, int steps, unsigned* end) {
    __shared__ unsigned own[1024];
    own[threadIdx.x] = ring[threadIdx.x];
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (where == 0) walk((const char*)ring, steps, end);
        else if (where == 1) walk((const char*)own, steps, end);
        else walk((const char*)__cluster_map_shared_rank(own, 1), steps, end);
    }
    __cluster_barrier_arrive();  // a block's shared memory is there until it ends
    __cluster_barrier_wait();
}
extern "C" __global__ void read(const uint4* x, int count, int laps, unsigned* sum) {
    unsigned all = 0;
    for (int lap = 0; lap < laps; ++lap)
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
            const uint4 v = __ldcg(x + i);  // not from the L1 cache
            all += v.x + v.y + v.z + v.w;
        }
    atomicAdd(sum, all);
}
"""
LATENCIES = {  # words of the ring, bytes from one place to the next, where, steps: in the L2 cache 128 laps, one cold
    "shared memory": (1024, 4, 1, 2**16),
    "shared memory of a neighbour": (1024, 4, 2, 2**14),
    "L2 cache": (1024, 128, 0, 2**17),
    "memory": (2**22, 128, 0, 2**13),
}
RATES = {"L2 cache": (2**20, 101), "memory": (2**26, 1)}  # vectors of 16 bytes, how often they are read
BLOCKS = 264  # two for each multiprocessor of an H100 or H200


def ring(count: int, apart: int, steps: int, device: str) -> tuple[Tensor, int]:
    """Return a ring of `count` words in random order, `apart` bytes from each other, int32, and where a walk of so many
    steps from its start ends."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).mul(apart).to(device)
    order = order.roll(-int(order.argmin()))  # 0 comes first
    words = torch.zeros(count * apart // 4, dtype=torch.int32, device=device)
    words[order // 4] = order.roll(-1).int()
    return words, int(order[steps % count])


def launched(name: str, blocks: int, given: Tensor, numbers: tuple[int, int], wanted: int) -> rows.Call:
    """Return a launch of a kernel of SOURCE, of 1024 threads a block, once it left the wanted word."""
    core.let_cupy_start()
    import cupy

    out = torch.zeros(1, dtype=torch.int32, device=given.device)
    arguments = (np.uint64(given.data_ptr()), *map(np.int32, numbers), np.uint64(out.data_ptr()))
    kernel = cupy.RawKernel(SOURCE, name, ("--std=c++17",))
    call = lambda turn, alive=(given, out): kernel((blocks,), (1024,), arguments)
    call(0)
    rows.hold(name, (int(out) - wanted) % 2**32, 0)
    return call


def chip_rows(left_out: dict[str, str], device: str = "cuda") -> list[dict]:
    """Return rows of kind "chip": latencies, `ms` for so many `steps`, and rates, `ms` for so many `bytes` read."""

    def latency(count: int, apart: int, where: int, steps: int) -> rows.Entry:
        words, end = ring(count, apart, steps, device)
        return launched("chase", 2, words, (where, steps), end), {"steps": steps}

    def rate(vectors: int, laps: int) -> rows.Entry:
        x = torch.randint(-(2**31), 2**31, (4 * vectors,), dtype=torch.int32, device=device)
        call = launched("read", BLOCKS, x, (vectors, laps), laps * int(x.sum(dtype=torch.int64)))
        return call, {"bytes": laps * x.nbytes}

    ways = {f"{of}, latency": partial(latency, *how) for of, how in LATENCIES.items()}
    ways |= {f"{of}, rate": partial(rate, *how) for of, how in RATES.items()}
    calls, facts = rows.admit(ways, left_out)
    shared = rows.about("chip", torch.empty(0, dtype=torch.int32, device=device), "one thread, or all")
    return rows.table(shared, clock.time_cuda(calls, rounds=10), facts, base=None)


def sections(left_out: dict) -> rows.Sections:
    """Return the one step of the record."""
    return {"chip": [partial(chip_rows, left_out)]}
