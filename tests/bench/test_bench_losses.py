"""The records of what methods cost in the loss: a tiny model pruned in each way and trained on, and a SiLU model that is
cut; both trained on this CPU."""

import math

import pytest
import torch
from torch import nn

from twell_lab.bench import losses
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.ops import clock
from twell_lab.records import Record
from twell_lab.training.config import TrainConfig

SIZES = {"d_model": 32, "heads": 2, "context": 32, "lr": 3e-3, "device": "cpu"}
TINY = TrainConfig(**SIZES, layers=1, d_ff=64, batch=4, steps=30, warmup=2, eval_windows=8)
CUT = TrainConfig(**SIZES, layers=2, d_ff=300, batch=8, steps=60, eval_windows=40)
WAYS = {way.name: way for way in losses.WAYS}


@pytest.fixture(scope="module")
def trained():
    return losses.Trained(TINY)


@pytest.fixture(scope="module")
def rows(trained):
    first = {name: value.clone() for name, value in trained.model.state_dict().items()}
    made = [row for way in losses.WAYS for row in losses.way_rows(trained, way)]
    assert all(torch.equal(value, first[name]) for name, value in trained.model.state_dict().items())
    return {row["path"]: row for row in made}


def test_a_row_says_what_was_pruned_and_what_it_cost(rows, trained):
    assert list(rows) == [way.name for way in losses.WAYS]
    Record.new("pruning", "a test's own", [*rows.values()])
    dense = rows["dense"]
    assert dense["sparsity"] == 0 and dense["bits_before"] != dense["bits_after"]
    for name, row in rows.items():
        assert row["kind"] == "pruning" and row["ms"] > 0 and row["seed"] == 0 and 0 < row["bits_after"] < 9
        assert len(row["samples"]) == row["steps"] == 9
        if "%" in name:
            assert row["sparsity"] == pytest.approx(WAYS[name].sparsity, abs=0.11)  # blocks are few here
            assert row["bits_before"] != dense["bits_before"]
    assert rows["magnitude, 90%"]["bits_before"] > rows["magnitude, 50%"]["bits_before"]
    assert rows["2:4"]["sparsity"] == 0.5
    assert 0 <= rows["proximal L1, 1"]["sparsity"] < rows["proximal L1, 4"]["sparsity"] < 1
    gradual, at_once = rows["blocks of 32, 90%, gradually"], rows["blocks of 32, 90%"]
    assert gradual["bits_before"] == at_once["bits_before"] and gradual["bits_after"] != at_once["bits_after"]


@pytest.fixture(scope="module")
def calibrated():
    return losses.Calibrated(CUT)


def test_a_cut_says_what_it_costs_and_what_a_step_takes(calibrated, monkeypatch):
    monkeypatch.setattr(losses, "CUT_SPARSITIES", (0.9,))
    steps = losses.thresholds(config=CUT)["thresholds"]
    assert len(steps) == 4 and all(isinstance(layer.mlp.act_fn, nn.SiLU) for layer in calibrated.model.layers)
    for method, path in losses.PATHS.items():
        made = losses.cut_rows(calibrated, method, 0.9)
        paths = ["dense eager", "thresholds, dense", f"thresholds, forced {path}"]
        assert [row["path"] for row in made] == paths and [row["tokens"] for row in made] == [1] * 3
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


def test_a_path_that_computes_something_else_is_not_timed(calibrated, monkeypatch):
    def broken(*given):
        model = sparsify(*given)
        feed_forwards(model)[0].down.weight.data *= 100
        return model

    monkeypatch.setattr(losses, "sparsify", broken)
    monkeypatch.setattr(losses.rows, "measured", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match="forced kept_inputs: a layer: off by"):
        losses.cut_rows(calibrated, "teal", 0.9)
