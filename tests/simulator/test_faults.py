"""Planted faults, one kernel each: the exception says what happened, where, and by whom, and no array is changed."""

import platform
from typing import NamedTuple

import pytest
import torch

from twell_lab import simulator
from twell_lab.simulator import faults

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")

# The line with the fault ends in `// name of the kernel`; a second one of a race in `// and name of the kernel`.
PLANTED = r"""
#define KERNEL extern "C" __global__ void
#define T threadIdx.x

KERNEL past_the_end(float* out, const float* in) {
    out[T] = in[T + 1];  // past_the_end
}
KERNEL before_the_start(float* out, const float* in) {
    out[T] = in[(int)T - 2];  // before_the_start
}
KERNEL write_past_the_end(float* out, const float* in) {
    out[2 * T] = in[T];  // write_past_the_end
}
KERNEL across_the_end(float* out, const float* in) {
    const float4 v = ((const float4*)in)[T];  // across_the_end
    out[T] = v.x;
}
KERNEL in_no_array(float* out, const float* in) {
    out[T] = in[1 << 28];  // in_no_array
}
KERNEL null_pointer(float* out, const float* in, const float* bias) {
    out[T] = in[T] + bias[T];  // null_pointer
}
__device__ __forceinline__ float second(const float* in, int i) {
    return in[i + 3];  // in_a_function
}
template <int N>
__device__ float first(const float* in, int i) {
    return second(in, i + N);
}
KERNEL in_a_function(float* out, const float* in) {
    out[T] = first<2>(in, T);
}
KERNEL shared_past_the_end(float* out, const float* in) {
    __shared__ float square[4][8];
    square[T / 8][T % 8] = in[T];  // shared_past_the_end
    __syncthreads();
    out[T] = square[0][0];
}
KERNEL past_one_row(float* out, const float* in) {
    __shared__ float only[16];
    only[T] = in[T];  // past_one_row
    __syncthreads();
    out[T] = only[0];
}
KERNEL past_a_row(float* out, const float* in) {
    __shared__ float rows[4][8];
    rows[T / 9][T % 9] = in[T];  // past_a_row
    __syncthreads();
    out[T] = rows[0][0];
}
KERNEL own_array(float* out, const float* in) {
    float mine[4] = {1, 2, 3, 4};
    out[T] = mine[(int)T - 1];  // own_array
}
extern __shared__ float dynamic[];
KERNEL dynamic_past_the_end(float* out, const float* in) {
    dynamic[T] = in[T];  // dynamic_past_the_end
    __syncthreads();
    out[T] = dynamic[0];
}
KERNEL misaligned(float* out, const float* in) {
    const float2 v = *(const float2*)(in + T);  // misaligned
    out[T] = v.y;
}
KERNEL set_past_the_end(float* out, const float* in) {
    memset(out + 1, 0, 160);  // set_past_the_end
}
KERNEL copied_past_the_end(float* out, const float* in) {
    memcpy(out, in + 30, 44);  // copied_past_the_end
}
KERNEL moved_past_the_end(float* out, const float* in) {
    memmove(out, in, (size_t)1 << 33);  // moved_past_the_end
}
KERNEL set_past_own(float* out, const float* in) {
    float mine[4], other[4] = {};
    memset(mine, 0, 20);  // set_past_own
    out[T] = mine[T] + other[T];
}
KERNEL set_past_a_call(float* out, const float* in) {
    float mine[4], *p = mine;
    memset(p, 0, 1000);  // set_past_a_call
    out[T] = mine[T];
}
KERNEL atomic_past_the_end(float* out, const float* in) {
    atomicAdd(out + 40, in[0]);  // atomic_past_the_end
}

KERNEL barriers_of_a_branch(float* out, const float* in) {
    if (T < 32) {
        __syncthreads();  // barriers_of_a_branch
    } else {
        __syncthreads();  // and barriers_of_a_branch
    }
    out[T] = in[T];
}
KERNEL barrier_of_some(float* out, const float* in) {
    if (T < 32) __syncthreads();  // barrier_of_some
    out[T] = in[T];
    __syncthreads();  // and barrier_of_some
}
KERNEL barrier_against_shuffle(float* out, const float* in) {
    float v = in[T];
    if (T % 32 < 16) __syncthreads();  // barrier_against_shuffle
    v = __shfl_sync(0xffffffffu, v, 0);  // and barrier_against_shuffle
    out[T] = v;
}
KERNEL shuffles_of_a_branch(float* out, const float* in) {
    float v = in[T];
    if (T & 1) v = __shfl_sync(0xffffffffu, v, 0);  // and shuffles_of_a_branch
    else v = __shfl_xor_sync(0xffffffffu, v, 1);  // shuffles_of_a_branch
    out[T] = v;
}

KERNEL write_write(float* out, const float* in) {
    __shared__ float sum;
    sum = in[T];  // write_write
    __syncthreads();
    out[T] = sum;
}
KERNEL write_read(float* out, const float* in) {
    __shared__ float s[40];
    s[T] = in[T];  // and write_read
    out[T] = s[39 - T];  // write_read
}
KERNEL read_write(float* out, const float* in) {
    __shared__ float s[40];
    s[T] = in[T];
    __syncthreads();
    const float other = s[(T + 1) % 40];  // and read_write
    s[T] = other + 1;  // read_write
    __syncthreads();
    out[T] = s[T];
}
KERNEL two_readers_one_writer(float* out, const float* in) {
    __shared__ float s[40];
    s[T] = in[T];
    __syncthreads();
    out[T] = s[20];  // and two_readers_one_writer
    if (T == 39) s[20] = 1;  // two_readers_one_writer
}
KERNEL no_syncwarp(float* out, const float* in) {
    __shared__ float s[32];
    s[T] = in[T];  // and no_syncwarp
    out[T] = s[T ^ 1];  // no_syncwarp
}
KERNEL syncwarp_of_others(float* out, const float* in) {
    __shared__ float s[40];
    s[T] = in[T];  // and syncwarp_of_others
    __syncwarp();
    out[T] = s[39 - T];  // syncwarp_of_others
}
KERNEL overlapping_bytes(float* out, const float* in) {
    __shared__ __align__(8) float s[8];
    if (T == 0) *(float2*)(s + 2) = make_float2(1, 2);  // and overlapping_bytes
    if (T == 1) ((char*)s)[15] = 3;  // overlapping_bytes
}
KERNEL atomic_and_plain(float* out, const float* in) {
    __shared__ int n;
    if (T == 0) n = 0;
    __syncthreads();
    atomicAdd(&n, 1);  // and atomic_and_plain
    out[T] = n;  // atomic_and_plain
}

KERNEL same_element(float* out, const float* in) {
    out[T / 2] = in[T];  // same_element
}
KERNEL set_by_all(float* out, const float* in) {
    memset(out, 0, 4);  // set_by_all
}
KERNEL written_by_others(float* out, const float* in) {
    out[T] = in[T];  // and written_by_others
    if (out[T ^ 1] == 100) __trap();  // written_by_others
}
KERNEL blocks_share(float* out, const float* in) {
    out[T] = in[T] + blockIdx.x;  // blocks_share
}
KERNEL blocks_read(float* out, const float* in) {
    if (blockIdx.x == 0) out[T] = in[T];  // and blocks_read
    else out[20 + T] = out[T];  // blocks_read
}

KERNEL uninitialised(float* out, const float* in) {
    __shared__ float s[64];
    if (T < 30) s[T] = in[T];
    __syncthreads();
    if (T < 31) out[T] = s[T];  // uninitialised
}
KERNEL not_zeroed(float* out, const float* in) {
    __shared__ int histogram[4];
    atomicAdd(histogram + T % 4, 1);  // not_zeroed
    __syncthreads();
    out[T] = histogram[T % 4];
}
KERNEL uninitialised_in_the_second_block(float* out, const float* in) {
    __shared__ float s[32];
    if (blockIdx.x == 0) s[T] = in[T];
    __syncthreads();
    if (T == 0) out[blockIdx.x] = s[T];  // uninitialised_in_the_second_block
}

KERNEL lane_outside_the_mask(float* out, const float* in) {
    float v = in[T];
    if (T < 16) v = __shfl_sync(0xffffu, v, 20);  // lane_outside_the_mask
    out[T] = v;
}
KERNEL lane_that_left(float* out, const float* in) {
    if (T == 5) return;
    out[T] = __shfl_sync(0xffffffffu, in[T], 5);  // lane_that_left
}
KERNEL mask_without_the_caller(float* out, const float* in) {
    out[T] = __ballot_sync(0x7fffffffu, in[T] > 0);  // mask_without_the_caller
}

KERNEL divides(float* out, const float* in) {
    out[T] = 100 / ((int)in[T] - 21);  // divides
}
KERNEL least_by_minus_one(float* out, const float* in) {
    out[T] = (-2147483647 - 1 - (int)in[0]) / ((int)in[0] - 1);  // least_by_minus_one
}
KERNEL rest_of_least_by_minus_one(float* out, const float* in) {
    out[T] = (-2147483647 - 1 - (int)in[0]) % ((int)in[0] - 1);  // rest_of_least_by_minus_one
}
KERNEL large_array(float* out, const float* in) {  // large_array
    volatile char mine[100 << 20];
    mine[(int)in[1]] = 2;
    out[T] = mine[(int)in[2]];
}
__device__ float large_frame(const float* in, int i) {  // large_array_below
    volatile char mine[2 << 20];
    mine[(int)in[1]] = 2;
    return mine[(int)in[2]];
}
KERNEL large_array_below(float* out, const float* in) {
    out[T] = large_frame(in, T);  // and large_array_below
}
KERNEL asserts(float* out, const float* in) {
    assert(in[T] < 33);  // asserts
    out[T] = in[T];
}
KERNEL traps(float* out, const float* in) {
    if (T == 7) __trap();  // traps
    out[T] = in[T];
}
KERNEL no_way_on(float* out, const float* in) {
    if (T == 7) __builtin_trap();  // no_way_on
    out[T] = in[T];
}
KERNEL deletes_an_array(float* out, const float* in) {
    if (T == 7) delete[] in;  // deletes_an_array
    out[T] = in[T];
}
KERNEL exits(float* out, const float* in) {
    if (T == 7) exit(3);  // exits
    out[T] = in[T];
}
KERNEL sets_too_much(float* out, const float* in) {
    memset(out, 0, (size_t)-1);  // sets_too_much
}
KERNEL moves_too_much(float* out, const float* in) {
    memmove(out, in, (size_t)-4);  // moves_too_much
}
KERNEL near_zero(float* out, const float* in) {
    out[T] = strlen((const char*)1 + T);  // near_zero
}
KERNEL jumps_near_zero(float* out, const float* in) {
    ((void (*)())(0x10 + (size_t)in[0]))();  // jumps_near_zero
}
KERNEL endless_and_empty(float* out, const float* in) {
    for (;;) {}  // endless_and_empty
}
KERNEL endless(float* out, const float* in) {
    while (in[0] == 0) out[T] += 1;  // endless
}
KERNEL endless_barriers(float* out, const float* in) {
    while (in[0] == 0)  // and endless_barriers
        __syncthreads();  // endless_barriers
}
"""


