"""What `twell-lab record thresholds` does, at a small size: layers and logits compared, and timed, through the kernels."""

import pytest
import torch

from twell_lab.bench import cut_checks, thresholds
from twell_lab.models.tiny import ModelConfig

pytestmark = pytest.mark.gpu
SMALL = thresholds.Shape(
    ModelConfig(d_model=512, layers=2, heads=8, d_ff=2048, context=64),
    batch=16,
    steps=100,
    lr=1e-3,
    sparsities=(0.5, 0.9),
    held_out=40,
    cached=32,
    batches=(1, 4),
)


def test_every_step_of_the_record_of_thresholds():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"kept_inputs needs sm_80; this is {torch.cuda.get_device_name()}")
    refused = {}
    made = [row for step in thresholds.sections(refused, SMALL)["thresholds"] for row in step()]
    assert not refused
    for path in thresholds.SPARSE.values():
        rows = [row for row in made if row["path"] == path]
        assert [row["tokens"] for row in rows] == [1, 4] * len(SMALL.sparsities)
        for row in rows:
            assert row["layer_over_allowed"] <= 1 and row["error_over_allowed"] <= 1
            assert row["compared_tokens"] >= cut_checks.LEAST
            if row["tokens"] == 1:  # through a kernel, which adds in another order than torch
                assert row["layer_over_allowed"] > 0
