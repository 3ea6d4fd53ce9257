"""The firing profile against brute force, on models whose firing is known, and on models of transformers; and that what
is not certain is said to be unknown."""

import json
import math
import operator
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers import models_of
from tests.models.tiny import test_model
from twell_lab.analysis import profile as module
from twell_lab.analysis.profile import Counter, FiringProfile, activations, captured, profile
from twell_lab.analysis.running import POSITIONS, Rows, run
from twell_lab.core import InputError, RecordError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

WIDTH, VOCABULARY = 6, 11
NAN = math.nan


def identity_layer(width, gated=True):
    """A layer whose gate is its input: what goes in decides, neuron by neuron, what fires."""
    layer = (GatedFeedForward if gated else PlainFeedForward)(width, width)
    with torch.no_grad():
        (layer.gate_proj if gated else layer.up_proj).weight.copy_(torch.eye(width))
    return layer


class Reads(nn.Module):
    """A model of one layer in which the tokens alone say what fires.

    lies: how its tokens lie when the layer sees them: "sequences", "flat", "turned" ([sequence, batch, d_model]),
    "more" (with tokens in front that the ids do not name) or "fewer" (flat, one left out)."""

    def __init__(self, lies="sequences"):
        super().__init__()
        torch.manual_seed(1)
        self.lies, self.embedding, self.mlp = lies, nn.Embedding(VOCABULARY, WIDTH), identity_layer(WIDTH)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None):
        x = self.embedding(input_ids)
        lies = {"flat": x.flatten(0, 1), "turned": x.transpose(0, 1), "fewer": x.flatten(0, 1)[1:]}
        lies["more"] = torch.cat([torch.zeros_like(x[:, :2]), x], 1)
        return self.mlp(lies.get(self.lies, x))


course_model = partial(test_model.model, vocabulary=256, d_model=16, layers=3, heads=2)
llama = partial(models_of.build, "Llama")


def tokens(rows=2, length=9, high=64):
    return torch.randint(3, high, (rows, length), generator=torch.Generator().manual_seed(0))


def equal(one, other):
    return (torch.equal if isinstance(one, torch.Tensor) else operator.eq)(one, other)


def assert_same(one, other):
    for mine, its in zip(one.layers, other.layers, strict=True):
        for name, value in vars(mine).items():
            assert equal(value, getattr(its, name)), name
    assert equal(one.token_counts, other.token_counts) and equal(one.token_nnz, other.token_nnz)


@pytest.mark.parametrize("gated", [True, False])
def test_hand_set_weights_give_known_shares(gated):
    x = torch.tensor([[1.0, -1.0, 0.0, 2.0, 0.5], [-1.0, -1.0, -0.0, -2.0, -0.5], [1.0, 1.0, 1.0, -1.0, 3.0]])
    (layer,) = profile(identity_layer(5, gated), [x], tile=2, words=2).layers
    assert (layer.name, layer.d_model, layer.d_ff, layer.tokens, layer.gated) == ("", 5, 5, 3, gated)
    assert layer.neuron_frequency.tolist() == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3, 2 / 3])
    assert layer.overflow_rows == pytest.approx(1 / 3)  # one slot a tile: the last row has two in its first
    assert layer.mean_nnz == pytest.approx(7 / 3) and layer.density == pytest.approx(7 / 15)
    assert layer.dead == layer.always_on == 0
    x[:, 1], x[:, 0] = -1.0, 1.0
    (layer,) = profile(identity_layer(5, gated), [x], tile=2, words=2).layers
    assert layer.dead == layer.always_on == 1


def by_hand(fires, ids, mask, positions, tile, words):
    """The counts of one layer and of the vocabulary, one token after the other; what is no token has mask 0."""
    width = len(fires[0][0])
    found = dict.fromkeys(("tokens", "overflowing"), 0)
    found |= {"nnz_histogram": [0] * (width + 1), "neuron_counts": [0] * width, "tile_histogram": [0] * (tile + 1)}
    found |= {name: [0] * len(POSITIONS) for name in ("position_tokens", "position_nnz")}
    vocabulary = {"token_counts": [0] * VOCABULARY, "token_nnz": [0] * VOCABULARY}
    for fired, numbers, line, places in zip(fires, ids, mask, positions):
        for at, (counted, place) in enumerate(zip(line, places)):
            if not counted:
                continue
            nnz, group = sum(fired[at]), max(i for i, first in enumerate(POSITIONS) if first <= place)
            tiles = [sum(fired[at][start : start + tile]) for start in range(0, width, tile)]
            found["tokens"] += 1
            found["overflowing"] += max(tiles) > words - 1
            found["nnz_histogram"][nnz] += 1
            found["neuron_counts"] = [a + b for a, b in zip(found["neuron_counts"], fired[at])]
            for count in tiles:
                found["tile_histogram"][count] += 1
            found["position_tokens"][group] += 1
            found["position_nnz"][group] += nnz
            vocabulary["token_counts"][numbers[at]] += 1
            vocabulary["token_nnz"][numbers[at]] += nnz
    return found, vocabulary


