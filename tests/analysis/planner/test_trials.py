"""What is timed, how often, by which clock, and which layers share it."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from twell_lab.analysis import auto, costs, planner, trials
from twell_lab.analysis.profile import FiringProfile, activations, captured, profile
from twell_lab.analysis.trials import ALIKE, Times, Trial
from twell_lab.core import InputError
from twell_lab.layers.choice import DENSE, Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import measure
from twell_lab.ops.reference import GatedFeedForward

TWELL, HOT, MORE = Choice("twell"), Choice("hot_cold", 256), Choice("hot_cold", 512)
CUDA = torch.device("cuda")


@pytest.fixture
def timings(monkeypatch):
    """How many calls were really timed together, one number for each time that the CPU's clock ran."""
    seen, clock = [], trials.wall

    def counted(calls, device, beside):
        seen.append(len(calls))
        return clock(calls, device, beside)

    monkeypatch.setitem(trials.CLOCKS, "wall", counted)
    monkeypatch.setattr(planner, "_REACH", 100.0)  # layers as small as these are predicted to be all launches
    return seen


# ---- clocks ----


class Machine:
    """A GPU whose calls the host enqueues in `host` seconds each, and that works `device` seconds on each."""

    def __init__(self, host, device):
        self.now, self.busy, self.host, self.device = 0.0, 0.0, host, device

    def call(self, turn):
        self.now += self.host
        self.busy = max(self.busy, self.now) + self.device

    def wait(self):
        self.now = max(self.now, self.busy)


@given(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.integers(1, 30))
def test_a_burst_tells_the_host_from_the_wall(host, device, count):
    machine = Machine(host, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure.time, "perf_counter", lambda: machine.now)
        found = measure.time_bursts({"it": machine.call}, machine.wait, rounds=3, count=count)
    (returned, ended) = found["it"]
    assert len(returned) == len(ended) == 3
    assert returned == pytest.approx([1e3 * host] * 3)
    slower, other = max(host, device), min(host, device)
    assert ended == pytest.approx([1e3 * (slower * count + other) / count] * 3)


def test_bursts_take_turns_and_are_waited_for():
    seen = []
    calls = {name: lambda turn, name=name: seen.append(f"{name}{turn}") for name in ("a", "b")}
    measure.time_bursts(calls, lambda: seen.append("wait"), rounds=2, count=2)
    a, b = ([f"{name}0", f"{name}1", "wait"] * 2 for name in "ab")  # as many before they count
    assert seen == [*a, *b, *a, *b]
    seen.clear()
    measure.time_bursts(calls, lambda: seen.append("wait"), rounds=1, count=2, warm=0)
    assert seen == ["wait", "a0", "a1", "wait", "wait", "b0", "b1", "wait"]
    seen.clear()
    measure.time_bursts(calls, lambda: seen.append("wait"), rounds=1, count=2, warm=3)
    assert seen == [each for n in "ab" for each in (f"{n}0", f"{n}1", f"{n}2", "wait", f"{n}0", f"{n}1", "wait")]


@pytest.mark.parametrize(
    "host_ms, most, gigabyte_ms, reads",
    [
        (0.1, 100, 0.36, 1),
        (1.0, 100, 0.36, 4),
        (1.0, 100, 0.6, 4),
        (1.0, 3, 0.36, 3),
        (40.0, 100, 0.36, 100),
        (40.0, 4, 0.36, 4),
        (1.0, 100, 3.5, 1),
        (40.0, 100, 3.5, 12),
    ],
)
def test_before_a_call_is_timed_the_device_is_kept_busy_for_its_host(monkeypatch, host_ms, most, gigabyte_ms, reads):
    machine, seen = Machine(host_ms / 1e3, 0.0), []
    made = SimpleNamespace(sum=lambda: seen.append("read"))
    event = SimpleNamespace(record=lambda: seen.append("event"), elapsed_time=lambda end: gigabyte_ms)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(measure.torch, "zeros", lambda *_, **__: made)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure.torch.cuda, "Event", lambda **_: event)
    found = measure.time_cuda({"it": machine.call}, 2, warm=1, most_reads=most)
    first = ["read", "event", "read", "event"]  # of one read
    assert found == {"it": [gigabyte_ms] * 2} and seen == first + [*["read"] * reads, "event", "event"] * 2


