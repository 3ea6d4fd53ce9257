"""Planned layers on a GPU: as exact as promised on every path, inside torch, measured, and deciding for themselves."""

import copy
import time

import pytest
import torch

import twell_lab as tl
from twell_lab.analysis import auto, costs, trials
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


def test_a_plan_for_graphs_takes_what_is_fastest_in_one():
    layer, inputs = clock.workload(2048, 1024, 4096, 20, "lognormal", torch.bfloat16, "cuda")
    plan = tl.plan(profile(layer, inputs[:1]), layer, tokens=(1, 2048), batches=inputs[1:2], for_graphs=True)
    assert plan.inputs == "captured from the batches" and plan.clock == "graph"
    assert all(each.host_us is None for each in plan.layers[0].candidates)
    for tokens in (1, 2048):
        timed = {each.choice: each for each in plan.layers[0].candidates if each.tokens == tokens}
        (chosen,) = (each for each in timed.values() if each.chosen)
        assert chosen.measured_us <= timed[Choice("dense")].measured_us, str(plan)


@torch.no_grad()
def test_the_clocks_of_plain_calls():
    """The host's time is a part of the wall time."""
    layer, inputs = clock.workload(4096, 1024, 4096, 20, "lognormal", torch.bfloat16, "cuda")
    found = tl.feed_forwards(layer)[0]
    subject = trials.Subject(profile(layer, inputs[:1]).layers[0], found, lambda: inputs[1])
    for tokens in (1, 4096):
        calls = subject.calls(CHOICES, tokens)
        times = trials.wall(calls, torch.device("cuda"))
        assert set(times) == {None, *CHOICES}
        assert all(0 < taken.host <= taken.call and 0 < taken.device for taken in times.values())


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
    """38 layers of 2048 x 5632, mean nnz from 2 to 109, five classes: as many trials as it has densities, not layers."""
    model, inputs = gated_model(38, 2048, 5632, [2 * (109 / 2) ** (i / 37) for i in range(38)])
    ran, run = [], trials.Trials.run
    monkeypatch.setattr(trials.Trials, "run", lambda *given: ran.append(1) or run(*given))
    firing = profile(model, [inputs[0]])
    tl.plan(firing, model, tokens=(1,), batches=[inputs[1]])  # kernels compiled, rates known to be there
    ran.clear()
    torch.cuda.synchronize()
    start = time.perf_counter()
    plan = tl.plan(firing, model, tokens=(1, 16, 256, 2048, 16384), batches=[inputs[1], inputs[2]])
    print(f"{time.perf_counter() - start:.2f} s, {len(ran)} trials on {len(plan.timed_on)} layers")
    assert len(ran) <= 100 and len(plan.timed_on) <= 30, plan.timed_on
    for layer in plan.layers:
        for tokens in layer.choices:
            (taken,) = [each for each in layer.candidates if each.tokens == tokens and each.chosen]
            if taken.path != "dense" and taken.measured_us is not None:
                assert taken.measured_us < taken.before_us, taken


def test_a_layer_plans_itself_but_not_inside_a_graph(monkeypatch):
    monkeypatch.setattr(auto, "FORWARDS", 2)  # of 700 tokens
    layer, inputs, _ = drawn()
    graphed, sparse = tl.sparsify(copy.deepcopy(layer), "auto"), tl.sparsify(copy.deepcopy(layer), "auto")
    with torch.no_grad():
        graphed(inputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = graphed(inputs[0])
        for _ in range(4):
            graphed(inputs[0])
            sparse(inputs[0])
        graph.replay()
        assert graphed.plan is None and graphed.status()["plan"] == "none"
        assert sparse.plan is not None and clock.check(layer, sparse, inputs[1]) <= 1.0
        assert torch.equal(y, graphed(inputs[0]))
