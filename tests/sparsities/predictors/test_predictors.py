"""Layers that compute chosen neurons: they compute exactly those, and what is missing is measured."""

import copy

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab import core
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.models.thresholds import losses
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.sparsities import predictors
from twell_lab.sparsities.predictors import CoreFFN, LowRank, PredictedFFN, core_neurons, predict, remove
from twell_lab.sparsities.weights import prune
from twell_lab.training.text import source

SIZES = ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=40, context=24)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(SIZES).eval()


@pytest.fixture(scope="module")
def real():
    """The trained model that ships, text it learnt from, and held-out text."""
    found = LanguageModel.load(core.data_dir() / "checkpoints" / "small").eval().requires_grad_(False)
    seen, held_out = (part.tokens for part in source.standard_library().split())
    return found, source.spread_windows(seen, 24, 127), source.spread_windows(held_out, 8, 127)


@pytest.fixture(scope="module")
def found(real):
    return predict(real[0], real[1].split(8), rank=16, steps=120)


def windows(count=6):
    return torch.arange(count * 24).view(count, 24) * 7 % 50


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_hand(layer, x, neurons):
    """The formula in float64, with all other neurons' hidden values zero."""
    found = feed_forwards(layer)[0]
    first, up, down = found.pattern.double(), found.up.double(), found.down.double()
    hidden = torch.relu(first(x.double()))
    hidden = hidden if found.gate is None else hidden * up(x.double())
    keep = torch.zeros(hidden.shape[-1], dtype=torch.bool)
    keep[neurons] = True
    return down(hidden.where(keep, 0))


