"""Planted faults, one kernel each: the exception says what happened, where and by whom, no array is changed, and the
process goes on as before, in the build that watches nothing too where a thread can't go on."""

import faulthandler
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from twell_lab import simulator
from twell_lab.simulator.faults import (
    AssertionFault,
    BrokenHeap,
    ConstantWrite,
    DivisionByZero,
    Fault,
    GlobalRace,
    Misaligned,
    MismatchedBarrier,
    OutOfBounds,
    ProcessEnd,
    SharedRace,
    StackOverflow,
    TooLong,
    UninitialisedRead,
    WarpFault,
)

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
ROOT = Path(__file__).parents[2]
HEAD = """
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include <exception>
#include <new>
#define T threadIdx.x
extern __shared__ float dynamic[];
__constant__ float fixed[4] = {1, 2, 3, 4};
__device__ __forceinline__ float second(const float* in, int i) {
    return in[i + 3];  //! in_a_function
}
template <int N> __device__ float first(const float* in, int i) { return second(in, i + N); }
__device__ float framed(const float* in, int i) {  //! large_frame
    volatile char mine[2 << 20];
    mine[(int)in[1]] = 2;
    return mine[(int)in[2]];
}
__device__ int sum(volatile int a, const float* in, int n) { return in[0] + n < 0 ? 0 : sum(a, in, n + 1) + a; }  //! recursion
extern "C" __global__ void adds(float* out, const float* in, int n) {
    const int i = blockIdx.x * blockDim.x + T;
    out[i] = in[i] + n;
}
extern "C" __global__ void takes_and_gives_back(float* out, const float* in, int n) {
    for (int i = 0; i < n; ++i) {
        void* volatile all[] = {malloc(16 * i), calloc(i, 40), new float[i + 1], new (std::nothrow) double, aligned_alloc(64, 64), nullptr};
        all[1] = realloc(all[1], 100000 * (i % 3 + 1));
        bool there = true;
        for (int k = 0; k < 5; ++k) there = there && all[k] && (size_t)all[k] % 16 == 0;
        free(all[0]), free(all[1]), delete[] (float*)all[2], delete (double*)all[3], free(all[4]), free(all[5]);
        out[T] = there ? i : -2;
    }
}
extern "C" __global__ void uses_what_it_took(float* out, const float* in, int n) {
    int* own = (int*)calloc(n, 4);
    for (int i = 0; i < n; ++i) out[T] = own[i] == 0 ? out[T] : -2, own[i] = T + i;
    own = (int*)realloc(own, 400000);
    __syncthreads();
    float all = 0;
    for (int i = 0; i < n; ++i) all += own[i];
    out[T] = all;  // the same from every block, in whichever order they end
    free(own);
}
"""


class Planted(NamedTuple):
    """A kernel and the fault that it ends in. The line of the fault ends in `//!`, the other one of a race in `//+`, or
    stands in HEAD with the kernel's name. None: any. watches: the builds that find it."""

    kind: type[Fault]
    threads: int
    body: str
    array: str | None = None
    element: int | None = None
    thread: int | None = None
    other: int | None = None
    blocks: int = 1
    watches: tuple = ("faults",)


EVERY = ("faults", "counts", None)


def crash(kind: type[Fault], body: str, thread: int | None = 0, blocks: int = 1, **more) -> Planted:
    return Planted(kind, 40, body, thread=thread, blocks=blocks, **{"watches": EVERY} | more)


