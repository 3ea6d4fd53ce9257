"""Layers asked on a GPU what they compute: in their own type there, and with the GPU's random numbers left as they
were."""

import pytest
import torch
from torch import nn

from twell_lab.core.errors import InputError
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import sparsify
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

pytestmark = pytest.mark.gpu


class Dropping(GatedFeedForward):
    def __init__(self, *sizes, p):
        super().__init__(*sizes)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Scaled(GatedFeedForward):
    def forward(self, x):
        return 1.01 * super().forward(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(2048, 5632), (256, 1400), (33, 70)])
def test_what_computes_the_formula_is_taken_and_nothing_else(dtype, sizes):
    torch.manual_seed(0)
    with torch.device("cuda"):
        for kind in (GatedFeedForward, PlainFeedForward):
            assert isinstance(SparseFFN.from_module(kind(*sizes).to(dtype)), SparseFFN)
        assert isinstance(SparseFFN.from_module(Dropping(*sizes, p=0.0).to(dtype)), SparseFFN)
        dropping = Dropping(*sizes, p=0.1).to(dtype)
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        with pytest.raises(InputError, match="in training mode"):
            sparsify(dropping, "twell")
        assert torch.equal(torch.cuda.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
        with pytest.raises(InputError, match=r"1(\.\d+)?% off"):
            sparsify(Scaled(*sizes).to(dtype), "twell")
