"""The record of a SiLU model that is cut, trained on this CPU."""

import math

import pytest
from torch import nn

from twell_lab.bench import losses
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.ops import clock
from twell_lab.training.config import TrainConfig

SIZES = {"d_model": 32, "layers": 2, "heads": 2, "context": 32, "device": "cpu"}
TINY = TrainConfig(**SIZES, d_ff=300, batch=8, steps=60, lr=3e-3, eval_windows=40)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(losses, "CUT_SPARSITIES", (0.9,))


@pytest.fixture(scope="module")
def trained():
    return losses.Calibrated(TINY)


def test_a_cut_says_what_it_costs_and_what_a_step_takes(trained):
    steps = losses.thresholds(config=TINY)["thresholds"]
    assert len(steps) == 4 and all(isinstance(layer.mlp.act_fn, nn.SiLU) for layer in trained.model.layers)
    for method, path in losses.PATHS.items():
        made = losses.cut_rows(trained, method, 0.9)
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


def test_a_path_that_computes_something_else_is_not_timed(trained, monkeypatch):
    def broken(*given):
        model = sparsify(*given)
        feed_forwards(model)[0].down.weight.data *= 100
        return model

    monkeypatch.setattr(losses, "sparsify", broken)
    monkeypatch.setattr(losses.rows, "measured", lambda *_, **__: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match="forced kept_inputs: a layer: off by"):
        losses.cut_rows(trained, "teal", 0.9)