SHARED = "__shared__ float s[40]; s[T] = in[T];"
KERNELS = {
    "past_the_end": Planted(OutOfBounds, 40, "out[T] = in[T + 1];  //!", "in", 40, 39),
    "before_the_start": Planted(OutOfBounds, 40, "out[T] = in[(int)T - 2];  //!", "in", -2, 0),
    "across_the_end": Planted(OutOfBounds, 11, "out[T] = ((const float4*)in)[T].x;  //!", "in", 40, 10),
    "in_no_array": Planted(OutOfBounds, 1, "out[T] = in[1 << 28];  //!", thread=0),
    "null_pointer": Planted(OutOfBounds, 8, "out[T] = in[T] + bias[T];  //!", thread=0),
    "near_zero": Planted(OutOfBounds, 8, "out[T] = strlen((const char*)1 + T);  //!", thread=0),
    "jumps_near_zero": Planted(OutOfBounds, 8, "((void (*)())(0x10 + (size_t)in[0]))();  //!", thread=0),
    "constant": Planted(ConstantWrite, 40, "((float*)fixed)[T % 4] = in[T];  //!", "fixed", 0, 0),
    "in_a_function": Planted(OutOfBounds, 40, "out[T] = first<2>(in, T);", "in", 40, 35),
    "shared_past_the_end": Planted(
        OutOfBounds, 40, "__shared__ float square[4][8]; square[T / 8][T % 8] = in[T];  //!", "square", None, 32
    ),
    "own_array": Planted(OutOfBounds, 4, "float mine[4] = {1, 2, 3, 4}; out[T] = mine[(int)T - 1];  //!", thread=0),
    "dynamic_past_the_end": Planted(OutOfBounds, 40, "dynamic[T] = in[T];  //!", "dynamic", 30, 30),
    "set_past_the_end": Planted(OutOfBounds, 1, "memset(out + 1, 0, 160);  //!", "out", 1, 0),
    "copied_past_the_end": Planted(OutOfBounds, 1, "memcpy(out, in + 30, 44);  //!", "in", 30, 0),
    "moved_past_the_end": Planted(OutOfBounds, 1, "memmove(out, in, (size_t)1 << 33);  //!", "in", 0, 0),
    "sets_too_much": Planted(OutOfBounds, 8, "memset(out, 0, (size_t)-1);  //!", "out", 0, 0),
    "set_past_own": Planted(
        OutOfBounds, 4, "float mine[4], *p = mine; memset(p, 0, 1000);  //!\nout[T] = mine[T];", thread=0
    ),
    "atomic_past_the_end": Planted(OutOfBounds, 1, "atomicAdd(out + 40, in[0]);  //!", "out", 40, 0),
    "misaligned": Planted(Misaligned, 4, "const float2 v = *(const float2*)(in + T);  //!\nout[T] = v.y;", "in", 1, 1),
    "wild": crash(OutOfBounds, "if (T == 37) *(volatile int*)0x123456789000ull = 1;  //!", 37),
    "no_address": crash(OutOfBounds, "if (T == 37) *(volatile int*)0x5555123456789000ull = 1;  //!", 37),
    "set_wild": crash(OutOfBounds, "memset((void*)0x123456789000ull, 1, 1 << 20);  //!"),
    # ---- barriers
    "barrier_of_some": Planted(
        MismatchedBarrier, 40, "if (T < 32) __syncthreads();  //!\nout[T] = in[T];\n__syncthreads();  //+"
    ),
    "barrier_against_shuffle": Planted(
        MismatchedBarrier,
        32,
        "float v = in[T];\nif (T % 32 < 16) __syncthreads();  //!\nout[T] = __shfl_sync(0xffffffffu, v, 0);  //+",
        watches=EVERY,
    ),
    "shuffles_of_a_branch": Planted(
        MismatchedBarrier,
        4,
        "float v = in[T];\nif (T & 1) v = __shfl_sync(0xffffffffu, v, 0);  //+\n"
        "else v = __shfl_xor_sync(0xffffffffu, v, 1);  //!\nout[T] = v;",
        watches=EVERY,
    ),
    # ---- races
    "write_write": Planted(
        SharedRace, 40, "__shared__ float sum;\nsum = in[T];  //!\n__syncthreads(); out[T] = sum;", "sum", 0, 1, 0
    ),
    "write_read": Planted(SharedRace, 40, f"{SHARED}  //+\nout[T] = s[39 - T];  //!", "s"),
    "read_write": Planted(
        SharedRace, 40, f"{SHARED}\n__syncthreads();\nconst float o = s[(T + 1) % 40];  //+\ns[T] = o + 1;  //!", "s"
    ),
    "two_readers_one_writer": Planted(
        SharedRace, 40, f"{SHARED}\n__syncthreads();\nout[T] = s[20];  //+\nif (T == 39) s[20] = 1;  //!", "s", 20
    ),
    "overlapping_bytes": Planted(
        SharedRace,
        2,
        "__shared__ __align__(8) float s[8];\nif (T == 0) *(float2*)(s + 2) = make_float2(1, 2);  //+\n"
        "if (T == 1) ((char*)s)[15] = 3;  //!",
        "s",
        3,
        1,
        0,
    ),
    "atomic_and_plain": Planted(
        SharedRace,
        40,
        "__shared__ int n; if (T == 0) n = 0;\n__syncthreads();\natomicAdd(&n, 1);  //+\nout[T] = n;  //!",
        "n",
        0,
    ),
    "same_element": Planted(GlobalRace, 40, "out[T / 2] = in[T];  //!", "out", 0, 1, 0),
    "set_by_all": Planted(GlobalRace, 2, "memset(out, 0, 4);  //!", "out", 0, 1, 0),
    "written_by_others": Planted(GlobalRace, 40, "out[T] = in[T];  //+\nif (out[T ^ 1] == 100) __trap();  //!", "out"),
    "blocks_share": Planted(GlobalRace, 40, "out[T] = in[T] + blockIdx.x;  //!", "out", 0, 0, 0, blocks=2),
    # ---- what nobody wrote
    "uninitialised": Planted(
        UninitialisedRead,
        40,
        "__shared__ float s[64]; if (T < 30) s[T] = in[T];\n__syncthreads();\nif (T < 31) out[T] = s[T];  //!",
        "s",
        30,
        30,
    ),
    "not_zeroed": Planted(UninitialisedRead, 40, "__shared__ int n[4];\natomicAdd(n + T % 4, 1);  //!", "n", 0, 0),
    "uninitialised_in_the_second_block": Planted(
        UninitialisedRead,
        20,
        "__shared__ float s[32]; if (blockIdx.x == 0) s[T] = in[T];\n__syncthreads();\n"
        "if (T == 0) out[blockIdx.x] = s[T];  //!",
        "s",
        0,
        0,
        blocks=2,
    ),
    # ---- warps
    "lane_that_left": Planted(
        WarpFault, 32, "if (T == 5) return;\nout[T] = __shfl_sync(0xffffffffu, in[T], 5);  //!", thread=0
    ),
    # ---- what would end the process, or never end
    "divides": crash(DivisionByZero, "out[T] = 100 / ((int)in[T] - 21);  //!", 21),
    "least_by_minus_one": crash(DivisionByZero, "out[T] = (-2147483647 - 1 - (int)in[0]) / ((int)in[0] - 1);  //!"),
    "large_array": crash(
        StackOverflow, "  //!\nvolatile char mine[100 << 20]; mine[(int)in[1]] = 2; out[T] = mine[(int)in[2]];"
    ),
    "large_frame": Planted(StackOverflow, 40, "out[T] = framed(in, T);  //+", thread=0),
    "recursion": crash(StackOverflow, "out[T] = sum(T, in, 0);", watches=(None,)),
    "asserts": crash(AssertionFault, "assert(in[T] < 33);  //!\nout[T] = in[T];", 33),
    "traps": crash(AssertionFault, "if (T == 7) __trap();  //!\nout[T] = in[T];", 7),
    "no_way_on": crash(AssertionFault, "if (T == 7) __builtin_trap();  //!\nout[T] = in[T];", 7),
    "deletes_an_array": crash(BrokenHeap, "if (T == 37) delete[] out;  //!", 37, array="out", element=0),
    "frees_an_own_array": crash(BrokenHeap, "int own[4], *volatile first = own;\nfree(first);  //!"),
    "frees_twice": crash(BrokenHeap, "void* volatile p = malloc(16);\nfree(p);\nfree(p);  //!"),
    "frees_inside": crash(BrokenHeap, "char* volatile p = new char[5000];\ndelete[] (p + 16);  //!"),
    "resizes_an_array": crash(BrokenHeap, "out = (float*)realloc(out, 100);  //!", array="out", element=0),
    "found_broken": crash(BrokenHeap, "char* volatile p = (char*)aligned_alloc(64, 4096);\nfree(p + 8);  //!"),
    **{
        f"calls_{call.strip(':').partition('(')[0]}": crash(ProcessEnd, f"if (T == 37) {call};  //!", 37)
        for call in ("exit(3)", "_exit(5)", "_Exit(5)", "abort()", "pthread_exit(nullptr)")
    },
    "calls_quick_exit": crash(ProcessEnd, "if (T == 37) std::quick_exit(4);  //!", 37),
    "calls_terminate": crash(ProcessEnd, "if (T == 37) std::terminate();  //!", 37),
    "endless": crash(TooLong, "for (;;) {}  //!"),
    "endless_sum": Planted(TooLong, 1, "while (in[0] == 0) out[T] += 1;  //!", thread=0),
    "endless_barriers": crash(TooLong, "while (in[0] == 0)  //+\n__syncthreads();  //!", None),
    "endless_second_block": crash(TooLong, "if (blockIdx.x == 1)\nfor (;;) {}  //!", blocks=2),
}
if platform.machine().lower() not in ("x86_64", "amd64"):  # other processors divide these, and tell addresses otherwise
    del KERNELS["least_by_minus_one"], KERNELS["no_address"]
