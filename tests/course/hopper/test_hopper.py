"""What notebook 09 reads from its record: on small rows made for these tests, which are no measurements."""

import pytest
import torch

from tests.course.recorded_rows import RATES, compared, everything, gates, row
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


def test_floors_are_what_the_slowest_part_takes():
    dense, gate, sparse = hopper.floors(hopper.work(16384, 2048, 5632, 29), RATES)
    assert gate["floor_ms"] == pytest.approx(1e3 * 2 * 16384 * 2048 * 5632 / RATES.matmul)
    assert dense["floor_ms"] == pytest.approx(3 * gate["floor_ms"])
    assert sparse["floor_ms"] == pytest.approx(1e3 * sparse["l2"] / RATES.l2)
    one, *_ = hopper.floors(hopper.work(1), RATES)
    assert one["floor_ms"] == pytest.approx(1e3 * one["memory"] / RATES.bandwidth)


def test_nothing_recorded_is_below_the_floor():
    rows = hopper.recorded()
    dense, gate, _ = hopper.floors(hopper.work(), hopper.peaks())
    assert all(row["ms"] > gate["floor_ms"] for row in hopper.versions(rows))
    assert all(
        row["ms"] > dense["floor_ms"]
        for row in rows
        if (row["path"], row["tokens"], row["d_model"]) == ("forced dense", 16384, hopper.D_MODEL)
    )


def test_versions_come_slowest_first():
    found = hopper.versions(gates())
    assert found[0]["path"] == "sm80 gate_pack" and found[-1]["path"] == "sm90 gate_pack v3"
    assert hopper.rates(gates()).matmul == pytest.approx(2 * 16384 * 2048 * 5632 / 0.52e-3)


def test_points_of_the_roofline():
    found = hopper.points(everything())
    names = [p["name"] for p in found]
    assert "TwELL" in names and "torch's dense layer" in names and "sm90 gate_pack v3" in names
    intensity = {p["name"]: p["intensity"] for p in found}
    assert intensity[hopper.BEFORE] < intensity["gate GEMM (torch)"] < intensity["sm90 gate_pack v3"]
    twice = [*everything(), *compared(27.3, tokens=1)]  # another workload of one token drew another nnz
    assert sorted(p["name"] for p in hopper.points(twice)) == sorted(names)


def test_the_pool_table_follows_the_rule():
    rows = hopper.pool_table([40, 31, 100, 33, 0])
    assert [each["start"] for each in rows] == [0, None, 9, 78, None]
    assert [each["lost"] for each in rows] == [False, False, True, True, False]