@given(
    batch=st.integers(1, 3),
    sequence=st.integers(1, 20),
    lies=st.sampled_from(["sequences", "flat"]),
    masked=st.sampled_from(["no", "left", "right", "anywhere"]),
    packed=st.booleans(),
    tile=st.integers(1, 9),
    words=st.integers(2, 10),
    piece=st.sampled_from([1, 7, 50, 2**20]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_counts_are_those_of_brute_force(batch, sequence, lies, masked, packed, tile, words, piece, seed):
    torch.manual_seed(seed)
    model, ids, words = Reads(lies), torch.randint(VOCABULARY, (batch, sequence)), min(words, tile + 1)
    given, mask, at = {"input_ids": ids}, torch.ones_like(ids), torch.arange(sequence)
    if masked != "no":
        keep = torch.randint(1, sequence + 1, (batch, 1))
        masks = {"left": at >= sequence - keep, "right": at < keep, "anywhere": torch.rand(batch, sequence) < 0.7}
        mask = masks[masked]
        mask[0, 0] |= not mask.any()
        given["attention_mask"] = mask = mask.long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if packed:  # several texts in one line
        given["position_ids"] = positions = at.expand(batch, sequence) % max(1, sequence // 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CPU", piece)
        found = profile(model, given, tile, words)
    fires = (model.embedding.weight > 0)[ids]
    layer, vocabulary = by_hand(*(t.tolist() for t in (fires, ids, mask, positions)), tile, words)
    for of, wanted in ((found.layers[0], layer), (found, vocabulary)):
        for name, value in wanted.items():
            assert getattr(of, name) == value if isinstance(value, int) else getattr(of, name).tolist() == value, name
    # One line after the other gives the same.
    lines = [{name: each[row : row + 1] for name, each in given.items()} for row in range(batch) if mask[row].any()]
    assert_same(found, profile(model, lines, tile, words))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "ours", "ours, plain"])
def test_a_model_and_its_swapped_twin_fire_as_their_layers_compute(name):
    ours = "ours" in name
    model = course_model(gated="plain" not in name) if ours else models_of.build(name)
    ids, mask = tokens(), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 1 if ours else 0
    given, seen = ids if ours else {"input_ids": ids, "attention_mask": mask}, []
    layers = feed_forwards(model)
    hooks = [
        layer.pattern.register_forward_hook(lambda m, a, out: seen.append(out.reshape(18, -1))) for layer in layers
    ]
    with torch.no_grad():
        model(given) if ours else model(**given)
    for hook in hooks:
        hook.remove()
    counted, found = mask.flatten().bool(), profile(model, [given], tile=8, words=4)
    for layer, profiled, gate in zip(layers, found.layers, seen, strict=True):
        fires, in_tile = gate[counted] > 0, (gate[counted] > 0).view(-1, 5, 8).sum(-1)
        assert (profiled.name, profiled.tokens, profiled.gated) == (layer.name, len(fires), layer.gate is not None)
        assert profiled.neuron_counts.tolist() == fires.sum(0).tolist()
        assert profiled.nnz_histogram.tolist() == fires.sum(1).bincount(minlength=41).tolist()
        assert profiled.tile_histogram.tolist() == in_tile.flatten().bincount(minlength=9).tolist()
        assert profiled.overflowing == (in_tile > 3).any(-1).sum()
    x, gate = activations(model, given, 1)
    assert x.shape == (counted.sum(), 16) and torch.equal(gate, seen[1][counted])
    assert torch.equal(captured(model, [given, given], [layers[1].name], 20)[layers[1].name], torch.cat([x, x])[:20])
    sparsify(model, "twell")
    assert_same(found, profile(model, [given], tile=8, words=4))
    torch.testing.assert_close(activations(model, given, layers[1].name), (x, gate))
    assert_same(found, profile(densify(model), [given], tile=8, words=4))


def test_routed_experts_know_the_places_of_their_tokens():
    model = models_of.build("Mixtral")
    batch = models_of.given(model)
    batch["attention_mask"][0, :4] = 0
    found = profile(model, batch)
    layers = [layer for layer in found.layers if ".0.mlp" in layer.name]
    assert sum(layer.position_tokens for layer in layers).tolist()[:9] == [4] * 5 + [2] * 3 + [2]
    assert found.token_counts.sum() == 14
    assert found.token_nnz.sum() == sum(layer.neuron_counts.sum() for layer in found.layers)

    home, seen = model.model.layers[0].mlp.experts, []
    hook = home.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())[:2]), with_kwargs=True
    )
    with torch.no_grad():
        model(**batch)
    hook.remove()
    ((x, chosen),) = seen
    mask = batch["attention_mask"].flatten().bool()
    for expert, layer in enumerate(layers):
        given = (chosen == expert).any(-1) & mask
        fires = x @ home.gate_up_proj[expert][: layer.d_ff].T > 0
        assert layer.tokens == given.sum() and layer.neuron_counts.tolist() == fires[given].sum(0).tolist()
    sparsify(model, "twell")
    assert_same(found, profile(model, batch))


