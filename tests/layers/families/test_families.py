"""Whole models of every family: the same answers, tokens, gradients and files once their layers are swapped."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from twell_lab.layers.anatomy import feed_forwards

import twell_lab as tl
from twell_lab.core import InputError
from twell_lab.layers.families import Family, families, known, register_family
from twell_lab.layers.paths import path
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.relufy import relufy
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import cpu

pytest.importorskip("transformers")
spec = importlib.util.spec_from_file_location("models_of", Path(__file__).with_name("models_of.py"))
models_of = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models_of)
build, logits, given = models_of.build, models_of.logits, models_of.given
every = pytest.mark.parametrize("name", models_of.MODELS)
causal = pytest.mark.parametrize("name", models_of.CAUSAL)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def over_the_entries(monkeypatch):
    """Small layers would take the dense path, which never looks at down_t."""
    monkeypatch.setattr(cpu, "_pays", lambda gate, entries: True)


def sparse_layers(model):
    return [each for each in model.modules() if isinstance(each, SparseFFN)]


def held(model):
    """The names of the parameters, and which tensors they are."""
    return {name: id(p) for name, p in model.named_parameters()}


def seats(model):
    return {name: id(each) for name, each in model.named_modules()}


@every
@torch.no_grad()
def test_the_answer_is_as_near_to_the_exact_one_as_the_dense_models(name):
    model, exact = build(name), logits(build(name, torch.float64))
    dense = (logits(model) - exact).norm(dim=-1)
    before, places, many = held(model), seats(model), len(feed_forwards(model))
    assert many >= (1 if name == "ALBERT" else 2)  # ALBERT's layers share their weights
    assert sparsify(model, "twell") is model and len(sparse_layers(model)) == many
    assert held(model) == before and [each.name for each in feed_forwards(model)]
    off = (logits(model) - exact).norm(dim=-1)
    assert (off <= 2 * dense.max() + 4e-7 * exact.norm(dim=-1)).all()
    assert densify(model) is model and held(model) == before and seats(model) == places
    assert torch.equal((logits(model) - exact).norm(dim=-1), dense)


@every
@torch.no_grad()
def test_the_layers_that_are_left_dense_give_the_same_bits_or_nearly(name):
    model = build(name)
    expected = logits(model)
    torch.testing.assert_close(logits(sparsify(model, "dense")), expected, rtol=1e-5, atol=1e-5)
    assert all(each.extra_bytes == 0 for each in sparse_layers(model))


@causal
@torch.no_grad()
def test_generation(name):
    model = build(name)
    tokens = given(model)["input_ids"]
    settings = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(tokens))
    expected = model.generate(tokens, **settings)
    assert torch.equal(sparsify(model, "twell").generate(tokens, **settings), expected)


@every
@torch.no_grad()
def test_what_is_saved_is_the_dense_model(name, tmp_path):
    model = build(name)
    expected, state = logits(model), copy.deepcopy(model.state_dict())
    sparsify(model, "twell").save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    if name in models_of.CODED:
        models_of.relu(again)
    assert torch.equal(logits(again), expected)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    found = logits(model)
    assert torch.equal(logits(sparsify(again, "twell")), found)
    model.load_state_dict({key: 0.5 * value for key, value in state.items()})  # layers notice that weights change
    again.load_state_dict({key: 0.5 * value for key, value in state.items()})
    torch.testing.assert_close(logits(model), logits(densify(again)), rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
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


@every
def test_copies_and_moves(name):
    model = sparsify(build(name), "twell")
    with torch.no_grad():
        expected = logits(model)
        twin = copy.deepcopy(model)
        assert torch.equal(logits(twin), expected)
        for p in twin.parameters():
            p.mul_(0.5)
        assert not torch.allclose(logits(twin), expected) and torch.equal(logits(model), expected)
        assert torch.equal(logits(model.double().float()), expected)
        half = model.bfloat16()
        found = logits(half).float()
        torch.testing.assert_close(found, logits(densify(half)).float(), rtol=0.1, atol=0.1 * found.abs().max().item())


@every
@torch.no_grad()
def test_a_profile_counts_the_same_before_and_after(name):
    model = build(name)
    batch = {key: value for key, value in given(model).items() if key != "attention_mask"}
    dense = tl.profile(model, batch)
    sparse = tl.profile(sparsify(model, "twell"), batch)
    for one, other in zip(dense.layers, sparse.layers, strict=True):
        assert (one.name, one.tokens) == (other.name, other.tokens) and one.tokens > 0
        assert (one.neuron_counts - other.neuron_counts).abs().max() <= 1  # what is near zero
        assert 0 < one.density < 1


@pytest.mark.parametrize("name", ["Phi-3", "GPT-2", "T5", "BERT", "Nemotron", "squared GPT-2"])
def test_layers_plan_themselves(name, monkeypatch):
    from twell_lab.analysis import auto

    monkeypatch.setattr(auto, "FORWARDS", 1)
    monkeypatch.setattr(auto, "LEAST", 1)
    model = build(name).requires_grad_(False)
    expected = logits(model)
    sparsify(model)
    for _ in range(3):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert {each.status()["plan"] for each in sparse_layers(model)} == {"planned"}
    assert len(tl.report(model).rows) >= 2


@pytest.mark.parametrize("name", ["Phi-3", "GPT-2", "T5", "BERT", "Nemotron", "squared GPT-2"])
@torch.no_grad()
def test_compiled(name):
    torch.compiler.reset()
    model = build(name)
    expected = logits(model)
    compiled = torch.compile(sparsify(model, "twell"), backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(**given(model)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Phi-3", "gated T5", "GPT-2", "T5", "BERT", "Falcon", "Mixtral", "Nemotron"])
def test_the_sum_of_hidden_activations_is_told_as_by_the_dense_layers(name):
    dense = build(name).train()
    sparse = sparsify(copy.deepcopy(dense), "twell")
    told = []
    for model in (dense, sparse):
        with tl.layer_terms(model) as terms:
            torch.manual_seed(5)
            logits(model)
        told.append([(term.name, term.l1.item(), term.nnz.item()) for term in terms])
    for one, other in zip(*told, strict=True):
        assert one[0] == other[0] and one[1:] == pytest.approx(other[1:], rel=1e-4)


# ---- what the layers hold, and what is put in their parts' place ----


@torch.no_grad()
def test_the_transposed_weight_of_gpt2_needs_no_copy():
    model = sparsify(build("GPT-2"), "twell")
    logits(model)
    for layer, block in zip(sparse_layers(model), model.transformer.h, strict=True):
        assert layer.extra_bytes == layer.stats.nbytes  # the counters alone
        assert path.held(layer)["down_t"].data_ptr() == block.mlp.c_proj.weight.data_ptr()


def of_all_tensors(model):
    """The bytes of the memory that the model's modules hold tensors in, each piece once, however many share it."""
    seen, found = set(), {}

    def look(each):
        if id(each) in seen:
            return
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        elif isinstance(each, dict):
            [look(value) for value in each.values()]
        elif isinstance(each, (list, tuple, set)):
            [look(value) for value in each]
        elif isinstance(each, nn.Module):
            look(vars(each))

    look(model)
    return sum(found.values())


