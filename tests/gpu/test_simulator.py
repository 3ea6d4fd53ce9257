"""The simulator and this GPU, side by side on fresh random inputs: the same bits."""

import pytest
import torch

from twell_lab import simulator
from twell_lab.formats import TwELL
from twell_lab.ops import portable
from twell_lab.bench import evidence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")]
NO_TAIL = (None, None, None)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit; of a NaN only that it is one."""
    a, b = a.cpu(), b.cpu()
    return torch.equal(torch.where(a.isnan(), 0, a), torch.where(b.isnan(), 0, b)) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("case", evidence.cases(), ids=lambda case: case.kernel)
def test_the_recorded_cases(case):
    on_gpu = {name: t.cuda() for name, t in case.inputs.items()}
    for version in case.versions:
        assert same(case.run(on_gpu, version), case.run(case.inputs, version)), version


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows,d_model,d_ff", [(9, 264, 520), (3, 2048, 300)])
def test_random_layers(rows, d_model, d_ff, dtype):
    gate = torch.where(torch.rand(rows, d_ff) < 0.05, 1.0, -1.0) * (torch.rand(rows, d_ff) + 0.01)
    gate[0] = gate[0].abs()  # every tile overflows
    gate = gate.to(dtype)
    x, up, down_t = (torch.randn(n, d_model).to(dtype) for n in (rows, d_ff, d_ff))
    bias, up_bias = torch.randn(d_model).to(dtype), torch.randn(d_ff).to(dtype)
    packed = TwELL.from_gate(gate).packed
    here = (x, packed, gate, NO_TAIL, up, down_t, up_bias, bias)
    there = tuple(t.cuda() if isinstance(t, torch.Tensor) else t for t in here)
    for version in (1, 2, 3, 4):
        assert same(portable.gated(*there, 256, version), portable.gated(*here, 256, version)), version
    for version in (1, 2, 3):
        down = [portable.down(*(args[i] for i in (1, 2, 3, 5, 7)), d_ff, 256, version) for args in (there, here)]
        assert same(*down), version
