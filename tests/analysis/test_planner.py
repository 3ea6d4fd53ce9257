"""Choosing: the fastest by what was timed, dense in doubt; who shares trials; and what is timed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import twell_lab as tl
from twell_lab.analysis import planner
from twell_lab.analysis.planner import Plain, Trial
from twell_lab.analysis.profile import FiringProfile, profile
from twell_lab.core import InputError
from twell_lab.layers.choice import DENSE, Choice
from twell_lab.layers.find import FeedForward, feed_forwards
from twell_lab.layers.paths import PATHS
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

TWELL, HOT = Choice("twell"), Choice("hot_cold", 256)


@pytest.fixture
def fused(rates, monkeypatch):
    """Rates of a GPU that computes hot neurons apart, and every path within reach of being timed."""
    monkeypatch.setattr(planner, "_REACH", 1e9)
    return replace(rates, fuses=True)


@pytest.fixture
def timed(monkeypatch):
    """timed(table): have trials take {tokens: (dense, twell, hot_cold, twell in the order of hot/cold)} microseconds, for
    other counts what the next larger one takes; returns a list of (layer, tokens) that were timed."""

    def read(table):
        asked = []

        def run(self, tokens, choices):
            asked.append((self.layer.name, tokens))
            dense, twell, hot, ordered = table[min(count for count in table if count >= tokens)]
            plain = {(choice, False): twell for choice in choices if choice == TWELL}
            order = {(TWELL, True): ordered, **{(choice, True): hot for choice in choices if choice.hot}}
            return {None: dense, (DENSE, False): dense, **plain, **(order if self.hot else {})}

        monkeypatch.setattr(Trial, "run", run)
        return asked

    return read


@pytest.mark.parametrize(
    "table, expected",
    [
        ({4096: (100, 50, 60, 70)}, ["twell"]),
        ({4096: (100, 99, 99, 99)}, ["dense"]),
        ({4096: (100, 97, 200, 200)}, ["twell"]),
        ({4096: (100, 50, 49, 55)}, ["twell"]),  # hot/cold has to gain 5%
        ({4096: (100, 50, 47, 55)}, ["hot_cold"]),
        ({4096: (100, 120, 94, 130)}, ["hot_cold"]),  # also over dense
        ({4096: (100, 120, 96, 130)}, ["dense"]),
        # Its order costs the other class more.
        ({2048: (100, 50, 80, 70), 4096: (100, 80, 50, 90)}, ["twell", "twell"]),
        ({2048: (100, 50, 80, 51), 4096: (100, 80, 50, 90)}, ["twell", "hot_cold"]),
        ({2048: (100, 120, 130, 150), 4096: (100, 80, 50, 90)}, ["dense", "hot_cold"]),
        ({1: (10, 5, 9, 5), 4096: (100, 120, 130, 150)}, ["twell", "dense"]),
    ],
)
def test_the_fastest_by_one_margin_and_hot_cold_by_another(profiled, layer, fused, timed, table, expected):
    timed(table)
    plan = tl.plan(profiled, layer[0], tokens=[*table], rates=fused, batches=layer[1][1:])
    found = plan.layers[0]
    assert [found.choice(tokens).path for tokens in table] == expected
    for row in found.candidates:
        assert row.why and row.timed_on == (None if row.measured_us is None else "")
        assert row.dense_us == (None if row.measured_us is None else table[row.tokens][0])
    assert plan.inputs == planner.CAPTURED and plan.calls == "eager"


def test_a_path_that_is_slower_at_the_fewest_of_a_class_is_not_taken(profiled, layer, rates, timed):
    timed({4: (100, 50, 0, 0), 5: (100, 200, 0, 0), 64: (100, 50, 0, 0)})
    plan = tl.plan(profiled, layer[0], tokens=(4, 64), rates=rates, batches=layer[1][1:]).layers[0]
    assert plan.choice(4) == TWELL and plan.choice(5) == plan.choice(64) == DENSE
    assert [row.why for row in plan.candidates if row.chosen and row.tokens == 64] == [
        "twell is slower than dense at 5 tokens, the fewest of its class"
    ]


def test_without_timing_predictions_decide(profiled, layer, rates):
    fused = replace(rates, fuses=True)
    plan = tl.plan(profiled, layer[0], rates=fused, tokens=(1, 16384), measure=False)
    assert plan.inputs is None and all(row["measured_us"] is None for row in plan.table())
    assert {row["path"] for row in plan.table()} == {"dense", "twell", "hot_cold"}
    assert plan.rates == vars(fused) and plan.device == rates.device
    for row in plan.table():
        dense = next(r for r in plan.table() if (r["tokens"], r["path"]) == (row["tokens"], "dense"))
        if row["chosen"] and row["path"] != "dense":
            assert row["predicted_us"] * planner.MARGIN_PREDICTED <= dense["predicted_us"]
    narrow = GatedFeedForward(16, 40)
    plan = tl.plan(profile(narrow, [torch.randn(9, 16)]), narrow, rates=fused, tokens=(4096,), measure=False)
    assert {row["path"] for row in plan.table()} == {"dense", "twell"}


def test_layers_that_fire_alike_share_the_trials_of_the_one_that_fires_most(rates, timed):
    layers, stack = [], nn.Module()
    for number, nnz in enumerate((20, 22, 90, 21)):
        drawn = clock.workload(4, 128, 600, nnz, "uniform", torch.float32, "cpu")[0]
        x = clock.workload(1000, 128, 600, nnz, "uniform", torch.float32, "cpu")[1][0]
        layers.append(replace(profile(drawn, x).layers[0], name=f"layer{number}"))
        stack.add_module(f"layer{number}", drawn)
    asked = timed({64: (100, 50, 0, 0)})
    plan = tl.plan(FiringProfile(layers), stack, tokens=64, rates=replace(rates, launch=0.0))
    assert asked == [("layer2", 64), ("layer1", 64)] and plan.inputs == planner.DRAWN
    assert [layer.candidates[0].timed_on for layer in plan.layers] == ["layer1", "layer1", "layer2", "layer1"]
    assert plan.layers[0].neuron_counts == tuple(layers[0].neuron_counts.tolist())


def test_what_cannot_be_planned_is_dense_and_says_why(profiled, layer, rates, timed):
    timed({64: (100, 50, 0, 0)})
    silent = FiringProfile([replace(profiled.layers[0], tokens=0)])
    (row,) = tl.plan(silent, layer[0], rates=rates, tokens=64).layers[0].candidates
    assert (row.path, row.why) == ("dense", "no token reached it in the profile")
    teal = copy.deepcopy(layer[0])
    tl.thresholds(teal, layer[1][:1], 0.5, method="teal").apply(teal)
    seen = profile(teal, layer[1][:1])
    (row,) = tl.plan(seen, teal, rates=rates, tokens=64).layers[0].candidates
    assert row.path == "dense" and "it is timed on batches" in row.why
    plan = tl.plan(seen, teal, rates=replace(rates, device="a GPU"), tokens=1, batches=layer[1][1:])
    assert {row["path"] for row in plan.table()} == {"dense", "kept_inputs"}


@pytest.mark.parametrize("batches", [True, False])
def test_a_plan_is_what_the_clock_said(profiled, layer, rates, batches):
    module, inputs = layer
    before = copy.deepcopy(module.state_dict())
    plan = tl.plan(profiled, module, tokens=(1, 90), rates=rates, batches=inputs[1:] if batches else None)
    assert plan.inputs == (planner.CAPTURED if batches else planner.DRAWN) and plan.dtype == "float32"
    for row in plan.table():
        if row["chosen"] and row["path"] != "dense":
            assert row["measured_us"] * planner.MARGIN <= row["dense_us"]
    assert any(row["measured_us"] is not None for row in plan.table())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module) is GatedFeedForward


def test_compiled_calls_are_timed_compiled(profiled, layer, rates, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda module, **how: compiled.append((type(module), how)) or module)
    plan = tl.plan(profiled, layer[0], tokens=4, rates=rates, batches=layer[1][1:], calls="compiled")
    assert plan.calls == "compiled" and len(compiled) >= 2 and all(how == {"dynamic": False} for _, how in compiled)


@pytest.mark.parametrize("path", ["int8", "twell_int8"])
def test_a_lossy_path_says_how_far_off_it_is(profiled, layer, rates, monkeypatch, path):
    monkeypatch.setattr(planner, "_REACH", 1e9)
    plan = tl.plan(profiled, layer[0], tokens=8, rates=rates, batches=layer[1][1:], paths=[path])
    (why,) = [row["why"] for row in plan.table() if row["path"] == path]
    assert "; lossy: its output is " in why and why.endswith("% off")


def test_in_the_order_of_hot_cold_every_count_takes_the_path_that_is_timed(profiled, layer, fused):
    trial = Trial(profiled.layers[0], feed_forwards(layer[0])[0], {**PATHS}, fused, [16384])
    trial.prepare("eager", layer[1][1], 0)
    assert trial._make(TWELL, True) and trial._make(TWELL, False) and trial._make(HOT, True)
    plan = trial.ways[TWELL, True].plan
    assert plan.choice(1) == plan.choice(10**6) == TWELL
    order = plan.order(256)
    assert torch.equal(trial.ways[TWELL, True].up.weight, layer[0].up_proj.weight[order])
    assert torch.equal(trial.ways[TWELL, False].up.weight, layer[0].up_proj.weight)
    for way in trial.ways.values():
        torch.testing.assert_close(way(layer[1][0]), layer[0](layer[1][0]), rtol=1e-4, atol=1e-4)


def both(gated):
    module = GatedFeedForward(8, 20)
    module.forward = lambda x: module.down_proj(module.gate_proj(x).relu() * module.up_proj(x).relu())
    return FeedForward("", module, module.gate_proj, module.up_proj, module.down_proj, both=True)


def cut(module, method):
    tl.thresholds(module, torch.randn(50, 8), 0.5, method=method).apply(module)
    return feed_forwards(module)[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: feed_forwards(GatedFeedForward(8, 20))[0],
        lambda: feed_forwards(PlainFeedForward(8, 20))[0],
        lambda: feed_forwards(PlainFeedForward(8, 20, "relu2"))[0],
        lambda: both(True),
        lambda: cut(GatedFeedForward(8, 20), "teal"),
        lambda: cut(GatedFeedForward(8, 20), "wina"),
    ],
    ids=["gated", "plain", "squared", "dReLU", "TEAL", "WINA"],
)
def test_a_plain_layer_computes_as_the_one_found_with_its_weights(make):
    torch.manual_seed(0)
    found, x = make(), torch.randn(7, 8)
    plain = Plain(found)
    torch.testing.assert_close(plain(x), found.module(x))
    assert plain.up_proj.weight.data_ptr() == found.up.weight.data_ptr()


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(profile=[1]), "profile is a list"),
        (dict(tokens=(0, 4)), "tokens is"),
        (dict(tokens=(4, 4)), "tokens is"),
        (dict(tokens=[[4]]), "tokens is"),
        (dict(batches=[]), "batches is empty"),
        (dict(calls="captured"), "calls is 'captured' on cpu; accepted: eager"),
        (dict(paths=["fast"]), "paths has 'fast'"),
        (dict(paths=["two_four"]), "path 'two_four'"),
        (dict(paths=["kept_inputs"]), "kept_inputs"),
        (dict(model=GatedFeedForward(32, 599)), "d_ff 600, gated in the profile and d_model 32, d_ff 599"),
        (dict(model=GatedFeedForward(32, 600).double()), "float64"),
        (dict(model=nn.Linear(3, 3)), "no ReLU feed-forward"),
        (dict(model=LanguageModel(ModelConfig(d_model=32, layers=1, heads=2, d_ff=300, context=16))), "missing in"),
    ],
)
def test_what_does_not_fit_is_refused(profiled, layer, rates, changes, named):
    how = {"profile": profiled, "model": layer[0], "rates": rates, "tokens": (4,), "batches": layer[1][1:], **changes}
    with pytest.raises(tl.TwellError, match=named):
        tl.plan(how.pop("profile"), how.pop("model"), **how)


def test_a_plan_of_another_model_is_refused(profiled, layer, rates):
    plan = tl.plan(profiled, layer[0], rates=rates, measure=False)
    with pytest.raises(InputError, match="the plan"):
        plan.check_model(feed_forwards(PlainFeedForward(32, 600)))
    with pytest.raises(InputError, match="has no layer 'x'"):
        plan.layer("x")
