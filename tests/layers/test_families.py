"""Whole models of every family: their layers are found, and give the same answers, gradients and files once they are
swapped; and models that were made ReLU models are loaded as what was saved."""

import copy

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.layers import models_of
from tests.layers.models_of import build, given, logits, sparse_layers
from twell_lab.core import InputError
from twell_lab.layers.families import FAMILIES, Family, register_family
from twell_lab.layers.find import feed_forwards, is_plain, survey
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.relufy import relufy
from twell_lab.models.swap import densify, sparsify

pytest.importorskip("transformers")
every = pytest.mark.parametrize("name", models_of.MODELS)
# One of each way in which projections are stored and called.
KINDS = ["Llama", "Phi-3", "OPT", "GPT-2", "MPT", "BERT", "T5", "Mixtral"]


def held(model):
    return {name: id(p) for name, p in model.named_parameters()}


def places(model):
    return {name: id(each) for name, each in model.named_modules()}


@every
@torch.no_grad()
def test_the_answer_is_as_near_to_the_exact_one_as_the_dense_models(name):
    model, exact = build(name), logits(build(name, torch.float64))
    dense = (logits(model) - exact).norm(dim=-1)
    before, modules, many = held(model), places(model), len(feed_forwards(model))
    assert many >= (1 if name == "ALBERT" else 2)  # ALBERT's layers share their weights
    assert survey(model)[1] == {}
    assert sparsify(model, "twell") is model and len(sparse_layers(model)) == many
    assert all(map(is_plain, sparse_layers(model)))
    assert held(model) == before and [each.name for each in feed_forwards(model)]
    for net in (model, copy.deepcopy(model)):
        off = (logits(net) - exact).norm(dim=-1)
        assert (off <= 2 * dense.max() + 4e-7 * exact.norm(dim=-1)).all()
    assert densify(model) is model and held(model) == before and places(model) == modules
    assert torch.equal((logits(model) - exact).norm(dim=-1), dense)


@pytest.mark.parametrize(
    "name, training", [*((name, True) for name in models_of.MODELS), *((name, False) for name in KINDS)]
)
def test_gradients(name, training):
    dense = build(name).train(training)
    sparse = sparsify(copy.deepcopy(dense), "twell")
    for model in (dense, sparse):
        torch.manual_seed(5)  # dropouts drop the same
        answer = logits(model)
        answer.mul(torch.linspace(-1, 1, answer.shape[-1])).sum().backward()
    wanted = dict(dense.named_parameters())
    scale = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
    for key, p in sparse.named_parameters():
        assert (p.grad is None) == (wanted[key].grad is None), key
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted[key].grad, rtol=1e-3, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("name", [name for name in KINDS if name in models_of.CAUSAL])
@torch.no_grad()
def test_generation(name):
    model = build(name)
    tokens = given(model)["input_ids"]
    settings = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(tokens))
    expected = model.generate(tokens, **settings)
    assert torch.equal(sparsify(model, "twell").generate(tokens, **settings), expected)


@pytest.mark.parametrize("name", ["Phi-3", "T5", "BERT", "squared GPT-2"])
@torch.no_grad()
def test_compiled(name):
    torch.compiler.reset()
    model = build(name)
    expected = logits(model)
    compiled = torch.compile(sparsify(model, "twell"), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**given(model)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_what_is_saved_is_the_dense_model(name, tmp_path):
    model = build(name)
    expected, state = logits(model), copy.deepcopy(model.state_dict())
    sparsify(model, "twell").save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    if name in models_of.CODED:
        models_of.relu(loaded)
    assert torch.equal(logits(loaded), expected)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in state.items())
    half = {key: 0.5 * value for key, value in state.items()}
    model.load_state_dict(half)
    loaded.load_state_dict(half)
    torch.testing.assert_close(logits(model), logits(loaded), rtol=1e-4, atol=1e-4)


# The configuration's activation is also that of the head, which keeps it.
SHARED = {
    "BERT": "cls.predictions.transform",
    "squared BERT": "cls.predictions.transform",
    "ALBERT": "predictions.activation",
    "DistilBERT": "activation",
}


@pytest.mark.parametrize("name", [name for name in models_of.MODELS if name not in (*models_of.CODED, *SHARED)])
@torch.no_grad()
def test_a_relufied_model_is_loaded_as_what_was_saved(name, tmp_path):
    model = build(name, act="gelu")
    before = logits(model)
    assert relufy(model) is model and feed_forwards(model) and not torch.equal(logits(model), before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    torch.testing.assert_close(logits(sparsify(loaded, "twell")), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*models_of.CODED, *SHARED])
@torch.no_grad()
def test_what_the_configuration_cannot_say_is_refused_or_left_unsaid(name):
    model = build(name, act="gelu")
    before, config = logits(model), model.config.to_dict()
    with pytest.raises(InputError, match=SHARED.get(name, "Config with a ReLU would not be that of")):
        relufy(model)
    assert torch.equal(logits(model), before) and model.config.to_dict() == config
    with pytest.warns(UserWarning, match="configuration stays as it was"):
        relufy(model, only=lambda name, module: True)
    assert feed_forwards(model) and model.config.to_dict() == config


class Own(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)
        self.silu, self.scale = nn.ReLU(), scale

    def forward(self, x):
        return self.scale * self.w2(self.silu(self.w1(x)) * self.w3(x))


PLACES = dict(models="Own", gate="w1", up="w3", down="w2", activation="silu")


def test_a_family_of_ones_own_is_known_and_does_not_vouch_for_its_layers():
    family = Family(**PLACES)
    try:
        assert tl.register_family(family) is family is register_family(family) and FAMILIES.count(family) == 1
        model = nn.Sequential(Own(), Own(scale=2.0), Own())
        x = torch.randn(3, 16)
        expected = model(x)
        ((name, reason),) = survey(model)[1].items()
        assert name == "1" and "does not compute" in reason and "100% off" in reason
        torch.testing.assert_close(sparsify(model, "twell")(x), expected, rtol=1e-4, atol=1e-4)
        assert [isinstance(each, SparseFFN) for each in model] == [True, False, True]
    finally:
        FAMILIES.remove(family)


@pytest.mark.parametrize(
    "changes",
    [
        *(dict(up=up) for up in ("", 3, "w2", "a.b")),
        *(dict(models=None), dict(gate="w2"), dict(gate=None, inside=True, dropout="drop")),
    ],
    ids=str,
)
def test_a_family_that_cannot_be_is_refused(changes):
    with pytest.raises(InputError, match="accepted"):
        Family(**PLACES | changes)
