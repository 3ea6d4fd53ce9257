"""Small kernels that are wrong, with the fault that each must give, and small ones that are right and must run without
one and give NumPy's values: on one core and on two. A record of kind `sanitizer` says what the four tools of NVIDIA's
compute-sanitizer report of the same kernels on a GPU; WHY says where they and the simulator differ.

Every kernel is `k(int* a, int* b, const int* x)` with a and b of 1,024 zeros and x of 1,024 small numbers; T is the
thread in its block, B the block, N the threads of a block."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from twell_lab import records, simulator
from twell_lab.core import CompileError
from twell_lab.simulator import faults

pytestmark = pytest.mark.skipif(not simulator.available(), reason="the simulator needs a C++ compiler")
X = np.random.default_rng(0).integers(-9, 10, 1024).astype(np.int32)
COMMON = """
#define T ((int)threadIdx.x)
#define B ((int)blockIdx.x)
#define N ((int)blockDim.x)
#define ALL 0xffffffffu
__device__ int counter, total, table[64];
__device__ int warp_sum(int v) {
    for (int by = 16; by; by /= 2) v += __shfl_down_sync(ALL, v, by);
    return v;
}
"""


@dataclass(frozen=True)
class Kernel:
    """body: of the kernel; a launch of grid x block raises `fault`, if there is one."""

    body: str
    grid: int
    block: int
    fault: str


def kernels(text: str) -> dict[str, Kernel]:
    """Name -> kernel, from lines "name: body" or "name <<<grid, block>>>: body" that may go on on lines further in; without
    <<<>>> it is one block of 64. A line "# fault" stands before those that have it."""
    found, fault = {}, ""
    for line in text.strip().replace("\n    ", " ").split("\n"):
        if line.startswith("# "):
            fault = line[2:]
        else:
            name, grid, block, body = re.fullmatch(r"(\w+)(?: <<<(\d+), (\d+)>>>)?: (.*)", line).groups()
            found[name] = Kernel(body, int(grid or 1), int(block or 64), fault)
    return found


WRONG = """
# SharedRace
reversed: __shared__ int s[64]; s[T] = x[T]; a[T] = s[63 - T];
one_writes_all_read: __shared__ int s; if (T == 0) s = 5; a[T] = s;
reduction_without_the_inner_barrier: __shared__ int s[64]; s[T] = x[T]; __syncthreads(); for (int by = 32; by; by /=
    2) if (T < by) s[T] += s[T + by]; if (T == 0) a[0] = s[0];
scan_in_place: __shared__ int s[64]; s[T] = x[T]; __syncthreads(); for (int by = 1; by < 64; by *= 2) { if (T >= by)
    s[T] += s[T - by]; __syncthreads(); } a[T] = s[T];
warp_sync_between_warps: __shared__ int s[64]; s[T] = x[T]; __syncwarp(); a[T] = s[63 - T];
warp_without_sync <<<1, 32>>>: __shared__ int s[64]; s[T] = x[T]; a[T] = s[T ^ 1];
zeroed_then_counted: __shared__ int s; if (T == 0) s = 0; atomicAdd(&s, 1); __syncthreads(); a[T] = s;
counted_then_read: __shared__ int s; if (T == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); if (T == 63) a[0] = s;
# GlobalRace
global_reversed: a[T] = x[T]; b[T] = a[63 - T];
shift_in_place: a[T] = a[T + 1];
one_word_of_blocks <<<8, 1>>>: a[0] += 1;
block_reads_anothers <<<2, 64>>>: a[64 * B + T] = x[T]; b[T] = a[T];
block_overwrites_what_another_reads <<<2, 64>>>: if (B == 0) b[T] = a[T]; else a[T] = 1;
global_counted_then_read: atomicAdd(a, 1); if (T == 63) a[1] = a[0];
read_beside_atomics: if (a[0] < 50) atomicAdd(a, 1);
device_variable <<<8, 1>>>: total += 1;
last_block_without_fence <<<8, 1>>>: a[1 + B] = 1; if (atomicAdd(&counter, 1) == 7) { for (int i = 0; i < 8; ++i) a[0]
    += a[1 + i]; counter = 0; }
