"""The kernels that take their overflow from the pool, on the GPU: against float64, against each other, in graphs.

Outputs are poisoned: torch fills what it allocates with NaN in deterministic mode, so a row that is forgotten is seen,
and a lost row that somebody writes."""

import pytest
import torch

from tests.simulator.pooled_cases import Pooled, adversarial, bits, gate_of
from twell_lab import simulator
from twell_lab.formats import packed_and_pool
from twell_lab.ops import portable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16]
EVERY = [("gated", 5), ("gated", 6), ("gated", 7), ("down", 4), ("down", 5)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, version", EVERY)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300])
def test_adversarial_rows(tokens, name, version, dtype):
    for i, (d_model, d_ff) in enumerate([(2048, 5632), (264, 600), (64, 9000), (4096, 1100)]):
        layer = Pooled.draw(adversarial(tokens, d_ff, dtype), d_model, biases=i % 2 == 1, start=i > 1)
        if tokens == 300:
            x = layer.x
            x[5, 3], x[48, 0], x[33, 9], x[20, 1], x[29, -1] = torch.nan, torch.inf, -torch.inf, torch.inf, torch.nan
        layer.to("cuda").check(name, version)


@pytest.mark.parametrize("name, version", EVERY)
def test_many_rows(name, version):
    """More than fit in the two passes' workspace at once; overflow in groups all over them."""
    tokens = portable._TWO_PASS_ROWS + 1003
    gate = gate_of(tokens, 520, torch.bfloat16, 0.03)
    gate[::7, :40] = gate[::7, :40].abs()
    gate[5::1000, 256:] = 1.0
    layer = Pooled.draw(gate, 264, biases=True, start=True).to("cuda")
    layer.check(name, version)
    assert layer.expected_lost.sum() == len(range(5, tokens, 1000))


@pytest.mark.parametrize("d_model", [8, 768, 2048, 5120, 16384])
def test_one_pass_and_two_give_the_same_bits(d_model):
    layer = Pooled.draw(adversarial(300, 1100, torch.bfloat16), d_model, biases=True, start=True).to("cuda")
    one, two = layer.run("gated", 5), layer.run("gated", 7)
    kept = ~layer.expected_lost
    assert torch.equal(bits(one[kept]), bits(two[kept]))
    assert all(torch.equal(bits(layer.run("gated", 7)[kept]), bits(two[kept])) for _ in range(3))


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, version", EVERY)
def test_the_simulator_has_the_same_bits(name, version, dtype):
    for d_model in (264, 2048):
        layer = Pooled.draw(adversarial(40, 600, dtype), d_model, biases=True, start=True)
        here, there = layer.run(name, version), layer.to("cuda").run(name, version).cpu()
        kept = ~layer.expected_lost
        assert torch.equal(bits(here[kept]), bits(there[kept]))


@pytest.mark.parametrize("tokens", [40, 1000])
def test_the_default_version_in_a_graph(tokens):
    layer = Pooled.draw(adversarial(tokens, 1100, torch.bfloat16), 2048).to("cuda")
    expected = layer.run("gated", None)
    packed, pool, lost_rows = packed_and_pool(layer.gate)
    lost, lost_x = torch.zeros(1 + tokens, dtype=torch.int32, device="cuda"), torch.empty_like(layer.x)
    stats = torch.zeros(4, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lost[:1].zero_()
        y = portable.gated_pooled(layer.x, packed, pool, layer.up, layer.down_t, None, None, None, lost, lost_x, stats)
    for replay in (1, 2):
        graph.replay()
        torch.cuda.synchronize()
        assert lost[0] == lost_rows.sum() and stats[0] == replay * tokens and stats[3] == replay * int(lost_rows.sum())
        assert torch.equal(bits(y[~lost_rows]), bits(expected[~lost_rows]))
