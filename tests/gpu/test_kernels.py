"""Every kernel on the GPU at hand, beside its reference (tests/ops/table.py)."""

import pytest
import torch

from tests.ops.table import Case, cases, check
from twell_lab import formats
from twell_lab.cuda.launch import run
from twell_lab.ops.pack import pack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases())
def test_on_a_gpu(case: Case):
    check(case, "cuda")


def test_a_matrix_of_more_than_two_to_the_31_values():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    rows, columns = 2**31 // 5632 + 1000, 5632
    gate = torch.full((rows, columns), -1.0, dtype=torch.bfloat16, device="cuda")
    gate[-1, -3:] = torch.tensor([1.0, 2.0, 3.0])
    packed = run(pack, gate, 256, 32)
    assert packed[-1, -1, 0] == 3 and packed[:-1, :, 0].max() == 0
    value, column = formats.split_words(packed[-1, -1, 1:4], torch.bfloat16)
    assert value.tolist() == [1.0, 2.0, 3.0] and column.tolist() == [253, 254, 255]