last_block_without_barrier <<<4, 64>>>: __shared__ bool last; b[64 * B + T] = 1; __threadfence(); if (T == 0) last =
    atomicAdd(&counter, 1) == 3; __syncthreads(); if (!last) return; if (T == 0) { for (int i = 0; i < 256; ++i) a[0]
    += b[i]; counter = 0; }
flag_without_fence <<<2, 1>>>: if (B == 0) { a[0] = 7; atomicExch(b, 1); } else { while (!atomicAdd(b, 0)) {} a[1] =
    a[0]; }
volatile_flag_without_fence <<<2, 1>>>: volatile int* flag = b; if (B == 0) { a[0] = 7; *flag = 1; } else { while
    (!*flag) {} a[1] = a[0]; }
fence_of_the_block_for_the_grid <<<2, 1>>>: if (B == 0) { a[0] = 7; __threadfence_block(); atomicExch(b, 1); } else {
    while (!atomicAdd(b, 0)) {} a[1] = a[0]; }
another_flag <<<2, 1>>>: if (B == 0) { a[0] = 7; __threadfence(); atomicExch(b, 1); } else { atomicAdd(b + 1, 0); a[1]
    = a[0]; }
vector_over_a_scalar: if (T == 0) *(int4*)a = make_int4(1, 2, 3, 4); else a[T % 4] = 1;
halves_of_one_word: ((short*)a)[T / 2] = 1;
# MismatchedBarrier
two_barriers: if (T < 32) __syncthreads(); else { a[T] = 1; __syncthreads(); }
barrier_in_an_uneven_loop: for (int i = 0; i < 1 + T / 32; ++i) __syncthreads(); a[T] = 1; __syncthreads();
shuffle_in_a_branch <<<1, 32>>>: int v = T; if (T < 16) v = __shfl_sync(ALL, v, 0); else __syncwarp(); a[T] = v;
# WarpFault
shuffle_at_two_places <<<1, 32>>>: int v = T; if (T < 16) v = __shfl_xor_sync(ALL, v, 1); else v =
    __shfl_xor_sync(ALL, v, 2); a[T] = v;
ballot_at_two_places <<<1, 32>>>: if (T < 16) a[T] = __ballot_sync(ALL, 1); else a[T] = __ballot_sync(ALL, T > 20);
two_masks <<<1, 32>>>: a[T] = __shfl_xor_sync(T < 16 ? 0x1ffffu : ALL, T, 1);
sync_with_two_masks <<<1, 32>>>: __syncwarp(T < 16 ? 0x1ffffu : ALL); a[T] = T;
mask_without_the_caller <<<1, 32>>>: a[T] = __shfl_sync(0xffffu, T, 0);
lane_out_of_the_mask <<<1, 32>>>: if (T < 16) a[T] = __shfl_sync(0xffffu, T, 20);
width_64 <<<1, 32>>>: a[T] = __shfl_down_sync(ALL, T, 1, 64);
# OutOfBounds
past_the_end_of_a_device_array: table[T + 1] = 1;
negative_shared: __shared__ int s[64]; s[T - 1] = x[T]; a[T] = 1;
# Misaligned
float2_at_four_bytes: __shared__ float2 s[4]; if (T < 4) s[T] = make_float2(T, T); __syncthreads(); float2 v =
    *(float2*)((float*)s + 1); a[T] = (int)v.x;
float4_at_eight_bytes: if (T == 0) { float4* to = (float4*)(table + 2); *to = make_float4(1, 2, 3, 4); }
"""
RIGHT = """
reversed: __shared__ int s[64]; s[T] = x[T]; __syncthreads(); a[T] = s[63 - T];
reduction_of_a_warp <<<1, 32>>>: int v = warp_sum(x[T]); if (T == 0) a[0] = v;
warp_exchange: __shared__ int s[64]; s[T] = x[T]; __syncwarp(); a[T] = s[T ^ 1];
scan_in_place: __shared__ int s[64]; s[T] = x[T]; __syncthreads(); for (int by = 1; by < 64; by *= 2) { int v = T >=
    by ? s[T - by] : 0; __syncthreads(); s[T] += v; __syncthreads(); } a[T] = s[T];