@pytest.mark.parametrize("busy_ms, count, rounds", [(0.01, 10, 5), (0.5, 6, 5), (1.9, 3, 5), (2.0, 1, 2), (40.0, 1, 2)])
def test_the_clock_of_a_gpu_is_three(monkeypatch, busy_ms, count, rounds):
    asked = []

    def bursts(calls, wait, *, count, rounds=5, warm):
        assert warm == (3 if rounds == 5 else 0)
        asked.append((count, rounds))
        return {name: ([0.2, 0.1, 0.3], [3.0, 2.0, 9.0]) for name in calls}

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def events(calls, rounds, **how):
        # The first call of a kind does what later ones need not do again: no reason to read a hundred gigabytes.
        assert how == ({"warm": 1, "most_reads": 4} if rounds == 2 else {})
        return {name: [busy_ms] * rounds for name in calls}

    monkeypatch.setattr(measure, "time_cuda", events)
    monkeypatch.setattr(measure, "time_bursts", bursts)
    found = trials.wall({None: id, DENSE: id}, CUDA)
    # The host's least: what else it does only adds.
    assert found == {each: pytest.approx(Times(3000.0, 100.0, 1e3 * busy_ms)) for each in (None, DENSE)}
    assert asked == [(count, rounds)]


def test_in_a_graph_the_host_has_no_part(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(measure, "graphed", lambda call: ("graph of", call))
    monkeypatch.setattr(
        measure, "time_cuda", lambda calls, rounds: {name: [0.5] for name, call in calls.items() if call[0]}
    )
    assert trials.graph({TWELL: id}, CUDA) == {TWELL: Times(500.0, None, 500.0)}


@pytest.mark.parametrize("ms, bursts, each", [(0.1, 10, 10), (0.7, 10, 4), (10.0, 3, 1), (1000.0, 3, 1)])
def test_on_a_cpu_there_is_one_clock(monkeypatch, ms, bursts, each):
    """Calls take turns by bursts, three or more, and not much longer than they have to."""
    machine, order = Machine(ms / 1e3, 0.0), []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: machine.now)
    calls = {c: lambda turn, c=c: (order.append(c), machine.call(turn)) for c in (None, DENSE)}
    found = trials.wall(calls, torch.device("cpu"))
    assert found == {c: (pytest.approx(1e3 * ms), None, None) for c in calls}
    warm = [None, None, DENSE, DENSE]
    assert order == warm + ([None] * 2 * each + [DENSE] * 2 * each) * bursts


@pytest.mark.parametrize("ms, rounds", [(0.1, 10), (10.0, 7), (1000.0, 3)])
def test_on_a_cpu_other_weights_come_between_two_calls(monkeypatch, ms, rounds):
    machine, order, others = Machine(ms / 1e3, 0.0), [], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: machine.now)
    made = torch.zeros

    def zeros(*size, **how):
        others.append(made(*size, **how).as_subclass(Passing))
        return others[-1]

    class Passing(torch.Tensor):
        def add_(self, value):
            order.append("others")
            machine.now += 5.0  # which is in no time
            return self

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(trials, "_MOST_BESIDE", 1000)
    calls = {c: lambda turn, c=c: (order.append(c), machine.call(turn)) for c in (None, DENSE)}
    found = trials.wall(calls, torch.device("cpu"), 2**40)
    assert found == {c: (pytest.approx(1e3 * ms), None, None) for c in calls} and others[0].nbytes == 1000
    assert order == [None, None, DENSE, DENSE] + ["others", None, "others", "others", DENSE, "others"] * rounds


def test_a_plan_is_told_of_the_models_other_weights(monkeypatch, layer, rates):
    model, asked = LanguageModel(ModelConfig(d_model=16, d_ff=300, heads=2)), []
    monkeypatch.setitem(
        trials.CLOCKS, "wall", lambda calls, device, beside: asked.append(beside) or trials.wall(calls, device)
    )
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    tl.plan(profile(model, [tokens]), model, tokens=(1,), batches=[tokens], rates=rates)
    everything = sum(each.nbytes for each in model.parameters())
    assert asked and set(asked) == {everything - 3 * 4 * 16 * 300}


