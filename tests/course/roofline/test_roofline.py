"""The work of a layer as notebook 09 computes it, on small rows made for these tests."""

import pytest

from tests.course.recorded_rows import RATES, compared, everything, gates
from twell_lab.course.hopper import data as hopper
from twell_lab.course.roofline import data as roofline


def test_floors_name_what_limits_each_step():
    dense, gate, sparse = roofline.floors(roofline.work(16384, 2048, 5632, 29), RATES)
    assert (dense["limit"], gate["limit"], sparse["limit"]) == ("tensor cores", "tensor cores", "L2 cache")
    assert dense["floor_ms"] == pytest.approx(3 * gate["floor_ms"]) and gate["operations"] == 2 * 16384 * 2048 * 5632
    one, *_ = roofline.floors(roofline.work(1), RATES)
    assert one["limit"] == "memory" and one["intensity"] < 2


def test_nothing_recorded_is_below_the_floor():
    rows = hopper.recorded()
    dense, gate, _ = roofline.floors(roofline.work(), roofline.peaks())
    assert all(row["ms"] > gate["floor_ms"] for row in roofline.versions(rows))
    assert all(
        row["ms"] > dense["floor_ms"]
        for row in rows
        if (row["path"], row["tokens"], row["d_model"]) == ("forced dense", 16384, hopper.D_MODEL)
    )


def test_versions_come_slowest_first():
    found = roofline.versions(gates())
    assert found[0]["path"] == "sm80 gate_pack" and found[-1]["path"] == "sm90 gate_pack v3"
    assert roofline.rates(gates()).tensor == pytest.approx(2 * 16384 * 2048 * 5632 / 0.52e-3)


def test_points_of_the_roofline():
    found = roofline.points(everything())
    names = [p["name"] for p in found]
    assert "TwELL" in names and "torch's dense layer" in names and "sm90 gate_pack v3" in names
    intensity = {p["name"]: p["intensity"] for p in found}
    assert intensity[roofline.BEFORE] < intensity["gate GEMM (torch)"] < intensity["sm90 gate_pack v3"]
    twice = [*everything(), *compared(27.3, tokens=1)]  # another workload of one token drew another nnz
    assert sorted(p["name"] for p in roofline.points(twice)) == sorted(names)


def test_the_pool_table_follows_the_rule():
    rows = roofline.pool_table([40, 31, 100, 33, 0])
    assert [each["start"] for each in rows] == [0, None, 9, 78, None]
    assert [each["lost"] for each in rows] == [False, False, True, True, False]
