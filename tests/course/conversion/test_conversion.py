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
from twell_lab.models.relufy import relufy
from twell_lab.models.thresholds import losses
from twell_lab.models.tiny import LanguageModel, ModelConfig


@pytest.fixture(scope="module")
def smooth():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=32, context=16)).eval()
    for layer in model.layers:
        layer.mlp.act_fn = nn.SiLU()
    return model


@pytest.fixture(scope="module")
def judged(smooth):
    windows = held_out(some_text(200_000), 24, 16)
    return data.judge("tiny", smooth, windows[::2], windows[1::2])


def point(way="cut", density=0.1, change=1.0, **more):
    made = {"way": way, "model": "m", "what": "w", "density": density, "change": change}
    return made | {"low": change - 0.5, "high": change + 0.5, "where": data.HERE} | more


def weights(model):
    return [value.clone() for value in model.state_dict().values()]


def test_a_converted_model_is_held_against_the_one_that_it_was(smooth, judged):
    relu = relufy(copy.deepcopy(smooth), only=lambda name, layer: True)
    (point,) = data.converted({"ReLU": relu}, judged)
    assert 0 < point["density"] < 0.8 and point["way"] == "convert" and point["what"] == "ReLU"
    change = float(losses(relu, judged.windows).mean() / judged.alone.mean()) - 1
    assert point["low"] <= point["change"] <= point["high"] and point["change"] == pytest.approx(100 * change, abs=1e-3)


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