# ---- what is computed ----


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
    if kind == "squared":
        layer = PlainFeedForward(d_model, d_ff, "relu2")
    for part in list(layer.children()) if bias else ():
        if isinstance(part, nn.Linear):
            part.bias = nn.Parameter(torch.randn(part.out_features))
    layer, x = layer.requires_grad_(False), torch.randn(tokens, d_model)
    (whole,) = feed_forwards(layer)
    core = torch.randperm(d_ff)[:count].sort().values
    torch.testing.assert_close(
        CoreFFN(whole, core)(x).double(), by_hand(copy.deepcopy(layer), x, core), rtol=1e-4, atol=1e-5
    )
    predictor = LowRank(d_model, d_ff, 2).requires_grad_(False)
    together = PredictedFFN(whole, predictor, count)(x)
    for row, one in zip(x, together, strict=True):
        best = predictor(row[None]).topk(count).indices[0]
        expected = by_hand(copy.deepcopy(layer), row, best)
        torch.testing.assert_close(one.double(), expected, rtol=1e-4, atol=1e-5)
        alone = PredictedFFN(whole, predictor, count)(row.view(1, 1, -1))
        assert alone.shape == (1, 1, d_model)
        torch.testing.assert_close(alone[0, 0].double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_copies_follow_the_weights(model):
    (layer,) = feed_forwards(model.layers[0].mlp)
    x = torch.randn(1, 16)
    for made in (CoreFFN(layer, torch.arange(10)), PredictedFFN(layer, LowRank(16, 40, 2), 10)):
        made(x)
        layer.down.weight.add_(1.0)
        layer.up.weight.mul_(2.0)
        fresh = copy.deepcopy(made)
        assert torch.equal(made(x), fresh(x))
        layer.down.weight.data = torch.randn(16, 40)
        assert torch.equal(made(x), copy.deepcopy(made)(x)) and not torch.equal(made(x), fresh(x))


def both_kinds(layer):
    return [CoreFFN(layer, torch.arange(10)), PredictedFFN(layer, LowRank(16, 40, 2).requires_grad_(False), 10)]


@pytest.mark.parametrize("number", [0, 1])
@torch.no_grad()
def test_another_weight_at_the_same_address_is_told_apart(model, number):
    (layer,) = feed_forwards(model.layers[0].mlp)
    made, x, buffer = both_kinds(layer)[number], torch.randn(1, 16), bytearray(16 * 40 * 4)
    for value in range(3):  # three storages over one piece of memory, each at version 0
        numpy.frombuffer(buffer, dtype=numpy.float32)[:] = value
        weight = torch.frombuffer(buffer, dtype=torch.float32).view(16, 40)
        layer.down.weight = nn.Parameter(weight, requires_grad=False)
        assert torch.equal(made(x), copy.deepcopy(made)(x))


@pytest.mark.parametrize("number", [0, 1])
def test_weights_made_in_inference_mode_are_copied_on_every_call(number):
    with torch.inference_mode():
        layer = GatedFeedForward(16, 40).requires_grad_(False)
        made, x = both_kinds(feed_forwards(layer)[0])[number], torch.randn(1, 16)
        expected = made(x)
        layer.down_proj.weight.mul_(2)
        assert torch.equal(made(x), 2 * expected)
    assert torch.equal(made(x), 2 * expected)


@torch.no_grad()
def test_writes_that_torch_does_not_count_are_seen_after_refresh(model):
    (layer,) = feed_forwards(model.layers[0].mlp)
    x = torch.randn(1, 16)
    for made in both_kinds(layer):
        expected = made(x)
        layer.down.weight.data.mul_(2)
        made.refresh()
        assert torch.equal(made(x), 2 * expected)


@torch.no_grad()
def test_compiled_code_follows_the_weights(model):
    (layer,) = feed_forwards(model.layers[0].mlp)
    x = torch.randn(1, 16)
    for made in both_kinds(layer):
        compiled = torch.compile(made, backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(x), copy.deepcopy(made)(x))
            layer.down.weight.mul_(2)


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda model: prune(model, 0.9, only=lambda name, module: "down_proj" in name), "down_proj is a SparseLinear"),
        (lambda model: sparsify(model, "twell"), "the layer is a SparseFFN"),
        (lambda model: setattr(model.layers[0].mlp.dense, "act_fn", nn.SiLU()), "act_fn is a SiLU"),
    ],
    ids=["pruned", "swapped", "activation"],
)
@torch.no_grad()
def test_a_layer_that_was_changed_below_is_refused_until_removed(model, change, named):
    tokens = windows()
    for chosen in (predict(model, [tokens], steps=1, rank=1), core_neurons(model, tokens[:1])):
        changed = chosen.apply(copy.deepcopy(model))
        expected = changed(tokens)
        assert torch.equal(copy.deepcopy(changed)(tokens), expected)
        change(changed)
        for each in (changed, copy.deepcopy(changed)):
            with pytest.raises(InputError, match=rf"{named}, put there after .*; accepted: remove\(model\)"):
                each(tokens)
        assert not torch.equal(remove(changed)(tokens), expected)


def test_all_neurons_are_the_dense_layer_and_removing_gives_it_back(model):
    first, tokens = state(model), windows()
    expected = model(tokens)
    found = predict(model, [tokens], steps=2, rank=3)
    core = core_neurons(model, tokens[:1], 1.0)
    assert same(state(model), first)
    for chosen in (found.at(1.0), core):
        dense = [layer.mlp for layer in model.layers]
        assert chosen.apply(model) is model
        assert not any(layer.mlp in dense for layer in model.layers) and "lossy" in repr(model.layers[0].mlp)
        if chosen is core:
            torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
        assert chosen.remove(model) is model and [layer.mlp for layer in model.layers] == dense
        assert torch.equal(model(tokens), expected)
    assert core.sparsity == 0.0 and core.tokens == 24


# ---- how well it is chosen ----


