"""Recordings that need transformers' engine of continuous batching and its Trainer, on models small enough for a CPU."""

import pytest

from twell_lab.bench import decoding, fine_tuning
from twell_lab.models.tiny import ModelConfig

pytest.importorskip("accelerate")
SIZES = ModelConfig(d_model=64, layers=2, heads=2, d_ff=256, context=64)


def test_a_server_answers_all_requests_dense_and_planned(monkeypatch):
    """In float32 all answers begin with the dense model's token, and no request waits less than nothing."""
    for name, value in (("REQUESTS", 5), ("ROUNDS", 2), ("PROMPT", 16), ("ANSWER", 8), ("BLOCKS", 16)):
        monkeypatch.setattr(decoding, name, value)
    dense, planned = decoding.serving(size=SIZES)["serving"][1]()
    assert (dense["path"], planned["path"]) == ("dense", "planned") and planned["same"] == 1.0
    for row in (dense, planned):
        assert row["requests"] == 5 and 0 < row["p50_s"] <= row["p99_s"]
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms"])


def test_the_recipe_makes_a_relu_model_that_learns_and_falls_silent():
    recipe = fine_tuning.Recipe(
        SIZES, batch=4, steps=(40, 40), rates=(2e-3, 1e-3), l1=3e-3, warmup=10, new=8, held_out=16
    )
    control, sparse = fine_tuning.tuned_rows(recipe)
    assert (control["path"], sparse["path"]) == (fine_tuning.CONTROL, fine_tuning.SPARSE)
    assert max(control["loss"], sparse["loss"]) < control["loss_before"] == sparse["loss_before"]
    assert sparse["density"] < 0.45 and sparse["logged"][0]["density"] > 0.45  # half of them fire at first
