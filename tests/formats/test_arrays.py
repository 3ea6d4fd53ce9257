"""Arrays of other libraries: their memory is shared, never copied, and what cannot be shared is refused by name."""

import numpy as np
import pytest
import torch

import twell_lab as tl
from twell_lab.core import InputError
from twell_lab.formats import COO, CSR, ELL, Hybrid, TwELL, as_tensor

MAKERS = {
    "COO": COO.from_dense,
    "CSR": CSR.from_dense,
    "ELL": ELL.from_dense,
    "Hybrid": Hybrid.from_dense,
    "TwELL of a matrix": TwELL.from_dense,
    "TwELL of a gate": TwELL.from_gate,
    "pack": tl.pack,
}


def array(rows=5, columns=300, dtype=np.float32):
    drawn = np.random.default_rng(3).normal(size=(rows, columns))
    return np.where(drawn > 1, drawn, 0).astype(dtype)


class Foreign:
    """An array of a library that torch does not know: it offers DLPack and nothing else."""

    def __init__(self, inside, error=None):
        self.inside, self.error, self.asked = inside, error, 0

    def __dlpack_device__(self):
        return self.inside.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        self.asked += 1
        if self.error:
            raise self.error
        return self.inside.__dlpack__()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_an_array_gives_what_its_tensor_gives(name, dtype):
    x = array(dtype=dtype)
    for given in (x, Foreign(x), x.T.copy().T):
        assert MAKERS[name](given) == MAKERS[name](torch.from_numpy(x.copy()))


def test_memory_is_shared():
    x = array()
    for given in (x, Foreign(x), x[::2, 5:]):
        shared = as_tensor("x", given)
        inside = given.inside if isinstance(given, Foreign) else given
        assert shared.data_ptr() == inside.ctypes.data and tuple(shared.shape) == inside.shape
    x[1, 1] = 7.0
    assert as_tensor("x", x)[1, 1] == 7.0
    t = torch.ones(2, 3, requires_grad=True)
    assert as_tensor("x", t) is t


def test_it_is_asked_once():
    given = Foreign(array())
    tl.pack(given)
    assert given.asked == 1


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    "given, told",
    [
        (array()[::-1], r"ndarray with strides \(-1200, 4\); none below zero is accepted: copy it"),
        (array()[:, ::-1], "none below zero"),
        (array().astype(">f4"), "ndarray that torch cannot share: .*byte order"),
        (array().astype(object), "ndarray that torch cannot share"),
        (Foreign(array(), BufferError("it moved")), "Foreign that torch cannot share: it moved"),
        (Foreign(array(), RuntimeError()), "Foreign that torch cannot share: RuntimeError"),
        (array().astype(np.int32), "int32"),
        (array()[0], r"\[300\]"),
        (np.float32(1.0), "float32"),
        (array().tolist(), "is a list; a torch.Tensor, or an array with __dlpack__"),
        (np.ndarray, "is a type;"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_taken_is_refused_by_name(name, given, told):
    with pytest.raises(InputError, match=told):
        MAKERS[name](given)


def test_float64_goes_where_a_format_holds_it():
    x = array(dtype=np.float64)
    assert torch.equal(CSR.from_dense(x).to_dense(), torch.from_numpy(x))
    for make in (TwELL.from_dense, tl.pack):
        with pytest.raises(InputError, match="float64"):
            make(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_an_array_on_a_gpu_that_torch_cannot_use():
    class OnGpu:
        __cuda_array_interface__ = {"shape": (2, 3), "typestr": "<f4", "data": (1 << 40, False), "version": 3}

    for make in MAKERS.values():
        with pytest.raises(InputError, match="OnGpu that torch cannot share"):
            make(OnGpu())
