"""The records of lossy models: a SiLU model that is cut, and a ReLU model with chosen neurons, trained on this CPU."""

import math
from dataclasses import replace

import pytest
from torch import nn

from twell_lab.bench import losses, rows
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.ops import clock
from twell_lab.records import Record
from twell_lab.training.config import TrainConfig

SIZES = {"d_model": 32, "layers": 2, "heads": 2, "context": 32, "device": "cpu"}
TINY = TrainConfig(**SIZES, d_ff=300, batch=8, steps=60, lr=3e-3, eval_windows=40)
CHOSEN = replace(losses.SMALL_CHOSEN, **SIZES, d_ff=256, batch=4, steps=12, warmup=2, l1=1e-2, eval_windows=4)
FEW = {"BATCHES": (1, 3), "CUT_SPARSITIES": (0.9,), "SPARSITIES": (0.9,), "SECONDS": 0.01}
FEW |= {"RECALLS": (0.5, 1.0), "SHARES": (0.1, 1.0)}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for name, value in FEW.items():
        monkeypatch.setattr(losses, name, value)


@pytest.fixture(scope="module")
def trained():
    return losses.Calibrated(TINY)


def broken(model, *_, **__):
    feed_forwards(model)[0].down.weight.data *= 100
    return model


def test_a_cut_says_what_it_costs_and_what_a_step_takes(trained):
    steps = losses.thresholds(config=TINY)["thresholds"]
    assert len(steps) == 4 and all(isinstance(layer.mlp.act_fn, nn.SiLU) for layer in trained.model.layers)
    for method, path in losses.PATHS.items():
        made = losses.cut_rows(trained, method, 0.9)
        paths = ["dense eager", "thresholds, dense", f"thresholds, forced {path}"]
        assert [row["path"] for row in made] == 2 * paths and [row["tokens"] for row in made] == [1] * 3 + [3] * 3
        for row in made:
            assert row["kind"] == "thresholds" and row["ms"] > 0 and row["dense_ms"] > 0 and row["cached"] == 16
            step = f"{method.upper()} 90%, decode step, batch {row['tokens']}, SiLU trained on Python"
            assert row["workload"].startswith(step) and row["nnz"] == pytest.approx(30, rel=0.3)
        for row in (row for row in made if row["path"] != "dense eager"):
            low, change, high = row["loss_change"]
            assert low <= change <= high and row["dense_loss"] < 0.8 * math.log(256)
            assert row["loss"] == pytest.approx(row["dense_loss"] + change, abs=2e-5)
            assert row["spared"] == pytest.approx(0.6 if method == "cats" else 0.9, abs=0.01)
        assert all(0 <= row["layer_over_allowed"] <= 1 for row in made[2::3])


def test_a_path_that_computes_something_else_is_not_timed(trained, monkeypatch):
    monkeypatch.setattr(losses, "sparsify", lambda *given: broken(sparsify(*given)))
    monkeypatch.setattr(losses, "decode_rows", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match="forced kept_inputs: a layer: off by"):
        losses.cut_rows(trained, "teal", 0.9)


def test_chosen_neurons_say_what_they_cost():
    (step,) = losses.predictors(config=CHOSEN)["chosen neurons"]
    made = {row["path"]: row for row in step()}
    assert set(made) == {
        "dense eager",
        "lossy: predicted, recall 50%",
        "lossy: predicted, recall 100%",
        "lossy: core neurons, 10%",
        "lossy: core neurons, 100%",
        "lossy: CATS 90%, computed densely",
        "lossy: TEAL 90%, computed densely",
        "lossy: TEAL 90%, forced kept_inputs",
        "trained with L1, dense",
        "trained with L1, forced twell",
    }
    Record.new("predictors", "a test's own", [*made.values()])
    for row in made.values():
        assert row["kind"] == "chosen_neurons" and row["ms"] > 0 and row["dense_ms"] > 0 and row["tokens"] == 1
        low, change, high = row["loss_change"]
        assert low <= change <= high
    assert made["dense eager"]["loss_change"] == [0, 0, 0]
    assert made["lossy: core neurons, 100%"]["loss_change"] == pytest.approx([0, 0, 0], abs=1e-4)
    assert made["lossy: core neurons, 10%"]["sparsity"] == pytest.approx(0.9, abs=0.01)
    some, all_of_them = (made[f"lossy: predicted, recall {recall}%"] for recall in (50, 100))
    assert some["sparsity"] > all_of_them["sparsity"] and abs(all_of_them["loss_change"][1]) < 1e-3
    assert made["lossy: core neurons, 10%"]["loss"] != made["dense eager"]["loss"]
    assert made["trained with L1, dense"]["loss"] == made["trained with L1, forced twell"]["loss"]


def test_nothing_is_timed_where_the_lossless_path_is_wrong(monkeypatch):
    monkeypatch.setattr(losses, "sparsify", broken)
    monkeypatch.setattr(losses, "_lossy", lambda *_: [])
    monkeypatch.setattr(rows, "clocked", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match="forced twell"):
        losses.chosen_rows(CHOSEN)
