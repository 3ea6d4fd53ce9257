"""The record of pruning: a tiny model pruned in each way and trained on."""

from dataclasses import replace

import pytest
import torch

from twell_lab.app import tables
from twell_lab.bench import pruning
from twell_lab.core import InputError
from twell_lab.records import Record
from twell_lab.sparsities.blocks import empty_share
from twell_lab.sparsities.two_four import is_two_four
from twell_lab.sparsities.weights import SparseLinear
from twell_lab.training.config import TrainConfig

TINY = pruning.Shape(
    TrainConfig(d_model=32, layers=1, heads=2, d_ff=64, context=32, batch=4, steps=12, lr=3e-3, warmup=2, device="cpu"),
    steps=9,
    windows=8,
)
WAYS = {way.name: way for way in pruning.WAYS}


@pytest.fixture(scope="module")
def trained():
    return pruning.Trained(TINY, 0)


@pytest.fixture(scope="module")
def rows(trained):
    first = {name: value.clone() for name, value in trained.model.state_dict().items()}
    made = [row for way in TINY.ways for row in pruning.way_rows(trained, way)]
    assert all(torch.equal(value, first[name]) for name, value in trained.model.state_dict().items())
    return {row["path"]: row for row in made}


def test_a_row_says_what_was_pruned_and_what_it_cost(rows, trained):
    assert list(rows) == [way.name for way in pruning.WAYS]
    Record.new("pruning", "a test's own", [*rows.values()])
    dense = rows["dense"]
    assert dense["sparsity"] == 0 and dense["bits_before"] == dense["dense_bits"] != dense["bits_after"]
    for name, row in rows.items():
        assert row["kind"] == "pruning" and row["ms"] > 0 and len(row["samples"]) == TINY.steps and row["seed"] == 0
        assert row["dense_bits"] == dense["dense_bits"] and 0 < row["bits_after"] < 9
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
    pruning.way_rows(trained, WAYS[name])
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


def test_the_same_seed_gives_the_same_row(trained, rows):
    (again,) = pruning.way_rows(trained, WAYS["2:4"])
    timed = ("ms", "spread", "samples")
    assert {k: v for k, v in again.items() if k not in timed} == {
        k: v for k, v in rows["2:4"].items() if k not in timed
    }


def test_a_step_for_each_seed_and_way_and_one_training_a_seed(monkeypatch):
    made = []
    monkeypatch.setattr(pruning, "Trained", lambda shape, seed: made.append(seed) or seed)
    monkeypatch.setattr(pruning, "way_rows", lambda trained, way: [(trained, way.name)])
    found = pruning.sections(replace(TINY, seeds=(3, 4), ways=pruning.WAYS[:2]))
    assert not made
    assert [step() for steps in found.values() for step in steps] == [
        [(3, "dense")],
        [(3, "magnitude, 50%")],
        [(4, "dense")],
        [(4, "magnitude, 50%")],
    ]
    assert made == [3, 4] and [*found] == ["seed 3", "seed 4"]


def test_bad_input_is_named():
    with pytest.raises(InputError, match="steps is 2; a whole number from 3"):
        replace(TINY, steps=2)
    with pytest.raises(InputError, match="how is 'random'"):
        pruning.Way("x", "random")


def test_the_table_is_made_of_the_newest_record():
    def record(day, more):
        rows = [
            {"kind": "pruning", "device": "CPU", "path": path, "ms": 1.0, "seed": seed, "sparsity": zeros}
            | {"bits_before": 2.0 + zeros + more, "bits_after": 2.0 + zeros / 2 + seed / 10}
            for seed in (0, 1)
            for path, zeros in (("dense", 0.0), ("2:4", 0.5))
        ]
        return Record("pruning", "a test's own", rows, f"2026-01-0{day}T00:00:00Z", None, None, {}, kernels={})

    assert tables.pruning([record(1, 3.0), record(2, 1.0)]).splitlines() == [
        "| bits a byte, CPU, 2026-01-02, seeds 0 and 1 | zeros | pruned | and trained on | more than dense |",
        "| --- | --- | --- | --- | --- |",
        "| dense | 0% | 3.000, 3.000 | 2.000, 2.100 | +0.000, +0.000 |",
        "| 2:4 | 50% | 3.500, 3.500 | 2.250, 2.350 | +0.250, +0.250 |",
    ]
    assert "nothing is recorded yet" in tables.pruning([])
