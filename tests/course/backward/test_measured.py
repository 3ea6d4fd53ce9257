"""Recorded training steps as notebook 11 reads them: each kind of one record, by path, and what is said if there are none."""

import pytest
import torch

from tests.course.recorded_rows import record
from twell_lab.bench import training
from twell_lab.course.backward import measured
from twell_lab.course.roofline.data import LOGNORMAL
from twell_lab.ops import clock as clocks

WHERE = "recorded on NVIDIA H100 80GB HBM3, 2026-11-21"


def row(path: str, ms: float, nnz: float = 29.02, workload: str = LOGNORMAL, **more) -> dict:
    return {
        "kind": "training",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "tokens": 16384,
        "d_model": 2048,
        "d_ff": 5632,
        "gated": True,
        "nnz": nnz,
        "workload": workload,
        "path": path,
        "ms": ms,
        "spread": 0.01,
        "dense_ms": 6.0,
        "x_dense": 6.0 / ms,
        "x_compiled": 5.4 / ms,
        **more,
    }


def compared(nnz: float = 29.02, workload: str = LOGNORMAL, ms: float = 3.0, choice: str = "twell") -> list[dict]:
    return [
        row("dense eager", 6.0, nnz, workload, peak_bytes=1012 * 2**20),
        row("dense compiled", 5.4, nnz, workload),
        row("forced twell", ms, nnz, workload, peak_bytes=390 * 2**20),
        row("planned", ms, nnz, workload, choice=choice),
        row("planned compiled", 2.7, nnz, workload, choice=choice),
    ]


@pytest.fixture
def stored(keep):
    """A function that makes these lists of rows the records, oldest first."""

    def store(*each: tuple[str, list[dict]], kernels: tuple[str, ...] = ()) -> None:
        keep(
            *(record(name, f"2026-11-{20 + day}T00:00:00Z", rows, kernels) for day, (name, rows) in enumerate(each, 1))
        )

    return store


def placed(rows: list[dict]) -> list[dict]:
    return [each | {"where": WHERE} for each in rows]


def test_each_kind_is_of_one_record_the_newest_that_timed_most_of_it(stored):
    layer = "trained, L1 0.0001, layer 0"
    stored(
        ("training", compared(ms=4.0) + compared(8.01, ms=2.0)),
        ("training", compared(ms=3.0) + compared(8.01, ms=1.5) + compared(60.0, layer)),
        ("training", compared(ms=2.5) + compared(60.0, layer, ms=2.9)),
        ("inference", compared(60.0) + compared(90.0) + compared(120.0)),
    )
    rows = measured.recorded()
    told = [(each["workload"], each["ms"], each["where"][-10:]) for each in rows if each["path"] == "forced twell"]
    # Of a few neurons that fire often the second record timed two steps, the third one.
    assert told == [(LOGNORMAL, 3.0, "2026-11-22"), (LOGNORMAL, 1.5, "2026-11-22"), (layer, 2.9, "2026-11-23")]
    assert not measured.recorded("RTX")


SIZES = {"dense": {"x": 3 * 2**20}, "sparse": {"x": 2**20}}


def test_without_a_record_everything_says_so(stored):
    stored()
    rows = measured.recorded()
    assert rows == [] and measured.steps(rows) == [] and measured.series(rows) == {} and measured.wholes(rows) == []
    assert measured.three_lines(rows, SIZES) == [measured.MISSING, "Kept: 3 MiB dense, 1 sparse."]
    assert measured.COMMAND in measured.MISSING


def test_your_own_steps_are_checked_and_come_as_rows(my_gpu):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    times = {"dense eager": [6.0, 6.0], "forced twell": [3.0, 3.0]}
    rows = measured.step_rows(layer, inputs, 8, lambda calls: times, lambda call: len(call(0)) * 2**20)
    assert [(each["path"], each["nnz"], each["x_dense"]) for each in rows] == [
        ("dense eager", 8, 1.0),
        ("forced twell", 8, 2.0),
    ]
    assert rows[0]["where"] == "yours, now, on My GPU" and rows[0]["peak_bytes"] == 5 * 2**20
    assert (rows[0]["tokens"], rows[0]["d_model"], rows[0]["d_ff"]) == (32, 64, 256)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    dense = training.dense_layer
    monkeypatch.setattr(training, "our_layer", lambda path: lambda x, gate, up, down: dense(x, gate, up, 2 * down))
    layer, inputs = clocks.workload(32, 64, 256, 8, "lognormal", torch.bfloat16, "cpu")
    with pytest.raises(clocks.WrongResult, match="a gradient is off by"):
        measured.step_rows(layer, inputs, 8, clock=lambda calls: pytest.fail("it was timed"))
