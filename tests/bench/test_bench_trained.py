"""The record of a trained model and its dense twin, tiny and on the CPU; whole trainings by one process and by two; and
what a profile takes."""

import math
import subprocess
from dataclasses import replace

import pytest

from twell_lab.app import recordings, tables
from twell_lab.bench import whole
from twell_lab.core import TwellError
from twell_lab.models.tiny import ModelConfig
from twell_lab.records import Record

SIZES = {"d_model": 32, "d_ff": 300, "context": 32, "batch": 8, "steps": 60, "log_every": 3, "eval_every": 60}
TINY = replace(whole.SMALL, **SIZES, eval_windows=16)
PATHS = ["dense eager", "planned", "forced twell"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "SMALL", TINY)
        patch.setattr(whole, "SECONDS", 0.0)
        patch.setattr("torch.cuda.is_available", lambda: False)
        return recordings.make("trained", tmp_path_factory.mktemp("trained"), seconds=1000.0)[0]


def test_both_are_trained_alike_but_for_l1(record):
    sparse, twin = (row for row in record.rows if row["kind"] == whole.RUN)
    for row in (sparse, twin):
        history = row["history"]
        assert row["steps"] == 60 == history["step"][-1] and row["tokens"] == 256 and row["read"] == 60 * 256
        assert len(history["ms"]) == len(history["nnz_layers"]) == len(history["ce"]) == 21 and min(history["ms"]) > 0
        assert history["ce"][-1] < history["ce"][0] and row["ms"] > 0 and row["total_seconds"] >= row["seconds"] - 0.1
        late = [nnz for step, nnz in zip(history["step"], history["nnz"]) if step > 48]
        first, last = (sum(some) / 3 for some in (late[:3], late[-3:]))
        assert row["nnz_moved"] == pytest.approx(last / first - 1, abs=0.03)
        assert len(row["firing"]) == 2
    assert (sparse["config"]["l1"], sparse["config"]["kernels"]) == (TINY.l1, "auto")
    same = {"l1": 0, "kernels": "off"}
    assert sparse["config"] | same == twin["config"]
    assert sparse["mean_nnz"] < twin["mean_nnz"] and sparse["history"]["ce"][0] == twin["history"]["ce"][0]


def test_its_own_firing_is_timed_beside_the_twin(record):
    rows = [row for row in record.rows if row["kind"] != whole.RUN]
    sparse = [f"trained with L1, {work}" for work in ("decode step, batch 1", "decode step, batch 16")]
    sparse += [f"trained with L1, {count} x 32 tokens" for count in (2, 8)]
    assert [(row["workload"], row["path"]) for row in rows] == [
        *((work, path) for work in sparse for path in PATHS),
        *(("trained with L1, training step, 8 x 32 tokens", path) for path in ("dense eager", "planned")),
        *((f"dense twin, {work}", path) for work in ("8 x 32 tokens", "decode step, batch 16") for path in PATHS[:2]),
    ]
    assert all(row["error_over_allowed"] <= 1 for row in rows if "error_over_allowed" in row)
    assert all(row["choice"] == "2 twell" for row in rows if row["path"] == "forced twell")
    losses = {row["path"]: row["loss"] for row in rows if row["workload"] == sparse[-1]}
    assert losses["forced twell"] == pytest.approx(losses["dense eager"], abs=1e-5) and losses["dense eager"] > 0
    bits = record.rows[0]["validation_bits_per_byte"]
    assert losses["dense eager"] / math.log(2) == pytest.approx(bits, rel=0.2)  # other parts of the same text


def test_the_tables(record):
    lines = tables.trained([record]).splitlines()
    assert lines[0].endswith("| with L1 | dense twin |") and lines[2] == "| steps of 256 tokens | 60 | 60 |"
    speed = tables.trained_speed([record]).splitlines()
    assert speed[0].endswith("| dense | planned | every layer on TwELL | dense twin | dense twin, planned |")
    assert len(speed) == 2 + 5 + 2 and sum("loss, nats" in line for line in speed) == 2
    for table in (tables.trained, tables.trained_speed):
        assert "nothing is recorded yet" in table([]) and table([replace(record, rows=[])]) == table([])


def test_the_twin_is_left_out_where_time_is_short(monkeypatch):
    asked = []
    monkeypatch.setattr(whole, "run_rows", lambda name, config, models: asked.append(name) or [])
    rest = whole.trained({}, TINY)[whole.TWIN]
    assert [row for step in rest for row in step()] == [] and not asked


# ---- trainings by several processes ----

RUN = {"steps": 16, "batch": 4, "context": 16, "d_model": 16, "layers": 2, "heads": 2, "d_ff": 32, "l1": 0.01}
RUN |= {"log_every": 2, "eval_every": 16, "eval_windows": 4, "compile": False, "tokenizer": None}


def test_two_processes_train_and_stand_beside_their_dense_run():
    rows = whole.training_runs(RUN, ((2, "fsdp"),), "sparse", device="cpu")
    assert [row["path"] for row in rows] == ["2 GPUs, fsdp, dense", "2 GPUs, fsdp, sparse"]
    dense, sparse = rows
    assert dense["x_dense"] == 1 and sparse["x_dense"] == pytest.approx(dense["ms"] / sparse["ms"])
    assert sparse["ce"] == pytest.approx(dense["ce"], rel=1e-3)
    assert sparse["nnz"] == pytest.approx(dense["nnz"], rel=1e-2)
    assert Record.new("two-gpus", "as it is kept", rows).rows == rows


def test_a_run_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "training", " diverged")
    monkeypatch.setattr(whole.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(TwellError, match="(?s)^1 GPU, dense: exit status 1\n.*training diverged"):
        whole.training_runs(RUN, ((1, "ddp"),), device="cpu")


def test_a_profile_is_timed_beside_a_plain_forward():
    sizes = ModelConfig(d_model=32, layers=2, heads=2, d_ff=64, context=32)
    plain, counted = whole.profiling_rows(sizes, sequences=4)
    assert (plain["path"], counted["path"]) == ("plain forward", "profile") and plain["x_dense"] == 1
    assert plain["tokens"] == 2 * 4 * 32 and 16 < counted["nnz"] < 48 and "random weights" in plain["workload"]