def test_graphs_are_refused_where_there_are_none(profiled, layer, rates):
    with pytest.raises(InputError, match="for_graphs is True, but the plan is for cpu; accepted: on a GPU"):
        tl.plan(profiled, layer[0], rates=rates, for_graphs=True)
    with pytest.raises(InputError, match="for_graphs is 'no'"):
        tl.plan(profiled, layer[0], rates=rates, for_graphs="no")


# ---- who shares a trial ----

us = st.floats(1.0, 1e5)


@given(us, us, us, us)
def test_trials_are_shared_by_what_is_predicted(a, b, c, d):
    kept = Trial("0", {DENSE: 10.0, TWELL: a, HOT: b}, {})
    predict = {DENSE: 10.0, TWELL: c, HOT: d, MORE: 1.2 * d}.__getitem__
    apart = kept.apart(predict, [DENSE, TWELL, HOT], False)
    assert apart == pytest.approx(max(c / a, a / c, d / b, b / d))
    assert kept.apart(predict, [DENSE], True) == 1.0
    # The hot size that was timed stands for another one only if it should be nearly as good.
    assert kept.apart(predict, [MORE], False) == pytest.approx(max(d / b, b / d))
    assert kept.apart(predict, [MORE], True) == float("inf")
    better = {**{each: predict(each) for each in (DENSE, TWELL, HOT)}, MORE: d / 1.2}.__getitem__
    assert kept.apart(better, [MORE], False) == float("inf")


@given(us, st.floats(1, 100), st.floats(1, 100), st.floats(1 / ALIKE, ALIKE))
def test_times_of_a_layer_like_it(call, host, device, ratio):
    taken = Times(max(call, host, device), host, device)
    kept = Trial("0", {DENSE: 10.0, TWELL: 5.0}, {None: taken, DENSE: taken, TWELL: taken})
    assert kept.of("0", lambda choice: 1e9) is kept
    other = kept.of("1", {DENSE: 10.0, TWELL: 5.0 * ratio}.__getitem__)
    assert other.layer == "0" and other.predicted == {DENSE: 10.0, TWELL: 5.0 * ratio}
    assert other.times[None] == taken and other.times[DENSE] == pytest.approx(taken)
    scaled = other.times[TWELL]
    assert scaled.host == host and scaled.device == pytest.approx(device * ratio)
    assert scaled.call == pytest.approx(max(taken.call * ratio, host)) and scaled.call >= host
    assert Times(7.0).scaled(2.0) == Times(14.0)


def several(nnzs, d_ff=600, kind="lognormal"):
    """(layers that fire so much each, their profile)."""
    made = [measure.workload(90, 32, d_ff, nnz, kind, torch.float32, "cpu", seed=i) for i, nnz in enumerate(nnzs)]
    found = [profile(layer, x[:1]).layers[0] for layer, x in made]
    named = [replace(each, name=str(i)) for i, each in enumerate(found)]
    return nn.ModuleList([layer for layer, _ in made]), FiringProfile(named)


def test_layers_alike_are_timed_once(rates, timings):
    model, firing = several([20] * 6)
    plan = tl.plan(firing, model, rates=rates, tokens=(1, 64))
    assert plan.timed_on == {"0": ["0", "1", "2", "3", "4", "5"]} and plan.clock == "wall"
    assert 2 <= len(timings) <= 4  # each class, and the smallest counts of the second where it is not dense
    assert "measured on 0" in str(plan)
    assert all(each.before_us > 0 for layer in plan.layers for each in layer.candidates if each.measured_us)


