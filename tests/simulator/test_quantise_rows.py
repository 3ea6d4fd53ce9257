"""The kernel that rounds rows to few bits, run on the CPU: bit for bit as torch's operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulator import quantise_cases
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops.quantise_rows import KINDS, quantise_rows

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@given(columns=st.integers(1, 300), padded=st.sampled_from([0, 10, 24]), seed=st.integers(0, 99))
@settings(max_examples=6, deadline=None)
def test_bit_for_bit(dtype, kind, columns, padded, seed):
    for width, versions in ((columns, (None, 1)), (8 * columns, (1, 2))):
        quantise_cases.check(quantise_cases.draw(width, dtype, seed), kind, versions, padded)


def test_every_value_of_half_precision_becomes_the_same_e4m3():
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.abs() <= 448][None].contiguous()  # with 448 itself: the scale is one
    quantise_cases.check(x, torch.float8_e4m3fn, (1,), 0)


def test_what_does_not_fit():
    for wrong, kind in (
        (torch.zeros(3), torch.int8),
        (torch.zeros(2, 2).double(), torch.int8),
        (torch.ones(2, 2), None),
    ):
        with pytest.raises(InputError, match="are accepted"):
            quantise_rows(wrong, kind)
    for shape, version in (((2, 7), 2), ((2, 8), 3)):
        with pytest.raises(InputError, match=f"version is {version}"):
            quantise_rows(torch.ones(shape), torch.int8, 0, version)
    assert [t.shape for t in quantise_rows(torch.ones(0, 8), torch.int8)] == [(0, 8), (0,)]
