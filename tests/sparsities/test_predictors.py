"""Layers that compute chosen neurons: they compute exactly those, and what is missing is measured."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.sparsities import few_neurons, predictors
from twell_lab.sparsities.few_neurons import CoreFFN, core_neurons, remove
from twell_lab.sparsities.predictors import LowRank, PredictedFFN, predict

SIZES = ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=40, context=24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(SIZES).eval()


def windows(count=6):
    return torch.arange(count * 24).view(count, 24) * 7 % 50


def by_hand(layer, x, neurons):
    """The formula in float64, with all other neurons' hidden values zero."""
    (whole,) = feed_forwards(copy.deepcopy(layer).double())
    hidden = torch.relu(whole.pattern(x.double()))
    hidden = hidden if whole.gate is None else hidden * whole.up(x.double())
    keep = torch.zeros(hidden.shape[-1], dtype=torch.bool)
    keep[neurons] = True
    return whole.down(hidden.where(keep, 0))


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["gated", "plain", "squared"]),
    tokens=st.integers(1, 5),
    d_model=st.integers(1, 9),
    d_ff=st.integers(1, 17),
    bias=st.booleans(),
    data=st.data(),
)
def test_a_layer_computes_the_chosen_neurons_and_no_others(kind, tokens, d_model, d_ff, bias, data):
    count = data.draw(st.integers(1, d_ff))
    torch.manual_seed(d_model * d_ff)
    layer = GatedFeedForward(d_model, d_ff) if kind == "gated" else PlainFeedForward(d_model, d_ff)
    layer = PlainFeedForward(d_model, d_ff, "relu2") if kind == "squared" else layer
    for part in list(layer.children()) if bias else ():
        if isinstance(part, nn.Linear):
            part.bias = nn.Parameter(torch.randn(part.out_features))
    layer, x = layer.requires_grad_(False), torch.randn(tokens, d_model)
    (whole,) = feed_forwards(layer)
    core = torch.randperm(d_ff)[:count].sort().values
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(CoreFFN(whole, core)(x).double(), by_hand(layer, x, core), **close)
    predictor = LowRank(d_model, d_ff, 2).requires_grad_(False)
    few = PredictedFFN(whole, predictor, count)
    for row, one in zip(x, few(x), strict=True):
        expected = by_hand(layer, row, predictor(row[None]).topk(count).indices[0])
        torch.testing.assert_close(one.double(), expected, **close)
        alone = few(row.view(1, 1, -1))
        assert alone.shape == (1, 1, d_model)
        torch.testing.assert_close(alone[0, 0].double(), expected, **close)


