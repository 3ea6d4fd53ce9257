"""Profiling on a GPU: the counts of the CPU, without waiting for the device, in the memory that is promised."""

import pytest
import torch

from twell_lab.analysis import profile as module
from twell_lab.analysis.profile import Counter
from twell_lab.analysis.running import Rows, run
from twell_lab.layers.find import feed_forwards
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward

from .drawn import unwaiting

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("piece", [1000, 2**26])
def test_counts_are_those_of_the_cpu_and_wait_for_nothing(monkeypatch, piece):
    monkeypatch.setattr(module, "_PIECE", piece)
    (layer,) = feed_forwards(GatedFeedForward(16, 300))
    x, gate = torch.randn(2, 90, 16), torch.randn(180, 300) - 1
    counted = torch.rand(180) < 0.9
    linked = counted & counted.roll(-1) & (torch.arange(180) % 90 != 89)
    rows = Rows(counted, torch.arange(180) % 9, linked)
    expected = Counter(layer, 64, 8)
    nnz = expected.add(x, lambda of: gate[of], rows)
    found, x, gate, rows = Counter(layer, 64, 8), x.cuda(), gate.cuda(), rows.map(torch.Tensor.cuda)
    found.add(x[:0], lambda of: gate[:0][of], Rows())  # its counts move there once
    there = unwaiting(lambda: found.add(x, lambda of: gate[of], rows))
    assert torch.equal(there.cpu(), nnz)
    for name, value in vars(expected.result()).items():
        mine = getattr(found.result(), name)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name


def test_layers_of_the_2b_shape_are_profiled_in_little_memory():
    sizes = ModelConfig(d_model=2048, layers=4, heads=16, d_ff=5632, context=2048)
    model = LanguageModel(sizes).cuda().bfloat16().eval()
    tokens = torch.randint(256, (8, 2048), device="cuda")
    counters = [Counter(layer, 256, 32) for layer in feed_forwards(model)]
    watched = [(counter.layer, counter.add) for counter in counters]

    def peak(watched) -> int:
        torch.cuda.reset_peak_memory_stats()
        run(model, watched, tokens)
        return torch.cuda.max_memory_allocated()

    assert peak(watched) - peak([]) < 2**30