def test_an_encoder_and_a_decoder_have_tokens_of_their_own():
    model = models_of.build("T5")
    batch = models_of.given(model)
    batch["attention_mask"][0, 7:] = 0
    found = profile(model, batch)
    for layer in found.layers:
        lengths = [9, 7] if layer.name.startswith("encoder") else [5, 5]
        assert layer.tokens == sum(lengths), layer.name
        stood = [sum(place < length for length in lengths) for place in range(8)]
        assert layer.position_tokens[:8].tolist() == stood
    assert found.token_counts.sum() == 16 + 10
    # Labels of the encoder's length, of which the model makes the decoder's input itself: those tokens are unknown.
    labels = {**models_of.given(model), "labels": batch["input_ids"]}
    del labels["decoder_input_ids"]
    found = profile(model, labels)
    assert found.token_counts.sum() == 18
    decoder = sum(layer.neuron_counts.sum() for layer in found.layers if layer.name.startswith("decoder"))
    assert found.token_nnz.sum() == sum(layer.neuron_counts.sum() for layer in found.layers) - decoder


@pytest.mark.parametrize("compiled", [lambda model: torch.compile(model, backend="eager"), "layers"])
def test_a_compiled_model_is_profiled_as_the_one_inside(compiled):
    ids, model, mask = tokens(), llama(), torch.ones(2, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    expected, x = profile(model, {"input_ids": ids, "attention_mask": mask}), activations(model, ids, 1)
    if callable(compiled):
        model = compiled(model)
    for part in model.model.layers if compiled == "layers" else ():
        part.compile(backend="eager")
    for _ in range(2):
        assert_same(profile(model, [(ids, mask)]), expected)  # the mask by its place
        with torch.no_grad():
            model(ids)  # and now there is code
    assert torch.equal(activations(model, ids, 1)[1], x[1])


def test_layers_without_tokens_and_layers_left_out():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = GatedFeedForward(4, 8), GatedFeedForward(4, 8)

        def forward(self, x):
            return self.used(x)

    x = torch.randn(3, 4)
    found = profile(Two(), [x])
    assert found.tokens == 3 and found.layers[1].tokens == 0
    assert found.table()[1]["density"] is None and math.isnan(found.layers[1].density)
    (layer,) = profile(Two(), x, only=lambda name, _: name == "used").layers
    assert layer.name == "used"
    for call in (lambda: activations(Two(), x, "idle"), lambda: captured(Two(), x, ["idle"], 2)):
        with pytest.raises(InputError, match="idle"):
            call()


@pytest.mark.parametrize("swap", [False, True])
def test_modes_hooks_and_gradients_are_put_back_also_after_an_exception(swap):
    model = course_model()
    model = (sparsify(model, "twell") if swap else model).train()
    model.layers[1].eval()

    def state():
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        return [module.training for module in model.modules()], hooks, torch.is_grad_enabled()

    def batches():
        yield tokens(1, 12)
        during.append(state())
        raise KeyboardInterrupt

    before, during = state(), []
    for inputs, error in ((batches(), KeyboardInterrupt), ([tokens(1, 99)], InputError)):
        with pytest.raises(error):
            profile(model, inputs)
        assert state() == before
    assert not any(during[0][0]) and not during[0][2]


def test_positions_are_grouped_up_to_any_length():
    far = {"input_ids": torch.tensor([[1, 2, 3]]), "position_ids": torch.tensor([[5, 100, 2**40]])}
    rows = profile(Reads(), far).by_position()
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(5, 5, 1), (64, 127, 1), (2**31, None, 1)]