counted_then_read: __shared__ int s; if (T == 0) s = 0; __syncthreads(); atomicAdd(&s, 1); __syncthreads(); a[T] = s;
appended: if (x[T] > 0) { int i = atomicAdd(b, 1); a[i] = 1; }
compacted_by_ballot <<<1, 32>>>: unsigned fires = __ballot_sync(ALL, x[T] > 0); if (x[T] > 0) a[__popc(fires & ((1u <<
    T) - 1))] = x[T];
last_block_all_write <<<4, 64>>>: __shared__ bool last; b[64 * B + T] = x[64 * B + T]; __syncthreads(); if (T == 0) {
    __threadfence(); last = atomicAdd(&counter, 1) == 3; } __syncthreads(); if (!last) return; int sum = 0; for (int i
    = 0; i < 4; ++i) sum += b[64 * i + T]; a[T] = sum; if (T == 0) counter = 0;
last_block_fence_before_barrier <<<4, 64>>>: __shared__ bool last; b[64 * B + T] = x[64 * B + T]; __threadfence();
    __syncthreads(); if (T == 0) last = atomicAdd(&counter, 1) == 3; __syncthreads(); if (!last) return;
    __threadfence(); int sum = 0; for (int i = 0; i < 4; ++i) sum += b[64 * i + T]; a[T] = sum; if (T == 0) counter =
    0;
last_warp <<<2, 64>>>: b[64 * B + T] = x[64 * B + T]; __threadfence(); __syncwarp(); int before = 0; if (T % 32 == 0)
    before = atomicAdd(&counter, 1); if (__shfl_sync(ALL, before, 0) != 3) return; __threadfence(); int sum = 0; for
    (int i = 0; i < 4; ++i) sum += b[32 * i + T % 32]; a[T % 32] = sum; if (T % 32 == 0) counter = 0;
flag <<<2, 1>>>: if (B == 0) { a[0] = 7; __threadfence(); atomicExch(b, 1); } else { while (!atomicAdd(b, 0)) {}
    __threadfence(); a[1] = a[0]; }
volatile_flag <<<2, 1>>>: volatile int* flag = b; if (B == 0) { a[0] = 7; __threadfence(); *flag = 1; } else { while
    (!*flag) {} __threadfence(); a[1] = a[0]; }
flag_of_a_block <<<2, 64>>>: if (B == 0) { a[T] = x[T]; __syncthreads(); if (T == 0) { __threadfence(); atomicExch(b,
    1); } } else { if (T == 0) while (!atomicAdd(b, 0)) {} __syncthreads(); a[64 + T] = a[63 - T]; }
chain_of_blocks <<<6, 1>>>: if (B) { while (!atomicAdd(&b[B - 1], 0)) {} __threadfence(); } a[B] = x[B] + (B ? a[B -
    1] : 0); __threadfence(); atomicExch(&b[B], 1);
chain_hands_on <<<6, 1>>>: if (B) { while (!atomicAdd(&b[B - 1], 0)) {} __threadfence(); } else a[0] = 5; if (B) a[B]
    = a[0]; __threadfence(); atomicExch(&b[B], 1);
lock <<<6, 1>>>: while (atomicCAS(b, 0, 1)) {} __threadfence(); a[0] += x[B]; __threadfence(); atomicExch(b, 0);
ticket <<<6, 1>>>: int mine = atomicAdd(b, 1); while (atomicAdd(b + 1, 0) != mine) {} __threadfence(); a[0] += x[B];
    __threadfence(); atomicAdd(b + 1, 1);
double_buffer: __shared__ int s[2][64]; int sum = 0; s[0][T] = x[T]; __syncthreads(); for (int t = 0; t < 4; ++t) { if
    (t < 3) s[(t + 1) % 2][T] = x[64 * (t + 1) + T]; sum += s[t % 2][63 - T]; __syncthreads(); } a[T] = sum;
producer_and_consumer_warps: __shared__ int s[2][32]; for (int t = 0; t < 5; ++t) { if (T < 32 && t < 4) s[t % 2][T] =
    x[32 * t + T]; if (T >= 32 && t) a[32 * (t - 1) + T - 32] = s[(t - 1) % 2][T - 32]; __syncthreads(); }