class Planted(NamedTuple):
    kind: type[simulator.Fault]
    threads: int
    says: str
    array: str | None = None
    element: int | None = None
    thread: int | None = None  # None: any
    other: int | None = None
    blocks: int = 1


KINDS = {
    "past_the_end": Planted(
        faults.OutOfBounds, 40, "reads 4 bytes out of bounds: just past the end of in", "in", 40, 39
    ),
    "before_the_start": Planted(faults.OutOfBounds, 40, "8 bytes before the start of in", "in", -2, 0),
    "write_past_the_end": Planted(faults.OutOfBounds, 40, "writes 4 bytes out of bounds", "out", 40, 20),
    "across_the_end": Planted(faults.OutOfBounds, 11, "reads 16 bytes out of bounds", "in", 40, 10),
    "in_no_array": Planted(faults.OutOfBounds, 1, "at an address in no array", thread=0),
    "null_pointer": Planted(
        faults.OutOfBounds, 8, "at an address near zero (0x0), as of a null pointer; given as None: bias\n", thread=0
    ),
    "near_zero": Planted(
        faults.OutOfBounds, 8, "reads memory out of bounds: at an address near zero (0x1)\n", thread=0
    ),
    "jumps_near_zero": Planted(faults.OutOfBounds, 8, "out of bounds: at an address near zero (0x10)\n", thread=0),
    "sets_too_much": Planted(
        faults.OutOfBounds, 8, "writes 18,446,744,073,709,551,615 bytes out of bounds", "out", 0, 0
    ),
    "moves_too_much": Planted(
        faults.OutOfBounds, 8, "reads 18,446,744,073,709,551,612 bytes out of bounds", "in", 0, 0
    ),
    "deletes_an_array": Planted(
        faults.BrokenHeap, 40, "it gives back what they did not give: in[0], float32 [40]", "in", 0, 7
    ),
    "exits": Planted(faults.ProcessEnd, 40, "would end this process with exit()", thread=7),
    "in_a_function": Planted(faults.OutOfBounds, 40, "just past the end of in", "in", 40, 35),
    "shared_past_the_end": Planted(faults.OutOfBounds, 40, "index 4 of square, float[4][8]", "square", None, 32),
    "past_one_row": Planted(faults.OutOfBounds, 20, "index 16 of only, float[16]", "only", 16, 16),
    "past_a_row": Planted(faults.OutOfBounds, 20, "index 8 of rows, float[8]", "rows", None, 8),
    "own_array": Planted(faults.OutOfBounds, 4, "index -1 of an array, float[4]", thread=0),
    "dynamic_past_the_end": Planted(faults.OutOfBounds, 40, "writes 4 bytes out of bounds", "dynamic", 30, 30),
    "set_past_the_end": Planted(
        faults.OutOfBounds, 1, "writes 160 bytes out of bounds: across the end of out", "out", 1, 0
    ),
    "copied_past_the_end": Planted(
        faults.OutOfBounds, 1, "reads 44 bytes out of bounds: across the end of in", "in", 30, 0
    ),
    "moved_past_the_end": Planted(faults.OutOfBounds, 1, "reads 8,589,934,592 bytes out of bounds", "in", 0, 0),
    "set_past_own": Planted(
        faults.OutOfBounds, 4, "writes 20 bytes out of bounds: past one of the thread's own", thread=0
    ),
    "set_past_a_call": Planted(
        faults.OutOfBounds, 4, "1,000 bytes out of bounds: past one of the thread's own", thread=0
    ),
    "atomic_past_the_end": Planted(faults.OutOfBounds, 1, "just past the end of out", "out", 40, 0),
    "misaligned": Planted(faults.Misaligned, 4, "no multiple of 8", "in", 1, 1),
    "barriers_of_a_branch": Planted(faults.MismatchedBarrier, 40, "threads 32-39: __syncthreads at"),
    "barrier_of_some": Planted(faults.MismatchedBarrier, 40, "threads 0-31: __syncthreads at"),
    "barrier_against_shuffle": Planted(faults.MismatchedBarrier, 32, "threads 0-15: __syncthreads at"),
    "shuffles_of_a_branch": Planted(faults.MismatchedBarrier, 4, "threads 1, 3: __shfl_sync at"),
    "write_write": Planted(faults.SharedRace, 40, "of the same block writes it", "sum", 0, 1, 0),
    "write_read": Planted(faults.SharedRace, 40, "of the same block", "s"),
    "read_write": Planted(faults.SharedRace, 40, "of the same block", "s"),
    "two_readers_one_writer": Planted(faults.SharedRace, 40, "of the same block", "s", 20),
    "no_syncwarp": Planted(faults.SharedRace, 32, "__syncwarp() would do", "s"),
    "syncwarp_of_others": Planted(faults.SharedRace, 40, "no __syncthreads() in between that both come to", "s"),
    "overlapping_bytes": Planted(faults.SharedRace, 2, "race on shared memory", "s", 3, 1, 0),
    "atomic_and_plain": Planted(faults.SharedRace, 40, "race on shared memory", "n", 0),
    "same_element": Planted(faults.GlobalRace, 40, "nothing puts one before the other", "out", 0, 1, 0),
    "set_by_all": Planted(faults.GlobalRace, 2, "nothing puts one before the other", "out", 0, 1, 0),
    "written_by_others": Planted(faults.GlobalRace, 40, "of the same block writes it", "out"),
    "blocks_share": Planted(faults.GlobalRace, 40, "the order of blocks is not defined", "out", 0, 0, 0, blocks=2),
    "blocks_read": Planted(faults.GlobalRace, 20, "of block 0 writes it", "out", 0, 0, 0, blocks=2),
    "uninitialised": Planted(faults.UninitialisedRead, 40, "which no thread of the block has written", "s", 30, 30),
    "not_zeroed": Planted(faults.UninitialisedRead, 40, "which no thread of the block has written", "histogram", 0, 0),
    "uninitialised_in_the_second_block": Planted(faults.UninitialisedRead, 20, "of block 1", "s", 0, 0, blocks=2),
    "lane_outside_the_mask": Planted(faults.WarpFault, 32, "shuffles from lane 20", thread=0),
    "lane_that_left": Planted(faults.WarpFault, 32, "shuffles from lane 5, which takes no part", thread=0),
    "mask_without_the_caller": Planted(
        faults.WarpFault, 32, "0x7fffffff, which leaves out the caller, lane 31", thread=31
    ),
    "divides": Planted(faults.DivisionByZero, 40, "divides a whole number by zero", thread=21),
    "least_by_minus_one": Planted(faults.DivisionByZero, 40, "or the least one by -1", thread=0),
    "rest_of_least_by_minus_one": Planted(faults.DivisionByZero, 40, "or the least one by -1", thread=0),
    "large_array": Planted(
        faults.StackOverflow, 40, "needs more memory for the arrays and calls of one thread", thread=0
    ),
    "large_array_below": Planted(faults.StackOverflow, 40, "a GPU gives it at most 512 KiB", thread=0),
    "asserts": Planted(faults.AssertionFault, 40, "assert(in[T] < 33)", thread=33),
    "traps": Planted(faults.AssertionFault, 40, "__trap()", thread=7),
    "no_way_on": Planted(faults.AssertionFault, 40, "a trap instruction", thread=7),
    "endless_and_empty": Planted(faults.TooLong, 1, "loop that never ends", thread=0),
    "endless": Planted(faults.TooLong, 1, "loop that never ends", thread=0),
    "endless_barriers": Planted(faults.TooLong, 40, "loop that never ends"),
}