def test_first_tokens_are_compared_with_later_ones():
    layer, x = identity_layer(WIDTH), -torch.ones(4, 30, WIDTH)
    x[:, :, 0] = 1.0
    assert profile(layer, x).layers[0].first_to_later == 1.0
    x[:, :2] = 1.0
    assert profile(layer, x).layers[0].first_to_later == 6.0
    assert math.isnan(profile(layer, x[:, :8]).layers[0].first_to_later)  # nothing later to compare with


def test_tokens_by_how_many_neurons_fire():
    model, ids = Reads(), torch.tensor([[3, 3, 3, 5, 5, 7]])
    found, fires = profile(model, ids), (model.embedding.weight > 0).sum(1).tolist()
    rows, mean = found.by_token(), sum(fires[token] for token in ids[0].tolist()) / 6
    assert {row["token"]: row["count"] for row in rows} == {3: 3, 5: 2, 7: 1}
    assert [row["nnz"] for row in rows] == sorted((fires[token] for token in (3, 5, 7)), reverse=True)
    assert all(row["x_mean"] == pytest.approx(row["nnz"] / mean) for row in rows)


ZEROS = torch.zeros(2, 9, dtype=torch.int64)


@pytest.mark.parametrize(
    "model, given",
    [
        (Reads("turned"), ZEROS),
        (Reads("fewer"), ZEROS),
        (Reads().mlp, torch.ones(9, WIDTH)),
        (Reads(), {"input_ids": ZEROS, "past_key_values": "earlier ones"}),
        (Reads(), {"input_ids": ZEROS, "attention_mask": torch.ones(2, 9), "cache": "earlier ones"}),
        (Reads(), {"input_ids": ZEROS, "position_ids": torch.zeros(3, 2, 9).long()}),
    ],
)
def test_positions_that_are_not_certain_are_unknown(model, given):
    found = profile(model, given)
    (layer,) = found.layers
    assert layer.tokens and not layer.position_tokens.any() and not layer.position_nnz.any()
    assert found.by_position() == [] and math.isnan(layer.first_to_later)


def test_token_ids_that_layers_do_not_see_one_by_one_are_not_counted():
    for lies in ("turned", "fewer", "more"):
        assert profile(Reads(lies), ZEROS).token_counts is None, lies
    # Tokens that were put in front stand in the sequence, as the layer sees it.
    assert profile(Reads("more"), ZEROS).layers[0].position_tokens[:8].tolist() == [2] * 8
    known = profile(Reads(), [ZEROS, {"input_ids": ZEROS, "past_key_values": "earlier ones"}])
    assert known.layers[0].tokens == 36 and known.layers[0].position_tokens.sum() == 18
    assert known.token_counts[0] == 36
    loose = profile(Reads().mlp, torch.randn(3, 20, WIDTH))
    assert loose.token_counts is None and loose.by_token() == []


def test_memory_does_not_grow_with_the_tokens_of_a_call():
    """A gate of 1 GB that takes no memory (one row many times) is counted in a process of its own."""
    code = """
import resource, torch
from twell_lab.analysis.profile import Counter
from twell_lab.layers.find import feed_forwards
from twell_lab.ops.reference import GatedFeedForward
layer, = feed_forwards(GatedFeedForward(2, 4096))
rows = torch.randn(1, 4096).expand(2**16, 4096)
counter = Counter(layer, 256, 32)
counter.add(torch.empty(1, 2).expand(2**10, 2), lambda of: rows[of])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
counter.add(torch.empty(1, 2).expand(2**16, 2), lambda of: rows[of])
assert counter.result().tokens == 2**16 + 2**10
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 64 * 1024, "KiB"  # whole, its booleans alone would take 256 MiB


def test_counting_multiplies_nothing_again():
    """The layer's own answers are counted, not computed a second time."""

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            return function(*args, **(kwargs or {}))

    model = nn.Sequential(GatedFeedForward(64, 128), GatedFeedForward(64, 128)).eval()
    x, counters = torch.randn(2, 16, 64), [Counter(layer, 64, 8) for layer in feed_forwards(model)]
    counts = []
    for watched in ([], [(counter.layer, counter.add) for counter in counters]):
        with Products() as products:
            run(model, watched, x)
        counts.append(products.count)
    assert counts[0] == counts[1] >= 6 and all(counter.result().tokens for counter in counters)


