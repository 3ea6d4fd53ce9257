"""Whole trainings that are timed: small ones, by one process and by two, on a CPU."""

import pytest

from twell_lab.bench import runs
from twell_lab.bench.runs import How
from twell_lab.core import InputError
from twell_lab.records import Record

TINY = {
    "steps": 16,
    "batch": 4,
    "context": 16,
    "d_model": 16,
    "layers": 2,
    "heads": 2,
    "d_ff": 32,
    "log_every": 2,
    "eval_every": 16,
    "eval_windows": 4,
    "l1": 0.01,
    "compile": False,
    "tokenizer": None,
}


@pytest.fixture(scope="module")
def rows():
    return runs.rows(TINY, (How(1, "ddp", "off"), How(2, "fsdp", "off"), How(2, "fsdp", "sparse")), device="cpu")


def test_a_row_for_each_way_beside_the_dense_run_of_its_kind(rows):
    assert [row["path"] for row in rows] == ["1 GPU, dense", "2 GPUs, fsdp, dense", "2 GPUs, fsdp, sparse"]
    assert rows[0]["x_dense"] == rows[1]["x_dense"] == 1 and rows[2]["x_dense"] == pytest.approx(
        rows[1]["ms"] / rows[2]["ms"]
    )
    assert Record.new("two-gpus", "as it is kept", rows).rows == rows


def test_they_train_the_same(rows):
    for row in rows[1:]:
        assert row["ce"] == pytest.approx(rows[0]["ce"], rel=1e-3) and row["nnz"] == pytest.approx(
            rows[0]["nnz"], rel=1e-2
        )


def test_what_a_run_says_that_fails():
    with pytest.raises(runs.RunFailed, match="(?s)^1 GPU, dense: exit status 1\n.*training diverged"):
        runs.rows({**TINY, "lr": 1e30, "warmup": 1}, (How(1, "ddp", "off"),), device="cpu")


def test_a_way_without_its_dense_run_is_refused_before_it_is_trained():
    with pytest.raises(InputError, match="hows has '2 GPUs, fsdp, sparse' without the dense run beside it"):
        runs.rows(TINY, (How(2, "ddp", "off"), How(2, "fsdp", "sparse")), device="cpu")
