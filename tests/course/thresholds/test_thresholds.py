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


@pytest.fixture(scope="module")
def model():
    return llama(**WIDE)


@pytest.fixture(scope="module")
def counted(model):
    return shown.count("a Llama of random weights", model, tokens(10), tokens(6, seed=7), sparsities=(0.4, 0.8))


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
    assert view["density"] == [layer.density["activation"] for layer in expected.layers]
    assert view["error"] == pytest.approx([layer.error for layer in expected.layers])
    # The first layer is given the same with thresholds and without; and these are all rows: fewer than are kept.
    model, gate = expected.apply(llama(**WIDE)), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda m, a, out: gate.append(out.flatten(0, -2)))
    profile = tl.profile(model, tokens(10)).layers[0]
    counts = TwELL.from_dense(gate[0]).counts
    assert view["overflow"][0] == pytest.approx((counts > 31).double().mean().item())
    took = by_choice(Firing.of(profile), rates_of("H100 SXM"), 1)
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
    assert step.ms == (4.0,) * 7 and step.dense_ms == (2.0,) * 7 and step.device == "CPU"
    # What was timed is the model as it was, and one with thresholds whose layers gave up none of their values.
    gave, cut = seen[0][0], counted.calibration.at(0.9).apply(copy.deepcopy(model))
    with torch.no_grad():
        dense, sparse = (each(own.windows[:1]).logits[:, -1].flatten() for each in (model, cut))
    assert torch.allclose(gave["dense_ms"].flatten(), dense, atol=1e-5)
    assert torch.allclose(gave["ms"].flatten(), sparse, atol=1e-5)
    assert not torch.allclose(gave["ms"], gave["dense_ms"], atol=1e-5)
    assert torch.equal(answer(model), before) and not lossy_parts(model)
    view = shown.view(own, 0.9)
    assert view["step"] == {"device": "CPU", "ms": 4.0, "dense_ms": 2.0}
    assert view["steps"] == [(0.9, 4.0, 4.0, 4.0, 2.0)] and shown.view(own, 0.8)["step"] is None
    assert "decoding a token took 4 ms on the TwELL path instead of 2" in shown.sentence(view)


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


@pytest.mark.parametrize(
    "change, said",
    [
        ({"windows": tokens(1)}, "two or more windows"),
        ({"model": "a name"}, "tl.load"),
    ],
)
def test_wrong_arguments(model, change, said):
    given = {"what": "random weights", "model": model, "batches": tokens(4), "windows": tokens(4), **change}
    with pytest.raises(InputError, match=said):
        shown.count(given.pop("what"), given.pop("model"), given.pop("batches"), given.pop("windows"), **given)
    assert not lossy_parts(model)
