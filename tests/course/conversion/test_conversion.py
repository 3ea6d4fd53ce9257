"""What notebook 05 computes: cuts, conversions and trainings as points, and the sentences made of them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from twell_lab import records
from twell_lab.course.conversion import data
from twell_lab.course.training import held_out, some_text
from twell_lab.layers.lossy import lossy_parts

TINY = replace(data.MODEL, steps=4, batch=2, context=16, d_model=16, layers=2, heads=2, d_ff=32)


@pytest.fixture(scope="module")
def text():
    return some_text(200_000)


@pytest.fixture(scope="module")
def windows(text):
    return held_out(text, 24, TINY.context)


@pytest.fixture(scope="module")
def smooth(text):
    return data.smooth(text, TINY)


@pytest.fixture(scope="module")
def judged(smooth, windows):
    return data.judge("tiny", smooth, windows[::2], windows[1::2])


def point(way="cut", density=0.1, change=1.0, **more):
    made = {"way": way, "model": "m", "what": "w", "density": density, "change": change}
    return made | {"low": change - 0.5, "high": change + 0.5, "where": data.HERE} | more


def weights(model):
    return [value.clone() for value in model.state_dict().values()]


def test_a_smooth_model_has_a_silu_and_is_the_same_again(text, smooth):
    assert sum(isinstance(module, nn.SiLU) for module in smooth.modules()) == TINY.layers and not smooth.training
    again = data.smooth(text, TINY)
    assert all(map(torch.equal, weights(smooth), weights(again)))


def test_training_on_changes_the_model_and_tells_its_loss(text, smooth, windows):
    model = copy.deepcopy(smooth)
    history = data.further(model, text, replace(TINY, steps=11), windows)
    assert [row["step"] for row in history] == [0, 10, 11]
    assert history[-1]["bits"] < history[0]["bits"]
    assert history[0]["bits"] == data.judge("tiny", smooth, windows[:4], windows).bits_per_byte
    assert not model.training and not all(map(torch.equal, weights(smooth), weights(model)))
    assert data.further(model, text, TINY) == []


def test_l1_leaves_fewer_firing(text, smooth, windows, judged):
    relu, config = data.to_relu(smooth), replace(TINY, steps=30, l1_delay=2, l1_warmup=2)
    models = {"alone": copy.deepcopy(relu), "L1": copy.deepcopy(relu)}
    data.further(models["alone"], text, config)
    data.further(models["L1"], text, replace(config, l1=0.3))
    alone, pressed = data.converted(models, judged)
    assert pressed["density"] < 0.8 * alone["density"] and pressed["way"] == "convert"


def test_a_conversion_is_a_copy_with_the_same_weights_and_no_warning(smooth, recwarn):
    relu = data.to_relu(smooth)
    assert not any(isinstance(module, nn.SiLU) for module in relu.modules()) and not recwarn.list
    assert any(isinstance(module, nn.SiLU) for module in smooth.modules())
    assert all(map(torch.equal, weights(smooth), weights(relu)))


def test_cuts_leave_what_was_asked_for_and_the_model_as_it_was(judged):
    before = weights(judged.model)
    none, some, most = data.cut(judged, (0.0, 0.5, 0.99))
    assert none["change"] == none["low"] == none["high"] == 0
    assert [round(each["density"], 2) for each in (none, some, most)] == [1.0, 0.5, 0.01]
    assert most["low"] <= most["change"] <= most["high"] and some["what"] == "cut 50%"
    assert not lossy_parts(judged.model) and all(map(torch.equal, before, weights(judged.model)))


@pytest.mark.parametrize("density", (0.9, 0.3, 0.02))
def test_a_cut_to_a_density_has_it(judged, density):
    assert data.cut_to(judged, density)["density"] == pytest.approx(density, rel=0.01)


def test_recorded_points_are_those_of_the_sweeps():
    points = data.recorded()
    small = [each for each in points if each["model"] == "l1-free"]
    rows = next(record for record in records.load_all() if record.name == "sweep-small").rows
    assert [each["density"] for each in small] == [1 - row["zeros"] for row in rows]
    least, *_, last = (row["validation_bits_per_byte"] for row in rows)
    assert small[0]["change"] == 0 and small[-1]["change"] == pytest.approx(100 * (last / least - 1))
    assert len(points) > len(small) and all(each["where"].startswith("recorded on ") for each in points)


def test_the_trained_twin_is_held_against_the_one_that_was_not(judged, monkeypatch):
    assert data.trained(judged, "") == []  # no model of data/checkpoints
    free = replace(judged, what="l1-free")
    sparse = replace(judged, what="sparse", alone=judged.alone - 5)
    monkeypatch.setattr(data, "shipped", lambda name, text, device: sparse)
    one, half = data.trained(free, "prose")
    assert one["change"] == one["low"] == 0 and half["density"] == pytest.approx(one["density"] / 2, rel=0.01)
    assert {one["way"], half["way"]} == {"train"} and {one["model"], half["model"]} == {"l1-free"}
    assert half["what"] == "with L1, then cut"


@pytest.mark.parametrize(("change", "said"), ((0.0, "convert"), (9.0, "cut"), (5.2, "unclear")))
def test_intervals_decide_between_a_point_and_the_nearest_cut(change, said):
    cuts = [point(density=at, change=5.0) for at in (0.2, 0.101, 0.05)]
    mine = point("convert", 0.1, change)
    assert data.nearest(mine, cuts) is cuts[1] and data.nearest(mine | {"model": "n"}, cuts) is None
    assert data.better(mine, cuts[1]) == said