SIGNATURE = 'extern "C" __global__ void {}(float* out, const float* in, const float* bias) {{'
SOURCE = HEAD + "".join(
    SIGNATURE.format(name) + ("" if k.body.startswith(" ") else "\n") + k.body + "\n}\n" for name, k in KERNELS.items()
)


def lines_of(name: str) -> tuple[set[int], set[int]]:
    """The lines of a kernel's fault, and of what else it names."""
    lines, here, first, other = SOURCE.splitlines(), False, set(), set()
    for number, line in enumerate(lines, 1):
        here = line.startswith(SIGNATURE.format(name)) or (here and line != "}")
        if line.endswith(f"//! {name}") or (here and line.endswith("//!")):
            first.add(number)
        if here and line.endswith("//+"):
            other.add(number)
    return first, other


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> simulator.Program:
    path = tmp_path_factory.mktemp("planted") / "planted.cu"
    path.write_text(SOURCE)
    return simulator.compile(path)


def caught(planted: simulator.Program, kernel: str, watch: str | None = "faults", **options) -> Fault:
    """The fault of a launch with arrays of 40 floats; a watched one leaves them as they were."""
    out, given, want = torch.full((40,), -1.0), torch.arange(40.0), KERNELS[kernel]
    seconds = 0.3 if want.kind is TooLong else 60
    how = {"seconds": seconds, "shared_bytes": 120 if "dynamic" in kernel else 0, "watch": watch} | options
    with pytest.raises(Fault) as info:
        planted.launch(kernel, want.blocks, want.threads, (out, given, None), **how)
    assert watch != "faults" or ((out == -1).all() and torch.equal(given, torch.arange(40.0)))
    return info.value


