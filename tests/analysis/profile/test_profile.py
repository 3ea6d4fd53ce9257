"""The firing profile against brute force, on models whose firing is known, and on models of transformers."""

import json
import math
import operator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.analysis import profile as module
from twell_lab.analysis.profile import FiringProfile, activations, profile
from twell_lab.analysis.running import Rows
from twell_lab.core import InputError, RecordError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward


def identity_layer(width, gated=True):
    """A layer whose gate is its input: what goes in decides, neuron by neuron, what fires."""
    layer = (GatedFeedForward if gated else PlainFeedForward)(width, width)
    with torch.no_grad():
        (layer.gate_proj if gated else layer.up_proj).weight.copy_(torch.eye(width))
    return layer


def course_model(**changes):
    torch.manual_seed(0)
    sizes = dict(d_model=16, layers=3, heads=2, d_ff=40, context=12)
    return LanguageModel(ModelConfig(**{**sizes, **changes}))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            hidden_act="relu",
            max_position_embeddings=32,
        )
    ).eval()


def opt():
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=16,
            ffn_dim=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=16,
            activation_function="relu",
            max_position_embeddings=32,
            dropout=0.0,
        )
    ).eval()


def assert_same(one, other):
    assert len(one.layers) == len(other.layers)
    for a, b in zip(one.layers, other.layers):
        for name, value in vars(a).items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, getattr(b, name)), name


# Counts


