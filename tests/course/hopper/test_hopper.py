"""What notebook 09 reads from its record: on small rows made for these tests, which are no measurements."""

import pytest
import torch

from tests.course.recorded_rows import compared, everything, gates, row
from twell_lab.analysis.planner import plan
from twell_lab.analysis.profile import profile
from twell_lab.course.hopper import data as hopper
from twell_lab.ops import clock as clocks


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
    assert [first[key] for key in ("nnz", "torch", "fused", "planned", "choice")] == [8.0, 2.0, 1.9, 0.5, "twell"]
    assert (second["nnz"], second["planned"]) == (29.0, 1.0)
    other = [each | {"where": "elsewhere"} for each in compared(29.0) if each["path"] != "planned"]
    assert hopper.parts([*other, row("planned")]) == []  # of different runs


def test_the_estimate_is_the_floor_and_the_reads():
    dense, few = hopper.estimate(8)
    again, many = hopper.estimate(300)
    assert dense == again == pytest.approx(1.1465, rel=1e-3) and 0.38 < few < dense < many


def test_cells_compare_like_with_like():
    found = hopper.cells([*compared(29, tokens=1), *compared(29), *gates(), *compared(29, workload="overflow: x")])
    few, many = ({cell["path"]: cell["x"] for cell in found if cell["tokens"] == tokens} for tokens in (1, 16384))
    assert few["planned"] == pytest.approx(0.02 / 0.01) and few["planned compiled"] == pytest.approx(1.9)
    assert many["forced hot_cold"] == pytest.approx(2 / 1.5) and set(few) == set(many)


def test_the_record_of_this_checkout_has_what_the_notebook_shows():
    rows = hopper.recorded()
    assert len({each["where"] for each in rows}) == 1 and len(hopper.parts(rows)) >= 5
    assert {each["path"] for each in hopper.by_nnz(rows)} == {"dense eager", "forced dense", "forced twell", "planned"}
    assert {cell["tokens"] for cell in hopper.cells(rows)} >= {1, 64, 2048, 16384}
    assert len({cell["path"] for cell in hopper.cells(everything())}) == 5