def test_layers_of_other_densities_and_shapes_are_timed_themselves(rates, timings):
    rates = replace(rates, launch=1e-9)  # or launches alone are counted in layers so small
    model, firing = several([4, 4, 200, 200])
    narrow, other = several([4], d_ff=300)
    model.append(narrow[0])
    firing.layers.append(replace(other.layers[0], name="4"))
    plan = tl.plan(firing, model, rates=rates, tokens=(64,))
    assert plan.timed_on == {"0": ["0", "1"], "2": ["2", "3"], "4": ["4"]}
    assert len(timings) == 3


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([4, 5, 8, 12, 20, 21, 60, 200]), min_size=1, max_size=6), st.booleans())
def test_what_a_plan_says_of_its_trials_is_so(nnzs, uniform):
    """Every shared time is that of a layer predicted to be alike, scaled; no layer is timed twice for one thing."""
    rates = costs.Rates("CPU", "float32", bandwidth=3e12, l2=7.4e12, matmul=7e14, launch=1e-9)
    model, firing = several(nnzs, kind="uniform" if uniform else "lognormal")
    ran = []

    def clock(calls, device, beside):
        (subject, tokens) = calls.pop("asked")
        ran.append((subject.layer.name, tokens, frozenset(calls) - {None}))
        return {each: Times(100.0 if each in (None, DENSE) else 50.0) for each in calls}

    def calls(self, choices, tokens):
        return {None: None, **dict.fromkeys(choices), "asked": (self, tokens)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials.Subject, "calls", calls)
        patch.setitem(trials.CLOCKS, "wall", clock)
        plan = tl.plan(firing, model, rates=rates, tokens=(4, 64, 1024))
    assert len(set(ran)) == len(ran) <= 5 * len(nnzs)
    predicted = {
        (layer.name, each.tokens, each.choice): each.predicted_us for layer in plan.layers for each in layer.candidates
    }
    shared = 0
    for layer in plan.layers:
        for each in layer.candidates:
            if each.timed_on is None:
                assert each.measured_us is each.before_us is None
                continue
            assert any(name == each.timed_on and each.choice in choices for name, _, choices in ran)
            there = predicted.get((each.timed_on, each.tokens, each.choice))
            if each.timed_on != layer.name and there is not None:
                shared += 1
                ratio = each.predicted_us / there
                assert 1 / ALIKE - 1e-9 <= ratio <= ALIKE + 1e-9
                assert each.measured_us == pytest.approx((100.0 if each.choice == DENSE else 50.0) * ratio)
    if len(nnzs) > len(set(nnzs)) and not uniform:
        assert shared or len(ran)


def test_only_what_is_within_reach_is_timed(rates, monkeypatch):
    model, firing = several([20])
    (layer,) = firing.layers
    weigher = planner._Weigher(layer, rates, trials.Trials(), trials.Subject(layer, tl.feed_forwards(model)[0]))
    times = {DENSE: 100.0, TWELL: 90.0, HOT: 200.0, MORE: 120.0}
    monkeypatch.setattr(weigher, "weighed", lambda tokens: times)
    assert weigher.worth_timing(64) == [DENSE, TWELL, MORE]
    times[TWELL] = 10.0
    assert weigher.worth_timing(64) == [DENSE, TWELL]  # dense is what it is compared with
    times[TWELL], times[MORE] = 151.0, 150.0
    assert weigher.worth_timing(64) == [DENSE, MORE]
    times[MORE] = 151.0
    assert weigher.worth_timing(64) == []


def test_hopeless_layers_are_not_timed_at_all(rates, monkeypatch):
    monkeypatch.setattr(planner, "_REACH", 0.0)
    model, firing = several([20])
    plan = tl.plan(firing, model, rates=rates, tokens=(1, 64))
    assert plan.inputs is None and plan.clock is None and plan.timed_on == {}
    assert "predicted" in str(plan)


