"""The record of thresholds: a SiLU model trained and cut on this CPU."""

import math

import pytest
from torch import nn

from twell_lab.bench import cut_checks, thresholds
from twell_lab.models.tiny import ModelConfig
from twell_lab.ops import clock

TINY = thresholds.Shape(
    ModelConfig(d_model=32, layers=2, heads=2, d_ff=300, context=32),
    batch=8,
    steps=60,
    lr=3e-3,
    sparsities=(0.5, 0.9),
    held_out=40,
    cached=16,
    batches=(1, 3),
    device="cpu",
)


@pytest.fixture(scope="module")
def trained():
    return thresholds.Trained(TINY)


def test_the_model_is_trained_with_silu_on_bytes(trained):
    found, cost = trained.cut(0.5)
    assert cost.dense < 0.8 * math.log(256) and cost.windows == 40
    assert all(isinstance(layer.mlp.act_fn, nn.SiLU) for layer in trained.model.layers)
    assert not trained.model.training and not any(each.requires_grad for each in trained.model.parameters())
    assert [layer.density["activation"] for layer in found.layers] == pytest.approx([0.5, 0.5], abs=0.05)


@pytest.mark.parametrize("method, path", [("cats", "twell"), ("teal", "kept_inputs")])
def test_rows_say_what_a_cut_costs_and_what_a_step_takes(trained, method, path):
    made = thresholds.cut_rows(trained, 0.9, method)
    paths = ["dense eager", "thresholds, dense", f"thresholds, forced {path}"]
    assert [row["path"] for row in made] == 2 * paths and [row["tokens"] for row in made] == [1] * 3 + [3] * 3
    for row in made:
        assert row["kind"] == "thresholds" and row["ms"] > 0 and row["dense_ms"] > 0 and row["cached"] == 16
        assert row["workload"].startswith(
            f"{method.upper()} 90%, decode step, batch {row['tokens']}, SiLU trained on Python"
        )
        assert row["nnz"] == pytest.approx(30, rel=0.3)
        low, change, high = row.get("loss_change", (0, 0, 0))
        assert ("loss_change" in row) == (row["path"] != "dense eager") and low <= change <= high
        assert row.get("loss", 0) == pytest.approx(row.get("dense_loss", 0) + change, abs=2e-5)
    for row in made[2::3]:
        assert 0 <= row["layer_over_allowed"] <= 1 and 0 < row["error_over_allowed"] <= 1
        assert row["compared_tokens"] >= cut_checks.LEAST


def broken(model, *plan, **how):
    model.layers[0].mlp.down_proj.weight.data *= 100
    return model


def test_a_path_that_computes_something_else_is_not_timed(trained, monkeypatch):
    monkeypatch.setattr(thresholds, "sparsify", broken)
    monkeypatch.setattr(thresholds, "_timed", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(clock.WrongResult, match=r"CATS 50%, decode step, batch 1: layers.0.mlp is off by .* times"):
        thresholds.cut_rows(trained, 0.5)


def test_it_costs_the_record_no_other_row(trained, monkeypatch):
    monkeypatch.setattr(thresholds, "sparsify", broken)
    refused = {}
    made = thresholds.cut_rows(trained, 0.5, "teal", refused)
    assert [row["path"] for row in made] == 2 * ["dense eager", "thresholds, dense"]
    assert [*refused] == [f"TEAL 50%, decode step, batch {batch}, thresholds, forced kept_inputs" for batch in (1, 3)]
    assert all("layers.0.mlp is off by" in why for why in refused.values())
