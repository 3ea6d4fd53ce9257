"""What the slider shows is what the library gives at that sparsity, and looking it up runs no model."""

import copy
import dataclasses

import pytest
import torch

import twell_lab as tl
from tests.models.thresholds.models_of import answer, llama, tokens
from twell_lab.analysis.predict import by_choice, rates_of
from twell_lab.core import InputError
from twell_lab.course import thresholds as shown
from twell_lab.formats import TwELL
from twell_lab.layers.choice import DENSE
from twell_lab.layers.lossy import lossy_parts
from twell_lab.layers.paths.cost import Firing

WIDE = dict(intermediate_size=600)  # three tiles, the last of them narrower
HOW = dict(gpu="L4", tokens=64, sparsities=(0.4, 0.8))


@pytest.fixture(scope="module")
def model():
    return llama(**WIDE)


@pytest.fixture(scope="module")
def counted(model):
    return shown.count("a Llama of random weights", model, tokens(10), tokens(6, seed=7), **HOW)


@pytest.fixture
def runs(model):
    """How often the model, or a layer of it, has run since."""
    found = []
    hooks = [module.register_forward_pre_hook(lambda m, args: found.append(m)) for module in model.modules()]
    yield found
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.7, 0.95])
def test_at_a_level_all_is_what_the_library_gives(counted, model, sparsity, runs):
    view = shown.view(counted, sparsity)
    assert not runs
    expected = tl.thresholds(llama(**WIDE), tokens(10), sparsity)
    assert view["layers"] == ["layer 0", "layer 1"]
    assert view["density"]["activation"] == [layer.density["activation"] for layer in expected.layers]
    assert view["error"] == pytest.approx([layer.error for layer in expected.layers])
    # The first layer is given the same with thresholds and without; and these are all rows: fewer than are kept.
    model, gate = expected.apply(llama(**WIDE)), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, a, out: gate.append(out.flatten(0, -2)))
    profile = tl.profile(model, tokens(10)).layers[0]
    counts = TwELL.from_dense(gate[0]).counts
    assert view["overflow"][0] == pytest.approx((counts > 31).double().mean().item())
    took = by_choice(Firing.of(profile), rates_of("L4"), 64)
    assert view["us"][0] == pytest.approx(min(took.values())) and view["path"][0] == min(took, key=took.get).path
    assert view["dense_us"][0] == pytest.approx(took[DENSE])


def test_between_levels_and_points_it_is_on_the_line(counted):
    low, middle, high = (shown.view(counted, at) for at in (0.5, 0.52, 0.55))
    for name in ("error", "overflow", "dense_us"):
        for a, b, c in zip(low[name], middle[name], high[name], strict=True):
            assert b == pytest.approx(0.6 * a + 0.4 * c)
    first, second = (100 * cost.change / cost.dense for cost in (counted.losses[0.4], counted.losses[0.8]))
    assert shown.view(counted, 0.2)["loss"] == pytest.approx(first / 2)
    assert shown.view(counted, 0.7)["loss"] == pytest.approx(0.25 * first + 0.75 * second)
    assert [shown.view(counted, at)["measured"] for at in (0.0, 0.4, 0.5, 0.8)] == [True, True, False, True]
    assert shown.view(counted, 0.81)["loss"] is None  # nothing was measured on the other side
    assert [at for at, *_ in low["points"]] == [0.0, 0.4, 0.8]


def test_a_point_is_measured_by_running_the_model_and_nothing_else_is(counted, model, runs):
    own = dataclasses.replace(counted, losses=dict(counted.losses))
    before = answer(model)
    runs.clear()
    for step in range(96):
        shown.view(own, step / 100)
    assert not runs
    cost = shown.measure(own, 0.9)
    assert runs and torch.equal(answer(model), before) and not lossy_parts(model)
    expected = tl.thresholds(model, tokens(10), 0.9).loss(model, tokens(6, seed=7))
    assert (
        cost == expected
        and shown.view(own, 0.9)["loss"] == 100 * cost.change / cost.dense
        and shown.view(own, 0.9)["measured"]
    )
    assert [at for at, *_ in shown.view(own, 0.1)["points"]] == [0.0, 0.4, 0.8, 0.9]


def stepping(monkeypatch, seen, ms=4.0, dense_ms=2.0):
    """Have the clock run each call once, append what it gave, and tell these milliseconds."""

    def bursts(calls, wait, *, rounds, count):
        seen.append(({name: call(0) for name, call in calls.items()}, rounds, count))
        return {"ms": ([], [ms] * rounds), "dense_ms": ([], [dense_ms] * rounds)}

    monkeypatch.setattr(shown.data.clocks, "time_bursts", bursts)


