"""What notebook 09 reads from its record: on small rows made for these tests, which are no measurements."""

import pytest
import torch

from tests.course.recorded_rows import compared, everything, gates, row
from twell_lab.bench import forward
from twell_lab.course.hopper import data as hopper


def test_what_a_gpu_measures_are_rows_as_the_record_has_them(my_gpu, monkeypatch):
    monkeypatch.setattr(forward, "inference_rows", lambda case: [row(nnz=case.nnz, tokens=case.tokens)])
    monkeypatch.setattr(hopper, "dtype_for", lambda device: torch.float16)
    rows = hopper.yours((8, 29), tokens=4)
    assert [(each["nnz"], each["tokens"], each["d_ff"]) for each in rows] == [(8, 4, 5632), (29, 4, 5632)]


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
