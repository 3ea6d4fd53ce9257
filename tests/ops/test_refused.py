"""Tensors that a kernel does not take are refused with what it takes."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.ops import ampere, hopper_dense


def test_by_the_gate_kernel_of_ampere():
    x, gate = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    assert not ampere.takes(x, gate)
    with pytest.raises(InputError, match=r"x is torch.bfloat16 \[4, 64\] on cpu and gate is \[16, 64\]"):
        ampere.gate_pack(x, gate)


def test_by_the_dense_kernels_of_hopper():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not hopper_dense.takes(x, x)
    with pytest.raises(InputError, match="on cpu"):
        hopper_dense.gate_up(x, x, x)
