"""A model of the reader's, ours or of transformers, is read as it is; sentences say what made-up rows hold."""

import math

import pytest
import torch

import twell_lab as tl
from twell_lab.analysis import costs, predict
from twell_lab.core.errors import InputError
from twell_lab.course import own_model, thresholds
from twell_lab.course.own_model import data
from twell_lab.layers.choice import DENSE
from twell_lab.layers.paths.cost import Firing

SAID = "def "


@pytest.fixture(scope="module")
def small():
    return own_model.read("small")


@pytest.fixture(scope="module")
def text():
    return own_model.some_text()


@pytest.fixture(scope="module")
def halves(small, text):
    return own_model.windows(small, text, count=8)


def test_a_shipped_model_says_what_it_is_and_goes_on_as_it_generates(small):
    assert small.shipped and small.fires and small.context == 128 and "1,115,264 parameters" in str(small)
    expected = small.model.generate(small.encode(SAID), 20)
    assert own_model.go_on(small, small.model, SAID, 20) == small.decode(expected)


def test_a_folder_of_transformers_says_the_same(small, tmp_path):
    pytest.importorskip("transformers")
    small.model.save_pretrained(tmp_path)
    theirs = own_model.read(tmp_path)
    assert theirs.name == tmp_path.name and not theirs.shipped and theirs.fires and theirs.context == small.context
    assert "LlamaForCausalLM" in str(theirs)
    assert torch.equal(theirs.encode("a text"), small.encode("a text"))
    ids = small.encode(SAID)[None]
    assert torch.allclose(own_model.logits(theirs.model, ids), own_model.logits(small.model, ids), atol=1e-4)
    assert own_model.go_on(theirs, theirs.model, SAID, 20) == own_model.go_on(small, small.model, SAID, 20)
    assert own_model.never_sparse(theirs) is theirs


def test_a_model_without_a_relu_does_not_fire(small):
    silent = tl.models.tiny.LanguageModel(small.model.config)
    for layer in tl.feed_forwards(silent):
        layer.module.act_fn = torch.nn.SiLU()
    assert not data.Own("mine", False, silent, 8, small.encode, small.decode).fires


def test_the_text_is_prose_and_its_windows_do_not_meet(text, small, halves):
    assert len(text) > 20_000 and not set(text) - {*map(chr, range(32, 127)), "\n"}
    first, second = halves
    assert first.shape == second.shape == (4, 128)
    assert not {tuple(each) for each in first.tolist()} & {tuple(each) for each in second.tolist()}
    with pytest.raises(InputError, match="four windows of 128"):
        own_model.windows(small, text[:500])


def test_gains_are_those_of_the_best_paths_of_all_layers(small, halves):
    firing = tl.profile(small.model, [halves[0]])
    (row,) = own_model.gains(firing, ["NVIDIA L4"], [1])
    took = [predict.by_choice(Firing.of(layer), predict.rates_of("L4"), 1) for layer in firing.layers]
    assert row["gpu"] == "L4" and row["us"] == pytest.approx(sum(min(each.values()) for each in took))
    assert row["dense_us"] == pytest.approx(sum(each[DENSE] for each in took))
    assert row["x_dense"] == pytest.approx(row["dense_us"] / row["us"])
    launches = sum(
        costs.predict(DENSE, Firing.of(each), predict.rates_of("L4"), 1, 2)["launches"] for each in firing.layers
    )
    assert row["launches"] == pytest.approx(100 * launches / row["dense_us"])
    assert sum(int(part.split()[0]) for part in row["paths"].split(", ")) == 4
    assert "L4" in own_model.gains_table([row])


def test_how_far_off_predictions_are_is_that_of_the_records(monkeypatch):
    monkeypatch.setattr(
        predict, "errors", lambda: [{"gpu": "L4", "layers": 7, "least": 0.5, "median": 1.0, "most": 2.0}]
    )
    assert (
        own_model.off()
        == "L4: for 7 recorded layers, predicted over measured time was 0.50 to 2.00, 1.00 in the middle"
    )
    monkeypatch.setattr(predict, "errors", list)
    assert "no recorded layer" in own_model.off()


