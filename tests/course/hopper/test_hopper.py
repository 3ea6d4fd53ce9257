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


def test_without_a_record_the_command_is_named_and_nothing_fails():
    told = hopper.parts_sentence([]), hopper.crossing_sentence({}), hopper.losses([])
    assert set(told) == {hopper.MISSING} and hopper.COMMAND in hopper.MISSING


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured():
    assert hopper.yours() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_measures_has_the_form_of_the_record(my_gpu, dtype):
    """Real layers on the CPU, and a clock that makes up its times."""
    layer, inputs = clocks.workload(4, 32, 512, 8, "lognormal", dtype, "cpu")
    planned = plan(profile(layer, inputs[:1]), layer, tokens=4, batches=inputs[1:2])
    clock = lambda calls: {name: [4.0, 4.0] if name == "dense eager" else [2.0, 2.0] for name in calls}  # noqa: E731
    rows = hopper.layer_rows(layer, inputs, planned, 8, clock)
    assert [each["path"] for each in rows] == ["dense eager", "planned", "forced dense", "forced twell"]
    assert [each["x_dense"] for each in rows] == [1, 2, 2, 2] and "choice" in rows[1] and "choice" not in rows[2]
    assert rows[0]["where"] == "yours, now, on My GPU" and (rows[0]["tokens"], rows[0]["d_ff"]) == (4, 512)
    assert {each["dtype"] for each in rows} == {str(dtype).removeprefix("torch.")}
    assert [each.get("fuses") for each in rows] == [None, None, False, None]  # a CPU, as a T4, has no such kernels


def test_a_readers_gpu_is_measured_in_its_own_type_on_other_inputs_than_planned(my_gpu, monkeypatch):
    """All of `yours` but the GPU: what it draws, plans on and times."""
    seen = {}
    monkeypatch.setattr(hopper, "dtype_for", lambda device: torch.float16)
    drawn = clocks.workload
    monkeypatch.setattr(
        clocks, "workload", lambda tokens, *rest: drawn(tokens, 32, 512, rest[2], rest[3], torch.float32, "cpu")
    )
    from twell_lab.analysis import costs, planner

    real = plan
    rates = costs.Rates("CPU", "float16", 3e12, 7.4e12, 7e14, 2e-6)
    monkeypatch.setattr(costs, "measure_rates", lambda device, dtype: seen.update(dtype=dtype) or rates)
    monkeypatch.setattr(
        planner, "plan", lambda *a, rates, batches, **more: seen.update(planned=batches) or real(*a, **more)
    )
    monkeypatch.setattr(
        hopper, "layer_rows", lambda layer, inputs, plan, nnz: seen.update(timed=inputs) or [row(nnz=nnz)]
    )
    assert [each["nnz"] for each in hopper.yours((8, 29), tokens=4)] == [8, 29]
    assert seen["dtype"] == torch.float16 and len(seen["timed"]) == clocks.ROTATED
    assert not any(torch.equal(x, other) for x in seen["timed"] for other in seen["planned"])
    assert all(torch.equal(x[:, 0], other[:, 0]) for x in seen["timed"] for other in seen["planned"])


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


def test_losses_count_what_is_slower_than_dense():
    told = hopper.losses(hopper.cells([*compared(8), *compared(300, twell=8.0)]))
    assert told.startswith(
        "Cells slower than torch's layer: planned 0 of 2, compiled 0 of 2, TwELL 1 of 2; recorded on"
    )
    slow = [each | ({"x_compiled": 0.96} if each["path"] == "planned compiled" else {}) for each in compared(8)]
    assert "compiled 1 of 1" in hopper.losses(hopper.cells(slow))


@pytest.mark.parametrize(
    "path, name",
    [
        ("forced hot_cold 768 (graph)", "forced hot_cold"),
        ("planned", "planned"),
        ("forced twell (graph)", "forced twell"),
    ],
)
def test_the_family_of_a_path(path, name):
    assert hopper.family(path) == name


def test_the_record_of_this_checkout_has_what_the_notebook_shows():
    rows = hopper.recorded()
    assert len({each["where"] for each in rows}) == 1 and len(hopper.parts(rows)) >= 5
    assert set(hopper.by_nnz(rows)) == {"dense eager", "forced dense", "forced twell", "planned"}
    assert {cell["tokens"] for cell in hopper.cells(rows)} >= {1, 64, 2048, 16384}
    assert len({cell["path"] for cell in hopper.cells(everything())}) == 5