def check_it_still_works(planted: simulator.Program, watch: str | None = None) -> None:
    out, given = torch.zeros(4096), torch.arange(4096.0)
    planted.launch("adds", 64, 64, (out, given, 5), watch=watch)
    assert torch.equal(out, given + 5)


@pytest.mark.parametrize("kernel", [name for name, k in KERNELS.items() if "faults" in k.watches])
def test_a_planted_fault_is_caught_and_named(kernel, planted):
    want, fault = KERNELS[kernel], caught(planted, kernel)
    first, other = lines_of(kernel)
    assert type(fault) is want.kind, fault
    assert (fault.kernel, fault.block, fault.array) == (kernel, want.blocks - 1, want.array), fault
    for name, value in (("element", want.element), ("thread", want.thread), ("other_thread", want.other)):
        assert value is None or getattr(fault, name) == value, fault
    assert fault.line.number in first | other
    assert fault.line.text in str(fault) and f"planted.cu:{fault.line.number}" in str(fault)
    if want.kind in (SharedRace, GlobalRace):
        assert {fault.line.number, fault.other_line.number} == first | other
        assert fault.other_thread is not None
    elif want.kind is MismatchedBarrier:
        assert all(f"planted.cu:{number}" in str(fault) for number in first | other)


@pytest.mark.parametrize(
    "kernel, watch", [(name, watch) for name, k in KERNELS.items() for watch in k.watches if watch != "faults"]
)
def test_where_a_thread_cannot_go_on_it_is_a_fault_unwatched_too(kernel, watch, planted):
    want, fault = KERNELS[kernel], caught(planted, kernel, watch, cores=1)
    assert type(fault) is want.kind and (fault.kernel, fault.block) == (kernel, want.blocks - 1)
    if want.kind is not MismatchedBarrier:
        assert want.thread in (None, fault.thread)
    if want.kind not in (MismatchedBarrier, TooLong) and lines_of(kernel)[0]:
        assert {fault.line.number} == lines_of(kernel)[0]
    check_it_still_works(planted, watch)


