"""Who gets room for copies of weights, what the others do, and that no model ever holds more than it may."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from twell_lab.analysis import auto, costs, planner, room, trials
from twell_lab.analysis.costs import Rates
from twell_lab.analysis.room import Room, without
from twell_lab.analysis.trials import Times
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.choice import DENSE, Candidate, Choice, LayerPlan
from twell_lab.layers.layout import copy_bytes
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import turned
from twell_lab.ops.measure import device_name
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

RATES = Rates("CPU", "float32", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=2.5e-6)
HOT, TWELL = Choice("hot_cold", 256), Choice("twell")
D_MODEL, D_FF = 16, 600
TOKENS = torch.arange(32).view(2, 16)


@pytest.fixture
def moves(monkeypatch):
    """Weights are moved here as they are on a GPU."""
    monkeypatch.setattr(turned, "DEVICES", ["cuda", "cpu"])


def layer_plan(name="0", d_ff=D_FF, timed=True, **us):
    """The plan of a gated layer: for 64 and 4096 tokens the fastest of these choices, times in microseconds."""
    weighed = {DENSE: us.get("dense", 100.0), TWELL: us.get("twell", 100.0), HOT: us.get("hot_cold", 100.0)}
    best = min(weighed, key=weighed.get)
    counts = torch.randint(0, 999, (d_ff,), generator=torch.Generator().manual_seed(d_ff)).tolist()
    candidates = [
        Candidate(tokens, c.path, c.hot, took, took if timed else None, c == best, "a test's", timed_on=name)
        for tokens in (64, 4096)
        for c, took in weighed.items()
    ]
    return LayerPlan(name, D_MODEL, d_ff, True, 1000, tuple(counts), tuple(candidates))


def model(*sizes, rest=0):
    """Gated layers of these d_ff, and other parameters, as a model has them."""
    torch.manual_seed(0)
    layers = [GatedFeedForward(D_MODEL, d_ff) for d_ff in sizes]
    if rest:
        layers.append(nn.Linear(D_MODEL, rest, bias=False))
    return nn.Sequential(*layers).requires_grad_(False).eval()


def plan_of(*layers, **changes):
    here = {"device": device_name(torch.device("cpu")), "dtype": "float32", "rates": RATES.as_dict()}
    return tl.Plan([*layers], **here, **changes)


def bytes_of(module):
    return sum(p.nbytes for p in module.parameters())


def copied(module):
    """Bytes of the copies of weights that the layers hold, their counters aside."""
    layers = [each for each in module.modules() if isinstance(each, SparseFFN)]
    return sum(each.nbytes for layer in layers for name, each in layer._buffers.items() if name != "stats")


def paths(module):
    return [
        {row["path"] for row in each.status()["classes"]} for each in module.modules() if isinstance(each, SparseFFN)
    ]


# ---- the bytes ----


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("choice", [DENSE, TWELL, HOT], ids=str)
@pytest.mark.parametrize("reorders", [True, False])
@pytest.mark.parametrize("moved", [True, False])
def test_what_is_foreseen_is_what_is_held(gated, choice, reorders, moved, monkeypatch):
    monkeypatch.setattr(turned, "DEVICES", ["cpu"] if moved else [])
    layer = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, 300).requires_grad_(False).eval()
    layer.up_proj.bias = nn.Parameter(torch.randn(300), requires_grad=False)
    model = nn.Sequential(layer)
    (found,) = feed_forwards(model)
    foreseen = copy_bytes(found, reorders)[choice.path]
    sparsify(model, choice, reorder=reorders)
    model(torch.randn(3, D_MODEL))
    assert copied(model) == foreseen
    if moved and (reorders or choice != HOT):
        assert foreseen == 0
    (found,) = feed_forwards(model)  # a swapped layer is foreseen like a dense one
    assert all(copy_bytes(found, reorders)[path] == need for path, need in copy_bytes(found, reorders).items())
    assert copy_bytes(found, reorders)[choice.path] == foreseen


# ---- plans ----


def test_what_finds_no_room_does_the_next_best(moves):
    made = model(D_FF, D_FF)
    plan = plan_of(layer_plan("0", hot_cold=50.0, twell=80.0), layer_plan("1", hot_cold=50.0))
    sparsify(made, plan)
    assert paths(made) == [{"twell"}, {"dense"}] and copied(made) == 0
    for row in tl.report(made).rows:
        assert "hot_cold 256 needs" in row["why"] and "memory=0.02 leaves" in row["why"]
    assert "0.02" in str(tl.report(made)) and "% of the model's" in str(tl.report(made))
    sparsify(made, plan, memory=math.inf)
    assert paths(made) == [{"hot_cold"}] * 2 and copied(made) > 0.9 * bytes_of(made)
    assert "leaves" not in str(tl.report(made))


def test_who_gains_most_a_byte_is_first(moves):
    made = model(D_FF, D_FF, D_FF)
    plan = plan_of(
        layer_plan("0", hot_cold=60.0), layer_plan("1", hot_cold=60.0, twell=62.0), layer_plan("2", hot_cold=50.0)
    )
    for memory, expected in ((0.3, "...."), (0.35, "..h"), (0.7, "h.h"), (1.1, "hhh")):
        found = copy.deepcopy(made)
        sparsify(found, plan, memory=memory)
        assert "".join("h" if "hot_cold" in each else "." for each in paths(found)) == expected[:3], memory
        assert copied(found) <= memory * bytes_of(found)


def test_a_path_that_loses_to_dense_is_no_next_best(moves):
    """Nor is one of which only the predictions are known, where the others were timed."""
    for twell, expected in ((80.0, {"twell"}), (98.0, {"dense"}), (101.0, {"dense"})):
        made = model(D_FF)
        sparsify(made, plan_of(layer_plan("0", hot_cold=50.0, twell=twell)))
        assert paths(made) == [expected]
    planned = layer_plan("0", hot_cold=50.0, twell=60.0)
    untimed = [replace(c, measured_us=None) if c.choice == TWELL else c for c in planned.candidates]
    made = model(D_FF)
    sparsify(made, plan_of(replace(planned, candidates=tuple(untimed))))
    assert paths(made) == [{"dense"}]
    for twell, expected in ((75.0, {"twell"}), (95.0, {"dense"})):  # nothing timed at all: 10%
        made = model(D_FF)
        sparsify(made, plan_of(layer_plan("0", timed=False, hot_cold=50.0, twell=twell)))
        assert paths(made) == [expected]


def test_a_plan_of_one_choice_falls_back_to_dense(moves):
    made = model(D_FF)
    forced = LayerPlan.forced(layer_plan("0"), HOT)
    sparsify(made, plan_of(forced))
    assert paths(made) == [{"dense"}] and copied(made) == 0
    assert tl.report(made).rows[0]["why"].startswith("hot_cold 256 needs")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([300, 600, 900]), min_size=1, max_size=4),
    memory=st.floats(0, 1.5),
    times=st.lists(st.tuples(st.floats(20, 120), st.floats(20, 120)), min_size=4, max_size=4),
    reorder=st.booleans(),
    moved=st.booleans(),
    tied=st.booleans(),
)
def test_no_model_ever_holds_more_than_it_may(sizes, memory, times, reorder, moved, tied):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turned, "DEVICES", ["cpu"] if moved else [])
        made = model(*sizes, rest=50)
        kept = made[0].down_proj.weight.data if tied else None
        plan = plan_of(
            *(layer_plan(str(at), d_ff, twell=t, hot_cold=h) for at, (d_ff, (t, h)) in enumerate(zip(sizes, times)))
        )
        x = torch.randn(5, D_MODEL)
        expected = [made[at](x) for at in range(len(sizes))]
        sparsify(made, plan, memory=memory, reorder=reorder)
        for at, wanted in enumerate(expected):
            torch.testing.assert_close(made[at](x), wanted, rtol=1e-4, atol=1e-4)
        assert copied(made) <= memory * bytes_of(made)
        before = [layer.plan for layer in made if isinstance(layer, SparseFFN)]
        sparsify(made, replace(plan, layers=before), memory=memory, reorder=reorder)  # what was fitted, fits
        assert [layer.plan for layer in made if isinstance(layer, SparseFFN)] == before
        del kept


# ---- reordered ----


@pytest.mark.parametrize("kind", ["loaded", "for inference"])
def test_with_reorder_nothing_is_copied(kind, moves):
    """Also where parameters require gradients, as those of a model do that was just loaded."""
    made = model(D_FF, D_FF).requires_grad_(kind == "loaded")
    state = copy.deepcopy(made.state_dict())
    plan = plan_of(layer_plan("0", hot_cold=50.0), layer_plan("1", hot_cold=50.0))
    x = torch.randn(5, D_MODEL)
    with torch.no_grad():
        expected = made(x)
    sparsify(made, plan, reorder=True)
    with torch.no_grad():
        torch.testing.assert_close(made(x), expected, rtol=1e-4, atol=1e-4)
    assert paths(made) == [{"hot_cold"}] * 2 and copied(made) == 0
    assert {row["layout"] for row in tl.report(made).rows} == {"reordered"}
    assert all(torch.equal(t, state[name]) for name, t in densify(made).state_dict().items())


def test_a_tied_layer_is_copied_within_memory_and_reported(moves):
    made = model(D_FF, D_FF)
    kept = made[0].up_proj.weight.data
    plan = plan_of(layer_plan("0", hot_cold=50.0), layer_plan("1", hot_cold=50.0))
    sparsify(made, plan, reorder=True, memory=0.6)
    assert paths(made) == [{"hot_cold"}] * 2 and [each.reordered for each in made] == [False, True]
    assert tl.report(made).rows[0]["layout"] == "plain: up is tied, sharded, or can be changed unseen"
    assert 0 < copied(made) <= 0.6 * bytes_of(made)
    sparsify(made, plan, reorder=True)
    assert paths(made) == [{"dense"}, {"hot_cold"}] and copied(made) == 0
    del kept


def test_two_models_that_share_a_tensor(moves):
    one, other = model(D_FF), model(D_FF)
    other[0].gate_proj.weight = one[0].gate_proj.weight
    x = torch.randn(5, D_MODEL)
    expected = one(x), other(x)
    for each in (one, other):
        sparsify(each, plan_of(layer_plan("0", hot_cold=50.0)), reorder=True, memory=math.inf)
    assert not one[0].reordered and not other[0].reordered
    for each, wanted in zip((one, other), expected):
        torch.testing.assert_close(each(x), wanted, rtol=1e-4, atol=1e-4)


def test_many_tokens_are_not_packed_whole_in_reordered_neurons(moves):
    """There the first tiles would overflow: the layer does without that, or without the hot part."""
    both = layer_plan("0", twell=60.0)
    for hot, expected in ((50.0, {"twell", "hot_cold"}), (90.0, {"twell"})):
        few = [replace(c, chosen=c.choice == TWELL) for c in both.candidates if c.tokens == 64]
        more = [replace(c, tokens=2048, chosen=c.choice == TWELL) for c in few]
        many = [
            replace(c, chosen=c.choice == HOT, measured_us=hot if c.choice == HOT else c.measured_us + 32)
            for c in both.candidates
            if c.tokens == 4096
        ]
        slow = [replace(c, measured_us=hot + 12) if c.choice == HOT else c for c in more]
        plan = replace(both, candidates=(*few, *slow, *many))
        made = model(D_FF)
        sparsify(made, plan_of(plan), reorder=True)
        assert paths(made) == [expected]
        if "hot_cold" in expected:
            assert [row["path"] for row in made[0].status()["classes"]] == ["twell", "hot_cold", "hot_cold"]


# ---- who says how much ----


def test_a_path_by_name_has_any_room_but_no_more_than_asked_for(moves):
    made = model(D_FF)
    sparsify(made, HOT)
    assert paths(made) == [{"hot_cold"}]
    densify(made)
    with pytest.raises(InputError, match=r"hot_cold 256 for every layer needs 120,\d+ bytes.*memory=0.02 leaves 2,304"):
        sparsify(made, HOT, memory=0.02)
    assert not [each for each in made.modules() if isinstance(each, SparseFFN)]
    sparsify(made, HOT, memory=0.02, reorder=True)
    assert made[0].reordered and copied(made) == 0


def test_where_weights_stay_where_they_are_any_room_is_the_default():
    made = model(D_FF)
    sparsify(made, plan_of(layer_plan("0", hot_cold=50.0)))
    assert paths(made) == [{"hot_cold"}]
    sparsify(made, plan_of(layer_plan("0", hot_cold=50.0)), memory=0.02)
    assert paths(made) == [{"dense"}] and copied(made) == 0


def test_layers_that_stay_as_they_are_have_their_part(moves):
    made = model(D_FF, D_FF)
    plan = plan_of(layer_plan("0", hot_cold=50.0), layer_plan("1", hot_cold=50.0))
    first = {"only": lambda name, module: name == "0"}
    sparsify(made, replace(plan, layers=plan.layers[:1]), memory=0.6, **first)
    second = {"only": lambda name, module: name == "1"}
    sparsify(made, replace(plan, layers=plan.layers[1:]), memory=0.6, **second)
    assert paths(made) == [{"hot_cold"}, {"dense"}]


@pytest.mark.parametrize("memory", [-0.1, math.nan, "2%", True, [0.1]])
def test_a_share_that_is_none(memory):
    made = model(D_FF)
    with pytest.raises(InputError, match=r"memory is .*; a share of the model's bytes from 0 up"):
        sparsify(made, memory=memory)
    with pytest.raises(InputError, match="reorder is 1; True or False"):
        sparsify(made, reorder=1)
    assert type(made[0]) is GatedFeedForward


# ---- the planner, and layers that decide by themselves ----


@pytest.fixture
def timed(monkeypatch):
    """What the clock reads: hot/cold is the best."""

    def clock(calls, device, beside):
        us = {"dense": 100.0, "twell": 90.0, "hot_cold": 50.0}
        return {each: Times(us["dense"] if each is None else us[each.path]) for each in calls}

    monkeypatch.setitem(trials.CLOCKS, "wall", clock)
    monkeypatch.setattr(planner, "_REACH", 100.0)
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: RATES)


def language_model():
    torch.manual_seed(0)
    sizes = dict(d_model=32, layers=3, heads=2, d_ff=300, context=16)
    return LanguageModel(ModelConfig(**sizes)).requires_grad_(False).eval()


def test_a_plan_made_for_so_much_memory_is_what_sparsify_does(moves, timed, tmp_path):
    made = language_model()
    profile = tl.profile(made, TOKENS)
    found = {}
    for memory in (0.0, 0.3, 0.6):
        plan = tl.plan(profile, made, rates=RATES, tokens=(4, 32), batches=TOKENS, memory=memory)
        plan = tl.Plan.load(plan.save(tmp_path / "plan.json"))
        assert plan.memory == memory
        swapped = sparsify(copy.deepcopy(made), plan)
        assert [layer.plan for layer in swapped.modules() if isinstance(layer, SparseFFN)] == plan.layers
        assert copied(swapped) <= memory * bytes_of(swapped)
        found[memory] = sum("hot_cold" in each for each in paths(swapped))
    assert 0 == found[0.0] < found[0.3] < found[0.6] <= 3
    plan = tl.plan(profile, made, rates=RATES, tokens=(4, 32), batches=TOKENS, memory=0.0, reorder=True)
    swapped = sparsify(made, plan, reorder=True)
    assert paths(swapped) == [{"hot_cold"}] * 3 and copied(swapped) == 0
    with pytest.raises(InputError, match="reordered.*densify first"):
        tl.plan(profile, swapped, rates=RATES, tokens=(4,))
    with pytest.raises(InputError, match="memory is 0.1 without a model"):
        tl.plan(profile, rates=RATES, tokens=(4,), device="cpu", memory=0.1)


def test_a_profile_of_a_reordered_model_has_the_neurons_in_their_own_order(moves, timed):
    made = language_model()
    profile = tl.profile(made, TOKENS)
    sparsify(made, tl.plan(profile, made, rates=RATES, tokens=(4,), batches=TOKENS), reorder=True)
    again = tl.profile(made, TOKENS)
    assert all(each.reordered for each in made.modules() if isinstance(each, SparseFFN))
    for one, other in zip(again.layers, profile.layers):
        assert (one.neuron_counts - other.neuron_counts).abs().sum() <= 2  # rounded in another order
        assert (one.tile_histogram - other.tile_histogram).abs().sum() <= 8


@pytest.mark.parametrize("reorder", [True, False])
def test_layers_that_decide_by_themselves_share_the_room(reorder, moves, timed):
    made = language_model()
    expected = made(TOKENS)
    sparsify(made, memory=0.6, reorder=reorder)
    for _ in range(auto.FORWARDS + 2):
        torch.testing.assert_close(made(TOKENS), expected, rtol=1e-4, atol=1e-4)
    count = sum("hot_cold" in each for each in paths(made))
    assert count == 3 if reorder else 0 < count < 3
    assert copied(made) <= 0.6 * bytes_of(made) and (copied(made) == 0) == reorder
    assert {row["state"] for row in tl.report(made).rows} == {"planned"}


def test_a_room_is_named_in_bytes_of_the_models_parameters():
    made = model(D_FF)
    assert Room(made, 0.5).left == bytes_of(made) / 2 and Room(made, math.inf).left == math.inf
    assert Room(made, 0.5, held=10**9).left == 0 and room.SHARE == 0.02
    plan = layer_plan("0", hot_cold=50.0)
    assert without(plan, None, lambda tokens, choice: True, "") == plan