early_exit_of_lanes <<<1, 32>>>: if (T >= 20) return; a[T] = __shfl_sync(ALL, x[T], 3);
part_of_a_warp <<<1, 32>>>: int v = x[T]; if (T < 16) v = __shfl_xor_sync(0xffffu, v, 1); __syncwarp(); a[T] = v;
function_called_at_two_places <<<2, 32>>>: int v; if (B) v = warp_sum(x[T]); else v = warp_sum(2 * x[T]); if (T == 0)
    a[B] = v;
odd_even_sort: __shared__ int s[64]; s[T] = x[T]; __syncthreads(); for (int i = 0; i < 64; ++i) { int j = 2 * T + i %
    2; if (j < 63 && s[j] > s[j + 1]) { int v = s[j]; s[j] = s[j + 1]; s[j + 1] = v; } __syncthreads(); } a[T] = s[T];
work_queue <<<3, 64>>>: for (;;) { int i = atomicAdd(b, 1); if (i >= 100) break; a[i] = 3 * x[i]; }
exchange_of_half_a_warp: __shared__ int s[64]; unsigned half = T % 32 < 16 ? 0xffffu : 0xffff0000u; s[T] = x[T];
    __syncwarp(half); a[T] = s[T ^ 8] + __popc(__ballot_sync(half, T % 3 == 0));
chain_of_syncwarps: __shared__ int s; if (T == 0) s = x[0]; if (T < 2) __syncwarp(3u); if (T == 1 || T == 2)
    __syncwarp(6u); if (T == 2) a[0] = s;
writer_after_readers: __shared__ int s; for (int i = 0; i < 3; ++i) { if (T == i) s = x[i]; __syncthreads(); a[T] = s
    + i; __syncthreads(); }
vote_before_exit: if (__syncthreads_or(x[T] > 9) || T % 32 >= 8) return; a[T] = __shfl_sync(ALL, x[T], 0);
memset_apart: memset(a + 4 * T, 1, 16);
"""
# x -> what the first values of a are after a right kernel.
VALUES = {
    "reversed": lambda x: x[63::-1],
    "reduction_of_a_warp": lambda x: [x[:32].sum()],
    "warp_exchange": lambda x: x[:64].reshape(-1, 2)[:, ::-1],
    "scan_in_place": lambda x: np.cumsum(x[:64]),
    "counted_then_read": lambda x: np.full(64, 64),
    "appended": lambda x: np.ones((x[:64] > 0).sum()),
    "compacted_by_ballot": lambda x: x[:32][x[:32] > 0],
    "last_block_all_write": lambda x: x[:256].reshape(4, 64).sum(0),
    "last_block_fence_before_barrier": lambda x: x[:256].reshape(4, 64).sum(0),
    "last_warp": lambda x: x[:128].reshape(4, 32).sum(0),
    "flag": lambda x: [7, 7],
    "volatile_flag": lambda x: [7, 7],
    "flag_of_a_block": lambda x: np.concatenate([x[:64], x[63::-1]]),
    "chain_of_blocks": lambda x: np.cumsum(x[:6]),
    "chain_hands_on": lambda x: [5] * 6,
    "lock": lambda x: [x[:6].sum()],
    "ticket": lambda x: [x[:6].sum()],
    "double_buffer": lambda x: x[:256].reshape(4, 64)[:, ::-1].sum(0),
    "producer_and_consumer_warps": lambda x: x[:128],
    "early_exit_of_lanes": lambda x: [x[3]] * 20,
    "part_of_a_warp": lambda x: np.concatenate([x[:16].reshape(-1, 2)[:, ::-1].ravel(), x[16:32]]),
    "function_called_at_two_places": lambda x: [2 * x[:32].sum(), x[:32].sum()],
    "odd_even_sort": lambda x: np.sort(x[:64]),
    "work_queue": lambda x: 3 * x[:100],
    "exchange_of_half_a_warp": lambda x: (
        x[np.arange(64) ^ 8] + np.repeat((np.arange(64) % 3 == 0).reshape(4, 16).sum(1), 16)
    ),
    "chain_of_syncwarps": lambda x: [x[0]],
    "writer_after_readers": lambda x: np.full(64, x[2] + 2),
    "vote_before_exit": lambda x: np.repeat([x[0], 0, x[32], 0], [8, 24, 8, 24]),
    "memset_apart": lambda x: np.full(256, 0x01010101),
}

WRONG, RIGHT = kernels(WRONG), kernels(RIGHT)
KERNELS = {"wrong": WRONG, "right": RIGHT}
SIGNATURE = 'extern "C" __global__ void {}(int* a, int* b, const int* x) {{'

# Where compute-sanitizer, of kernels built by nvcc -O3, reports nothing and the simulator a fault, and why.
WHY = {
    "racecheck looks at shared memory alone": """global_reversed shift_in_place one_word_of_blocks block_reads_anothers
        block_overwrites_what_another_reads global_counted_then_read read_beside_atomics
        device_variable last_block_without_fence last_block_without_barrier
        flag_without_fence volatile_flag_without_fence fence_of_the_block_for_the_grid another_flag
        vector_over_a_scalar halves_of_one_word""",
    "one thread writes a word that others read or count; why racecheck reports nothing was not looked for": """
        one_writes_all_read zeroed_then_counted counted_then_read""",
    "synccheck looks at barriers; what these operations are given is undefined, and not checked": """shuffle_at_two_places
        ballot_at_two_places mask_without_the_caller lane_out_of_the_mask width_64""",
    "memcheck reports nothing of what lies beside a static array of a block or of the program": """negative_shared
        past_the_end_of_a_device_array""",
    "the compiler loads the one word that is used": "float2_at_four_bytes",
}
# The one right kernel that a tool reports: racecheck warns of a read that a chain of two __syncwarp, each of other lanes,
# has behind the write. What a __syncwarp orders is ordered for its lanes, and order is passed on.
WARNED = "right_chain_of_syncwarps"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Every kernel of both tables in one file, so that the compiler starts once."""
    path = tmp_path_factory.mktemp("races") / "races.cu"
    every = ((f"{kind}_{name}", case) for kind, cases in KERNELS.items() for name, case in cases.items())
    path.write_text(COMMON + "".join(SIGNATURE.format(name) + case.body + "}\n" for name, case in every))
    return simulator.compile(path)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_named_and_changes_nothing(program, name, cores):
    case, a, b = WRONG[name], np.zeros(1024, np.int32), np.zeros(1024, np.int32)
    with pytest.raises(getattr(faults, case.fault)):
        program.launch(f"wrong_{name}", case.grid, case.block, (a, b, X), cores=cores)
    assert not a.any() and not b.any()


