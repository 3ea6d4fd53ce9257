"""Finding micro-tiles by the kernels, in the simulator: counts, columns and the bits of the values."""

import pytest
import torch

from tests.ops.microtiles import cases
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops import microtiles

simulated = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@simulated
@pytest.mark.parametrize("height, rows, width", [(32, 37, 1048), (64, 70, 528), (128, 130, 264), (32, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_versions_find_what_indexing_finds(dtype, height, rows, width):
    a = cases.draw(rows, width, dtype)
    for version in (1, 2)[: 1 + (width % 8 == 0)]:
        cases.check_found(a, height, version)


@simulated
@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_all_zero_and_all_dense(fill):
    a = torch.full((40, 1032), fill, dtype=torch.bfloat16)
    for version in (1, 2):
        cases.check_found(a, 32, version)
    assert microtiles.find(a[:0], 32)[2].shape == (0, 1032, 32)


def test_what_the_kernels_do_not_take():
    a = torch.zeros(8, 9, dtype=torch.bfloat16)
    for other, height in ((a, 16), (a.float(), 32), (a.t(), 32), (a[0], 32)):
        with pytest.raises(InputError, match="heights of 32, 64, 128 are accepted"):
            microtiles.find(other, height)
    with pytest.raises(InputError, match=r"version is 2; .* \(1,\) are accepted"):
        microtiles.find(a, 32, 2)
    found = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 8, 32), (8, 16))]
    with pytest.raises(InputError, match="compute capability 8.0"):
        microtiles.product(torch.zeros(1), torch.zeros(1, 8), *found, 8)
