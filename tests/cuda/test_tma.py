"""Tensor maps without a driver: the arguments it gets, what is refused, and where the gate's maps put each weight row."""

import ctypes

import pytest
import torch

from twell_lab.core import DeviceError, InputError, StackError
from twell_lab.cuda import tma
from twell_lab.cuda.launch import Buffer

ADDRESS, BF16 = 1 << 20, torch.bfloat16


class Driver:
    """Stands for cuTensorMapEncodeTiled: keeps what it was message, and writes the call's number into the map."""

    def __init__(self):
        self.calls, self.answer = [], 0

    def __call__(self, out, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill):
        assert out.value % 64 == 0 and list(steps) == [1] * rank.value
        self.calls.append((dtype, address.value, list(dims), list(strides), list(box), swizzle))
        ctypes.memset(out.value, len(self.calls), 128)
        return self.answer


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(tma, "_encode", lambda: made)
    return made


@pytest.mark.parametrize(
    "shape, strides, at, dims, row",
    [
        ((8, 32), (72, 1), 152, (32, 8), 144),  # part of a larger matrix
        ((1, 64), (1, 1), 0, (64, 1), 128),  # a single row may have any stride
    ],
)
def test_a_matrix_is_described_innermost_first(driver, shape, strides, at, dims, row):
    matrix = Buffer(1, 2 * at, shape, strides, torch.float16, 0)
    found = tma.matrix_map(matrix, 128)
    assert found == (matrix, dims, (row,), (64, 128), 128)
    encoded = tma.tensor_map(ADDRESS, torch.float16, *found[1:])
    assert driver.calls == [(6, ADDRESS, [*dims], [row], [64, 128], 3)] and encoded == b"\1" * 128


GOOD = {"address": ADDRESS, "dtype": BF16, "dims": (64, 9), "strides": (128,), "box": (64, 128)}


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"address": ADDRESS + 8}, "multiples of 16"),
        ({"strides": (120,)}, "multiples of 16"),
        ({"strides": (2**40,)}, "below 2"),
        ({"strides": ()}, "one stride fewer"),
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (1,) * 6}, "1 to 5 dims"),
        ({"box": (64, 257)}, "1 to 256"),
        ({"box": (128, 8)}, "at most the swizzle"),
        ({"dtype": torch.bool}, "a tensor map of torch.bool"),
        ({"swizzle": 16}, "swizzle of 16"),
    ],
)
def test_what_the_engine_does_not_take_is_refused(driver, wrong, message):
    tma.tensor_map(**GOOD)
    with pytest.raises(InputError, match=message):
        tma.tensor_map(**GOOD | wrong)
    assert len(driver.calls) == 1


def test_a_refusal_by_the_driver_names_the_numbers(driver):
    driver.answer = 1
    with pytest.raises(DeviceError, match=r"error 1.*bfloat16 at 0x100000, dims \(64, 9\)"):
        tma.tensor_map(**GOOD)


def test_without_a_driver_it_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    tma._encode.cache_clear()
    with pytest.raises(StackError, match="NVIDIA driver.*libcuda"):
        tma.tensor_map(**GOOD)
    tma._encode.cache_clear()
