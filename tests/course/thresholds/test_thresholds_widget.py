"""The slider of thresholds without a browser: moves run no model and are quick, the button measures a point."""

import dataclasses

import pytest
import torch

from tests.models.thresholds.models_of import llama, tokens
from twell_lab.core import InputError
from twell_lab.course import thresholds as shown
from twell_lab.course.thresholds.widget import ThresholdExplorer


@pytest.fixture(scope="module")
def model():
    return llama(intermediate_size=300, num_hidden_layers=24)


@pytest.fixture(scope="module")
def once(model):
    return shown.count("a Llama of random weights", model, tokens(10), tokens(6, seed=7), sparsities=(0.3, 0.6))


@pytest.fixture
def explorer(draws, once):
    return ThresholdExplorer(dataclasses.replace(once, losses=dict(once.losses), steps={}))


def trace(explorer, name):
    return next(each for each in explorer.figure.data if each.name == name)


def test_the_figure_follows_the_slider(explorer):
    for value in (0.3, 0.47, 0.9, 0.0):
        explorer.slider.value = value
        view = shown.view(explorer.counted, value)
        assert explorer.view == view
        density = [100 * share for share in view["density"]["activation"]]
        assert list(trace(explorer, "kept behind the gate").y) == density
        assert list(trace(explorer, "error").y) == [100 * error for error in view["error"]]
        assert list(trace(explorer, "here").y) == ([] if view["loss"] is None else [view["loss"]])
        assert f"sparsity {value:.0%} (lossy)<br>" in explorer.figure.layout.title.text


def test_a_move_runs_no_model(explorer, model):
    ran = []
    hooks = [each.register_forward_pre_hook(lambda m, args: ran.append(m)) for each in model.modules()]
    for value in torch.linspace(0, 0.95, 39).tolist():
        explorer.slider.value = value
    assert not ran
    explorer.button.click()
    assert ran
    for hook in hooks:
        hook.remove()


def test_the_button_measures_here_and_marks_the_points(explorer):
    explorer.slider.value = 0.45
    assert not explorer.view["measured"] and list(trace(explorer, "measured").x) == [0, 30, 60]
    assert explorer.button.description == "measure here" and list(trace(explorer, "with thresholds").x) == []
    explorer.button.click()
    assert explorer.view["measured"] and list(trace(explorer, "measured").x) == [0, 30, 45, 60]
    cost = explorer.counted.losses[0.45]
    assert explorer.view["loss"] == 100 * cost.change / cost.dense
    assert "(measured)" in explorer.figure.layout.title.text
    step = explorer.view["step"]
    assert step["ms"] > 0 and list(trace(explorer, "with thresholds").x) == list(trace(explorer, "without").x) == [45]
    assert list(trace(explorer, "with thresholds").y) == [step["ms"]]
    assert list(trace(explorer, "without").y) == [step["dense_ms"]]
    assert f"took {step['ms']:.3g} ms" in explorer.figure.layout.title.text


def test_where_the_loss_is_known_the_button_times_a_step(explorer, monkeypatch):
    monkeypatch.setattr(shown.data, "measure", lambda *_: pytest.fail("it is known"))
    explorer.slider.value = 0.6
    assert explorer.view["measured"] and explorer.button.description == "measure here"
    explorer.button.click()
    assert [*explorer.counted.steps] == [0.6] and explorer.button.description == "measured here"


def test_a_second_press_measures_nothing_and_another_place_can_be(explorer, model):
    explorer.slider.value = 0.45
    explorer.button.click()
    found, ran = explorer.view, []
    hook = model.register_forward_pre_hook(lambda m, args: ran.append(m))
    explorer.button.click()
    hook.remove()
    assert not ran and explorer.view == found
    assert explorer.button.description == "measured here"
    explorer.slider.value = 0.46
    assert explorer.button.description == "measure here"
    explorer.slider.value = 0.45
    assert explorer.button.description == "measured here" and explorer.view == found


def test_a_press_while_it_measures_does_nothing_and_a_move_is_drawn(explorer, monkeypatch):
    """As a second thread of the kernel would have it; and the button keeps the keyboard's focus, so is not disabled."""
    measured = []

    def measure(counted, sparsity):
        measured.append(sparsity)
        assert explorer.button.description == "measuring ..." and not explorer.button.disabled
        explorer.button.click()
        explorer.slider.value = 0.2
        assert explorer.view["sparsity"] == 0.2 and explorer.button.description == "measuring ..."
        counted.losses[sparsity] = counted.losses[0.3]

    monkeypatch.setattr(shown.data, "measure", measure)
    explorer.slider.value = 0.5
    explorer.button.click()
    assert measured == [0.5] == [*explorer.counted.steps]
    assert explorer.view["sparsity"] == 0.2 and explorer.button.description == "measure here"
    assert 50 in trace(explorer, "measured").x


@pytest.mark.parametrize("verb", ["measure", "clock"])
def test_a_measurement_that_fails_leaves_the_button_as_it_was(explorer, monkeypatch, verb):
    monkeypatch.setattr(shown.data, verb, lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        explorer.measure()
    assert not explorer.button.disabled and explorer.button.description == "measure here"
    assert explorer.view["measured"] == (verb == "clock")  # what was measured before it is kept, and drawn
    monkeypatch.undo()
    explorer.measure()
    assert explorer.button.description == "measured here"


def test_what_is_no_count_is_refused():
    with pytest.raises(InputError, match="counted is a dict"):
        ThresholdExplorer({})


def test_a_move_is_light(light, once):
    explorer = ThresholdExplorer(dataclasses.replace(once, losses=dict(once.losses), steps={}))
    light(explorer, [lambda at=at: setattr(explorer.slider, "value", at) for at in (0.3, 0.8)])
