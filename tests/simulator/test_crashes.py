"""Kernels that crash or never end, unwatched too: the launch ends with a fault, and the process goes on as before."""

import faulthandler
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from twell_lab import simulator
from twell_lab.simulator import faults
from twell_lab.simulator.stacks import STACKS

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")

ROOT = Path(__file__).parents[2]
SOURCE = r"""
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
#include <exception>
#define KERNEL(NAME) extern "C" __global__ void NAME(int* out, const int* in, int n)
KERNEL(adds) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i] + n;
}
KERNEL(divides) {
    out[threadIdx.x] = (n - 2147483647 - 1) / (in[0] - 1);  // divides
}
KERNEL(large_array) {  // large_array
    volatile char mine[100 << 20];
    mine[in[0]] = n;
    out[threadIdx.x] = mine[in[0]];
}
__device__ int sum(volatile int a, const int* in, int n) { return in[0] + n < 0 ? 0 : sum(a, in, n + 1) + a; }  // recursion
KERNEL(recursion) {
    out[threadIdx.x] = sum(n, in, 0);
}
KERNEL(wild) {
    if (threadIdx.x == 37) *(volatile int*)(0x123456789000ull + n) = 1;  // wild
}
KERNEL(no_address) {
    if (threadIdx.x == 37) *(volatile int*)(0x5555123456789000ull + n) = 1;  // no_address
}
KERNEL(set_wild) {
    memset((void*)(0x123456789000ull + n), 1, 1 << 20);  // set_wild
    out[threadIdx.x] = n;
}
KERNEL(trap) {
    if (threadIdx.x == 37) __builtin_trap();  // trap
}
KERNEL(deletes_an_array) {
    if (threadIdx.x == 37) delete[] out;  // deletes_an_array
}
KERNEL(frees_an_own_array) {
    int own[4], *volatile first = own;
    free(first);  // frees_an_own_array
}
KERNEL(frees_twice) {
    void* volatile p = malloc(16);
    free(p);
    free(p);  // frees_twice
}
KERNEL(frees_twice_large) {
    void* volatile p = malloc(5000);
    free(p);
    free(p);  // frees_twice_large
}
KERNEL(frees_inside) {
    char* volatile p = new char[5000];
    delete[] (p + 16);  // frees_inside
}
KERNEL(resizes_an_array) {
    out = (int*)realloc(out, 100);  // resizes_an_array
}
KERNEL(found_broken) {
    char* volatile p = (char*)aligned_alloc(64, 4096);
    free(p + 8);  // found_broken
}
KERNEL(calls_exit) {
    exit(3);  // calls_exit
}
KERNEL(calls_quick_exit) {
    if (threadIdx.x == 37) std::quick_exit(4);  // calls_quick_exit
}
KERNEL(calls__exit) {
    _exit(5);  // calls__exit
}
KERNEL(calls__Exit) {
    _Exit(5);  // calls__Exit
}
KERNEL(calls_abort) {
    abort();  // calls_abort
}
KERNEL(calls_pthread_exit) {
    pthread_exit(nullptr);  // calls_pthread_exit
}
KERNEL(calls_terminate) {
    std::terminate();  // calls_terminate
}
KERNEL(raises) {
    raise(SIGABRT);  // raises
}
KERNEL(endless) {
    for (;;) {}  // endless
}
KERNEL(endless_sets) {
    for (;;) memset(out, n, 4000);  // endless_sets
}
KERNEL(endless_sum) {
    while (n < in[1]) out[threadIdx.x] += in[0];  // endless_sum
}
KERNEL(endless_second_block) {
    if (blockIdx.x == 1)
        for (;;) {}  // endless_second_block
}
"""
CRASHES = {
    "divides": (faults.DivisionByZero, "divides a whole number by zero, or the least one by -1", 0),
    "large_array": (faults.StackOverflow, "needs more memory for the arrays and calls of one thread", 0),
    "recursion": (faults.StackOverflow, "needs more memory for the arrays and calls of one thread", 0),
    "wild": (faults.OutOfBounds, "at an address in no array (0x123456789000", 37),
    "no_address": (faults.OutOfBounds, "at an address that no memory has", 37),
    "set_wild": (faults.OutOfBounds, "at an address in no array (0x123456789000", 0),
    "trap": (faults.AssertionFault, "a trap instruction", 37),
}
WOULD_END = {
    "deletes_an_array": (faults.BrokenHeap, "it gives back what they did not give: out[0], int32 [4096]", 37),
    "frees_an_own_array": (faults.BrokenHeap, "it gives back what they did not give", 0),
    "frees_twice": (faults.BrokenHeap, "it gives back a second time what it has given back", 0),
    "frees_twice_large": (faults.BrokenHeap, "it gives back a second time what it has given back", 0),
    "frees_inside": (faults.BrokenHeap, "it gives back an address inside of what they gave", 0),
    "resizes_an_array": (faults.BrokenHeap, "it gives back what they did not give: out[0]", 0),
    "found_broken": (faults.BrokenHeap, "the C library found it broken", 0),
    "calls_exit": (faults.ProcessEnd, "would end this process with exit()", 0),
    "calls_quick_exit": (faults.ProcessEnd, "would end this process with quick_exit()", 37),
    "calls__exit": (faults.ProcessEnd, "would end this process with _exit()", 0),
    "calls__Exit": (faults.ProcessEnd, "would end this process with _Exit()", 0),
    "calls_abort": (faults.ProcessEnd, "would end this process with abort()", 0),
    "calls_pthread_exit": (faults.ProcessEnd, "would end this process with pthread_exit()", 0),
    "calls_terminate": (faults.ProcessEnd, "would end this process with std::terminate()", 0),
    "raises": (faults.ProcessEnd, "would end this process with abort()", 0),
}
if platform.machine().lower() not in ("x86_64", "amd64"):  # other processors divide it, and tell addresses otherwise
    del CRASHES["divides"], CRASHES["no_address"]