@pytest.mark.parametrize("call", ["system(0)", "fork()", "raise(9)", "rand()"])
def test_a_call_of_the_hosts_library_is_refused(tmp_path, call):
    path = tmp_path / "host.cu"
    path.write_text(
        "#include <signal.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        f'extern "C" __global__ void k(int* a) {{ a[0] = {call}; }}'
    )
    with pytest.raises(CompileError, match=f"calls {call.partition('(')[0]}"):
        simulator.compile(path).launch("k", 1, 1, (np.zeros(4, np.int32),))


@pytest.mark.parametrize("watch, cores", [("counts", 1), ("faults", 2), (None, 2)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_gives_numpys_values(program, name, watch, cores):
    case, a = RIGHT[name], np.zeros(1024, np.int32)
    arguments = (a, np.zeros(1024, np.int32), X)
    program.launch(f"right_{name}", case.grid, case.block, arguments, watch=watch, cores=cores)
    expected = np.ravel(VALUES[name](X))
    np.testing.assert_array_equal(a[: len(expected)], expected)


def reports() -> dict[str, dict[str, str]]:
    """Return kernel -> tool, or "plain", -> the report of the recorded runs in a few words, "nothing" for none."""
    found = [record for record in records.load_all() if record.name == "sanitizer"]
    return {row["kernel"]: row for row in max(found, key=lambda record: record.date).rows}


def test_where_compute_sanitizer_says_otherwise_the_table_says_why():
    names, recorded = [f"{kind}_{name}" for kind, cases in KERNELS.items() for name in cases], reports()
    reported = {name: any(recorded[name][tool] != "nothing" for tool in TOOLS) for name in names}
    assert all(recorded[name]["plain"] == "NumPy's values" for name in names if name.startswith("right_"))
    # What waits for ever, on a GPU and under each tool, was stopped: that is a report.
    differs = {kernel for kernel, is_reported in reported.items() if is_reported != kernel.startswith("wrong_")}
    assert differs == {f"wrong_{name}" for names in WHY.values() for name in names.split()} | {WARNED}