@pytest.mark.parametrize(
    "kernel, watch", [("uses_what_it_took", None), *(("takes_and_gives_back", watch) for watch in EVERY)]
)
def test_memory_that_a_kernel_takes_is_no_fault(planted, kernel, watch):
    for _ in range(2):
        out, t = torch.full((64,), -1.0), torch.arange(64.0)
        planted.launch(kernel, 1 if watch else 50, 64, (out, t, 9), watch=watch)
        assert torch.equal(out, 9 * t + 36 if kernel == "uses_what_it_took" else torch.full_like(t, 8.0))


def test_every_kind_of_fault_is_planted():
    assert {planted.kind for planted in KERNELS.values()} == set(Fault.__subclasses__())


def test_the_calls_that_lead_to_a_fault_are_named(planted):
    names = [line.function.split("<")[0].split("(")[0].split()[-1] for line in caught(planted, "in_a_function").path]
    assert names == ["in_a_function", "first", "second"]


@pytest.mark.parametrize("kernel", ["write_write", "read_write", "same_element", "uninitialised", "barrier_of_some"])
def test_the_same_fault_every_time_on_any_number_of_cores(kernel, planted):
    said = set()
    for cores in (1, 2, 2, 3):
        with pytest.raises(Fault) as info:
            planted.launch(kernel, 20, 40, (torch.zeros(40), torch.arange(40.0), None), cores=cores)
        said.add(str(info.value))
    assert len(said) == 1 and "block 0 (grid 20" in said.pop()


