"""Kernels written as in CUDA tutorials, and arguments of the wrong kind: nothing of it may end the process."""

import ctypes

import numpy as np
import pytest
import torch

from twell_lab import core, simulator
from twell_lab.cuda.launch import run
from twell_lab.ops.down import down
from twell_lab.ops.pack import pack

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
SOURCE = """
#include <cuda_runtime.h>
#include <device_launch_parameters.h>
#include <cassert>
#include <stdio.h>
struct Three { float a, b, c; };
extern "C" __global__ void sum_of(Three t, float* out) { out[threadIdx.x] = t.a + t.b + t.c; }
extern "C" __global__ void large_local(float* out) {
    float a[100000];
    for (int i = 0; i < 100000; ++i) a[i] = i;
    out[threadIdx.x] = a[threadIdx.x * 3];
}
extern "C" __global__ void prints() { if (threadIdx.x == 0) printf("hello from %d threads\\n", blockDim.x); }
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("habits") / "habits.cu"
    path.write_text(SOURCE)
    return simulator.compile(path)


def test_a_thread_has_as_much_memory_of_its_own_as_on_a_gpu(program):
    out = torch.zeros(40)
    program.launch("large_local", 1, 40, (out,))
    assert torch.equal(out, torch.arange(40.0) * 3)


def test_printf_prints(program, capfd):
    program.launch("prints", 2, 32, ())
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "hello from 32 threads\n" * 2


class Three(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in "abc"]


@pytest.mark.parametrize(
    "given", [Three(1, 2, 3), np.array((1, 2, 3), "f4,f4,f4")[()], np.float32([1, 2, 3]).tobytes()]
)
def test_a_struct_is_passed_by_its_bytes(program, given):
    out = torch.zeros(4)
    program.launch("sum_of", 1, 4, (given, out))
    assert out.tolist() == [6.0] * 4


@pytest.mark.parametrize("given", [3, None, b"abc", torch.zeros(3)])
def test_a_struct_of_another_size_is_refused(program, given):
    with pytest.raises(core.InputError, match="t of sum_of is .*Three takes 12 bytes"):
        program.launch("sum_of", 1, 4, (given, torch.zeros(4)))


@pytest.mark.parametrize("watch", ["faults", None])
def test_a_read_only_array_is_not_written(program, watch):
    given = np.zeros(4, np.float32)
    given.flags.writeable = False
    program.launch("sum_of", 1, 4, (Three(1, 2, 3), given), watch=watch)
    assert not given.any()


def test_more_static_shared_memory_than_a_gpu_takes_is_refused(tmp_path):
    path = tmp_path / "large.cu"
    path.write_text('extern "C" __global__ void k(float* o) { __shared__ float a[20000]; a[0] = 1; o[0] = a[0]; }')
    with pytest.raises(core.InputError, match=r"\(a\) have 80,000 bytes; a GPU takes 49,152"):
        simulator.compile(path).launch("k", 1, 1, (torch.zeros(1),))


def test_launch_refuses_versions_and_geometries_that_a_kernel_has_not():
    for arguments in ((256, 32, 3), (256, 0, None), (0, 32, None), (256, 32, 9)):
        with pytest.raises(core.InputError):
            run(pack, torch.randn(8, 333).bfloat16(), *arguments)
    packed = run(pack, torch.randn(2, 64).bfloat16(), 64, 65)
    with pytest.raises(core.InputError, match="version is 9; 1 to 3"):
        run(down, packed, None, (None, None, None), torch.randn(64, 8).bfloat16(), None, 64, 64, 9)
