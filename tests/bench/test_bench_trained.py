"""The record of a trained model and its dense twin, tiny and on the CPU."""

import math
import time
from dataclasses import replace

import pytest

from twell_lab.app import recordings, tables
from twell_lab.bench import trained
from twell_lab.ops import clock

BASE = trained.small()
CONFIG = replace(BASE.config, d_model=32, d_ff=300, context=32, batch=8, steps=60, log_every=3, eval_every=60)
TINY = replace(
    BASE,
    config=replace(CONFIG, eval_windows=16),
    forwards=(2, 4),
    batches=(1, 3),
    cached=16,
    windows=16,
    together=8,
    questions=(60, 20, 8),
    seconds=0.0,
    reserve=0.0,
)
PATHS = ["dense eager", "planned", "forced twell"]


@pytest.fixture(scope="module")
def record():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "small", lambda: TINY)
        patch.setattr("torch.cuda.is_available", lambda: False)
        return recordings.make("trained", seconds=100.0)


def of(record, *kinds):
    return [row for row in record.rows if row["kind"] in kinds]


def test_both_are_trained_alike_but_for_l1(record):
    sparse, twin = of(record, trained.RUN)
    for row in (sparse, twin):
        history = row["history"]
        assert row["steps"] == 60 == history["step"][-1] and row["tokens"] == 256 and row["read"] == 60 * 256
        assert len(history["ms"]) == len(history["nnz_layers"]) == len(history["ce"]) == 21 and min(history["ms"]) > 0
        assert history["ce"][-1] < history["ce"][0] and row["ms"] > 0 and row["total_seconds"] >= row["seconds"] - 0.1
        late = [nnz for step, nnz in zip(history["step"], history["nnz"]) if step > 48]
        assert row["nnz_last"] == [min(late), max(late)] and row["settled"] == (abs(row["nnz_moved"]) < 0.05)
        first, last = (sum(some) / 3 for some in (late[:3], late[-3:]))
        assert row["nnz_moved"] == pytest.approx(last / first - 1, abs=0.03) and "cut" not in row
        assert len(row["firing"]) == 2 and len(row["positions"]["nnz"]) == 2
    assert (sparse["config"]["l1"], sparse["config"]["kernels"]) == (TINY.config.l1, "auto")
    assert (twin["config"]["l1"], twin["config"]["kernels"]) == (0.0, "off")
    same = {"l1": 0, "kernels": 0}
    assert sparse["config"] | same == twin["config"] | same
    assert sparse["mean_nnz"] < twin["mean_nnz"] and sparse["history"]["ce"][0] == twin["history"]["ce"][0]


def test_loss_and_answers_before_and_after_swapping(record):
    rows = {row["path"]: row for row in of(record, trained.QUALITY)}
    assert list(rows) == [*PATHS, "dense twin"]
    for path, row in rows.items():
        assert row["questions"] == 60 and row["chance"] == 0.25
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2), abs=1e-5)
        low, change, high = row["loss_change"]
        assert low <= change <= high and row["loss"] - rows["dense eager"]["loss"] == pytest.approx(change, abs=1e-5)
        if path in PATHS:  # float32: the same model
            assert abs(change) < 1e-5 and row["answers_changed"] <= 1 and row["nnz"] == rows["dense eager"]["nnz"]
    runs = of(record, trained.RUN)
    for path, run in (("dense eager", runs[0]), ("dense twin", runs[1])):  # the trainer's own validation
        assert rows[path]["bits_per_byte"] == pytest.approx(run["validation_bits_per_byte"], abs=1e-3)
        assert rows[path]["nnz"] == pytest.approx(run["mean_nnz"], abs=0.02)
    assert rows["dense twin"]["loss_change"][1] != 0 and rows["dense twin"]["nnz"] > rows["dense eager"]["nnz"]


def test_its_own_firing_is_timed_beside_the_twin(record):
    rows = of(record, "model_forward", "model_decode", "model_training")
    found = [(row["workload"], row["path"]) for row in rows]
    sparse = [f"trained with L1, {work}" for work in ("decode step, batch 1", "decode step, batch 3")]
    sparse += [f"trained with L1, {count} x 32 tokens" for count in (2, 4)]
    assert found == [
        *((work, path) for work in sparse for path in PATHS),
        *(("trained with L1, training step, 4 x 32 tokens", path) for path in ("dense eager", "planned")),
        *((f"dense twin, {work}", path) for work in ("4 x 32 tokens", "decode step, batch 3") for path in PATHS[:2]),
    ]
    assert all(row["error_over_allowed"] <= 1 for row in rows if "error_over_allowed" in row)
    assert all(row["choice"] == "2 twell" for row in rows if row["path"] == "forced twell")
    assert all(row["loss"] > 0 for row in rows if row["kind"] == "model_forward")