def test_recall_and_precision_are_counted_on_other_tokens(real, found):
    model, seen, held_out = real
    for layer in found.layers:
        assert (layer.recalls.diff() >= 0).all() and layer.recalls[0] == 0 and abs(layer.recalls[-1] - 1) < 1e-9
        neurons = layer.neurons(0.95)
        assert layer.recalls[neurons] >= 0.95 > layer.recalls[neurons - 1]
    rows = found.table()
    for row in rows:
        chance = row["neurons"] / row["d_ff"]
        assert row["recall"] > 1.3 * chance  # chosen at random, it would be this share
        assert row["precision"] > 1.3 * row["firing"] / row["d_ff"] and 0 < row["error"] < 0.6
    assert "lossy" in str(found) and 0.2 < found.sparsity < 0.9 and found.at(0.8).sparsity > found.sparsity
    # The same numbers by hand, from what fires in the layer.
    layer, (whole, *_) = found.layers[0], feed_forwards(model)
    fired = whole.pattern(layer._x) > 0
    chosen = torch.zeros_like(fired).scatter_(1, layer.predictor(layer._x).topk(rows[0]["neurons"]).indices, True)
    assert rows[0]["recall"] == pytest.approx(float((fired & chosen).sum() / fired.sum()), abs=1e-3)
    assert rows[0]["precision"] == pytest.approx(float((fired & chosen).sum() / chosen.sum()), abs=1e-3)


def test_more_neurons_lose_less_and_predicted_ones_lose_less_than_random_ones(real, found):
    model, _, held_out = real
    base, worse = losses(model, held_out).mean(), []
    for recall in (0.5, 0.9, 0.99):
        worse.append(float(losses(found.at(recall).apply(model), held_out).mean() - base))
        remove(model)
    assert worse[0] > worse[1] > worse[2] - 1e-3 and worse[0] > 0.1 > worse[1]
    guessing = copy.deepcopy(found.at(0.9))
    for layer in guessing.layers:
        torch.manual_seed(1)
        nn.init.normal_(layer.predictor.wide.weight)
        nn.init.zeros_(layer.predictor.wide.bias)
    assert float(losses(guessing.apply(model), held_out).mean() - base) > 3 * abs(worse[1])
    remove(model)


def test_the_core_is_what_most_tokens_fire(real):
    model, _, held_out = real
    prompt = held_out[:1, :64]
    core = core_neurons(model, prompt, 0.2, of_token=1.0)
    hidden = []
    hook = model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: hidden.append(args[0][0]))
    model(prompt)
    hook.remove()
    counts = (hidden[0] != 0).sum(0)
    chosen = core.neurons["layers.1.mlp"]
    assert len(chosen) == 103 and (chosen.diff() > 0).all()
    left = torch.ones(512, dtype=torch.bool)
    left[chosen] = False
    assert counts[chosen].min() >= counts[left].max()
    strongest = core_neurons(model, prompt, 0.01, of_token=0.01).neurons["layers.1.mlp"]
    tops = torch.bincount(hidden[0].abs().argmax(1), minlength=512)
    assert tops[strongest[:1]] > 0 and int(tops.argmax()) in strongest.tolist()
    base = float(losses(model, held_out)[0])
    costs = []
    for share in (0.05, 0.4, 1.0):
        costs.append(float(losses(core_neurons(model, prompt, share).apply(model), held_out)[0]) - base)
        remove(model)
    assert costs[0] > costs[1] > abs(costs[2]) and abs(costs[2]) < 1e-3
    assert "lossy" in str(core)


