"""Where in a sequence, at which tokens and beside which neighbours neurons fire, against brute force; and that what is
not certain is said to be unknown."""

import json
import math
import operator
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers import models_of
from twell_lab.analysis import profile as module
from twell_lab.analysis.layer_profile import POSITIONS
from twell_lab.analysis.predict import verdict
from twell_lab.analysis.profile import Counter, FiringProfile, profile
from twell_lab.analysis.running import run
from twell_lab.core import InputError, RecordError
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.ops.reference import GatedFeedForward

WIDTH, VOCABULARY = 6, 11


class Reads(nn.Module):
    """A model of one layer in which the tokens alone say what fires.

    lies: how its tokens lie when the layer sees them: "sequences", "flat", "turned" ([sequence, batch, d_model]),
    "more" (with tokens in front that the ids do not name) or "fewer" (flat, one left out)."""

    def __init__(self, lies="sequences"):
        super().__init__()
        torch.manual_seed(1)
        self.lies, self.embedding = lies, nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = GatedFeedForward(WIDTH, WIDTH)
        with torch.no_grad():
            self.mlp.gate_proj.weight.copy_(torch.eye(WIDTH))

    def fires(self, ids):
        return (self.embedding.weight > 0)[ids]

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, cache=None):
        x = self.embedding(input_ids)
        if self.lies == "flat":
            x = x.flatten(0, 1)
        elif self.lies == "turned":
            x = x.transpose(0, 1)
        elif self.lies == "more":
            x = torch.cat([torch.zeros_like(x[:, :2]), x], 1)
        elif self.lies == "fewer":
            x = x.flatten(0, 1)[1:]
        return self.mlp(x)


def assert_same(one, other):
    for a, b in zip(one.layers, other.layers, strict=True):
        for name, value in vars(a).items():
            assert equal(value, getattr(b, name)), name
    assert equal(one.token_counts, other.token_counts) and equal(one.token_nnz, other.token_nnz)


def equal(one, other):
    return (torch.equal if isinstance(one, torch.Tensor) else operator.eq)(one, other)


def by_hand(fires, ids, mask, positions):
    """The counts of one layer, one token after the other; what is no token has mask 0."""
    found = {name: 0 for name in ("pairs", "pair_nnz", "pair_shared")}
    found |= {name: [0] * len(POSITIONS) for name in ("position_tokens", "position_nnz")}
    tokens = {"token_counts": [0] * VOCABULARY, "token_nnz": [0] * VOCABULARY}
    for row, (line, places) in enumerate(zip(mask, positions)):
        for at, (counted, place) in enumerate(zip(line, places)):
            if not counted:
                continue
            nnz = sum(fires[row][at])
            group = max(i for i, first in enumerate(POSITIONS) if first <= place)
            found["position_tokens"][group] += 1
            found["position_nnz"][group] += nnz
            tokens["token_counts"][ids[row][at]] += 1
            tokens["token_nnz"][ids[row][at]] += nnz
            if at + 1 < len(line) and line[at + 1] and places[at + 1] == place + 1:
                found["pairs"] += 1
                found["pair_nnz"] += nnz + sum(fires[row][at + 1])
                found["pair_shared"] += sum(a and b for a, b in zip(fires[row][at], fires[row][at + 1]))
    return found, tokens


def check(found, fires, ids, mask, positions):
    layer, tokens = by_hand(fires.tolist(), ids.tolist(), mask.tolist(), positions.tolist())
    for name, value in layer.items():
        held = getattr(found.layers[0], name)
        assert (held if isinstance(held, int) else held.tolist()) == value, name
    for name, value in tokens.items():
        assert getattr(found, name).tolist() == value, name


# Counts