def test_the_tables(record):
    lines = tables.trained([record]).splitlines()
    assert lines[0].endswith("| with L1 | planned | every layer on TwELL | dense twin |")
    assert lines[2] == "| steps of 256 tokens | 60 |  |  | 60 |" and any(
        "95% interval; by chance 25%" in x for x in lines
    )
    assert len({line.count("|") for line in lines}) == 1
    speed = tables.trained_speed([record]).splitlines()
    assert "dense | planned | every layer on TwELL | dense twin | dense twin, planned" in speed[0]
    assert len(speed) == 2 + 5 and all("x)" in line for line in speed[2:])
    assert len(tables.profiling([record]).splitlines()) == 3
    for table in (tables.trained, tables.trained_speed, tables.profiling):
        assert "nothing is recorded yet" in table([]) and table([replace(record, rows=[])]) == table([])
    (run, *_), short = record.rows, dict(record.rows[1], cut="30 of 60 steps", steps=30)
    assert "| steps of 256 tokens | 60 | 30 (cut short) |" in tables.trained([replace(record, rows=[run, short])])
    energy = [dict(row, mj_per_token=2.5, peak_bytes=2**21) for row in record.rows if "workload" in row]
    assert "| mJ a token | 2.5 | 2.5 |" in tables.trained_speed([replace(record, rows=energy)])


# ---- when time is short, or something fails ----


@pytest.fixture
def begun(monkeypatch):
    """A record after its training with L1, of which nothing was trained: a step took 10 ms, and 5 s came beside."""
    made = trained.Trained(TINY, 100.0)
    history = {"step": [1, *range(10, 61, 10)], "ms": [4000.0] + [10.0] * 6}
    made.run = {"history": history, "total_seconds": 5 + 59 * 0.01}
    asked = []
    monkeypatch.setattr(made, "_trained", lambda *given: asked.append(given) or {"kind": trained.RUN})
    return made, asked


def test_the_twin_is_cut_where_time_is_short_and_says_so(begun):
    made, asked = begun
    made.end = time.perf_counter() + 5 + 30.4 * 0.01 * 1.05
    (row,) = made.train_twin()
    name, path, config = asked[0]
    assert row["cut"] == "30 of 60 steps, for want of time" and row["cut"] in path
    assert (name, config.steps, config.l1, config.kernels) == (trained.TWIN, 30, 0.0, "off")
    made.end = time.perf_counter() + 60
    (row,) = made.train_twin()
    assert "cut" not in row and asked[1][2].steps == 60
    made.end = time.perf_counter() + 1
    with pytest.raises(trained.LeftOut, match="there is time for 0 of 60 steps, and 20 are the least"):
        made.train_twin()


def test_a_section_that_fails_costs_no_other(monkeypatch):
    made = trained.Trained(TINY, 100.0)
    row = {"kind": trained.RUN, "ratio": math.inf, "nested": [{"x": math.nan, "y": 1.0}]}
    monkeypatch.setattr(made, "train", lambda: [])
    monkeypatch.setattr(made, "decode_rows", lambda batch: 1 / 0)
    monkeypatch.setattr(made, "step_rows", lambda: (_ for _ in ()).throw(clock.WrongResult("off by 7")))
    monkeypatch.setattr(made, "twin_rows", lambda: [row])
    rows, notes = recordings.run(made.sections(), 100.0)
    assert rows == [{"kind": trained.RUN, "ratio": None, "nested": [{"x": None, "y": 1.0}]}]
    assert notes["left_out"]["decode"] == "2 of 2 steps: LeftOut: ZeroDivisionError: division by zero"
    assert notes["left_out"]["training step"] == "1 of 1 steps: LeftOut: WrongResult: off by 7"
    for name in ("loss and answers", "forward"):
        assert "it was not trained" in notes["left_out"][name]