def test_a_saved_profile_comes_back_and_is_plain_json(tmp_path):
    for found in (
        profile(course_model(), [tokens(2, 12)], tile=16, words=4),
        profile(Reads().mlp, torch.ones(9, WIDTH)),
    ):
        loaded = FiringProfile.load(found.save(tmp_path / "profile.json"))
        assert_same(found, loaded)
        assert found.table() == loaded.table() == json.loads(json.dumps(found.table(), allow_nan=False))
        assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda c: c.update(format="something else"), "'format'"),
        (lambda c: c.update(version=3), "version 3"),
        (lambda c: c.update(layers=[]), "'layers' holds 0 profiles"),
        (lambda c: c["layers"][2].pop("tokens"), "'layers' 2 lacks 'tokens'"),
        (lambda c: c["layers"][0].update(overflowing=-1), "'overflowing'"),
        (lambda c: c["layers"][1]["nnz_histogram"].pop(), "'layers' 1: 'nnz_histogram'"),
        (lambda c: c["layers"][1].update(words=99), "words is 99"),
        (lambda c: c["layers"][1]["neuron_counts"].__setitem__(3, 10**400), "'neuron_counts'"),
        (lambda c: c["token_nnz"].pop(), "'token_nnz' have the lengths"),
    ],
)
def test_a_broken_saved_profile_names_the_file_and_the_field(tmp_path, edit, words):
    path = profile(course_model(), [tokens(1, 12)], tile=16, words=4).save(tmp_path / "profile.json")
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"profile.json.*{words}"):
        FiringProfile.load(path)


class Topped(GatedFeedForward):
    """Whose gate does not say who fires: of each row, the largest few alone."""

    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x))
        return self.down_proj(gate * (gate >= gate.topk(3).values[..., -1:]) * self.up_proj(x))


def smooth():
    layer = GatedFeedForward(4, 8)
    layer.act_fn = nn.SiLU()
    return nn.Sequential(layer)


def broken():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 2] = NAN
    return model


@pytest.mark.parametrize(
    "model, batches, words",
    [
        (lambda: "gpt2", [], r"tl.load\('gpt2'\)"),
        (lambda: nn.Linear(3, 3), [torch.zeros(1, 3)], "no ReLU feed-forward layer"),
        (smooth, [torch.zeros(1, 4)], "SiLU"),
        (lambda: nn.Sequential(Topped(16, 64)), [torch.randn(5, 16)], r"0 \(Topped\) does not compute"),
        (lambda: llama().to("meta"), [{"input_ids": tokens()}], "is on meta"),
        (broken, tokens(2, 4), "'model.layers.1.mlp', or its gate, is NaN at 8 of 8 tokens"),
        (course_model, [], "batches is empty"),
        (course_model, [torch.zeros(0, 12, dtype=torch.int64)], "no feed-forward layer saw a token"),
        (course_model, 3, "batches is a int"),
        (course_model, ["text"], "a batch is a str"),
        (llama, [tokens(1, 4), torch.tensor([[3, 64]])], "batch 1 has the token 64; accepted by this model: 0 to 63"),
        (course_model, torch.tensor([[3, 2**20]]), "batch 0 has the token 1048576; accepted by this model: 0 to "),
        (lambda: models_of.build("OPT"), tokens(1, 99), "batch 0 has 99 tokens in a sequence; .* up to 32"),
        (llama, [[3, 4, 5]], r"batch 0 \(without a tensor\) makes the model fail"),
        (llama, [tokens(), tokens().float()], r"batch 1 \(input_ids \[2, 9\] torch.float32\) makes the model fail"),
        (Reads, [{"input_ids": ZEROS, "attention_mask": torch.ones(1, 7)}], r"attention_mask has shape \[1, 7\]"),
    ],
)
def test_what_cannot_be_profiled_is_refused(model, batches, words):
    with pytest.raises(InputError, match=words) as refused:
        profile(model(), batches)
    assert "\n" not in str(refused.value)
    assert "makes the model fail" not in words or refused.value.__cause__ is not None  # the model's own error


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: profile(course_model(), tokens(1, 12), tile=0), "tile"),
        (lambda: profile(course_model(), tokens(1, 12), tile=256, words=258), "words"),
        (lambda: activations(course_model(), tokens(1, 12), 3), "layers.0.mlp"),
        (lambda: activations(course_model(), tokens(1, 12), "layers.9.mlp"), "layers.0.mlp"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(InputError, match=words):
        call()


def test_nan_fires_as_in_packing_and_counts_where_there_is_a_token():
    (layer,) = feed_forwards(identity_layer(2))
    answers = torch.tensor([[1.0, -1.0], [NAN, -1.0]])
    for counted in (True, False):
        counter = Counter(layer, 2, 2)
        nnz = counter.add(answers, answers.__getitem__, Rows(counted=torch.tensor([True, counted])))
        assert nnz.tolist() == [1, int(counted)]
        if counted:
            with pytest.raises(InputError, match="NaN at 1 of 2 tokens"):
                counter.result()
        else:
            assert counter.result().tokens == 1