def test_a_predictor_is_the_same_for_the_same_seed_and_leaves_the_generator(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two = (predict(model, [windows()], steps=3, rank=2, seed=4) for _ in range(2))
    other = predict(model, [windows()], steps=3, rank=2, seed=5)
    assert torch.equal(torch.rand(3), expected)
    for a, b, c in zip(one.layers, two.layers, other.layers, strict=True):
        assert torch.equal(a.recalls, b.recalls) and torch.equal(a.predictor.wide.weight, b.predictor.wide.weight)
        assert not torch.equal(a.predictor.wide.weight, c.predictor.wide.weight)


@pytest.mark.parametrize("dense", [False, True], ids=["nothing fires", "everything fires"])
def test_extremes(dense):
    layer = PlainFeedForward(8, 24).eval()
    nn.init.zeros_(layer.up_proj.weight)
    layer.up_proj.bias = nn.Parameter(torch.full((24,), 1.0 if dense else -1.0))
    found = predict(layer, [torch.randn(40, 8)], steps=2, rank=1, recall=1.0)
    (row,) = found.table()
    assert (row["neurons"], row["firing"], row["recall"]) == ((24, 24.0, 1.0) if dense else (1, 0.0, 1.0))
    assert row["error"] == 0.0
    x = torch.randn(3, 8)
    expected = layer(x)
    torch.testing.assert_close(found.apply(layer)(x), expected)


def test_at_most_so_many_tokens_are_kept(model, monkeypatch):
    monkeypatch.setattr(predictors, "ROWS", 40)
    seen = []

    def batches():
        for each in windows(6).split(1):
            seen.append(each)
            yield each

    found = predict(model, batches(), steps=1, rank=1)
    assert len(seen) == 2 and [layer.tokens for layer in found.layers] == [10, 10]


# ---- bad input ----


def test_bad_input_is_named(model):
    tokens = windows()
    for wrong in (0, 1.5, True, "all", float("nan")):
        with pytest.raises(InputError, match="recall is"):
            predict(model, [tokens], recall=wrong)
        with pytest.raises(InputError, match="share is"):
            core_neurons(model, tokens[:1], wrong)
    for name in ("rank", "steps"):
        with pytest.raises(InputError, match=f"{name} is 0; a whole number"):
            predict(model, [tokens], **{name: 0})
    with pytest.raises(InputError, match="was given 3 tokens; 8 tokens"):
        predict(model, [tokens[:1, :3]])
    with pytest.raises(InputError, match="batches is a int"):
        predict(model, 3)
    with pytest.raises(InputError, match=r"prompt is torch.int64 \[6, 24\]; token ids \[1, length\]"):
        core_neurons(model, tokens)
    with pytest.raises(InputError, match="no ReLU feed-forward layer in Linear"):
        predict(nn.Linear(3, 3), [torch.randn(9, 3)])
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.embedding.weight, float("inf"))
    with pytest.raises(InputError, match="values that are not finite"):
        predict(broken, [tokens])


def test_layers_that_cannot_be_replaced_are_named(model):
    tokens = windows()
    found, core = predict(model, [tokens], steps=1, rank=1), core_neurons(model, tokens[:1])
    with pytest.raises(InputError, match=r"layers.0.mlp \(SparseFFN\) was swapped by sparsify; accepted: densify"):
        predict(sparsify(copy.deepcopy(model), "twell"), [tokens])
    other = LanguageModel(ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=48, context=24))
    for each in (found, core):
        with pytest.raises(InputError, match=r"'layers.0.mlp' is \(48, 16\) where \(40, 16\)"):
            each.apply(other)
        each.apply(model)
        with pytest.raises(InputError, match="'layers.0.mlp' computes chosen neurons already; accepted: remove"):
            each.apply(model)
        remove(model)
    short = LanguageModel(ModelConfig(vocabulary=50, d_model=16, layers=1, heads=2, d_ff=40, context=24))
    with pytest.raises(InputError, match="'layers.1.mlp' is not there"):
        found.apply(short)
    assert isinstance(short.layers[0].mlp, GatedFeedForward)
    half = predict(model, [tokens], steps=1, rank=1, only=lambda name, module: name == "layers.1.mlp")
    half.apply(model)
    assert isinstance(model.layers[0].mlp, GatedFeedForward) and isinstance(model.layers[1].mlp, PredictedFFN)


def test_what_predicts_is_not_pruned(model):
    found = predict(model, [windows()], rank=4, steps=2)
    found.apply(model)
    before = [copy.deepcopy(each.state_dict()) for each in model.modules() if isinstance(each, LowRank)]
    prune(model, 0.5)
    there = [each for each in model.modules() if isinstance(each, LowRank)]
    assert len(there) == 2 and all(same(each.state_dict(), was) for each, was in zip(there, before, strict=True))
    assert type(there[0].narrow) is nn.Linear and type(model.head).__name__ == "SparseLinear"
