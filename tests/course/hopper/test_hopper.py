"""What notebook 09 reads from its record: on small rows made for these tests, which are no measurements."""

import pytest
import torch

from tests.course.recorded_rows import compared, everything, gates, record, row
from twell_lab.analysis.planner import plan
from twell_lab.analysis.profile import profile
from twell_lab.course.hopper import data as hopper
from twell_lab.ops import clock as clocks


def test_all_rows_are_of_the_newest_record_that_times_the_gate(keep):
    rows = [row(nnz=29.0, ms=3.0), *gates()]
    old = record("inference", "2026-01-01T00:00:00Z", rows)
    new = record(
        "inference", "2026-01-02T00:00:00Z", [row(ms=1.0), *gates(0.4), row(device="NVIDIA T4"), {"test": "none"}]
    )
    keep(
        old,
        new,
        record("inference", "2026-01-03T00:00:00Z", [row(ms=9.0)]),
        record("portable", "2026-01-04T00:00:00Z", rows),
    )
    found = hopper.recorded()
    assert len(found) == 7 and found[0]["ms"] == 1.0 and min(each["ms"] for each in found) == 0.4
    assert {each["where"] for each in found} == {"recorded on NVIDIA H100, 2026-01-02; stale: code has changed since"}
    assert hopper.recorded("A100") == []
    keep(record("inference", "2026-01-02T00:00:00Z", rows, kernels=()))
    assert hopper.recorded()[0]["where"] == "recorded on NVIDIA H100, 2026-01-02"


def test_what_a_gpu_measures_has_the_form_of_the_record(my_gpu):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = clocks.workload(4, 32, 512, 8, "lognormal", torch.float32, "cpu")
    planned = plan(profile(layer, inputs[:1]), layer, tokens=4, batches=inputs[1:2])
    clock = lambda calls: {name: [4.0, 4.0] if name == "dense eager" else [2.0, 2.0] for name in calls}  # noqa: E731
    rows = hopper.layer_rows(layer, inputs, planned, 8, clock)
    assert [each["path"] for each in rows] == ["dense eager", "planned", "forced dense", "forced twell"]
    assert [each["x_dense"] for each in rows] == [1, 2, 2, 2] and "choice" in rows[1] and "choice" not in rows[2]
    assert rows[0]["where"] == "yours, now, on My GPU" and (rows[0]["tokens"], rows[0]["d_ff"]) == (4, 512)
    assert [each.get("fuses") for each in rows] == [None, None, False, None]  # a CPU, as a T4, has no such kernels


def test_what_fusing_gives_is_apart_from_what_sparsity_adds():
    first, second = hopper.parts([*compared(29.0), *compared(8.0, twell=0.5), *compared(8.0, tokens=64)])
    assert (first["nnz"], first["fused"], first["sparsity"]) == (8.0, pytest.approx(2 / 1.9), pytest.approx(1.9 / 0.5))
    assert first["choice"] == "twell" and second["planned_ms"] == 1.0
    assert hopper.parts_sentence([first, second]) == "fused 1.05 x sparsity 1.90 = 2.00"
    other = [each | {"where": "elsewhere"} for each in compared(29.0) if each["path"] != "planned"]
    assert hopper.parts([*other, row("planned")]) == []  # of different runs


def test_the_estimate_is_the_floor_and_the_reads():
    dense, few = hopper.estimate(8)
    again, many = hopper.estimate(300)
    assert dense == again == pytest.approx(1.1465, rel=1e-3) and 0.38 < few < dense < many


def test_twell_is_slower_between_two_points():
    found = hopper.by_nnz([*compared(8), *compared(30, twell=1.5), *compared(50, twell=2.1)])
    assert [nnz for nnz, _ in found["forced twell"]] == [8, 30, 50]
    assert hopper.crossing(found) == hopper.crossing(found, other="dense eager") == (30, 50)
    assert (
        hopper.crossing_sentence(found) == "by nnz: fused wins from between 30 and 50, torch's from between 30 and 50"
    )
    assert "torch's nowhere" in hopper.crossing_sentence(hopper.by_nnz(compared(8)))
    assert hopper.crossing({}) is None


def test_cells_compare_like_with_like():
    found = hopper.cells([*compared(29, tokens=1), *compared(29), *gates(), *compared(29, workload="overflow: x")])
    few = {cell["path"]: (cell["x"], cell["how"]) for cell in found if cell["tokens"] == 1}
    many = {cell["path"]: (cell["x"], cell["how"]) for cell in found if cell["tokens"] == 16384}
    assert few["planned"] == (pytest.approx(2.0), "graph") and few["planned compiled"][1] == "compiled"
    assert many["forced hot_cold"] == (pytest.approx(2 / 1.5), "eager") and set(few) == set(many)


def test_the_record_of_this_checkout_has_what_the_notebook_shows():
    rows = hopper.recorded()
    assert len({each["where"] for each in rows}) == 1 and len(hopper.parts(rows)) >= 5
    assert set(hopper.by_nnz(rows)) == {"dense eager", "forced dense", "forced twell", "planned"}
    assert {cell["tokens"] for cell in hopper.cells(rows)} >= {1, 64, 2048, 16384}
    assert len({cell["path"] for cell in hopper.cells(everything())}) == 5