@given(
    batch=st.integers(1, 3),
    sequence=st.integers(1, 40),
    lies=st.sampled_from(["sequences", "flat"]),
    masked=st.sampled_from(["no", "left", "right", "anywhere"]),
    packed=st.booleans(),
    piece=st.sampled_from([1, 7, 50, 2**20]),
    together=st.sampled_from([0, 100, 2**18]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_counts_are_those_of_brute_force_in_pieces_of_any_size(
    batch, sequence, lies, masked, packed, piece, together, seed
):
    torch.manual_seed(seed)
    model, ids = Reads(lies), torch.randint(VOCABULARY, (batch, sequence))
    given = {"input_ids": ids}
    mask = torch.ones_like(ids)
    if masked != "no":
        keep = torch.randint(1, sequence + 1, (batch, 1))
        at = torch.arange(sequence)
        mask = {"left": at >= sequence - keep, "right": at < keep, "anywhere": torch.rand(batch, sequence) < 0.7}[
            masked
        ]
        mask[0, 0] |= not mask.any()
        given["attention_mask"] = mask = mask.long()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if packed:  # several texts in one line
        positions = torch.arange(sequence).expand(batch, sequence) % max(1, sequence // 3)
        given["position_ids"] = positions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_CPU", piece)
        patch.setattr(module, "_TOGETHER", together)
        found = profile(model, given)
    check(found, model.fires(ids), ids, mask, positions)
    layer = found.layers[0]
    assert layer.position_tokens.sum() == layer.tokens == mask.sum() == found.token_counts.sum()
    assert layer.position_nnz.sum() == layer.neuron_counts.sum() == found.token_nnz.sum()
    assert_same(found, profile(model, given))
    # One line after the other gives the same, at once and merged.
    lines = [{name: each[row : row + 1] for name, each in given.items()} for row in range(batch) if mask[row].any()]
    assert_same(found, profile(model, lines))
    whole = profile(model, lines[0])
    for line in lines[1:]:
        whole = whole.merged(profile(model, line))
    assert_same(found, whole)


def test_short_inputs_are_counted_together_whatever_is_known_of_them(monkeypatch):
    """And never more of them than a few."""
    model, counted = Reads("sequences"), []
    ids = torch.randint(VOCABULARY, (40, 6))
    mask = torch.ones(1, 6, dtype=torch.int64)
    mask[0, :2] = 0
    given = [
        {"input_ids": row[None], **({"attention_mask": mask} if number % 10 == 9 else {})}
        for number, row in enumerate(ids)
    ]
    add = module.Counter.add
    monkeypatch.setattr(
        module.Counter, "add", lambda counter, x, *more: counted.append(x.shape[:-1].numel()) or add(counter, x, *more)
    )
    found = profile(model, given)
    assert counted == 4 * [54, 6] and sum(counted) == 240  # what is known of masked rows is more
    masks = torch.ones_like(ids)
    masks[9::10] = mask
    check(found, model.fires(ids), ids, masks, (masks.cumsum(-1) - 1).clamp(min=0))
    counted.clear()
    monkeypatch.setattr(module, "_TOGETHER", 100 * WIDTH)
    assert_same(found, profile(model, given))
    assert max(counted) < 100 + 6


def test_rows_in_sequences_have_positions_and_neighbours_without_token_ids():
    layer = Reads().mlp
    x = torch.randn(3, 20, WIDTH)
    found = profile(layer, x)
    positions = torch.arange(20).expand(3, 20)
    held, _ = by_hand((x > 0).tolist(), [[0] * 20] * 3, [[1] * 20] * 3, positions.tolist())
    assert found.layers[0].position_nnz.tolist() == held["position_nnz"]
    assert found.layers[0].pair_shared == held["pair_shared"] and found.layers[0].pairs == 3 * 19
    assert found.token_counts is None and found.by_token() == []


def test_neighbours_share_what_they_share_and_chance_is_chance():
    layer, x = Reads().mlp, -torch.ones(1, 4, WIDTH)
    x[0, :2, :2] = x[0, 2:, 2:4] = 1.0  # two tokens that fire alike, then two others that do
    found = profile(layer, x).layers[0]
    assert (found.pairs, found.pair_nnz, found.pair_shared) == (3, 12, 4)
    assert found.neighbours_share == pytest.approx(4 / 8)
    assert found.neighbours_by_chance == pytest.approx(1 / 3)  # 4 neurons at half of the tokens: 1/4 of 3/4
    drawn = profile(layer, torch.randn(4, 2000, WIDTH) - 0.5).layers[0]
    assert drawn.neighbours_share == pytest.approx(drawn.neighbours_by_chance, abs=0.01)
    silent = profile(layer, -torch.ones(1, 4, WIDTH)).layers[0]
    assert math.isnan(silent.neighbours_share) and math.isnan(silent.neighbours_by_chance)
    assert profile(layer, torch.ones(1, 4, WIDTH)).layers[0].always_on == WIDTH and silent.always_on == 0


def test_positions_are_grouped_up_to_any_length():
    layer = Reads().mlp
    found = profile(layer, torch.ones(1, 100, WIDTH))
    rows = found.by_position()
    assert [(row["first"], row["last"], row["tokens"]) for row in rows[6:]] == [
        *((6, 6, 1), (7, 7, 1), (8, 15, 8), (16, 31, 16), (32, 63, 32), (64, 127, 36))
    ]
    assert all(row["density"] == 1 and row["layers"] == [1.0] for row in rows)
    far = {"input_ids": torch.tensor([[1, 2]]), "position_ids": torch.tensor([[5, 2**40]])}
    assert [row["first"] for row in profile(Reads(), far).by_position()] == [5, 2**31]
    assert profile(Reads(), far).by_position()[-1]["last"] is None


def test_heavy_first_tokens_are_found_and_said():
    layer, x = Reads().mlp, -torch.ones(4, 30, WIDTH)
    x[:, :, 0] = 1.0
    even = profile(layer, x)
    assert even.heavy_first is None and "heavy" not in verdict(even)
    x[:, :2] = 1.0
    heavy = profile(layer, x)
    assert heavy.heavy_first == {"positions": 2, "times": 6.0, "layers": 1, "worst": "", "worst_times": 6.0}
    assert "a sequence's first 2 tokens are heavy: 6.0 times as many neurons fire at the first as later." in verdict(
        heavy
    )
    assert profile(layer, x.flatten(0, 1)).heavy_first is None  # unknown
    assert profile(layer, x[:3]).heavy_first is None  # few
    assert profile(layer, x[:, :8]).heavy_first is None  # nothing later to compare with

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = Reads().mlp, GatedFeedForward(WIDTH, 1000)
            with torch.no_grad():
                self.two.gate_proj.weight.fill_(1.0)

        def forward(self, x):
            self.one(x)
            return self.two(x.abs())

    two = profile(Two(), x)
    assert two.heavy_first["positions"] == 0 and two.heavy_first["layers"] == 1
    assert "in 1 of 2 layers a sequence's first token is heavy: in one 6.0 times" in verdict(two)


def test_tokens_by_how_many_neurons_fire():
    model = Reads()
    ids = torch.tensor([[3, 3, 3, 5, 5, 7]])
    rows = profile(model, ids).by_token()
    fires = model.fires(torch.arange(VOCABULARY)).sum(1).tolist()
    assert sorted(row["token"] for row in rows) == [3, 5, 7]
    assert [row["nnz"] for row in rows] == sorted((fires[token] for token in (3, 5, 7)), reverse=True)
    assert {row["token"]: row["count"] for row in rows} == {3: 3, 5: 2, 7: 1}
    mean = sum(fires[token] for token in ids[0].tolist()) / 6
    assert all(row["x_mean"] == pytest.approx(row["nnz"] / mean) for row in rows)
    assert {row["token"] for row in profile(model, ids).by_token(least=2)} == {3, 5}
    for least in (0, 1.5, True, None):
        with pytest.raises(InputError, match="least is"):
            profile(model, ids).by_token(least)


# What is not certain


@pytest.mark.parametrize(
    "model, given",
    [
        (Reads("turned"), torch.zeros(2, 9, dtype=torch.int64)),
        (Reads("fewer"), torch.zeros(2, 9, dtype=torch.int64)),
        (Reads().mlp, torch.ones(9, WIDTH)),
        (Reads(), {"input_ids": torch.zeros(2, 9).long(), "past_key_values": "earlier ones"}),
        (Reads(), {"input_ids": torch.zeros(2, 9).long(), "cache": "earlier ones"}),  # from transformers 5.24 on
        (Reads(), {"input_ids": torch.zeros(2, 9).long(), "attention_mask": torch.ones(2, 9), "cache": "earlier ones"}),
        (Reads(), {"input_ids": torch.zeros(2, 9).long(), "position_ids": torch.zeros(3, 2, 9).long()}),
    ],
)
def test_positions_that_are_not_certain_are_unknown(model, given):
    found = profile(model, given)
    layer = found.layers[0]
    assert (layer.position_tokens, layer.position_nnz, layer.pairs, layer.pair_nnz) == (None,) * 4
    assert found.by_position() == [] and found.heavy_first is None
    assert found.table()[0]["neighbours_share"] is None


def test_token_ids_that_layers_do_not_see_one_by_one_are_not_counted():
    ids = torch.zeros(2, 9, dtype=torch.int64)
    for lies in ("turned", "fewer", "more"):
        assert profile(Reads(lies), ids).token_counts is None, lies
    # Tokens that were put in front stand in the sequence, as the layer sees it.
    assert profile(Reads("more"), ids).layers[0].position_tokens[:8].tolist() == [2] * 8
    known = profile(Reads(), [ids, {"input_ids": ids, "past_key_values": "earlier ones"}])
    assert known.layers[0].tokens == 36 and known.layers[0].position_tokens.sum() == 18
    assert known.token_counts[0] == 36


@pytest.mark.parametrize("name", ["Mixtral", "OLMoE"])
def test_routed_experts_know_the_places_of_their_tokens(name):
    model = models_of.build(name)
    batch = models_of.given(model)
    batch["attention_mask"][0, :4] = 0
    found = profile(model, batch)
    layers = [each for each in found.layers if ".0.mlp" in each.name]
    assert sum(each.position_tokens for each in layers).tolist()[:9] == [4] * 5 + [2] * 3 + [2]
    assert found.token_counts.sum() == 14
    assert found.token_nnz.sum() == sum(each.neuron_counts.sum() for each in found.layers)

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
        pairs = [at for at in range(17) if given[at] and given[at + 1] and at != 8]
        assert (layer.tokens, layer.pairs) == (given.sum(), len(pairs))
        assert layer.pair_shared == sum((fires[at] & fires[at + 1]).sum() for at in pairs)
    assert any(layer.pairs for layer in layers)
    sparsify(model, "twell")
    assert_same(found, profile(model, batch))


def test_an_encoder_and_a_decoder_have_tokens_of_their_own():
    model = models_of.build("T5")
    batch = models_of.given(model)
    batch["attention_mask"][0, 7:] = 0
    found = profile(model, batch)
    for layer in found.layers:
        lengths = [9, 7] if layer.name.startswith("encoder") else [5, 5]
        assert layer.tokens == sum(lengths) and layer.pairs == sum(lengths) - 2, layer.name
        stood = [sum(place < length for length in lengths) for place in range(8)]
        assert layer.position_tokens[:8].tolist() == stood
    assert found.token_counts.sum() == 16 + 10
    # Labels of the encoder's length, of which the model makes the decoder's input itself: those tokens are unknown.
    labels = {**models_of.given(model), "labels": batch["input_ids"]}
    del labels["decoder_input_ids"]
    found = profile(model, labels)
    assert found.token_counts.sum() == 18 and all(layer.pairs == 16 for layer in found.layers)
    decoder = sum(each.neuron_counts.sum() for each in found.layers if each.name.startswith("decoder"))
    assert found.token_nnz.sum() == sum(each.neuron_counts.sum() for each in found.layers) - decoder


def test_a_string_in_the_place_of_a_model_is_told_how_to_load_one():
    with pytest.raises(InputError, match=r"tl.load\('gpt2'\)"):
        profile("gpt2", [])


# Memory


def test_memory_does_not_grow_with_the_tokens_of_a_call():
    """A gate of 4 GB that takes no memory (one row many times) is counted in a process of its own."""
    code = """
import resource, torch
from twell_lab.analysis.profile import Counter
from twell_lab.layers.find import feed_forwards
from twell_lab.ops.reference import GatedFeedForward
layer, = feed_forwards(GatedFeedForward(2, 4096))
rows = torch.randn(1, 4096).expand(2**18, 4096)
counter = Counter(layer, 256, 32)
gate = lambda of: rows[of]
counter.add(torch.empty(1, 2).expand(2**10, 2), gate)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
counter.add(torch.empty(1, 2).expand(2**18, 2), gate)
assert counter.result().tokens == 2**18 + 2**10
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 64 * 1024, "KiB"  # whole, its booleans alone would take 1 GiB


def test_what_a_layer_of_the_2b_model_keeps_is_small():
    (layer,) = feed_forwards(GatedFeedForward(4, 5632))
    counter = Counter(layer, 256, 32)
    counter.add(torch.empty(1, 4).expand(5000, 4), lambda of: torch.randn(1, 5632).expand(5000, 5632)[of])
    kept = sum(each.numel() * each.element_size() for each in counter.counts.values())
    assert kept < 100_000  # of 38 layers, 4 MB


def test_counting_multiplies_nothing_again():
    """The layer's own answers are counted, not computed a second time."""

    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            return function(*args, **(kwargs or {}))

    model = nn.Sequential(GatedFeedForward(64, 128), GatedFeedForward(64, 128)).eval()
    x, counters = torch.randn(2, 16, 64), [Counter(layer, 64, 8) for layer in feed_forwards(model)]
    made = []
    for watched in ([], [(counter.layer, counter.add) for counter in counters]):
        with Products() as products:
            run(model, watched, x)
        made.append(products.count)
    assert made[0] == made[1] >= 6 and all(counter.result().tokens for counter in counters)


# Saving


def test_positions_neighbours_and_tokens_come_back(tmp_path):
    made = profile(Reads(), torch.randint(VOCABULARY, (3, 20)))
    assert_same(made, FiringProfile.load(made.save(tmp_path / "profile.json")))
    unknown = profile(Reads().mlp, torch.ones(9, WIDTH))
    assert_same(unknown, FiringProfile.load(unknown.save(tmp_path / "profile.json")))


def test_a_profile_of_version_1_loads_with_the_rest_unknown(tmp_path):
    made = profile(Reads(), torch.randint(VOCABULARY, (3, 20)))
    path = made.save(tmp_path / "profile.json")
    content = json.loads(path.read_text())
    content["version"] = 1
    del content["tokens"]
    for layer in content["layers"]:
        for name in ("position_tokens", "position_nnz", "pairs", "pair_nnz", "pair_shared"):
            del layer[name]
    path.write_text(json.dumps(content))
    old = FiringProfile.load(path)
    assert old.layers[0].neuron_counts.tolist() == made.layers[0].neuron_counts.tolist()
    assert old.layers[0].pairs is None and old.by_position() == [] and old.by_token() == []
    assert str(old) == str(made) and verdict(old)
    # With a newer one it merges; positions are known of some tokens then.
    both = old.merged(made)
    assert both.layers[0].tokens == 120 and both.layers[0].pairs == made.layers[0].pairs
    assert_same(both, FiringProfile.load(both.save(path)))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda c: c.pop("tokens"), "'tokens'"),
        (lambda c: c["tokens"].pop("ids"), "tokens: 'ids'"),
        (lambda c: c["tokens"].update(vocabulary=3), "'ids'"),
        (lambda c: c["tokens"].update(vocabulary=2**40), "'vocabulary' is 1099511627776"),
        (lambda c: c["tokens"]["ids"].reverse(), "ascending"),
        (lambda c: c["tokens"]["token_counts"].__setitem__(0, 0), "never seen"),
        (lambda c: c["tokens"]["token_nnz"].pop(), "'token_nnz'"),
        (lambda c: c["layers"][0].update(pairs=None), "'pairs' is not"),
        (lambda c: c["layers"][0].update(position_nnz=None), "'position_nnz' is not"),
        (lambda c: c["layers"][0]["position_tokens"].pop(), "'position_tokens'"),
        (lambda c: c["layers"][0]["position_tokens"].__setitem__(0, 4), "'position_tokens' makes 61"),
        (lambda c: c["layers"][0]["position_nnz"].__setitem__(0, 99), "'position_nnz'"),
        (lambda c: c["layers"][0].update(pairs=61), "'pairs'"),
        (lambda c: c["layers"][0].update(pair_nnz=10**6), "'pair_nnz'"),
        (lambda c: c["layers"][0].update(pair_shared=10**4), "'pair_shared'"),
        (lambda c: c["layers"][0].update(pair_shared=-1), "'pair_shared'"),
    ],
)
def test_a_broken_saved_profile_names_the_field(tmp_path, change, words):
    path = profile(Reads(), torch.randint(VOCABULARY, (3, 20))).save(tmp_path / "profile.json")
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=f"profile.json.*{words}"):
        FiringProfile.load(path)
