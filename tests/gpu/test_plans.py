"""Planned layers on a GPU: as exact as promised on every path, inside torch, and measured."""

import copy
import time

import pytest
import torch

import twell_lab as tl
from twell_lab.analysis import costs, trials
from twell_lab.analysis.profile import profile
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import clock
from twell_lab.ops.reference import PlainFeedForward

pytestmark = pytest.mark.gpu
CHOICES = [Choice("dense"), Choice("twell"), Choice("hot_cold", 512)]


def drawn(tokens=700, gated=True, dtype=torch.bfloat16):
    """(layer, three inputs, its profile from the first)."""
    layer, inputs = clock.workload(tokens, 256, 1400, 30, "lognormal", dtype, "cuda")
    if not gated:
        plain = PlainFeedForward(256, 1400).requires_grad_(False)
        plain.up_proj, plain.down_proj = layer.gate_proj, layer.down_proj
        layer = plain
    return layer, inputs, profile(layer, inputs[:1])


def by_tokens(layer, *choices):
    """A plan of a profiled layer with these choices for up to 64, 128, ... tokens."""
    candidates = tuple(
        Candidate(64 * (i + 1), c.path, c.hot, 1.0, None, True, "a test's") for i, c in enumerate(choices)
    )
    return LayerPlan(**{**vars(LayerPlan.forced(layer, choices[0])), "candidates": candidates})


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("tokens", [1, 33, 300, 700])
def test_every_path_keeps_the_error_promise(choice, gated, tokens):
    layer, inputs, profiled = drawn(gated=gated)
    sparse = SparseFFN(layer, plan=LayerPlan.forced(profiled.layers[0], choice))
    with torch.no_grad():
        assert clock.check(layer, sparse, inputs[1][:tokens], rows=200) <= 1.0


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_inside_torch(choice):
    """No waiting for the GPU; a graph and compiled code follow what the eager layer does; weights are followed."""
    layer, inputs, profiled = drawn()
    sparse = SparseFFN(layer, plan=LayerPlan.forced(profiled.layers[0], choice))
    x = inputs[1].clone()
    with torch.no_grad():
        sparse(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sparse(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sparse(x)
        x.copy_(inputs[2])
        graph.replay()
        assert torch.equal(y, sparse(x))
        compiled = torch.compile(sparse, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(
                compiled(x).float(), layer(x).float(), rtol=0.1, atol=0.05 * float(y.abs().max())
            )
            layer.up_proj.weight.mul_(0.5), layer.gate_proj.weight.mul_(2)
        moved = copy.deepcopy(sparse).cpu().cuda()
        assert torch.equal(moved(x), sparse(x))
        assert clock.check(layer, sparse, x) <= 1.0
    torch._dynamo.reset()


def test_what_a_layer_has_seen():
    layer, inputs, profiled = drawn(
        tokens=20000
    )  # from few, the neurons that happened to fire often would be taken for hot
    sparse = SparseFFN(layer, plan=by_tokens(profiled.layers[0], *CHOICES))
    with torch.no_grad():
        for tokens in (10, 100, 2100, 2100):
            sparse(inputs[1][:tokens])
    dense, twell, hot = sparse.status()["classes"]
    assert dense["rows"] is None and hot["rows"] == 4200
    assert 0.8 < hot["drift"] < 1.2 and hot["mean_nnz"] == pytest.approx(hot["planned_nnz"], rel=0.2)
    assert twell["rows"] in (None, 100)  # few tokens are not always counted


def test_rates_are_those_of_a_gpu():
    rates = costs.measure_rates("cuda")
    assert rates.device == torch.cuda.get_device_name() and rates.dtype == "bfloat16"
    assert 1e11 < rates.bandwidth < 2e13 and rates.bandwidth / 3 < rates.l2 < 1e14
    assert 1e12 < rates.matmul < 1e16 and 1e-7 < rates.launch < 1e-4 and rates.cache > 1e6


@pytest.mark.parametrize("calls", ["eager", "compiled", "captured"])
def test_a_plan_takes_what_is_fastest_for_the_way_of_calling(calls):
    layer, inputs = clock.workload(2048, 1024, 4096, 20, "lognormal", torch.bfloat16, "cuda")
    plan = tl.plan(profile(layer, inputs[:1]), layer, tokens=(1, 2048), batches=inputs[1:2], calls=calls)
    assert plan.inputs == "captured from the batches" and plan.calls == calls
    for tokens in (1, 2048):
        timed = {row.choice: row for row in plan.layers[0].candidates if row.tokens == tokens}
        (chosen,) = (row for row in timed.values() if row.chosen)
        assert chosen.measured_us <= timed[Choice("dense")].measured_us, str(plan)
    torch._dynamo.reset()


def gated_model(layers, d_model, d_ff, nnzs):
    """(a model of so many gated layers, one after the other, bf16; inputs of it): layer i fires as nnzs says."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Normed(d_model, d_ff, nnz, i) for i, nnz in zip(range(layers), nnzs)))
    return model, torch.randn(3, 4096, d_model, device="cuda", dtype=torch.bfloat16)


class Normed(torch.nn.Module):
    """A drawn gated layer behind a norm, whose first value is the constant that the layer's thresholds go by."""

    def __init__(self, d_model, d_ff, nnz, seed):
        super().__init__()
        rates = clock.firing_rates(d_ff, nnz, seed=seed)
        drawn = clock.drawn(rates, 1, d_model, torch.bfloat16, "cuda", shrink=max(nnz, 1) ** 0.5, seed=seed)
        self.mlp = drawn[0]

    def forward(self, x):
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        normed[..., 0] = x.shape[-1] ** 0.5
        return x + self.mlp(normed)


def test_a_model_is_planned_by_a_few_trials(monkeypatch):
    """38 layers of 2048 x 5632, mean nnz from 2 to 109: in ten seconds, as many timed as it has densities, not layers."""
    model, inputs = gated_model(38, 2048, 5632, [2 * (109 / 2) ** (i / 37) for i in range(38)])
    ran, run = set(), trials.Trial.run
    monkeypatch.setattr(trials.Trial, "run", lambda trial, *given: ran.add(trial.layer.name) or run(trial, *given))
    firing = profile(model, [inputs[0]])
    tl.plan(firing, model, batches=[inputs[1]])  # kernels compiled, rates known to be there
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan = tl.plan(firing, model, batches=[inputs[1], inputs[2]])
    seconds = time.perf_counter() - start
    print(f"{seconds:.2f} s, {len(ran)} layers timed\n{plan}")
    assert len(ran) <= 12 and seconds <= 10, (seconds, ran)
    for layer in plan.layers:
        for row in layer.candidates:
            if row.chosen and row.path != "dense":
                assert row.measured_us < row.dense_us, row
