"""What the notebook on kernels computes: workloads, faults, recorded times and predictions."""

import pytest
import torch

from tests.course import recorded_rows
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.course.first_kernels import data as kernels
from twell_lab.records import Record
from twell_lab.simulator.counts import Counts, Footprint, Traffic

needs_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@needs_compiler
def test_a_layer_runs_both_kernels():
    layer = kernels.Layer(2, d_model=64, d_ff=512, nnz=6)
    assert layer.off_by(layer.gated(1)) < 0.01 < layer.off_by(2 * layer.gated(1))


@needs_compiler
def test_a_fault_is_given_back_and_other_errors_are_not_swallowed(tmp_path):
    file = tmp_path / "k.cu"
    file.write_text('extern "C" __global__ void k(float* a, int n) { a[n] = 1.0f; }')
    program = simulator.compile(file)
    assert kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3), 2))) is None
    fault = kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3), 3)))
    assert type(fault).__name__ == "OutOfBounds" and fault.array == "a"
    with pytest.raises(InputError):
        kernels.fault_of(lambda: program.launch("k", 1, 1, (torch.zeros(3),)))


def record(device: str, ms: float, date: str) -> Record:
    row = {"kind": "kernel", "device": device, "tokens": 64, "path": "pack_v1", "ms": ms}
    return recorded_rows.record("portable", date, [row, {**row, "tokens": 1}, {"test": "no measurement"}])


def test_recorded_times_are_the_newest_of_the_wanted_gpu(keep):
    keep(
        record("NVIDIA H100", 2.0, "2026-01-01T00:00:00Z"),
        record("NVIDIA H100", 1.0, "2026-01-02T00:00:00Z"),
        record("NVIDIA T4", 9.0, "2026-01-03T00:00:00Z"),
    )
    times = kernels.recorded(64)
    assert list(times) == ["pack_v1"] and times["pack_v1"]["ms"] == 1.0 and "2026-01-02" in times["pack_v1"]["where"]
    assert kernels.recorded(64, device="T4")["pack_v1"]["ms"] == 9.0 and kernels.recorded(65) == {}


def counted(lines: int, requests: int = 1000, unique: int = 300) -> Counts:
    return Counts(
        global_reads=Traffic(requests=requests, bytes=64 * requests, sectors=2 * requests, lines=lines),
        footprints={"gate": Footprint(unique, 0)},
    )


def test_predictions_stand_beside_the_times():
    counts = {"pack_v1": counted(lines=10**6), "pack_v2": counted(lines=10), "pack_v3": counted(lines=10)}
    slow = 1e3 * simulator.predicted_time(counts["pack_v1"]).seconds
    fast = 1e3 * simulator.predicted_time(counts["pack_v2"]).seconds
    times = {"pack_v1": {"ms": 1.1 * slow, "where": "recorded"}, "pack_v2": {"ms": 3 * fast, "where": "recorded"}}
    rows = kernels.against_time(counts, times, {"pack_v1": {"ms": 7.0, "where": "yours, now"}})
    assert [row["measured_ms"] for row in rows] == [1.1 * slow, 3 * fast, None]
    assert [row["yours_ms"] for row in rows] == [7.0, None, None] and rows[0]["yours"] == "yours, now"
    assert [row["ratio"] for row in rows] == [pytest.approx(1.1), pytest.approx(3.0), None]
