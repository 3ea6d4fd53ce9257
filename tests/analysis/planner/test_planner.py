"""Choosing: the fastest by time, dense in doubt; real layers, and layers that decide from what they see."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from twell_lab.analysis import auto, costs, judge, planner, trials
from twell_lab.analysis.profile import profile
from twell_lab.analysis.trials import Times
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.choice import Choice, LayerPlan
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

DENSE, TWELL, HOT = Choice("dense"), Choice("twell"), Choice("hot_cold", 256)


def chosen(candidates):
    (found,) = [c.choice for c in candidates if c.chosen]
    return found


@pytest.fixture
def times(monkeypatch):
    """times(dense=..., twell=..., hot_cold=...): what the clock will read, in microseconds or as Times, whatever is
    really timed; `before` is the layer as the model has it, by default as long as dense. Returns the calls of the
    clock, as lists of what was timed."""

    def read(**us):
        def clock(calls, device, beside):
            for call in calls.values():
                call(0)
            timed.append([*calls])
            found = {c: us.get("before", us["dense"]) if c is None else us[c.path] for c in calls}
            return {c: each if isinstance(each, Times) else Times(each) for c, each in found.items()}

        timed = []
        monkeypatch.setitem(trials.CLOCKS, "wall", clock)
        monkeypatch.setattr(planner, "_REACH", 100.0)  # layers as small as these are predicted to be all launches
        return timed

    return read


def trial(**us):
    """Times by choice; `before` is the layer as the model has it."""
    found = {{"dense": DENSE, "twell": TWELL, "hot": HOT, "before": None}[name]: each for name, each in us.items()}
    return {choice: each if isinstance(each, Times) else Times(each) for choice, each in found.items()}


# ---- the judgement ----


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0.9, 1.1) | st.floats(0.01, 100), st.booleans())
def test_the_fastest_is_chosen_and_dense_in_doubt(dense, twell, ratio, timed):
    """And of two that are about as fast, the one that holds no copies."""
    hot = twell * ratio
    times = {DENSE: dense, TWELL: twell, HOT: hot}
    margin = planner.MARGIN if timed else planner.MARGIN_PREDICTED
    found = judge.judge(64, times, {c: Times(us) for c, us in times.items()}, margin, "measured")
    may = [us for us in (twell, hot) if us <= margin * dense]
    assert times[chosen(found)] == (twell if twell in may and twell <= judge.CLOSE * hot else min([*may, dense]))
    assert all(c.why and c.tokens == 64 and c.predicted_us == times[c.choice] for c in found)


def test_reasons():
    def reason(choice, measured, predicted=None):
        times = {DENSE: 100.0, TWELL: 90.0, HOT: 300.0}
        margin = planner.MARGIN if measured else planner.MARGIN_PREDICTED
        how = "measured" if measured else "predicted"
        known = measured or {c: Times(us) for c, us in predicted.items()}
        judged = judge.judge(1, predicted or times, known, margin, how, timed_on="" if measured else None)
        return next(c.why for c in judged if c.choice == choice)

    assert reason(TWELL, trial(dense=100.0, twell=50.0)) == "fastest, measured: 2.00x dense"
    assert reason(TWELL, trial(dense=100.0, twell=50.0, before=150.0)) == "fastest, measured: 3.00x dense"
    close = trial(dense=100.0, twell=50.5, hot=50.0)
    assert reason(TWELL, close) == "as fast as hot_cold 256, and splits no neurons, measured: 1.98x dense"
    assert reason(HOT, close) == "0.99x the time of the choice (too little for what splitting takes), measured"
    assert reason(DENSE, trial(dense=100.0, twell=98.0)) == "twell is less than 3% faster than dense, measured"
    compiled = judge.judge(1, {DENSE: 1, TWELL: 1}, trial(dense=100.0, twell=95.0), 0.97, "measured", 5.0)
    (dense,) = [c.why for c in compiled if c.chosen]
    assert dense == "twell is less than 3% faster than dense would be compiled, measured"
    assert reason(TWELL, trial(dense=100.0, twell=98.0)) == "less than 3% faster than dense, measured"
    assert reason(HOT, trial(dense=100.0, twell=50.0)) == "not timed: predicted 3.33x the best prediction"
    assert (
        reason(DENSE, None, {DENSE: 100.0, TWELL: 95.0, HOT: 99.0})
        == "twell is less than 10% faster than dense, predicted"
    )
    held_up = trial(dense=Times(100.0, 40.0, 90.0), twell=Times(50.0, 45.0, 30.0), hot=Times(60.0, 40.0, 70.0))
    assert reason(TWELL, held_up) == "faster, but its host time, 45 us, is above dense's, 40, measured"
    assert reason(HOT, held_up) == "fastest of those that may be taken, measured: 1.67x dense"
    behind = trial(dense=Times(500.0, 40.0, 490.0), twell=Times(100.0, 45.0, 90.0), hot=Times(60.0, 31.0, 61.0))
    assert reason(TWELL, behind) == "1.67x the time of the choice, measured" and "fastest, " in reason(HOT, behind)
    behind[HOT] = Times(200.0, 60.0, 119.0)
    assert reason(TWELL, behind) == "fastest, measured: 5.00x dense"  # the GPU takes twice as long as the host
    replayed = {c: Times(us, None, us) for c, us in {DENSE: 90.0, TWELL: 60.0, HOT: 70.0, None: 91.0}.items()}
    assert reason(TWELL, replayed) == "fastest, measured: 1.52x dense"  # graphs: nobody knows the host's time
    busy = trial(dense=Times(100.0, 90.0, 20.0), twell=Times(50.0, 45.0, 30.0))
    assert reason(DENSE, busy) == "twell is faster, but its device time, 30 us, is above dense's, 20, measured"


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(1, 1e4)), min_size=4, max_size=4), st.booleans()
)
def test_no_clock_of_a_choice_that_counts_is_above_denses(clocks, shared):
    dense, before, twell, hot = (Times(*each) for each in clocks)
    weighed = trial(dense=dense, before=before, twell=twell, hot=hot)
    margin = planner.MARGIN_SHARED if shared else planner.MARGIN
    choice = chosen(judge.judge(64, {c: 1.0 for c in (DENSE, TWELL, HOT)}, weighed, margin, "measured"))

    def may(taken):
        faster = taken.call <= margin * min(dense.call, before.call)
        held_up = taken.host > before.host and taken.host > judge.HIDDEN * taken.device
        return faster and not held_up and taken.device <= min(dense.device, before.device)

    assert choice == DENSE or may(weighed[choice])
    fastest = min((each for each in (twell, hot) if may(each)), default=dense)  # by call
    first = twell if may(twell) and twell.call <= judge.CLOSE * fastest.call else fastest
    assert weighed[choice].call == first.call


def test_predictions_elsewhere_are_as_far_off_as_they_were_where_timed(profiled, layer, rates, times):
    times(dense=10.0, twell=1e6, hot_cold=1e6)
    found = planner.plan_layer(profiled.layers[0], rates, (64, 4096), subject(profiled, layer), timed=[64])
    alone = planner.plan_layer(profiled.layers[0], rates, (64, 4096))
    assert found.choice(64) == found.choice(4096) == DENSE != alone.choice(4096)
    assert any("as far off as it was where timed" in c.why for c in found.candidates if c.tokens == 4096)


@pytest.mark.parametrize("host", [40.0, 60.0])
def test_a_path_that_holds_up_the_host_is_not_taken_where_nothing_is_timed_either(profiled, layer, rates, times, host):
    slow = Times(1e6, 1e6, 1e6)
    times(dense=Times(100.0, 45.0, 90.0), before=Times(100.0, 50.0, 95.0), twell=Times(45.0, host, 40.0), hot_cold=slow)
    found = planner.plan_layer(profiled.layers[0], rates, (64, 72, 65536), subject(profiled, layer), timed=[64])
    assert found.choice(64) == found.choice(72) == (TWELL if host < 50 else DENSE)
    assert found.choice(65536) == TWELL  # where the GPU takes far longer than the host
    (dense,) = [each for each in found.candidates if each.tokens == 72 and each.path == "dense"]
    if host > 50:
        assert "its host time, 60 us, is above dense's, 50" in dense.why and "predicted" in dense.why


def test_a_class_whose_choice_loses_at_its_smallest_count_is_cut(profiled, layer, rates, monkeypatch):
    def measure(first_wins):
        def calls(self, choices, tokens):
            asked.append(tokens)
            return {c: tokens for c in (None, *choices)}

        def clock(calls, device, beside):
            return {
                c: Times(100.0 if c in (None, DENSE) else 50.0 if n >= first_wins else 200.0) for c, n in calls.items()
            }

        asked = []
        monkeypatch.setattr(trials.Subject, "calls", calls)
        monkeypatch.setitem(trials.CLOCKS, "wall", clock)
        plan = planner.plan_layer(profiled.layers[0], rates, (4, 64, 1024), subject(profiled, layer))
        return {most: choice.path == "dense" for most, choice in plan.choices.items()}, asked, plan

    classes, asked, _ = measure(first_wins=1)
    assert classes == {4: False, 64: False, 1024: False} and asked == [4, 64, 5, 1024, 65]
    classes, asked, _ = measure(first_wins=65)
    assert classes == {4: True, 64: True, 1024: False} and asked == [4, 64, 1024, 65]
    for first in (66, 70, 100, 200, 1000, 1024):
        classes, asked, plan = measure(first_wins=first)
        assert all(plan.choice(tokens) == DENSE for tokens in range(1, first)), first
        assert (
            all(plan.choice(tokens) != DENSE for tokens in range(int(1.5 * first), 3000)) and plan.choice(1024) != DENSE
        )
        assert len(classes) <= 8 and len(asked) <= 14


# ---- plans of layers ----


def subject(profiled, layer):
    """The layer, to be timed on its second input."""
    return trials.Subject(profiled.layers[0], feed_forwards(layer[0])[0], lambda: layer[1][1])


def test_without_a_model_predictions_decide(profiled, rates):
    plan = tl.plan(profiled, rates=rates, tokens=(1, 16384), device="cpu")
    assert plan.inputs is None and all(row["measured_us"] is None for row in plan.table())
    sizes = {row["hot"] for row in plan.table()}
    assert sizes == {0, 256, 512} and plan.rates == rates.as_dict() and plan.device == rates.device
    assert {row["path"] for row in plan.table()} == {"dense", "twell", "hot_cold"}


def test_a_layer_too_narrow_for_a_hot_part(rates):
    layer = GatedFeedForward(16, 40)
    plan = tl.plan(profile(layer, [torch.randn(9, 16)]), layer, rates=rates, tokens=(4,), measure=False)
    assert {row["path"] for row in plan.table()} == {"dense", "twell"}


@pytest.mark.parametrize("fast", ["dense", "twell", "hot_cold"])
@pytest.mark.parametrize("batches", [True, False])
def test_what_is_timed_decides(profiled, layer, rates, times, fast, batches):
    module, inputs = layer
    times(**{"dense": 100.0, "twell": 100.0, "hot_cold": 100.0, fast: 50.0})
    plan = tl.plan(profiled, module, rates=rates, tokens=(8, 64), batches=inputs[1:] if batches else None)
    assert {choice.path for choice in plan.layers[0].choices.values()} == {fast}
    assert plan.inputs == (planner.CAPTURED if batches else planner.DRAWN)
    assert plan.dense_layers == ([""] if fast == "dense" else [])
    assert all(row["measured_us"] for row in plan.table() if row["chosen"] or row["path"] == "dense")


def test_really_timed(profiled, layer):
    module, inputs = layer
    before = copy.deepcopy(module.state_dict())
    plan = tl.plan(profiled, module, tokens=(1, 90), batches=inputs[1:])
    assert plan.inputs == planner.CAPTURED and plan.device == "CPU" and plan.dtype == "float32"
    for most in (1, 90):
        rows = [row for row in plan.table() if row["tokens"] == most and row["measured_us"] is not None]
        dense = next(row for row in rows if row["path"] == "dense")
        fastest = min(rows, key=lambda row: row["measured_us"])
        assert fastest["chosen"] or dense["chosen"]
        if fastest["measured_us"] > planner.MARGIN * dense["measured_us"]:
            assert dense["chosen"]
        if fastest["measured_us"] < 0.5 * dense["measured_us"]:
            assert fastest["chosen"]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module) is GatedFeedForward


def test_a_cpu_is_not_kept_for_minutes(profiled, layer, rates, monkeypatch):
    monkeypatch.setattr(planner, "_CPU_LONGEST", 0.0)
    plan = tl.plan(profiled, layer[0], rates=rates, tokens=(4,), batches=layer[1][1:])
    assert all(row["measured_us"] is None for row in plan.table())


@pytest.mark.parametrize("gated", [True, False])
def test_a_drawn_stand_in_fires_as_the_profile_says(gated):
    torch.manual_seed(0)
    layer = (GatedFeedForward if gated else PlainFeedForward)(64, 300)
    pattern = layer.gate_proj if gated else layer.up_proj
    pattern.weight.data[:, 0] = torch.linspace(-3, 1, 300) / 8
    x = torch.randn(4000, 64)
    x[:, 0] = 8
    found = profile(layer, [x]).layers[0]
    stand_in, inputs = trials.stand_in(found, 4000, torch.float32, torch.device("cpu"))
    again = profile(stand_in, inputs[:1]).layers[0]
    assert (again.d_model, again.d_ff, again.gated) == (64, 300, gated)
    off = again.neuron_frequency - found.neuron_frequency
    assert off.abs().max() < 0.05


def test_rows_are_repeated_where_there_are_too_few():
    x = torch.arange(10.0)[:, None]
    assert [part.flatten().tolist() for part in trials.inputs_of(x, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    (one,) = trials.inputs_of(x, 14)
    assert one.flatten().tolist() == [*range(10), *range(4)]


# ---- whole models ----


def course(**changes):
    torch.manual_seed(0)
    sizes = dict(d_model=32, layers=2, heads=2, d_ff=300, context=16)
    return LanguageModel(ModelConfig(**{**sizes, **changes})).requires_grad_(False).eval()


def opt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return (
        transformers.OPTForCausalLM(
            transformers.OPTConfig(
                vocab_size=256,
                hidden_size=32,
                ffn_dim=300,
                num_hidden_layers=2,
                num_attention_heads=2,
                word_embed_proj_dim=32,
                activation_function="relu",
                max_position_embeddings=32,
                dropout=0.0,
                init_std=0.5,
            )
        )
        .requires_grad_(False)
        .eval()
    )


@pytest.mark.parametrize("make", [course, lambda: course(gated=False), opt], ids=["gated", "plain", "OPT"])
@pytest.mark.parametrize("fast", ["dense", "hot_cold"])
def test_a_model_follows_its_plan(make, fast, rates, times, tmp_path):
    times(**{"dense": 100.0, "twell": 100.0, "hot_cold": 100.0, fast: 50.0})
    model, seen, other = make(), torch.randint(256, (2, 16)), torch.randint(256, (2, 16))
    logits = lambda m: getattr(m(seen), "logits", m(seen))  # noqa: E731
    expected, state = logits(model), copy.deepcopy(model.state_dict())
    plan = tl.plan(profile(model, seen), model, rates=rates, tokens=(8, 64), batches=other)
    plan = tl.Plan.load(plan.save(tmp_path / "plan.json"))
    assert sparsify(model, plan) is model
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    layers = [m for m in model.modules() if isinstance(m, SparseFFN)]
    assert len(layers) == 2 and {str(c) for m in layers for c in m.plan.choices.values()} == {
        "dense" if fast == "dense" else str(HOT)
    }
    assert (len(plan.dense_layers) == 2) == (fast == "dense") == all(m.extra_bytes == 0 for m in layers)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    again = tl.plan(
        profile(model, seen), model, rates=rates, tokens=(8,), batches=other
    )  # a sparse model is planned as well
    assert [layer.name for layer in again.layers] == [layer.name for layer in plan.layers]
    assert torch.equal(logits(densify(model)), expected)


def test_a_sparse_model_takes_another_plan(rates):
    model, seen = course(), torch.randint(256, (2, 16))
    plan = tl.plan(profile(model, seen), rates=rates, tokens=(64,), device="cpu")
    sparsify(model, "twell")
    layers = [m for m in model.modules() if isinstance(m, SparseFFN)]
    assert sparsify(sparsify(model, "twell"), None) is model and all(m.plan == TWELL for m in layers)
    sparsify(model, plan)
    assert [m for m in model.modules() if isinstance(m, SparseFFN)] == layers and all(
        m.plan is not None for m in layers
    )


def test_what_does_not_fit_is_refused(profiled, layer, rates):
    module, inputs = layer
    wrong = [
        (dict(profile=[1]), "profile is a list"),
        (dict(tokens=()), "tokens is"),
        (dict(tokens=(0, 4)), "tokens is"),
        (dict(tokens=(1, 10**400)), "tokens is"),
        (dict(tokens=(4, 4)), "tokens is"),
        (dict(batches=[]), "batches is empty"),
        (dict(device="nonsense"), "nonsense"),
        (dict(model=course()), "the same ones are accepted"),
        (dict(model=GatedFeedForward(32, 599)), "d_ff 600, gated, the model's d_model 32, d_ff 599"),
        (dict(model=PlainFeedForward(32, 600)), "plain"),
        (dict(model=copy.deepcopy(module).double()), "float64"),
        (dict(model=nn.Linear(3, 3)), "no ReLU feed-forward"),
    ]
    for changes, named in wrong:
        arguments = {
            "profile": profiled,
            "model": module,
            "rates": rates,
            "tokens": (4,),
            "batches": inputs[1:],
            **changes,
        }
        with pytest.raises(tl.TwellError, match=named):
            tl.plan(arguments.pop("profile"), arguments.pop("model"), **arguments)
    plan = tl.plan(profiled, rates=rates, device="cpu")
    for other in (course(), GatedFeedForward(32, 599), PlainFeedForward(32, 600)):
        with pytest.raises(InputError, match="the plan"):
            sparsify(other, plan)
        assert not any(isinstance(m, SparseFFN) for m in other.modules())
    for wrong in ("fast", "plan.jsn", "hot_cold", "", "\0", "x" * 5000, plan.layers[0], 3, torch.ones(2)):
        with pytest.raises(InputError, match=r"plan is .*'auto', 'dense', 'twell', 'two_four', .*, a Choice, or None"):
            sparsify(GatedFeedForward(32, 600), wrong)
    with pytest.raises(InputError, match="d_ff 600, gated True; d_model 32, d_ff 599"):
        SparseFFN(GatedFeedForward(32, 599), plan=plan.layers[0])
    with pytest.raises(InputError, match="hot is 256 of 40 neurons"):
        SparseFFN(GatedFeedForward(32, 40), plan=HOT)
    with pytest.raises(InputError, match="plan is a str"):
        SparseFFN(GatedFeedForward(32, 40), plan="auto")
    with pytest.raises(InputError, match="has no layer 'x'"):
        plan.layer("x")


# ---- layers that decide for themselves ----


@pytest.fixture
def soon(monkeypatch, rates):
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: rates)
    monkeypatch.setattr(auto, "TOKENS", 20)
    monkeypatch.setattr(auto, "FORWARDS", 3)
    monkeypatch.setattr(auto, "LEAST", 1)


@pytest.mark.parametrize("make", [course, opt])
def test_a_model_plans_itself(make, soon, times):
    times(dense=100.0, twell=100.0, hot_cold=50.0)
    model = make()
    expected = model(torch.arange(16)[None])
    sparsify(model, "auto")
    layers = [m for m in model.modules() if isinstance(m, SparseFFN)]
    for number in range(3):
        assert all(m.status()["plan"] == "watching" and m.plan is None for m in layers), number
        model(torch.arange(16)[None])
    found = model(torch.arange(16)[None])
    assert all(m.status()["plan"] == "planned" and m.plan.choice(64) == HOT for m in layers)
    torch.testing.assert_close(
        getattr(found, "logits", found), getattr(expected, "logits", expected), rtol=1e-4, atol=1e-4
    )
    assert layers[0].plan.profiled == 32 and layers[0].plan.name == feed_forwards(model)[0].name


def test_many_small_batches_are_enough_too(soon, times, layer):
    times(dense=100.0, twell=50.0, hot_cold=100.0)
    sparse = sparsify(copy.deepcopy(layer[0]), "auto")
    for number in range(4):
        assert sparse.plan is None, number
        sparse(layer[1][0][:1])
    assert sparse.plan.profiled == 3 and sparse.plan.choice(1) == TWELL
    assert {row["tokens"] for row in sparse.plan.table() if row["measured_us"] is not None} == {1}


def test_a_few_tokens_are_not_enough(soon, times, layer, monkeypatch):
    times(dense=100.0, twell=50.0, hot_cold=100.0)
    monkeypatch.setattr(auto, "TOKENS", 100)
    monkeypatch.setattr(auto, "LEAST", 10)
    sparse = sparsify(copy.deepcopy(layer[0]))
    for number in range(11):
        assert sparse.plan is None, number
        sparse(layer[1][0][number : number + 1])
    assert sparse.plan.profiled == 10


def test_training_compiling_and_copying_do_not_decide(soon, times, layer):
    times(dense=100.0, twell=50.0, hot_cold=100.0)
    sparse = sparsify(copy.deepcopy(layer[0]).requires_grad_(True), "auto")
    x = layer[1][0]
    for _ in range(6):
        sparse(x).sum().backward()
    assert sparse._watch.forwards == 0
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(sparse, fullgraph=True, backend="aot_eager")
        for _ in range(6):
            run(x)
        assert sparse._watch.forwards == 0 and sparse.plan is None
        torch._dynamo.reset()
        sparse(x)
        twin = copy.deepcopy(sparse)
        sparse(x)
        assert sparse.plan is not None and twin.plan is None
        twin(x)
        assert twin.plan is not None and isinstance(twin.plan, LayerPlan)
    sparsify(sparse, "auto")
    assert sparse.plan is None and sparse.status()["plan"] == "watching"
    assert isinstance(densify(sparse), GatedFeedForward)


def test_deciding_inside_inference_mode(soon, layer, monkeypatch):
    monkeypatch.setattr(costs, "measure_rates", costs.measure_rates)  # the real one, and the real clock
    monkeypatch.setattr(planner, "TOKENS", (4,))
    sparse, x = sparsify(copy.deepcopy(layer[0]), "auto"), layer[1][0]
    with torch.inference_mode():
        for _ in range(3):
            y = sparse(x.clone())
    assert sparse.plan is not None and not any(buffer.is_inference() for buffer in sparse.buffers())
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), layer[0](x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y, layer[0](x), rtol=1e-4, atol=1e-4)


def test_autocast_and_empty_batches_are_not_counted(soon, layer):
    sparse = sparsify(copy.deepcopy(layer[0]), "auto")
    sparse(layer[1][0][:0])
    with torch.autocast("cpu", torch.bfloat16):
        sparse(layer[1][0].bfloat16())
    assert sparse._watch.forwards == 0
    with pytest.raises(InputError):
        sparse([1.0])
    assert sparse.status()["plan"] == "watching"