def test_a_step_is_timed_with_thresholds_on_the_twell_path_and_without_in_turn(counted, model, monkeypatch):
    own = dataclasses.replace(counted, steps={})
    before, seen = answer(model), []
    stepping(monkeypatch, seen)
    step = shown.clock(own, 0.9)
    assert [how for _, *how in seen] == [[1, 1], [7, 5]]  # bursts of about ten milliseconds
    assert step.ms == (4.0,) * 7 and step.dense_ms == (2.0,) * 7 and (step.device, step.path) == ("CPU", "twell")
    assert step.what == "a forward of 64 tokens"  # four windows of 16
    # What was timed is the model as it was, and one with thresholds whose layers gave up none of their values.
    gave, cut = seen[0][0], counted.calibration.at(0.9).apply(copy.deepcopy(model))
    read = own.windows[:4]
    with torch.no_grad():
        assert torch.equal(gave["dense_ms"], model(read).logits)
        assert torch.allclose(gave["ms"], cut(read).logits, atol=1e-5)
    assert not torch.allclose(gave["ms"], gave["dense_ms"], atol=1e-5)
    assert torch.equal(answer(model), before) and not lossy_parts(model)
    view = shown.view(own, 0.9)
    assert view["step"] == {"what": step.what, "device": "CPU", "path": "twell", "ms": 4.0, "dense_ms": 2.0}
    assert view["steps"] == [(0.9, 4.0, 4.0, 4.0, 2.0)] and shown.view(own, 0.8)["step"] is None
    assert "a forward of 64 tokens took 4 ms on the TwELL path instead of 2" in shown.sentence(view)
    shown.clock(dataclasses.replace(own, tokens=3), 0.9)
    assert seen[-1][0]["ms"].shape == (1, 3, 64)


def test_a_clock_that_fails_leaves_no_thresholds(counted, model, monkeypatch):
    monkeypatch.setattr(shown.data.clocks, "time_bursts", lambda *_, **__: 1 / 0)
    own = dataclasses.replace(counted, steps={})
    with pytest.raises(ZeroDivisionError):
        shown.clock(own, 0.9)
    assert not lossy_parts(model) and not own.steps
    own.calibration.at(0.5).apply(model)
    with pytest.raises(InputError, match="has thresholds on it"):
        shown.clock(own, 0.9)
    tl.Thresholds.remove(model)


def test_teal_shows_both_places_and_no_time(model):
    found = shown.count("random weights", model, tokens(10), tokens(6, seed=7), method="teal", **HOW)
    view = shown.view(found, 0.6)
    expected = tl.thresholds(model, tokens(10), 0.6, method="teal")
    for site in ("input", "hidden"):
        assert view["density"][site] == [layer.density[site] for layer in expected.layers]
    assert view["error"] == pytest.approx([layer.error for layer in expected.layers])
    assert view["us"] == view["dense_us"] == view["path"] == [] and max(view["overflow"]) > 0
    assert " us " not in shown.sentence(view)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"what": ""}, "what is ''; what to call the model"),
        ({"what": None}, "what is None"),
        ({"gpu": "abacus"}, "gpu is 'abacus'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"tokens": 1.5}, "tokens is 1.5"),
        ({"sparsities": (0.5, 0.97)}, "sparsity is 0.97; a share from 0 to 0.95"),
        ({"greedy": True, "method": "teal"}, "greedy with 'teal'; accepted: 'cats'"),
        ({"windows": tokens(1)}, "two or more windows"),
        ({"model": "a name"}, "tl.load"),
    ],
)
def test_wrong_arguments(model, change, said):
    given = {"what": "random weights", "model": model, "batches": tokens(4), "windows": tokens(4), **change}
    with pytest.raises(InputError, match=said):
        shown.count(given.pop("what"), given.pop("model"), given.pop("batches"), given.pop("windows"), **given)
    assert not lossy_parts(model)


@pytest.mark.parametrize("sparsity", [-0.01, 0.96, 1, True, "0.5", float("nan")])
def test_a_sparsity_that_the_slider_does_not_have(counted, sparsity):
    for verb in (shown.view, shown.measure, shown.clock):
        with pytest.raises(InputError, match="sparsity is"):
            verb(counted, sparsity)