@torch.no_grad()
def test_what_a_layer_owns_is_made_again_when_a_state_is_loaded(model):
    (layer,) = feed_forwards(model.layers[0].mlp)
    x, state = torch.randn(1, 16), {name: 2 * t for name, t in model.layers[0].mlp.state_dict().items()}
    few = [CoreFFN(layer, torch.arange(10)), PredictedFFN(layer, LowRank(16, 40, 2), 10)]
    before = [module(x) for module in few]
    for module, old in zip(few, before):
        guess = (
            {f"predictor.{k}": v for k, v in module.predictor.state_dict().items()}
            if hasattr(module, "predictor")
            else {}
        )
        module.load_state_dict({f"dense.{name}": t for name, t in state.items()} | guess)
        torch.testing.assert_close(module(x), 8 * old, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(copy.deepcopy(module)(x), module(x))


def test_all_neurons_are_the_dense_layer_and_removing_gives_it_back(model):
    tokens = windows()
    expected, first = model(tokens), {name: t.clone() for name, t in model.state_dict().items()}
    found, core = predict(model, [tokens], steps=2, rank=3), core_neurons(model, tokens[:1], 1.0)
    for chosen in (found.at(1.0), core):
        dense = [layer.mlp for layer in model.layers]
        assert chosen.apply(model) is model and "lossy" in repr(model.layers[0].mlp) and "lossy" in str(chosen)
        with pytest.raises(InputError, match="'layers.0.mlp' computes chosen neurons already; accepted: remove"):
            chosen.apply(model)
        if chosen is core:
            torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
        assert remove(model) is model and [layer.mlp for layer in model.layers] == dense
        assert torch.equal(model(tokens), expected)
    assert core.sparsity == 0.0
    assert all(torch.equal(t, first[name]) for name, t in model.state_dict().items())


def test_recall_precision_and_error_are_counted_on_other_tokens(model):
    x = torch.randn(4, 400, 16, generator=torch.Generator().manual_seed(0)).cumsum(1)  # with directions to learn
    layer = model.layers[0].mlp
    found = predict(layer, [x.view(-1, 16)], rank=8, steps=60)
    (one,), (whole,) = found.layers.values(), feed_forwards(layer)
    assert (one.recalls.diff() >= 0).all() and one.recalls[0] == 0 and abs(one.recalls[-1] - 1) < 1e-9
    neurons = one.neurons(0.95)
    assert one.recalls[neurons] >= 0.95 > one.recalls[neurons - 1]
    (row,) = found.table()
    fired = whole.pattern(x.view(-1, 16)[1200:]) > 0
    chosen = torch.zeros_like(fired).scatter_(1, one.predictor(x.view(-1, 16)[1200:]).topk(neurons).indices, True)
    assert row["recall"] == pytest.approx(float((fired & chosen).sum() / fired.sum()), abs=1e-3)
    assert row["precision"] == pytest.approx(float((fired & chosen).sum() / chosen.sum()), abs=1e-3)
    assert row["precision"] > row["firing"] / row["d_ff"]
    assert found.at(0.5).sparsity > found.sparsity == 1 - neurons / 40


def test_the_core_is_what_most_tokens_fire(model, monkeypatch):
    prompt, hidden = windows()[:1], []

    def cores(share):
        few = core_neurons(model, prompt, share).apply(model)
        chosen = [layer.mlp.core for layer in few.layers]
        remove(model)
        return chosen

    monkeypatch.setattr(few_neurons, "OF_TOKEN", 1.0)
    (_, core) = cores(0.2)
    hook = model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: hidden.append(args[0][0]))
    model(prompt)
    hook.remove()
    counts = (hidden[0] != 0).sum(0)
    left = torch.ones(40, dtype=torch.bool).index_fill(0, core, False)
    assert len(core) == 8 and (core.diff() > 0).all() and counts[core].min() >= counts[left].max()
    monkeypatch.setattr(few_neurons, "OF_TOKEN", 0.01)
    (_, strongest) = cores(0.01)
    assert int(torch.bincount(hidden[0].abs().argmax(1), minlength=40).argmax()) in strongest.tolist()


def test_a_predictor_is_the_same_for_the_same_seed_and_keeps_so_many_tokens(model, monkeypatch):
    monkeypatch.setattr(predictors, "ROWS", 40)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (predict(model, windows(6).split(1), steps=3, rank=2) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all((10 * layer.firing) % 1 < 1e-9 for layer in one.layers.values())  # a quarter of 40 tokens judges
    for a, b in zip(one.layers.values(), two.layers.values(), strict=True):
        assert torch.equal(a.recalls, b.recalls) and torch.equal(a.predictor[1].weight, b.predictor[1].weight)


@pytest.mark.parametrize("dense", [False, True], ids=["nothing fires", "everything fires"])
def test_extremes(dense):
    layer = PlainFeedForward(8, 24).eval()
    nn.init.zeros_(layer.up_proj.weight)
    layer.up_proj.bias = nn.Parameter(torch.full((24,), 1.0 if dense else -1.0))
    (row,) = predict(layer, [torch.randn(40, 8)], steps=2, rank=1, recall=1.0).table()
    assert (row["neurons"], row["firing"], row["recall"]) == ((24, 24.0, 1.0) if dense else (1, 0.0, 1.0))
