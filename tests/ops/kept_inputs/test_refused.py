"""What the product of kept inputs refuses before it looks for a GPU."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.ops import kept_inputs


@pytest.mark.parametrize("threshold", [-1.0, torch.inf, torch.nan])
def test_a_threshold_that_is_none(threshold):
    with pytest.raises(InputError, match=f"threshold is {threshold}; finite numbers from 0 up"):
        kept_inputs.product(torch.zeros(1, 16).half(), torch.zeros(16, 8).half(), threshold=threshold)


@pytest.mark.parametrize("shape", [(1, 16), (0, 16), (16,), (), (1, 2, 16)])
@pytest.mark.parametrize("weight", [(16, 8), (16, 0), (16,), ()])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int16, torch.float32])
def test_tensors_of_a_cpu_of_any_shape_and_type(shape, weight, dtype):
    with pytest.raises(InputError, match="on cpu.*on one GPU from sm_80.*are accepted"):
        kept_inputs.product(torch.zeros(shape).to(dtype), torch.zeros(weight).to(dtype), threshold=0.5)