def test_a_cut_costs_what_the_library_measures(small, halves):
    counted = thresholds.count("small", small.model, [halves[0]], halves[1], sparsities=(0.5,))
    half, most = own_model.cut(counted, (0.5, 0.98))
    expected = tl.thresholds(small.model, [halves[0]], 0.98)
    cost = expected.loss(small.model, halves[1])
    assert most["density"] == pytest.approx(sum(each.density["activation"] for each in expected.layers) / 4)
    assert (
        most["change"] == pytest.approx(100 * cost.change / cost.dense) and most["low"] < most["change"] < most["high"]
    )
    assert half["change"] == 0 < most["change"]  # half of all values are zero by themselves


def test_where_the_trained_pair_is_missing_nothing_is_compared(small, monkeypatch, text):
    monkeypatch.setattr(data, "checkpoints", lambda: ["small"])
    assert own_model.trained(text) is None and own_model.never_sparse(small) is small


def test_the_trained_pair_differs_in_density(text, monkeypatch):
    if own_model.never_sparse(own_model.read("small")).name != "l1-free":
        pytest.skip("the pair lies in a checkout alone")
    few = data.windows
    monkeypatch.setattr(data, "windows", lambda mine, text: few(mine, text, count=4))
    found = own_model.trained(text)
    assert found["density"] < found["before"] / 3 and found["low"] <= found["change"] <= found["high"]


HERE = {"what": "decode step, batch 1", "low": 1.1, "times": 1.2, "high": 1.3}
PREDICTED = [
    {"gpu": "A", "tokens": 1, "x_dense": 1.5},
    {"gpu": "B", "tokens": 1, "x_dense": 2.5},
    {"gpu": "A", "tokens": 64, "x_dense": 1.0},
    {"gpu": "B", "tokens": 64, "x_dense": 1.05},
]
ROWS = [
    {"density": 0.1, "change": 0.5, "low": 0.2, "high": 0.8},
    {"density": 0.02, "change": 8.0, "low": 7.0, "high": 9.0},
]
TRAINED = {"density": 0.02, "before": 0.1, "change": 1.0, "low": 0.5, "high": 1.5}


def test_three_lines_say_what_to_do():
    here, gpus, cut = own_model.decide("mine", HERE, PREDICTED, "its twin", ROWS, TRAINED)
    assert (
        "(decode step, batch 1), mine with planned layers is 1.20 times as fast (middle half 1.10 to 1.30): swap the layers"
        in here
    )
    assert "with 1 token on 2 of 2 GPUs (at best 2.50, B), with 64 tokens on 0 of 2 GPUs (at best 1.05, B)" in gpus
    assert cut.startswith(
        "A cut of its twin to 10.0% of the neurons costs at most 1% of the loss; at 2.0% the cut costs +7.0 to +9.0%"
    )
    assert cut.endswith("+0.5 to +1.5%: train.")


@pytest.mark.parametrize(
    "low, high, said", [(0.5, 0.9, ": stay dense."), (0.9, 1.1, "no difference that counts"), (1.01, 1.2, ": swap")]
)
def test_what_is_slower_or_the_same_here_stays_dense(low, high, said):
    assert (
        said
        in own_model.decide(
            "mine",
            {"what": "a forward", "low": low, "times": (low + high) / 2, "high": high},
            PREDICTED,
            "its twin",
            ROWS,
            None,
        )[0]
    )


@pytest.mark.parametrize("low, high, said", [(0, 1, "train."), (10, 11, "cut."), (8, 9.5, "either will do.")])
def test_a_cut_is_compared_by_its_interval(low, high, said):
    assert own_model.decide("mine", HERE, PREDICTED, "its twin", ROWS, TRAINED | {"low": low, "high": high})[
        2
    ].endswith(said)


def test_no_cut_may_be_cheap_and_no_twin_be_here():
    third = own_model.decide("mine", HERE, PREDICTED, "its twin", ROWS[1:], None)[2]
    assert third == "Each cut of its twin that was measured may cost more than 1% of the loss."


def test_the_figure_shows_each_point_with_its_interval():
    figure = own_model.figures.cut_or_train(ROWS, TRAINED, "mine")
    cut, one = figure.data
    assert cut.name.startswith("mine") and list(cut.x) == [2, 10] and list(cut.y) == [8, 0.5]
    assert list(cut.error_y.array) == pytest.approx([1, 0.3]) and list(cut.error_y.arrayminus) == pytest.approx(
        [1, 0.3]
    )
    assert list(one.x) == [2] and list(one.y) == [1] and math.isclose(one.error_y.array[0], 0.5)
    assert len(own_model.figures.cut_or_train(ROWS, None, "mine").data) == 1
