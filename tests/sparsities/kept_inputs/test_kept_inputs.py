"""Layers with thresholds on their inputs (TEAL), swapped: the same function, zeroed inputs and all. What a GPU launches
is played by torch's operations, on the weights as the kernel would read them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import twell_lab as tl
from tests.models.thresholds.models_of import answer, llama, opt, ours, phi3, tokens
from twell_lab.core import InputError
from twell_lab.layers.layout import copy_bytes
from twell_lab.layers.lossy import cut_of, lossy_parts
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import kept_inputs, turned
from twell_lab.ops.activation import CURVES
from twell_lab.ops.reference import SquaredReLU
from twell_lab.sparsities import predictors

PATH = "kept_inputs"
MODELS = {
    "Llama": llama,
    "Phi-3": phi3,
    "ours, SiLU": lambda: ours(nn.SiLU()),
    "ours, plain GELU": lambda: ours(nn.GELU(), gated=False),
    "ours, ReLU": ours,
    "ours, plain ReLU": lambda: ours(gated=False),
}


def cut(model, sparsity=0.5):
    return tl.thresholds(model, tokens(), sparsity, method="teal").apply(model)


def layers(model):
    return [found.module for found in tl.feed_forwards(model)]


@pytest.fixture
def launched(monkeypatch):
    """Has weights turned on a CPU, and torch's operations in the place of the kernel's launches; lists the numbers of
    tokens they were for, and whether each weight was contiguous."""
    calls = []

    def layer(x, gate_t, up_t, down_t, gate_bias, up_bias, down_bias, kept):
        act = CURVES.get(kept.kind, torch.relu)
        assert all(t is None or t.is_contiguous() for t in (gate_t, up_t, down_t))
        x = x.masked_fill(x.abs() < kept.inputs, 0)
        beside = linear(x, up_t.t(), up_bias)
        h = act(beside) if gate_t is None else act(linear(x, gate_t.t(), gate_bias)) * beside
        calls.append(len(x))
        return linear(h.masked_fill(h.abs() < kept.hidden, 0), down_t.t(), down_bias)

    monkeypatch.setattr(turned, "DEVICES", ["cpu", "cuda"])
    monkeypatch.setattr(kept_inputs, "few", lambda x: x.shape[:-1].numel() <= kept_inputs.FEW)
    monkeypatch.setattr(kept_inputs, "takes", lambda x, *weights: 1 <= len(x) <= kept_inputs.MOST_TOKENS)
    monkeypatch.setattr(kept_inputs, "layer", layer)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_a_swapped_model_computes_the_same_and_back(name):
    model = cut(MODELS[name]())
    before, names, lossy = answer(model), [*model.state_dict()], [place for place, _ in lossy_parts(model)]
    assert not torch.equal(before, answer(MODELS[name]()))
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    assert all(isinstance(layer, SparseFFN) for layer in layers(sparse))
    # Phi-3's gate and up are one product of the model's, and two here.
    torch.testing.assert_close(answer(sparse), before, **({} if name == "Phi-3" else {"rtol": 0, "atol": 0}))
    assert [*sparse.state_dict()] == names
    assert [place for place, _ in lossy_parts(sparse)] == lossy and "lossy: |value| <" in repr(sparse)
    back = tl.densify(sparse)
    assert torch.equal(answer(back), before) and [place for place, _ in lossy_parts(back)] == lossy
    plain = tl.Thresholds.remove(back)
    assert torch.equal(answer(plain), answer(MODELS[name]()))
    assert not lossy_parts(plain) and not any(part._forward_pre_hooks for part in plain.modules())


@pytest.mark.parametrize("name", ["ours, SiLU", "ours, plain GELU", "ours, ReLU", "Llama", "Phi-3"])
def test_few_tokens_go_through_the_kernel(launched, name):
    model = cut(MODELS[name]())
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    first, same = layers(model)[0], layers(sparse)[0]
    d_model = same.up.weight.shape[1]
    for shape in ((1, d_model), (1, 2, d_model), (2, 1, d_model), (3, d_model), (d_model,)):
        x = torch.randn(shape)
        with torch.no_grad():
            for _ in range(3):  # the second call remembers what the first found out
                torch.testing.assert_close(same(x), first(x).view(shape))
    assert launched == [1] * 3 + [2] * 3 + [2] * 3 + [1] * 3


def test_the_weights_are_turned_and_nothing_is_held_twice(launched):
    model = cut(ours(nn.SiLU()))
    dense = {name: t.clone() for name, t in model.state_dict().items()}
    found = tl.feed_forwards(model)[0]
    foreseen = copy_bytes(found, False)
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    layer = layers(sparse)[0]
    assert foreseen[PATH] == 0 and layer.extra_bytes == 0 and layer.status()["layout"] == "turned"
    assert [turned.is_turned(part.weight) for part in layer.parts] == [True] * 3
    saved = sparse.state_dict()
    assert all(torch.equal(saved[name], t) and saved[name].is_contiguous() for name, t in dense.items())
    layer.train()
    assert [turned.is_turned(part.weight) for part in layer.parts] == [False] * 3
    layer.eval()
    assert [turned.is_turned(part.weight) for part in layer.parts] == [True] * 3
    layer.follow(tl.Choice("dense"))
    assert layer.status()["layout"] == "plain" and all(part.weight.is_contiguous() for part in layer.parts)


def test_changes_of_weights_are_followed(launched):
    model = cut(ours(nn.SiLU()))
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    dense, layer, x = layers(model)[0], layers(sparse)[0], torch.randn(1, 16)
    with torch.no_grad():
        for place in ("gate_proj", "up_proj", "down_proj"):
            torch.testing.assert_close(layer(x), dense(x))
            for each in (dense, layer):
                getattr(each, place).weight.mul_(1.5)
            torch.testing.assert_close(layer(x), dense(x))
        state = ours(nn.SiLU(), d_ff=40).layers[1].mlp.state_dict()
        for each in (dense, layer):
            each.load_state_dict({name: t + 1 for name, t in state.items()})
        torch.testing.assert_close(layer(x), dense(x))
        layer.down_proj.weight[0, 0] = torch.nan
        with pytest.raises(InputError, match="down has 1 values that are not finite"):
            layer(x)
    assert len(launched) == 7


def test_gradients_and_compiled_code_are_dense(launched):
    model = cut(ours(nn.SiLU()))
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    x = torch.randn(1, 16)
    grads = []
    for layer in (layers(model)[0], layers(sparse)[0]):
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        grads.append([given.grad, *(part.grad for part in layer.parameters())])
    for own, expected in zip(*grads):
        torch.testing.assert_close(own, expected)
    compiled = torch.compile(layers(sparse)[1], backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layers(model)[1](x))
    assert not launched


def test_a_profile_counts_hidden_values_that_are_kept():
    model = cut(ours(nn.SiLU()), 0.7)
    layer = layers(model)[0]
    seen = []
    layer.down_proj.register_forward_hook(lambda part, args, y: seen.append((args[0] != 0).sum().item()))
    found = tl.profile(model, tokens())
    assert found.layers[0].neuron_counts.sum() == sum(seen) and 0.2 < found.layers[0].density < 0.4
    sparse = tl.profile(tl.sparsify(cut(ours(nn.SiLU()), 0.7), PATH), tokens())
    assert torch.equal(sparse.layers[0].neuron_counts, found.layers[0].neuron_counts)


RATES = tl.plan.__globals__["Rates"]("a GPU", "float32", 3e12, 7e12, 7e14, 2e-6, 50 << 20, True)


def test_a_plan_weighs_it_for_few_tokens_on_a_gpu_and_never_for_other_layers():
    model = cut(ours(nn.SiLU(), d_model=256, d_ff=4096))
    firing = tl.profile(model, tokens())
    plan = tl.plan(firing, model, tokens=(1, 2, 64), rates=RATES, measure=False, progress=False)
    assert [str(plan.layers[0].choice(each)) for each in (1, 2, 64)] == [PATH, PATH, "dense"]
    assert {each.path for each in plan.layers[0].candidates} == {"dense", PATH}
    assert {each.path for each in plan.layers[0].candidates if each.tokens == 64} == {"dense"}
    sparse = SparseFFN.from_module(layers(model)[0], plan=plan.layers[0])
    assert [each["path"] for each in sparse.status()["classes"]] == [PATH, PATH, "dense"]
    plain = ours()
    firing = tl.profile(plain, tokens())
    plan = tl.plan(firing, plain, tokens=1, rates=RATES, measure=False, progress=False)
    assert PATH not in {each.path for each in plan.layers[0].candidates}
    with pytest.raises(InputError, match="'kept_inputs' is for layers with thresholds .*; the model has none"):
        tl.plan(firing, plain, tokens=1, rates=RATES, measure=False, progress=False, paths=["twell", PATH])


def test_on_a_cpu_nothing_is_gained_and_nothing_held():
    model = cut(ours(nn.SiLU()))
    firing = tl.profile(model, tokens())
    plan = tl.plan(firing, model, tokens=1, batches=tokens(), progress=False)
    assert {each.path for each in plan.layers[0].candidates} == {"dense"}
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    assert sum(layer.extra_bytes for layer in layers(sparse)) == 0
    decides = tl.sparsify(copy.deepcopy(model))
    for _ in range(24):
        assert torch.equal(answer(decides), answer(model))
        with torch.no_grad():
            decides(tokens(16, 16))
    assert {row["runs"] for row in tl.report(decides).rows} == {"dense"}


def test_timed_on_a_layer_of_a_model_that_was_not_swapped_yet(launched, monkeypatch):
    """The trial's layers share the projections, and leave the hooks of the model's own where they are."""
    monkeypatch.setattr("twell_lab.sparsities.kept_inputs.KeptInputs.helps", lambda self, tokens, rates: True)
    model = cut(ours(nn.SiLU()))
    before = answer(model)
    plan = tl.plan(tl.profile(model, tokens()), model, tokens=1, batches=tokens(), progress=False)
    assert {each.path for each in plan.layers[0].candidates if each.measured_us} == {"dense", PATH}
    assert launched and torch.equal(answer(model), before)


@pytest.mark.parametrize(
    "make, plan, said",
    [
        (
            lambda: cut(llama()),
            "twell",
            "path 'twell' does not compute 'model.layers.0.mlp' .lossy.*accepted: 'dense', 'kept_inputs'",
        ),
        (ours, PATH, "path 'kept_inputs' is for layers with thresholds on their inputs .*'layers.0.mlp' is none"),
        (lambda: cut(opt()), PATH, "no ReLU feed-forward layer in OPTForCausalLM"),
    ],
)
def test_what_cannot_go_this_way(make, plan, said):
    model = make()
    before = answer(model)
    with pytest.raises(InputError, match=said):
        tl.sparsify(model, plan)
    assert torch.equal(answer(model), before)


@pytest.mark.parametrize("make", [lambda: ours(SquaredReLU(), gated=False), lambda: ours(torch.tanh)])
def test_other_activations_stay_dense_whatever_they_are_told(make, launched):
    model = cut(make())
    sparse = tl.sparsify(copy.deepcopy(model), PATH)
    assert {row["runs"] for row in tl.report(sparse).rows} == {"dense"}
    assert torch.equal(answer(sparse), answer(model)) and not launched
    with pytest.raises(InputError, match="'kept_inputs' is for layers .* that its kernel has"):
        layers(sparse)[0].follow(tl.Choice(PATH))


def test_a_layer_swapped_by_hand_leaves_its_source_as_it_was(launched):
    model = cut(ours(nn.SiLU()))
    source, x = layers(model)[0], torch.randn(2, 16)
    expected = source(x)
    sparse = SparseFFN.from_module(source, plan=tl.Choice(PATH))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(sparse(x), expected)
    assert torch.equal(source(x), expected) and launched == [2, 2]


def test_predictors_refuse_layers_with_thresholds():
    with pytest.raises(InputError, match="has a threshold"):
        predictors.core_neurons(cut(ours()), tokens(1), 0.5)


def test_thresholds_of_one_place_alone():
    model = cut(ours(nn.SiLU()))
    layer = layers(model)[0]
    layer.lossy_hidden.threshold = 0.0
    expected = answer(model)
    assert cut_of(layer).hidden == 0 and torch.equal(answer(tl.sparsify(model, PATH)), expected)
