"""The small language model: what it computes, that it cannot see ahead, and that it comes back from disk."""

import json

import pytest
import torch
from torch.nn import functional as F

from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards, firing_layers
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig, rotate
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

SMALL = dict(vocabulary=50, d_model=24, layers=2, heads=3, d_ff=40, context=12)


def model(**changes):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**SMALL, **changes})).eval()


@pytest.mark.parametrize("gated", [True, False])
def test_scores_have_the_shape_of_the_vocabulary_and_no_token_sees_ahead(gated):
    tokens = torch.randint(50, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    with torch.no_grad():
        before, after = model(gated=gated)(tokens), model(gated=gated)(changed)
    assert before.shape == (2, 12, 50)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_attention_is_softmax_of_rotated_products():
    whole = model()
    attention, x = whole.layers[0].attention, torch.randn(2, 12, 24)
    query, key, value = (
        part.view(2, 12, 3, 8).transpose(1, 2) for part in F.linear(x, attention.qkv_proj.weight).chunk(3, dim=-1)
    )
    query, key = rotate(query, whole.cosine, whole.sine), rotate(key, whole.cosine, whole.sine)
    ahead = torch.ones(12, 12).triu(1).bool()
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(ahead, -torch.inf)
    expected = attention.out_proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(2, 12, 24))
    torch.testing.assert_close(attention(x, whole.cosine, whole.sine), expected)


def test_rotary_positions_leave_lengths_and_depend_on_distance_alone():
    whole = model()
    query, key = torch.randn(8).expand(12, 8), torch.randn(8).expand(12, 8)
    query, key = rotate(query, whole.cosine, whole.sine), rotate(key, whole.cosine, whole.sine)
    torch.testing.assert_close(query.norm(dim=-1), query[0].norm().expand(12))
    products = query @ key.T
    for distance in range(-11, 12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[0].expand_as(along))
    assert products[0].std() > 1e-3


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_saved_model_comes_back_with_the_same_scores(tmp_path, gated, activation):
    tokens, saved = torch.randint(50, (1, 9)), model(gated=gated, activation=activation)
    folder = saved.save(tmp_path / "new" / "folder")
    loaded = LanguageModel.load(folder)
    assert loaded.config == saved.config and torch.equal(loaded(tokens), saved(tokens))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_broken_saved_models_are_refused(tmp_path):
    with pytest.raises(InputError, match="missing"):
        LanguageModel.load(tmp_path / "missing")
    saved = model().save(tmp_path / "saved")
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(InputError, match="no model can be loaded"):
        LanguageModel.load(saved)
    with pytest.raises(InputError, match="config.json"):
        model().save(saved / "config.json" / "folder")


@pytest.mark.parametrize(
    "name, value", [("vocabulary", 0), ("d_model", 24.0), ("d_ff", "40"), ("gated", 1), ("d_model", 25), ("heads", 24)]
)
def test_wrong_sizes_are_refused_by_name(name, value):
    with pytest.raises(InputError, match=name):
        ModelConfig(**{**SMALL, name: value})


@pytest.mark.parametrize("shape", [(1, 13), (1, 0), (5,), (1, 2, 3)])
def test_inputs_longer_than_the_context_or_of_other_shapes_are_refused(shape):
    with pytest.raises(InputError, match="context"):
        model()(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"format": 99}, "format"),
        ({"new": 1}, "new"),
        ({"d_ff": 41}, "size mismatch for layers.0.mlp.gate_proj.weight"),
        ({"heads": 5}, "d_model"),
        ({"layers": 3}, 'Missing key.* "layers.2'),
        ({"layers": None}, "layers is None"),
        ({"layers": 2**31 - 1}, "GiB of memory"),
        ({"context": 2**31 - 1}, "GiB of memory|altered"),
        ({"activation": ["relu"]}, "activation is"),
    ],
)
def test_a_config_is_held_against_the_weights_before_anything_is_built(tmp_path, monkeypatch, change, words):
    saved = model().save(tmp_path)
    fields = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**fields, **change}))
    drawn = lambda tensor, **_: tensor.is_meta or pytest.fail("weights were drawn")  # noqa: E731
    monkeypatch.setattr(torch.nn.init, "normal_", drawn)
    with pytest.raises(InputError, match=words):
        LanguageModel.load(saved)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"format": 1, "layers": NaN}'])
def test_a_config_that_is_none_is_refused(tmp_path, content):
    saved = model().save(tmp_path)
    (saved / "config.json").write_bytes(content)
    with pytest.raises(InputError, match="config.json"):
        LanguageModel.load(saved)


@pytest.mark.parametrize(
    "sizes", [{"layers": 10**8}, {"d_ff": 2**31 - 1}, {"context": 2**31 - 1, "d_model": 512}, {"vocabulary": 2**31 - 1}]
)
def test_a_model_beyond_the_memory_is_not_begun(sizes):
    config = ModelConfig(**{"d_model": 64, "layers": 1, "heads": 2, "d_ff": 64, **sizes})
    with pytest.raises(InputError, match=f"{next(iter(sizes))} {sizes[next(iter(sizes))]}.*GiB of memory"):
        LanguageModel(config)
    with torch.device("meta"):
        if "layers" not in sizes:
            LanguageModel(config)  # takes none


def test_squared_layers_compute_their_formulas():
    x = torch.randn(5, 8)
    gated, plain = GatedFeedForward(8, 20, "relu2"), PlainFeedForward(8, 20, "relu2")
    gate, up, down = (part.weight for part in (gated.gate_proj, gated.up_proj, gated.down_proj))
    torch.testing.assert_close(gated(x), ((x @ gate.T).clamp(min=0) ** 2 * (x @ up.T)) @ down.T)
    torch.testing.assert_close(plain(x), (x @ plain.up_proj.weight.T).clamp(min=0) ** 2 @ plain.down_proj.weight.T)


@pytest.mark.parametrize("gated", [True, False])
def test_layers_that_fire_are_found_with_either_activation(gated):
    squared, plain = firing_layers(model(gated=gated, activation="relu2")), model(gated=gated)
    assert [layer.name for layer in squared] == ["layers.0.mlp", "layers.1.mlp"]
    assert all(layer.pattern is (layer.gate if gated else layer.up) for layer in squared)
    assert firing_layers(plain) == feed_forwards(plain)
    assert [layer.name for layer in firing_layers(sparsify(plain, "twell"))] == ["layers.0.mlp", "layers.1.mlp"]
