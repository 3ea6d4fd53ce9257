"""The transpose kernel, in the simulator; and compiled for every architecture that may run it."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.ops import transpose


@pytest.mark.parametrize("rows, columns", [(8, 8), (64, 64), (72, 64), (8, 136), (200, 8), (0, 8), (128, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_arrives(rows, columns, dtype):
    m = torch.randn(rows, columns).to(dtype)
    assert torch.equal(transpose.transposed(m), m.t())


def test_slices_and_odd_addresses():
    m = torch.randn(64 * 80 + 1).to(torch.bfloat16)
    for each in (m[1:].view(64, 80), m[:-1].view(80, 64).t(), m[:-1].view(64, 80)[:, 8:72]):
        assert torch.equal(transpose.transposed(each), each.t())


@pytest.mark.parametrize(
    "m", [torch.zeros(8, 9, dtype=torch.float16), torch.zeros(8, 8), torch.zeros(8, dtype=torch.float16)]
)
def test_what_is_not_taken_is_named(m):
    with pytest.raises(InputError, match="the matrix is"):
        transpose.transposed(m)