@every
@pytest.mark.parametrize("learns", [False, True])
def test_what_a_report_says_is_held_is_what_is_held(name, learns):
    """Measured by the memory of all tensors, right after the swap and once the model has run."""
    model = build(name).requires_grad_(learns)
    with torch.no_grad():
        logits(model)
    before = of_all_tensors(model)
    sparsify(model, "twell")
    for _ in range(2):
        told = tl.report(model).extra_bytes
        assert of_all_tensors(model) - before == told
        with torch.no_grad():
            logits(model)


def test_the_transposed_weight_of_gpt2_needs_no_room():
    """Nor does it take any, for a moment, where gradients are on."""
    model = build("GPT-2").requires_grad_(True)
    before = of_all_tensors(model)
    sparsify(model, "twell", memory=0.001)
    assert of_all_tensors(model) - before == sum(layer.stats.nbytes for layer in sparse_layers(model))
    with pytest.raises(InputError, match="needs .* bytes of copies"):
        sparsify(build("Phi-3"), "twell", memory=0.001)


@pytest.mark.parametrize(
    "name, place", [("Phi-3", "gate_up_proj"), ("GPT-2", "c_fc"), ("BERT", "output.dense"), ("T5", "wo")]
)
@torch.no_grad()
def test_a_projection_that_was_replaced_is_noticed_or_read(name, place):
    model = build(name)
    logits(sparsify(model, "twell"))
    sparse = sparse_layers(model)[0]
    home = sparse if sparse.registered else sparse.source
    above, _, leaf = place.rpartition(".")
    block = home.get_submodule(above)
    other = copy.deepcopy(getattr(block, leaf))
    vars(other).pop("forward", None)
    setattr(block, leaf, other)
    if name == "T5":
        other.weight.mul_(3)
        assert torch.equal(sparse(torch.ones(1, 16)), sparse(torch.ones(1, 16))) and sparse.down is other
    else:
        with pytest.raises(InputError, match=f"{place} of a .*was replaced; accepted: twell_lab.densify first"):
            logits(model)


@pytest.mark.parametrize(
    "name, place", [("Phi-3", "gate_up_proj"), ("GPT-2", "c_proj"), ("BERT", "intermediate.dense")]
)
def test_a_hook_on_a_projection_is_refused_before_and_noticed_after(name, place):
    model = build(name)
    layers = feed_forwards(model)
    hook = layers[0].module.get_submodule(place).register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=f"{place} has a forward hook"):
        sparsify(model)
    hook.remove()
    sparse = sparse_layers(sparsify(model, "twell"))[0]
    home = sparse if sparse.registered else sparse.source
    home.get_submodule(place).register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=f"{place} of a SparseFFN has a forward hook"):
        logits(model)