@pytest.mark.parametrize("gated", [True, False])
def test_hand_set_weights_give_known_counts(gated):
    nan = math.nan
    x = torch.tensor(
        [
            [1.0, -1.0, 0.0, 2.0, 0.5],  # 0, 3, 4
            [-1.0, -1.0, -0.0, -2.0, -0.5],  # none
            [1.0, 1.0, 1.0, -1.0, 3.0],  # 0, 1, 2, 4
        ]
    )
    layer = profile(identity_layer(5, gated), [x], tile=2, words=2).layers[0]
    assert (layer.name, layer.d_model, layer.d_ff, layer.tokens, layer.gated) == ("", 5, 5, 3, gated)
    assert layer.nnz_histogram.tolist() == [1, 0, 0, 1, 1, 0]
    assert layer.neuron_counts.tolist() == [2, 1, 1, 1, 2]
    assert layer.neuron_frequency.tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3, 2 / 3])
    # tiles (0, 1), (2, 3), (4): counts 1 1 1, then 0 0 0, then 2 1 1
    assert layer.tile_histogram.tolist() == [3, 5, 1]
    assert layer.overflow_rows == pytest.approx(1 / 3)  # one slot a tile: the last row has two in its first
    assert layer.mean_nnz == pytest.approx(7 / 3) and layer.density == pytest.approx(7 / 15)
    assert layer.dead == 0
    x[:, 1] = -1.0
    assert profile(identity_layer(5, gated), [x], tile=2, words=2).layers[0].dead == 1
    # NaN counts as firing, as in packing, and a whole profile of it is refused.
    counter = module.Counter(feed_forwards(identity_layer(5, gated))[0], 2, 2)
    answers = torch.tensor([[nan, -1.0, nan, -1.0, -1.0], [1.0, -1.0, -1.0, -1.0, -1.0]])
    counter.add(answers, answers.__getitem__)
    assert counter.result().nnz_histogram.tolist() == [0, 1, 1, 0, 0, 0]
    # x times the identity spreads a NaN over its row: 0 * NaN is NaN.
    x = torch.tensor([[nan, -1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    with pytest.raises(InputError, match="what enters '', or its gate, is NaN at 1 of 2 tokens"):
        profile(identity_layer(5, gated), [x], tile=2, words=2)


@given(
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    d_ff=st.integers(1, 70),
    tile=st.integers(1, 80),
    words=st.integers(2, 81),
    shift=st.floats(-1.5, 1.5),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_counts_are_those_of_brute_force(rows, d_ff, tile, words, shift, seed):
    if sum(rows) == 0 or words > tile + 1:
        return
    torch.manual_seed(seed)
    batches = [(torch.randn(count, d_ff) + shift).round(decimals=1) for count in rows]
    found = profile(identity_layer(d_ff), batches, tile=tile, words=words).layers[0]

    fires = [[value > 0 for value in row] for batch in batches for row in batch.tolist()]
    nnz, tiles, over = [0] * (d_ff + 1), [0] * (tile + 1), 0
    for row in fires:
        nnz[sum(row)] += 1
        inside = [sum(row[start : start + tile]) for start in range(0, d_ff, tile)]
        for count in inside:
            tiles[count] += 1
        over += max(inside) > words - 1
    assert found.tokens == len(fires)
    assert found.nnz_histogram.tolist() == nnz
    assert found.neuron_counts.tolist() == [sum(column) for column in zip(*fires)]
    assert found.tile_histogram.tolist() == tiles
    assert found.overflow_rows == over / len(fires)
    assert found.dead == sum(not any(column) for column in zip(*fires))
    assert found.mean_nnz == pytest.approx(sum(map(sum, fires)) / len(fires))


def test_cutting_the_same_tokens_into_other_batches_changes_nothing():
    model, tokens = course_model(), torch.randint(256, (6, 12))
    whole = profile(model, tokens, tile=16, words=5)
    assert_same(whole, profile(model, [tokens[:1], tokens[1:5], tokens[5:]], tile=16, words=5))
    assert_same(whole, profile(model, (tokens[i : i + 1] for i in range(6)), tile=16, words=5))
    assert whole.tokens == 72 and all(layer.tokens == 72 for layer in whole.layers)


def test_tiles_agree_with_what_packing_stores():
    from twell_lab.formats import TwELL

    model, tokens = course_model(d_ff=96), torch.randint(256, (4, 12))
    _, gate = activations(model, tokens, 1)
    packed = TwELL.from_gate(gate.detach(), tile=32, words=16)
    layer = profile(model, [tokens], tile=32, words=16).layers[1]
    assert layer.tile_histogram.tolist() == packed.counts.flatten().long().bincount(minlength=33).tolist()
    assert layer.overflowing == len(packed.overflow_rows) > 0


# Models


@pytest.mark.parametrize("gated", [True, False])
def test_a_course_model_against_what_its_own_layers_compute(gated):
    model, tokens = course_model(gated=gated), torch.randint(256, (2, 12))
    seen = []
    hooks = [
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: seen.append(out.flatten(0, -2) > 0))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    found = profile(model, [tokens]).layers
    assert [layer.name for layer in found] == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
    for layer, fires in zip(found, seen, strict=True):
        assert layer.gated is gated
        assert layer.neuron_counts.tolist() == fires.sum(0).tolist()
        assert layer.nnz_histogram.tolist() == fires.sum(1).bincount(minlength=41).tolist()


@pytest.mark.parametrize("make, gated", [(llama, True), (opt, False)])
def test_models_of_transformers_with_padding_left_out(make, gated):
    model = make()
    tokens = torch.randint(3, 64, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    pattern = feed_forwards(model)[1].pattern
    seen = []
    hook = pattern.register_forward_hook(lambda module, args, out: seen.append(out.reshape(18, 40) > 0))
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=mask)
    hook.remove()
    fires = seen[0][mask.flatten().bool()]

    layer = profile(model, [{"input_ids": tokens, "attention_mask": mask}], tile=8, words=4).layers[1]
    assert layer.tokens == 14 and layer.gated is gated
    assert layer.neuron_counts.tolist() == fires.sum(0).tolist()
    assert layer.nnz_histogram.tolist() == fires.sum(1).bincount(minlength=41).tolist()
    in_tile = fires.view(14, 5, 8).sum(-1)
    assert layer.tile_histogram.tolist() == in_tile.flatten().bincount(minlength=9).tolist()
    assert layer.overflowing == (in_tile > 3).any(-1).sum()
    assert layer.nnz_histogram.sum() == 14 and layer.tile_histogram.sum() == 14 * 5
    x, gate = activations(model, {"input_ids": tokens, "attention_mask": mask}, 1)
    assert x.shape == (14, 16) and torch.equal(gate > 0, fires)
    # A model takes positional inputs too.
    assert profile(model, [tokens]).tokens == 18


@pytest.mark.parametrize("make", [course_model, lambda: course_model(gated=False), llama, opt])
def test_a_sparsified_model_fires_as_its_dense_twin(make):
    model, tokens = make(), torch.randint(3, 64, (2, 9))
    dense, (x, gate) = profile(model, [tokens]), activations(model, tokens, -1)
    sparsify(model, "twell")
    assert_same(dense, profile(model, [tokens]))
    sparse_x, sparse_gate = activations(model, tokens, -1)
    torch.testing.assert_close(sparse_x, x)
    torch.testing.assert_close(sparse_gate, gate)
    densify(model)
    assert_same(dense, profile(model, [tokens]))


class WithDropout(GatedFeedForward):
    """A layer that computes its formula in evaluation mode alone."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_a_layer_that_drops_in_training_is_profiled_as_it_evaluates():
    torch.manual_seed(0)
    model, rows = nn.Sequential(WithDropout(16, 40)).train(), [torch.randn(12, 16)]
    plain = nn.Sequential(GatedFeedForward(16, 40))
    plain.load_state_dict(model.state_dict())
    assert_same(profile(model, rows), profile(plain, rows))
    assert model[0].training
    with pytest.raises(InputError, match="in training mode"):
        sparsify(model, "twell")


def test_activations_are_the_inputs_and_answers_of_the_chosen_layer():
    model, tokens = course_model(), torch.randint(256, (2, 12))
    x, gate = activations(model, tokens, "layers.2.mlp")
    assert x.shape == (24, 16) and gate.shape == (24, 40)
    assert not x.requires_grad and not gate.requires_grad
    torch.testing.assert_close(gate, x @ model.layers[2].mlp.gate_proj.weight.T)
    assert torch.equal(activations(model, tokens, -1)[0], x)
    assert not torch.equal(activations(model, tokens, 0)[0], x)


# A good guest


def hooks_of(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("swap", [False, True])
def test_modes_hooks_and_gradients_are_put_back_also_after_an_exception(swap):
    model = course_model()
    if swap:
        sparsify(model, "twell")
    model.train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    hooks = hooks_of(model)
    during = []
    watch = model.register_forward_pre_hook(
        lambda module, args: during.append((module.training, torch.is_grad_enabled()))
    )
    profile(model, [torch.randint(256, (1, 12))])
    watch.remove()
    assert during == [(False, False)]
    assert [module.training for module in model.modules()] == modes and hooks_of(model) == hooks

    def batches():
        yield torch.randint(256, (1, 12))
        raise KeyboardInterrupt

    too_long = torch.zeros(1, 99, dtype=torch.int64)
    for failing, error in ((batches(), KeyboardInterrupt), ([too_long], InputError)):
        with pytest.raises(error):
            profile(model, failing)
        assert [module.training for module in model.modules()] == modes and hooks_of(model) == hooks
    with pytest.raises(InputError):
        activations(model, too_long, 0)
    assert [module.training for module in model.modules()] == modes and hooks_of(model) == hooks
    assert torch.is_grad_enabled()


# Saving


def test_a_saved_profile_comes_back_and_is_plain_json(tmp_path):
    saved = profile(course_model(), [torch.randint(256, (2, 12))], tile=16, words=4)
    loaded = FiringProfile.load(saved.save(tmp_path / "profile.json"))
    assert_same(saved, loaded)
    assert saved.table() == loaded.table() == json.loads(json.dumps(saved.table(), allow_nan=False))
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]
    assert set(saved.table()[0]) == {
        "layer",
        "d_model",
        "d_ff",
        "gated",
        "tokens",
        "density",
        "mean_nnz",
        "dead",
        "always_on",
        "overflow_rows",
        "neighbours_share",
        "neighbours_by_chance",
    }


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.update(format="something else"), "'format'"),
        (lambda c: c.update(version=3), "version 3"),
        (lambda c: c.pop("layers"), "'layers'"),
        (lambda c: c["layers"][2].pop("tokens"), "layer 2: 'tokens'"),
        (lambda c: c["layers"][0].update(gated=1), "'gated'"),
        (lambda c: c["layers"][0].update(name=None), "'name'"),
        (lambda c: c["layers"][1]["nnz_histogram"].pop(), "layer 1: 'nnz_histogram'"),
        (lambda c: c["layers"][1]["neuron_counts"].append(1), "'neuron_counts'"),
        (lambda c: c["layers"][1].update(tile_histogram=["1"] * 17), "'tile_histogram'"),
        (lambda c: c["layers"][1].update(d_ff=-1), "'d_ff'"),
        (lambda c: c["layers"][1].update(tokens=2**63), "'tokens' is 9223372036854775808"),
        (lambda c: c["layers"][1]["neuron_counts"].__setitem__(3, 2**63), "'neuron_counts'"),
        (lambda c: c["layers"][1]["neuron_counts"].__setitem__(3, 10**400), "'neuron_counts'"),
        (
            lambda c: c["layers"][1]["neuron_counts"].__setitem__(3, c["layers"][1]["neuron_counts"][3] + 1),
            "whole profile",
        ),
        (
            lambda c: c["layers"][1]["nnz_histogram"].__setitem__(0, c["layers"][1]["nnz_histogram"][0] + 1),
            "'nnz_histogram'.*whole profile",
        ),
        (
            lambda c: c["layers"][1]["tile_histogram"].__setitem__(0, c["layers"][1]["tile_histogram"][0] + 1),
            "'tile_histogram'.*whole profile",
        ),
        (lambda c: c["layers"][1].update(overflowing=99), "'overflowing'"),
        (lambda c: c["layers"][1].update(d_ff=0, nnz_histogram=[12], neuron_counts=[]), "'d_ff' is 0"),
        (lambda c: c["layers"][1].update(words=99), "words is 99"),
        (lambda c: c.update(version=True), "version True"),
    ],
)
def test_a_broken_saved_profile_names_the_file_and_the_field(tmp_path, change, words):
    found = profile(course_model(), [torch.randint(256, (1, 12))], tile=16, words=4)
    path = found.save(tmp_path / "profile.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"profile.json.*{words}"):
        FiringProfile.load(path)


def test_files_that_are_no_json_or_not_there_are_named(tmp_path):
    (tmp_path / "half.json").write_text('{"format": "twell')
    for name in ("half.json", "missing.json"):
        with pytest.raises(RecordError, match=name):
            FiringProfile.load(tmp_path / name)
    with pytest.raises(RecordError, match="nowhere"):
        profile(course_model(), [torch.randint(256, (1, 12))]).save(tmp_path / "nowhere" / "profile.json")


# What is refused


class SiLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = GatedFeedForward(4, 8)
        self.mlp.act_fn = nn.SiLU()


@pytest.mark.parametrize("model", [nn.Linear(3, 3), SiLU()])
def test_models_without_a_relu_feed_forward_layer_are_refused(model):
    with pytest.raises(InputError, match="feed-forward"):
        profile(model, [torch.zeros(1, 3)])
    with pytest.raises(InputError, match="feed-forward"):
        activations(model, torch.zeros(1, 3), 0)


@pytest.mark.parametrize(
    "batches, words",
    [
        ([], "batches is empty"),
        (iter(()), "batches is empty"),
        ([torch.zeros(0, 12, dtype=torch.int64)], "token"),
        (3, "int"),
        ([3], "a batch is a int"),
        (["text"], "a batch is a str"),
    ],
)
def test_no_batches_no_tokens_and_no_tensors_are_refused(batches, words):
    with pytest.raises(InputError, match=words):
        profile(course_model(), batches)


@pytest.mark.parametrize(
    "batches, words",
    [
        (
            [torch.ones(1, 4).long(), torch.tensor([[3, 64]])],
            "batch 1 has the token 64; accepted by this model: 0 to 63",
        ),
        ([{"input_ids": torch.tensor([[-2, 3]])}], "batch 0 has the token -2; accepted"),
        (iter([torch.ones(0, 4).long()]), r"batch 0 has no token: input_ids has shape \[0, 4\]"),
        ([{"input_ids": torch.ones(2, 0).long()}], r"batch 0 has no token: input_ids has shape \[2, 0\]"),
        ([[3, 4, 5]], "batch 0 has a int for a tensor; accepted: token ids"),
        ([{"input_ids": [[3, 4, 5]]}], "batch 0 has a list for a tensor; .* return_tensors='pt'"),
    ],
)
def test_a_batch_that_a_model_of_transformers_cannot_read_is_told(batches, words):
    with pytest.raises(InputError, match=words) as told:
        profile(llama(), batches)
    assert told.value.__cause__ is not None  # the model's own error


def test_a_sequence_that_is_too_long_is_told():
    longest = opt().config.max_position_embeddings
    with pytest.raises(InputError, match=f"batch 0 has 99 tokens in a sequence; .* up to {longest}"):
        profile(opt(), torch.ones(1, 99).long())


def test_another_error_of_the_models_has_a_note_on_the_batch():
    good = torch.ones(1, 4).long()
    with pytest.raises(RuntimeError) as told:
        profile(llama(), [good, good.float()])
    assert told.value.__notes__ == ["The model failed on batch 1, counted from 0: input_ids [1, 4] torch.float32."]


def test_a_model_that_gives_nan_is_refused_by_the_first_layer_that_is_given_one():
    model, ids = llama(), torch.arange(8).view(2, 4)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 2] = math.nan
    with pytest.raises(InputError, match="what enters 'model.layers.1.mlp', or its gate, is NaN at 8 of 8 tokens"):
        profile(model, ids)


@pytest.mark.parametrize("counted, refused", [([True, False], False), ([True, True], True)])
def test_what_is_no_token_may_hold_nan(counted, refused):
    counter = module.Counter(feed_forwards(identity_layer(2))[0], 2, 2)
    answers = torch.tensor([[1.0, -1.0], [math.nan, math.nan]])
    counter.add(answers, answers.__getitem__, Rows(counted=torch.tensor(counted)))
    with pytest.raises(InputError, match="NaN at 1 of 2 tokens") if refused else nullcontext():
        counter.check()


def test_weights_on_meta_are_refused_before_anything_runs():
    with pytest.raises(InputError, match="is on meta, without values; accepted: a model that was loaded"):
        profile(llama().to("meta"), [{"input_ids": torch.ones(1, 4).long()}])


def test_a_mask_that_fits_no_position_is_refused():
    with pytest.raises(InputError, match=r"attention_mask has shape \[1, 9\]"):
        profile(llama(), [{"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 9)}])


@pytest.mark.parametrize("tile, words", [(0, 32), (65537, 32), (256, 1), (256, 258), (2.5, 2)])
def test_an_impossible_geometry_is_refused(tile, words):
    with pytest.raises(InputError):
        profile(course_model(), [torch.randint(256, (1, 12))], tile=tile, words=words)


@pytest.mark.parametrize("layer", [3, -4, "layers.9.mlp", 1.0, None])
def test_a_layer_that_is_not_there_is_refused_with_those_that_are(layer):
    with pytest.raises(InputError, match="layers.0.mlp"):
        activations(course_model(), torch.randint(256, (1, 12)), layer)


def test_a_layer_that_saw_no_token_says_none_rather_than_zero():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = GatedFeedForward(4, 8), GatedFeedForward(4, 8)

        def forward(self, x):
            return self.used(x)

    found = profile(Two(), [torch.randn(3, 4)])
    assert found.tokens == 3 and found.layers[1].tokens == 0
    assert found.table()[1]["density"] is None and math.isnan(found.layers[1].density)
    with pytest.raises(InputError, match="idle"):
        activations(Two(), torch.randn(3, 4), "idle")


class Topped(GatedFeedForward):
    """Whose gate does not say who fires: of each row, the largest few alone."""

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * (gate >= gate.topk(3).values[..., -1:]) * self.up_proj(x))


def test_layers_whose_gate_does_not_say_who_fires_are_refused_or_left_out():
    model = nn.Sequential(GatedFeedForward(16, 64), Topped(16, 64))
    x = torch.randn(5, 16)
    with pytest.raises(InputError, match=r"1 \(Topped\) does not compute"):
        profile(model, x)
    (layer,) = profile(model, x, only=lambda name, module: not isinstance(module, Topped)).layers
    assert layer.name == "0" and layer.tokens == 5


def test_what_is_no_profile_is_told():
    with pytest.raises(InputError, match="the other profile is a NoneType"):
        FiringProfile([]).compare(None)
    with pytest.raises(InputError, match="the other profile is a str"):
        FiringProfile([]).merged("profile.json")


# ---- compiled models, and masks without a name ----


def in_place(model):
    model.compile(backend="eager")
    return model


def by_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


@pytest.mark.parametrize("how", [lambda model: torch.compile(model, backend="eager"), in_place, by_layers])
def test_a_compiled_model_is_profiled_as_the_one_inside(how):
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = profile(llama(), [tokens])
    compiled = how(llama())
    for _ in range(2):
        found = profile(compiled, [tokens])
        assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
        for mine, its in zip(found.layers, expected.layers, strict=True):
            assert torch.equal(mine.neuron_counts, its.neuron_counts) and mine.tokens == 18
        with torch.no_grad():
            compiled(tokens)  # and now there is code
    assert torch.equal(activations(compiled, tokens, 1)[1], activations(llama(), tokens, 1)[1])


def test_a_plan_and_thresholds_of_a_compiled_model():
    import twell_lab as tl

    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(0))
    model = llama()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(tokens).logits
    made = tl.plan(tl.profile(compiled, [tokens]), compiled, tokens=[36], measure=False)
    assert [layer.name for layer in made.layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    tl.sparsify(model, made), tl.densify(model)
    chosen = tl.thresholds(compiled, [tokens], 0.6)
    assert chosen == tl.thresholds(model, [tokens], 0.6)
    seen = []
    only = lambda name, module: seen.append(name) or True  # noqa: E731
    assert tl.sparsify(compiled, "twell", only=only) is compiled
    assert set(seen) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert [row["layer"] for row in tl.report(compiled).rows] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens).logits, before)


def test_padding_is_left_out_by_whatever_place_its_mask_has():
    tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    named = profile(llama(), [{"input_ids": tokens, "attention_mask": mask}])
    for model in (llama(), torch.compile(llama(), backend="eager")):
        placed = profile(model, [(tokens, mask)])
        assert placed.tokens == named.tokens == 14
        for one, other in zip(placed.layers, named.layers, strict=True):
            assert torch.equal(one.neuron_counts, other.neuron_counts)
            assert torch.equal(one.position_tokens, other.position_tokens)
    with pytest.raises(InputError, match=r"attention_mask has shape \[2, 4\]"):
        profile(identity_layer_with_mask(), [(torch.rand(2, 9, 6), torch.ones(2, 4))])


def identity_layer_with_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = identity_layer(6)

        def forward(self, x, attention_mask):
            return self.layer(x)

    return Masked()


@pytest.mark.parametrize(
    "rows, columns, width", [(0, 512, 256), (1, 8, 8), (511, 4080, 2040), (255, 24, 12), (9, 4096, 2048)]
)
def test_booleans_are_added_eight_at_a_time(rows, columns, width):
    for share in (0.0, 0.5, 1.0):
        firing = torch.rand(rows, columns) < share if share < 1 else torch.ones(rows, columns, dtype=torch.bool)
        runs, in_columns = module._in_runs(firing, width), module._in_columns(firing)
        assert runs.dtype == in_columns.dtype == torch.int64
        assert torch.equal(runs, firing.view(rows, columns // width, width).sum(-1))
        assert torch.equal(in_columns, firing.sum(0))


def test_answers_whose_rows_do_not_lie_together_are_counted():
    """As of a layer that gives the transpose of what it computed."""
    (layer,) = feed_forwards(GatedFeedForward(16, 256))
    gate, x = torch.randn(256, 10).t(), torch.randn(10, 16)
    turned, together = (module.Counter(layer, 64, 8) for _ in range(2))
    nnz = turned.add(x, lambda of: gate[of])
    assert torch.equal(nnz, (gate > 0).sum(-1)) and torch.equal(nnz, together.add(x, lambda of: gate.contiguous()[of]))
    for name, count in together.counts.items():
        assert torch.equal(turned.counts[name], count), name


class Scaled(GatedFeedForward):
    """A feed-forward layer with a setting that its forward reads."""

    scale = 1.0

    def forward(self, x):
        return self.scale * super().forward(x)


def asked_while_profiling(layers, monkeypatch):
    """The names of the layers that a profile asks what they compute."""
    asked = []
    check = module.probe.check
    monkeypatch.setattr(module.probe, "check", lambda name, *given: asked.append(name) or check(name, *given))
    profile(nn.Sequential(*layers), [torch.randn(4, 16)])
    return asked


def test_of_layers_with_the_same_code_and_settings_one_is_asked(monkeypatch):
    assert asked_while_profiling([Scaled(16, 40) for _ in range(4)], monkeypatch) == ["0"]


def with_attribute(layer, value):
    layer.note = value
    return layer


@pytest.mark.parametrize(
    "another",
    [
        lambda: Scaled(16, 48),
        lambda: GatedFeedForward(16, 40),
        lambda: with_attribute(Scaled(16, 40), "another"),
        lambda: with_attribute(Scaled(16, 40), [1]),
    ],
)
def test_a_layer_that_differs_in_anything_is_asked_itself(another, monkeypatch):
    layers = [Scaled(16, 40), another()]
    assert asked_while_profiling(layers, monkeypatch) == ["0", "1"]


def test_a_layer_with_another_setting_than_one_that_passed_is_refused():
    layers = [Scaled(16, 40) for _ in range(3)]
    layers[2].scale = 0.5
    with pytest.raises(InputError, match="2 .*does not compute"):
        profile(nn.Sequential(*layers), [torch.randn(4, 16)])