def lines_of(name: str) -> list[int]:
    """The lines marked with this name, the one of the fault itself first."""
    marks = (f"// {name}", f"// and {name}")
    return [i for mark in marks for i, line in enumerate(PLANTED.splitlines(), 1) if line.endswith(mark)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> simulator.Program:
    path = tmp_path_factory.mktemp("planted") / "planted.cu"
    path.write_text(PLANTED)
    return simulator.compile(path)


def caught(planted: simulator.Program, kernel: str, **options) -> simulator.Fault:
    """The fault of a launch with arrays of 40 floats; they are as they were before."""
    out, given = torch.full((40,), -1.0), torch.arange(40.0)
    arguments = [out, given, None][: len(planted.kernels[kernel].parameters)]
    options = {
        "seconds": 0.3 if "endless" in kernel else 60,
        "shared_bytes": 120 if "dynamic" in kernel else 0,
    } | options
    with pytest.raises(simulator.Fault) as info:
        planted.launch(kernel, KINDS[kernel].blocks, KINDS[kernel].threads, arguments, **options)
    assert (out == -1).all() and torch.equal(given, torch.arange(40.0))
    return info.value


if platform.machine().lower() not in ("x86_64", "amd64"):  # other processors divide it, as GPUs do
    KINDS = {name: planted for name, planted in KINDS.items() if not name.endswith("least_by_minus_one")}


@pytest.mark.parametrize("kernel", KINDS)
def test_a_planted_fault_is_caught_and_named(kernel, planted):
    want, fault = KINDS[kernel], caught(planted, kernel)
    assert type(fault) is want.kind, fault
    text = str(fault)
    assert want.says in text and text.startswith(kernel)
    assert fault.kernel == kernel and fault.block == want.blocks - 1
    assert fault.array == want.array
    for expected, found in (
        (want.element, fault.element),
        (want.thread, fault.thread),
        (want.other, fault.other_thread),
    ):
        assert expected is None or expected == found, fault
    numbers = lines_of(kernel)
    assert fault.line.number in numbers and f"planted.cu:{fault.line.number}" in text
    assert fault.line.text == PLANTED.splitlines()[fault.line.number - 1].strip() and fault.line.text in text
    if want.kind in (faults.SharedRace, faults.GlobalRace):
        assert {fault.line.number, fault.other_line.number} == set(numbers)
        assert fault.other_thread is not None and f"thread {fault.other_thread} of" in text
    elif want.kind is faults.MismatchedBarrier and len(numbers) > 1:
        assert all(f"planted.cu:{number}" in text for number in numbers)


def test_every_kind_of_fault_is_planted():
    assert {planted.kind for planted in KINDS.values()} == set(simulator.Fault.__subclasses__())


def test_the_calls_that_lead_to_a_fault_are_named(planted):
    fault = caught(planted, "in_a_function")
    assert [line.function.split("<")[0].split("(")[0].split()[-1] for line in fault.path] == [
        "in_a_function",
        "first",
        "second",
    ]
    assert "float float" not in str(fault)
    assert str(fault).index("in second") < str(fault).index("in in_a_function")


@pytest.mark.parametrize("kernel", ["write_write", "read_write", "same_element", "uninitialised", "barrier_of_some"])
def test_the_same_fault_every_time_on_any_number_of_cores(kernel, tmp_path_factory, planted):
    out, given = torch.zeros(40), torch.arange(40.0)
    told = set()
    for cores in (1, 2, 2, 2, 3):
        with pytest.raises(simulator.Fault) as info:
            planted.launch(kernel, 20, 40, (out, given), cores=cores)
        told.add(str(info.value))
    assert len(told) == 1 and "block 0 (grid 20" in told.pop()


def test_unwatched_only_what_cannot_go_on_is_seen(planted):
    for kernel in ("barrier_against_shuffle", "shuffles_of_a_branch"):
        out = torch.zeros(40)
        with pytest.raises(faults.MismatchedBarrier, match="wait for each other at different"):
            planted.launch(kernel, 1, KINDS[kernel].threads, (out, torch.zeros(40)), watch=None)
    with pytest.raises(faults.TooLong):
        planted.launch("endless_barriers", 1, 40, (torch.zeros(40), torch.zeros(40)), watch=None, seconds=0.3)
    with pytest.raises(faults.AssertionFault):
        planted.launch("asserts", 1, 40, (torch.zeros(40), torch.arange(40.0)), watch=None)