# ---- made ReLU models ----

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
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again), logits(model))
    torch.testing.assert_close(logits(sparsify(again, "twell")), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*models_of.CODED, *SHARED])
@torch.no_grad()
def test_what_the_configuration_cannot_say_is_refused_or_left_unsaid(name):
    model = build(name, act="gelu")
    before, config = logits(model), model.config.to_dict()
    with pytest.raises(InputError, match=SHARED.get(name, "no field of .*Config makes .* a ReLU")):
        relufy(model)
    assert torch.equal(logits(model), before) and model.config.to_dict() == config
    with pytest.warns(UserWarning, match="configuration stays as it was"):
        relufy(model, only=lambda name, module: True)
    assert feed_forwards(model) and model.config.to_dict() == config


# ---- what is refused ----


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Phi-3", "GPT-NeoX"])
def test_another_activation_is_named_with_what_is_known_and_what_to_do(name):
    model = build(name)
    for layer in feed_forwards(model):
        family = layer.module
        for seat in ("act", "activation_fn", "intermediate_act_fn"):
            for module in family.modules():
                if isinstance(getattr(module, seat, None), nn.ReLU):
                    setattr(module, seat, nn.GELU())
    with pytest.raises(
        InputError,
        match="use GELU, hardly ever .*100%.; twell_lab.relufy .*thresholds.*Llama.*GPT-2.*BERT.*register_family",
    ):
        sparsify(model)


def test_a_model_of_no_family_is_told_which_are_known():
    with pytest.raises(InputError, match="none of its modules has the parts.*Llama.*Phi-3.*T5.*register_family"):
        sparsify(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))


def test_a_block_that_is_fed_in_pieces_is_refused():
    model = build("BERT")
    model.bert.encoder.layer[1].chunk_size_feed_forward = 1
    with pytest.raises(InputError, match=r"bert.encoder.layer.1 .BertLayer."):
        sparsify(model)
    assert not sparse_layers(model)


@pytest.mark.parametrize("name, place", [("DistilBERT", "lin1"), ("GPT-2", "c_fc"), ("Phi-3", "gate_up_proj")])
def test_a_projection_of_another_class_is_none(name, place):
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = build(name)
    for layer in feed_forwards(model):
        setattr(layer.module, place, Doubling(16, getattr(layer.module, place).weight.shape[0]))
    with pytest.raises(InputError, match="no ReLU feed-forward layer"):
        sparsify(model)


def test_a_fused_projection_of_an_odd_width_is_none():
    layer = build("Phi-3").model.layers[0].mlp
    layer.gate_up_proj = nn.Linear(16, 81)
    with pytest.raises(InputError, match="Phi3MLP is no feed-forward layer known here"):
        SparseFFN.from_module(layer)


# ---- families of one's own ----


class Own(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(16, 40), nn.Linear(16, 40), nn.Linear(40, 16)
        self.silu, self.scale = nn.ReLU(), scale

    def forward(self, x):
        return self.scale * self.w2(self.silu(self.w1(x)) * self.w3(x))


@pytest.fixture
def own():
    family = Family("Own", gate="w1", up="w3", down="w2", activation="silu")
    assert tl.register_family(family) is family is register_family(family) and known().count(family) == 1
    yield family
    families.remove(family)


def test_a_family_of_ones_own(own):
    model = nn.Sequential(Own(), Own())
    x = torch.randn(3, 16)
    expected = model(x)
    torch.testing.assert_close(sparsify(model, "twell")(x), expected, rtol=1e-4, atol=1e-4)
    assert len(sparse_layers(model)) == 2 and len(sparse_layers(densify(model))) == 0


def test_a_family_does_not_vouch_for_its_layers(own):
    with pytest.raises(InputError, match="1 .Own. does not compute.*100% off"):
        sparsify(nn.Sequential(Own(), Own(scale=2.0)))


@pytest.mark.parametrize(
    "changes",
    [
        dict(up=""),
        dict(up=3),
        dict(models=None),
        dict(dropout=""),
        dict(up="w2"),
        dict(activation="w3"),
        dict(gate="w2"),
        dict(up="a.b"),
        dict(inside=True),
        dict(gate=None, inside=True, dropout="drop"),
        dict(gate=None, inside=1),
        dict(residual=None),
    ],
    ids=str,
)
def test_a_family_that_cannot_be_is_refused(changes):
    with pytest.raises(InputError, match="accepted"):
        Family(**dict(models="Own", gate="w1", up="w3", down="w2", activation="silu") | changes)


def test_what_is_no_family_is_refused():
    with pytest.raises(InputError, match="family is a str"):
        register_family("Llama")
