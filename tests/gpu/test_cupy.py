"""CuPy arrays in the place of tensors: their memory is read where it is, after what CuPy is still computing."""

import pytest
import torch

import twell_lab as tl
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL, Hybrid, TwELL, as_tensor

pytestmark = pytest.mark.gpu
MAKERS = [COO.from_dense, CSR.from_dense, ELL.from_dense, Hybrid.from_dense, TwELL.from_dense, TwELL.from_gate, tl.pack]


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def drawn(cp, dtype, rows=70, columns=1000):
    return (cp.random.default_rng(3).standard_normal((rows, columns), dtype=cp.float32) - 1).astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("make", MAKERS)
def test_an_array_gives_what_its_tensor_gives(cp, make, dtype):
    x = drawn(cp, dtype)
    tensor = torch.from_numpy(cp.asnumpy(x))
    for given in (x, cp.asfortranarray(x)):
        made = make(given)
        assert made == make(tensor)  # computed on the CPU
        assert made.to_dense().is_cuda


def test_memory_is_shared(cp):
    x = drawn(cp, "float32")
    shared = as_tensor("x", x)
    assert shared.data_ptr() == x.data.ptr and shared.is_cuda
    back = cp.from_dlpack(tl.pack(x.astype("float16")).packed)
    assert back.dtype == cp.int32 and back.shape == (70, 4, 32)


def test_what_cupy_is_still_computing_is_waited_for(cp):
    side = cp.cuda.Stream(non_blocking=True)
    big = drawn(cp, "float32", 3000, 3000)
    cp.cuda.Device().synchronize()
    with side:
        x = big
        for _ in range(20):
            x = (x @ big) * 1e-2
        packed = tl.pack(x)
    side.synchronize()
    assert packed == tl.pack(torch.from_numpy(cp.asnumpy(x)))


def test_an_array_with_the_cuda_array_interface_alone(cp):
    x = drawn(cp, "float32")

    class Lean:
        __cuda_array_interface__ = x.__cuda_array_interface__

    assert tl.pack(Lean()) == tl.pack(x)


def test_what_cannot_be_taken(cp):
    x = drawn(cp, "float32")
    for wrong, told in ((x[::-1], "none below zero"), (x.astype(cp.int32), "int32"), (x[0], r"\[1000\]")):
        with pytest.raises(InputError, match=told):
            tl.pack(wrong)
    with pytest.raises(InputError, match="float64"):
        tl.pack(x.astype(cp.float64))
