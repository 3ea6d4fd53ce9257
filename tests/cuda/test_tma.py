"""Tensor maps without a driver: the arguments that it gets, and what is said where there is none."""

import ctypes

import pytest
import torch

from twell_lab.core import DeviceError, StackError
from twell_lab.cuda import tma
from twell_lab.cuda.launch import Buffer

ADDRESS = 1 << 20


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
    _, start = made = tma.encoded(found, ADDRESS)
    assert driver.calls == [(6, ADDRESS, [*dims], [row], [64, 128], 3)]
    assert start % 64 == 0 and ctypes.string_at(start, 128) == b"\1" * 128 and ctypes.sizeof(made[0]) >= 128


GOOD = tma.Map(Buffer(1, 0, (9, 64), (64, 1), torch.bfloat16, 0), (64, 9), (128,), (64, 128))


def test_a_refusal_by_the_driver_names_the_numbers(driver):
    driver.answer = 1
    with pytest.raises(DeviceError, match=r"error 1.*bfloat16 at 0x100000, dims \(64, 9\)"):
        tma.encoded(GOOD, ADDRESS)


def test_without_a_driver_it_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    tma._encode.cache_clear()
    with pytest.raises(StackError, match="NVIDIA driver.*libcuda"):
        tma.encoded(GOOD, ADDRESS)
    tma._encode.cache_clear()
