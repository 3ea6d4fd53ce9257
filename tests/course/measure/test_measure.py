"""The measurements of the first notebooks: recorded rows, and verdicts from made-up numbers."""

from tests.course import recorded_rows as made
from twell_lab.bench.comparison import DENSITY
from twell_lab.course.measure import data as measure


def test_recorded_densities_are_those_of_the_newest_record(keep):
    on = {"device": "Some GPU", "samples": [1.0, 2.0, 3.0]}
    rows = [made.row(**on, kind=DENSITY, density=density, path="CSR") for density in (0.001, 0.01, 0.1)]
    rows += [made.row(**on, kind="matmul_data", workload=name) for name in ("random", "zeros")]
    keep(*(made.record("density", f"2026-01-0{day}T00:00:00Z", rows, kernels=()) for day in (1, 2)))
    found = measure.recorded(DENSITY)
    assert {row["where"] for row in found} == {"recorded on Some GPU, 2026-01-02"} and len(found) == 3
    assert [row["workload"] for row in measure.recorded("matmul_data")] == ["random", "zeros"]


def test_recorded_calls_are_of_about_this_layer(keep):
    layer = {"path": "forced twell", "tokens": 8, "ms": 0.02, "dense": 0.04}
    others = [{"tokens": 1}, {"nnz": 60.0}, {"d_ff": 8192}, {"path": "planned"}, {"kind": "training"}]
    rows = [made.row(**layer)] + [made.row(**layer | other) for other in others]
    keep(made.record("inference", "2026-01-02T00:00:00Z", rows, kernels=()))
    assert [row["tokens"] for row in measure.recorded_calls(2048, 5632, 29)] == [1, 8]


def test_a_difference_within_the_spread_is_none():
    assert measure.compare({"a": [1.0] * 9, "b": [2.0] * 9}, "a", "b").endswith("2.0x as fast.")
    assert "no clear difference" in measure.compare({"a": [1.0, 1.5, 2.0], "b": [1.1, 1.6, 2.2]}, "a", "b")
