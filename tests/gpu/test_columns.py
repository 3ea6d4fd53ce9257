"""The weights' gradients of a sparse layer on the GPU: against float64, real sizes, the same bits every time and in the
simulator."""

import pytest
import torch

from tests.ops.columns.layers import Layer, bits, pattern
from twell_lab import simulator
from twell_lab.ops import clock, train_columns

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated, version", [(True, 1), (True, 2), (False, 2)])
@pytest.mark.parametrize(
    "tokens, d_ff, d_model", [(1, 1, 8), (67, 41, 264), (1000, 1100, 2048), (300, 20_000, 64), (77, 500, 16384)]
)
def test_odd_sizes(tokens, d_ff, d_model, gated, version, dtype):
    lost = (2, tokens - 1) if tokens > 4 else ()
    layer = Layer.draw(pattern(tokens, d_ff), d_model, dtype, gated=gated, lost=lost).to("cuda")
    layer.check(biases=tokens != 67, version=version)
    layer.check_records(train_columns.by_column(layer.s, layer.dh, d_ff, dtype))


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
@pytest.mark.parametrize(
    "nnz, d_model, gated", [(8, 2048, True), (29, 2048, True), (120, 768, True), (29, 2048, False)]
)
def test_real_sizes(nnz, d_model, gated, kind):
    rates = clock.firing_rates(5632, nnz, kind).float()
    fires = torch.rand(16384, 5632, generator=torch.Generator().manual_seed(1)) < rates
    layer = Layer.draw(fires, d_model, gated=gated, lost=range(100, 200), gap=0).to("cuda")
    found = bits(layer.check())
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found, bits(layer.run())))


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("gated", [True, False])
def test_the_simulator_has_the_same_bits(gated):
    layer = Layer.draw(pattern(400, 90), 264, gated=gated)
    here, there = bits(layer.run()), bits(layer.to("cuda").run())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there))


def test_in_a_graph_on_another_stream():
    layer = Layer.draw(pattern(1000, 1100), 264).to("cuda")
    expected = bits(layer.run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.run()
    for t in found.values():
        t.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(expected, bits(found)))
