"""The record of pruning: a tiny model pruned in each way and trained on."""

import pytest
import torch

from twell_lab.bench import losses
from twell_lab.records import Record
from twell_lab.training.config import TrainConfig

SIZES = {"d_model": 32, "layers": 1, "heads": 2, "d_ff": 64, "context": 32, "batch": 4}
TINY = TrainConfig(**SIZES, steps=30, lr=3e-3, warmup=2, eval_windows=8, device="cpu")
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
        assert (
            row["kind"] == "pruning" and row["ms"] > 0 and len(row["samples"]) == row["steps"] == 9 and row["seed"] == 0
        )
        assert 0 < row["bits_after"] < 9
        if "%" in name:
            assert row["sparsity"] == pytest.approx(WAYS[name].sparsity, abs=0.11)  # blocks are few here
            assert row["bits_before"] != dense["bits_before"]
    assert rows["magnitude, 90%"]["bits_before"] > rows["magnitude, 50%"]["bits_before"]
    assert rows["2:4"]["sparsity"] == 0.5
    assert 0 <= rows["proximal L1, 1"]["sparsity"] < rows["proximal L1, 4"]["sparsity"] < 1
    gradual, at_once = rows["blocks of 32, 90%, gradually"], rows["blocks of 32, 90%"]
    assert gradual["bits_before"] == at_once["bits_before"] and gradual["bits_after"] != at_once["bits_after"]