ENDLESS = ("endless", "endless_sets", "endless_second_block")
IN = torch.arange(4096, dtype=torch.int32)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> simulator.Program:
    path = tmp_path_factory.mktemp("crashes") / "crashes.cu"
    path.write_text(SOURCE)
    return simulator.compile(path)


def line_of(kernel: str) -> int:
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if line.endswith(f"// {kernel}"))


def caught(program, kernel: str, **options) -> simulator.Fault:
    with pytest.raises(simulator.Fault) as info:
        program.launch(kernel, 4, 64, (torch.zeros(4096, dtype=torch.int32), IN, 0), **{"watch": None} | options)
    return info.value


def check_it_still_works(program, watch=None) -> None:
    out = torch.zeros(4096, dtype=torch.int32)
    program.launch("adds", 64, 64, (out, IN, 5), watch=watch)
    assert torch.equal(out, IN + 5)


@pytest.mark.parametrize("kernel", CRASHES)
def test_an_unwatched_crash_is_a_fault_with_its_place(kernel, program):
    kind, says, thread = CRASHES[kernel]
    fault = caught(program, kernel, cores=1)
    assert type(fault) is kind and says in str(fault)
    assert (fault.kernel, fault.block, fault.thread) == (kernel, 0, thread)
    assert fault.line.number == line_of(kernel) and f"crashes.cu:{fault.line.number}" in str(fault)
    check_it_still_works(program)


@pytest.mark.parametrize("watch", [None, "faults", "counts"])
@pytest.mark.parametrize("kernel", WOULD_END)
def test_a_call_that_would_end_the_process_is_a_fault(kernel, watch, program):
    kind, says, thread = WOULD_END[kernel]
    for cores in (1, 2):
        fault = caught(program, kernel, watch=watch, cores=cores)
        assert type(fault) is kind and says in str(fault)
        assert (fault.kernel, fault.block, fault.thread) == (kernel, 0, thread)
        assert kernel == "raises" or fault.line.number == line_of(kernel)
    check_it_still_works(program, watch)


def test_who_else_aborts_ends_the_process(file):
    """Only an abort() of a kernel is its fault; one of another thread, or a signal that was sent, is not."""
    start = (
        "threading.Thread(target=launch, args=['endless'], kwargs={'seconds': 20}, "
        "daemon=True).start()\ntime.sleep(0.5)\n"
    )
    for text in (
        "ctypes.CDLL(None).abort()\n",
        "import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\ntime.sleep(5)\n",
    ):
        assert in_a_process(file, start + text).returncode == -signal.SIGABRT
    ignored = "import os, signal\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\n" + start
    ignored += "os.kill(os.getpid(), signal.SIGABRT)\nprint('on')\n"
    assert in_a_process(file, ignored).stdout == "on\n"


@pytest.mark.parametrize("kernel", ENDLESS)
@pytest.mark.parametrize("watch", [None, "faults", "counts"])
def test_an_endless_loop_ends_at_its_limit(kernel, watch, program):
    caught(program, kernel, watch=watch, seconds=0.01)  # builds
    start = time.monotonic()
    fault = caught(program, kernel, watch=watch, seconds=0.5)
    assert time.monotonic() - start > 0.4
    assert type(fault) is faults.TooLong and fault.block == (kernel == "endless_second_block")
    assert fault.line.function == kernel and (watch is None or fault.line.number == line_of(kernel))
    check_it_still_works(program, watch)