def test_a_layer_is_left_as_it_was_and_its_own_way_is_timed(layer, profiled):
    module, inputs = layer
    before = copy.deepcopy(module.state_dict())
    subject = trials.Subject(profiled.layers[0], tl.feed_forwards(module)[0], lambda: inputs[1])
    calls = subject.calls([TWELL, HOT], 30)
    assert set(calls) == {None, TWELL, HOT}
    for turn in range(4):
        expected = module(inputs[1][30 * (turn % 3) :][:30])
        assert torch.equal(calls[None](turn), expected)
        for choice in (TWELL, HOT):
            torch.testing.assert_close(calls[choice](turn), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


# ---- whole models ----


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = dict(d_model=32, layers=4, heads=2, d_ff=300, context=16)
    return LanguageModel(ModelConfig(**sizes)).requires_grad_(False).eval()


def test_the_model_runs_once_for_all_layers_that_are_timed(model, rates, timings, monkeypatch):
    monkeypatch.setattr(trials, "ALIKE", 0.99)  # nobody shares
    ran = []
    model.register_forward_hook(lambda *_: ran.append(1))
    batches = [torch.randint(256, (2, 16)) for _ in range(5)]
    firing = profile(model, batches[0])
    ran.clear()
    plan = tl.plan(firing, model, rates=rates, tokens=(64,), batches=batches[1:])
    assert plan.timed_on == {layer.name: [layer.name] for layer in firing.layers}
    assert len(ran) == 2 and len(timings) == 4  # 64 tokens are two batches
    ran.clear()
    tl.plan(firing, model, rates=rates, tokens=(64,), batches=batches[1:], measure=False)
    monkeypatch.setattr(planner, "_REACH", 0.0)
    tl.plan(firing, model, rates=rates, tokens=(64,), batches=batches[1:])
    assert not ran  # nothing was to be timed


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_captured_inputs_are_those_that_enter(model, swapped, mask):
    batches = [torch.randint(256, (1, 16)) for _ in range(3)]
    ran = []

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, attention_mask=None):
            ran.append(1)
            return self.inner(input_ids)

    net = Masked()
    if swapped:
        tl.sparsify(net, "twell")
    found = torch.ones(1, 16, dtype=torch.int64)
    found[:, :4] = 0
    given = [{"input_ids": batch, "attention_mask": found} if mask else batch for batch in batches]
    names = ["inner.layers.1.mlp", "inner.layers.3.mlp"]
    for rows, runs in ((5, 1), (20, 2), (1000, 3)):
        ran.clear()
        got = captured(net, given, names, rows)
        assert len(ran) == runs and [*got] == names
        for name in names:
            every = torch.cat([activations(net, batch, name)[0] for batch in given])
            assert torch.equal(got[name], every[:rows])
    found.zero_()
    if mask:
        with pytest.raises(InputError, match="no token reached 'inner.layers.1.mlp'"):
            captured(net, given, names, 5)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_stays_in_its_mode(model, rates, timings, training):
    model.train(training)
    model.layers[2].mlp.up_proj.train(not training)
    before = [each.training for each in model.modules()]
    firing = profile(model, torch.randint(256, (2, 16)))
    plan = tl.plan(firing, model, rates=rates, tokens=(16,), batches=torch.randint(256, (2, 16)))
    assert timings and plan.inputs and [each.training for each in model.modules()] == before


def test_layers_that_plan_themselves_share_too(model, rates, timings, monkeypatch):
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: rates)
    monkeypatch.setattr(auto, "FORWARDS", 2)
    monkeypatch.setattr(auto, "LEAST", 1)
    monkeypatch.setattr(planner, "TOKENS", (16,))
    torch.manual_seed(1)
    for layer in model.layers[1:]:
        layer.mlp.load_state_dict(model.layers[0].mlp.state_dict())
    tl.sparsify(model)
    for number in range(3):
        assert len(timings) == 0, number
        model(torch.randint(256, (2, 16)))
    layers = [each for each in model.modules() if isinstance(each, SparseFFN)]
    assert all(each.status()["plan"] == "planned" for each in layers)
    timed_on = {c.timed_on for each in layers for c in each.plan.candidates if c.measured_us}
    assert len(timings) == len(timed_on) < 4
    assert timed_on <= {f"layers.{i}.mlp" for i in range(4)} and "layers.0.mlp" in timed_on


def test_a_layer_alone_is_a_gated_module():
    """The layer as it was is called without its module: here that is the same function."""
    torch.manual_seed(0)
    dense = GatedFeedForward(16, 40)
    for projection in (dense.gate_proj, dense.up_proj, dense.down_proj):
        projection.bias = nn.Parameter(torch.randn(projection.out_features))
    x = torch.randn(5, 16)
    assert torch.equal(trials._Parts(tl.feed_forwards(dense)[0])(x), dense(x))
