"""The record of pruning: a tiny model pruned in each way and trained on."""

import pytest
import torch

from twell_lab.bench import losses
from twell_lab.records import Record
from twell_lab.sparsities.blocks import empty_share
from twell_lab.sparsities.two_four import is_two_four
from twell_lab.sparsities.weights import SparseLinear
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


@pytest.mark.parametrize("name", ["2:4", "blocks of 16, 50%", "blocks of 32, 90%, gradually", "proximal L1, 4"])
def test_the_zeros_are_where_the_way_has_them_and_stay(name, trained, monkeypatch):
    kept = []
    monkeypatch.setattr(trained, "bits", lambda model: kept.append(model) or 1.0)
    losses.way_rows(trained, WAYS[name])
    model = kept[-1]  # the last one that is measured, trained on
    weights = {each: module.weight for each, module in model.named_modules() if isinstance(module, SparseLinear)}
    assert len(weights) == 5 and isinstance(model.head, torch.nn.Linear)
    for weight in weights.values():
        if name == "2:4":
            assert is_two_four(weight)
        elif "16" in name:
            assert empty_share(weight, 16) == 0.5
        elif "32" in name:
            assert empty_share(weight, 32) > 0.4 or weight.shape == (32, 32)
        else:
            assert (weight == 0).any()