def test_a_loop_that_is_counted_ends_before_the_memory_does(program):
    before = resident_bytes()
    fault = caught(program, "endless_sum", watch="counts", seconds=600, cores=1)
    assert type(fault) is faults.TooLong and fault.line.number == line_of("endless_sum")
    assert resident_bytes() < before + (64 << 20)
    check_it_still_works(program, "counts")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_many_crashes_in_a_row_leave_nothing_behind(program):
    def crash_all(times: int) -> None:
        for i in range(times):
            for kernel, (kind, *_) in CRASHES.items():
                assert type(caught(program, kernel, cores=1 + i % 3)) is kind
            caught(program, "endless", cores=1 + i % 3, seconds=0.005)

    crash_all(6)
    before, threads = (resident_bytes(), STACKS._made), len(os.listdir("/proc/self/task"))
    crash_all(40)
    assert resident_bytes() < before[0] + (32 << 20) and STACKS._made == before[1]
    for _ in range(50):  # a thread that has ended is in the list for a moment more
        if len(os.listdir("/proc/self/task")) <= threads:
            break
        time.sleep(0.1)
    else:
        pytest.fail("threads are left")
    check_it_still_works(program)
    check_it_still_works(program, "counts")


def test_launches_of_several_threads_do_not_end_each_other(program):
    wrong, end = [], time.monotonic() + 3

    def crashes(kernel):
        while time.monotonic() < end:
            try:
                program.launch(kernel, 4, 64, (torch.zeros(4096, dtype=torch.int32), IN, 0), watch=None, seconds=0.05)
            except simulator.Fault as fault:
                if type(fault) is not (CRASHES[kernel][0] if kernel in CRASHES else faults.TooLong):
                    wrong.append(fault)

    def works():
        while time.monotonic() < end:
            try:
                check_it_still_works(program)
            except BaseException as error:
                wrong.append(error)

    running = [threading.Thread(target=crashes, args=[kernel]) for kernel in ("wild", "large_array", "endless")]
    running += [threading.Thread(target=works) for _ in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not wrong


def test_the_handlers_of_others_are_as_before_and_are_called_meanwhile(program):
    told = []
    numbers = [signal.SIGFPE, signal.SIGURG, signal.SIGILL]
    old = {number: signal.signal(number, lambda number, _: told.append(number)) for number in numbers}
    try:
        caught(program, "wild")
        for number in numbers:  # after a launch
            signal.raise_signal(number)
        assert told == numbers
        runner = threading.Thread(target=caught, args=(program, "endless"), kwargs={"seconds": 1.0})
        runner.start()
        signal.raise_signal(signal.SIGURG)
        signal.raise_signal(signal.SIGFPE)
        assert told[3:] == [signal.SIGURG, signal.SIGFPE]
        runner.join()
        check_it_still_works(program)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def in_a_process(program, text: str, *, interrupt: bool = False) -> subprocess.CompletedProcess:
    """Runs `text` after a launch; SIGINT once it has said that it is ready."""
    start = (
        "import ctypes, faulthandler, sys, threading, time, torch\n"
        "from twell_lab import simulator\n"
        f"program = simulator.compile({str(program)!r})\n"
        "IN, out = torch.arange(4096, dtype=torch.int32), torch.zeros(4096, dtype=torch.int32)\n"
        "def launch(kernel, **options):\n"
        "    program.launch(kernel, 4, 64, (out, IN, 5), **{'watch': None} | options)\n"
        "launch('adds')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start + text], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        if interrupt:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
    finally:
        process.kill()
    return subprocess.CompletedProcess("", process.returncode, out, err)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "crashes.cu"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("watch", [None, "faults"])
def test_ctrl_c_ends_an_endless_loop(watch, file):
    done = in_a_process(
        file,
        f"launch('adds', watch={watch!r})\n"
        "try:\n"
        "    print('ready', flush=True)\n"
        f"    launch('endless', watch={watch!r}, seconds=300)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        f"launch('adds', watch={watch!r})\n"
        "print(out[:3].tolist())\n",
        interrupt=True,
    )
    assert done.stdout == "interrupted\n[5, 6, 7]\n", done.stderr


def test_a_crash_outside_of_kernels_is_still_the_process_s_own(file):
    done = in_a_process(
        file,
        "faulthandler.enable()\n"
        "threading.Thread(target=launch, args=['endless'], kwargs={'seconds': 20}, daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "ctypes.string_at(8)\n",
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_a_crash_where_somebody_else_put_his_handler_ends_the_process(file):
    done = in_a_process(
        file,
        "threading.Thread(target=launch, args=['endless'], kwargs={'seconds': 20}, daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "faulthandler.enable()\n"
        "ctypes.string_at(8)\n",
    )
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1


def test_the_last_fault_is_kept_where_the_time_for_a_second_look_is_over(program, monkeypatch):
    """Several cores meet a fault; one core alone has no time left to meet it again."""
    run = simulator.program._Call.run

    def slowly(self, workers, names, **options):
        if workers == 1:
            raise faults.TooLong("too long", kernel="wild", block=0, thread=0, path=[])
        return run(self, workers, names, **options)

    monkeypatch.setattr(simulator.program._Call, "run", slowly)
    assert type(caught(program, "wild", watch="faults", cores=2)) is faults.OutOfBounds


def test_faulthandler_is_left_as_it_was(program):
    was = faulthandler.is_enabled()
    caught(program, "wild")
    assert faulthandler.is_enabled() == was
