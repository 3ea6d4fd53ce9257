"""The record of adapters and dropout: rows of tiny models."""

import torch

from twell_lab.bench import experiments
from twell_lab.models.tiny import ModelConfig
from twell_lab.records import Record
from twell_lab.training.config import TrainConfig

MODEL = ModelConfig(d_model=16, layers=1, heads=2, d_ff=32, context=8)
TINY = TrainConfig(d_model=16, layers=1, heads=2, d_ff=32, context=16, batch=2, steps=3, device="cpu")


def test_rows(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        experiments.rows,
        "clocked",
        lambda calls, *_, **__: (dict.fromkeys(calls, [1.0]), dict.fromkeys(calls, ([1.0], [1.0]))),
    )
    made = [row for steps in experiments.sections({}, MODEL, TINY).values() for step in steps for row in step()]
    Record.new("experiments", "a test's own", made)
    switched, fused = made[:2]
    assert (switched["path"], fused["path"]) == (experiments.SWITCH, experiments.FUSE)
    assert switched["kind"] == "adapters" and switched["worst_error"] == 0 < fused["worst_error"]  # a LoRA's rounding
    assert switched["written_bytes"] < 0.03 * fused["written_bytes"]
    trained = made[4:]
    assert experiments.dropout_rows(TINY, 1) == trained[3:]
    assert all(0 < row["bits_per_byte"] < 9 for row in trained)
    assert [(row["dropout"], row["seed"]) for row in trained] == [
        (kind, seed) for seed in (0, 1) for kind in ("none", "Bernoulli 1/2", "2:4")
    ]