def test_a_loop_that_is_counted_ends_before_the_memory_does(planted):
    before = resident_bytes()
    assert caught(planted, "endless_sum", "counts", seconds=600, cores=1).line.number in lines_of("endless_sum")[0]
    assert resident_bytes() < before + (64 << 20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


CRASHES = ("wild", "large_array", "recursion", "no_way_on", "divides", "endless")


def test_many_crashes_in_a_row_leave_nothing_behind(planted):
    def crash_all(times: int) -> None:
        for i in range(times):
            for kernel in CRASHES:
                assert type(caught(planted, kernel, None, cores=1 + i % 3, seconds=0.1)) is KERNELS[kernel].kind

    crash_all(3)
    before, threads = resident_bytes(), len(os.listdir("/proc/self/task"))
    crash_all(10)
    assert resident_bytes() < before + (32 << 20)
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > threads:  # one that has ended is in the list for a moment more
        assert time.monotonic() < end, "threads are left"
        time.sleep(0.05)


def test_launches_of_several_threads_do_not_end_each_other(planted):
    wrong, end = [], time.monotonic() + 1

    def repeated(call, *arguments, **how):
        try:
            while time.monotonic() < end:
                call(planted, *arguments, **how)
        except BaseException as error:
            wrong.append(error)

    running = [threading.Thread(target=repeated, args=[check_it_still_works]) for _ in range(2)]
    for kernel in ("wild", "large_array", "endless"):
        running.append(threading.Thread(target=repeated, args=[caught, kernel, None], kwargs={"seconds": 0.05}))
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_the_handlers_of_others_are_as_before_and_are_called_meanwhile(planted):
    called, numbers, enabled = [], [signal.SIGFPE, signal.SIGURG, signal.SIGILL], faulthandler.is_enabled()
    before = {number: signal.signal(number, lambda number, _: called.append(number)) for number in numbers}
    try:
        caught(planted, "wild", None)
        for number in numbers:
            signal.raise_signal(number)
        assert called == numbers and faulthandler.is_enabled() == enabled
        runner = threading.Thread(target=caught, args=(planted, "endless", None), kwargs={"seconds": 1.0})
        runner.start()
        signal.raise_signal(signal.SIGURG)
        signal.raise_signal(signal.SIGFPE)
        assert called[3:] == [signal.SIGURG, signal.SIGFPE]
        runner.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


PROGRAM = """
import ctypes, faulthandler, sys, threading, time, torch
from twell_lab import simulator
program = simulator.compile(sys.argv[1])
out = torch.zeros(64)
def launch(kernel, last=None, **options):
    program.launch(kernel, 1, 40, (out, torch.arange(64.0), last), **{'watch': None} | options)
launch('adds', 5)
"""
BESIDE = (
    "threading.Thread(target=launch, args=['endless'], kwargs={'seconds': 20}, daemon=True).start()\ntime.sleep(0.5)\n"
)


def in_a_process(planted: simulator.Program, folder: Path, text: str, interrupt: bool = False) -> tuple[int, str, str]:
    """Run `text` after a launch, with SIGINT after it has said that it is ready, until it says more; return status, output and errors."""
    (folder / "planted.cu").write_text(SOURCE)
    command = [sys.executable, "-c", PROGRAM + text, str(folder / "planted.cu")]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            if interrupt:
                assert process.stdout.readline() == "ready\n"
                time.sleep(0.5)
                process.send_signal(signal.SIGINT)
                while not select.select([process.stdout], [], [], 20)[0]:  # again, should it have come too early
                    process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
    return process.returncode, out, err


def test_ctrl_c_ends_an_endless_loop_and_a_crash_outside_of_kernels_is_still_the_process_s_own(planted, tmp_path):
    text = "try:\n    print('ready', flush=True)\n    launch('endless', seconds=300)\nexcept KeyboardInterrupt:\n"
    text += "    print('interrupted', flush=True)\nlaunch('adds', 5)\nprint(out[:3].tolist(), flush=True)\nfaulthandler.enable()\n"
    status, out, err = in_a_process(planted, tmp_path, text + BESIDE + "ctypes.string_at(8)\n", interrupt=True)
    assert out == "interrupted\n[5.0, 6.0, 7.0]\n", err
    assert status == -signal.SIGSEGV and err.count("Fatal Python error: Segmentation fault") == 1


def test_an_abort_outside_of_kernels_is_still_the_process_s_own(planted, tmp_path):
    assert in_a_process(planted, tmp_path, BESIDE + "ctypes.CDLL(None).abort()\n")[0] == -signal.SIGABRT
