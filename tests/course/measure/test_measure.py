"""The measurements of the first notebooks: right results whatever the clock says, verdicts from made-up numbers."""

import pytest
import torch

from tests.course import recorded_rows as made
from twell_lab.bench.comparison import DENSITY, scattered
from twell_lab.course.measure import data as measure


def table(**speeds) -> list[dict]:
    """Rows at three densities, and the dense ones; the middle half of the samples lies within 10% of the median."""
    densities = (0.001, 0.01, 0.1)
    return [
        {"density": density, "path": path, "samples": [each / speed for each in (0.9, 0.95, 1.0, 1.05, 1.1)]}
        for path, each in {**speeds, "dense": (1.0, 1.0, 1.0)}.items()
        for density, speed in zip(densities, each, strict=True)
    ]


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((10.0, 2.0, 0.5), "faster up to 1%, slower from 10%"),
        ((10.0, 1.05, 0.5), "faster up to 0.1%, slower from 10%"),  # in between the samples overlap
        ((0.7, 0.5, 0.1), "slower from 0.1%"),
        ((9.0, 5.0, 1.5), "faster up to 10%"),
        ((1.05, 1.0, 0.95), "no clear difference"),
    ],
)
def test_where_it_turns_is_said_by_the_densities_measured(speeds, words):
    assert measure.turning(table(CSR=speeds), "CSR") == words


def test_recorded_densities_are_those_of_the_newest_record(keep):
    on = {"device": "Some GPU", "samples": [1.0, 2.0, 3.0]}
    rows = [made.row(**on | row, kind=DENSITY) for row in table(CSR=(1.0, 1.0, 1.0))]
    rows += [made.row(**on, kind="matmul_data", workload=name) for name in ("random", "zeros")]
    keep(*(made.record("density", f"2026-01-0{day}T00:00:00Z", rows, kernels=()) for day in (1, 2)))
    found = measure.recorded(DENSITY)
    assert {row["date"][:10] for row in found} == {"2026-01-02"} and len(found) == 6
    assert measure.turning(found, "CSR") == "no clear difference"
    assert [row["workload"] for row in measure.recorded("matmul_data")] == ["random", "zeros"]


@pytest.mark.parametrize("per_row", [0, 1, 7, 50])
def test_every_way_of_multiplying_agrees_with_float64(per_row):
    a, b = scattered(12, 50, per_row), torch.randn(50, 30)
    a[3] = 0  # rows of different lengths: ELL pads this one
    ways = measure.multipliers(a, b)
    assert set(ways) == {"dense", "COO", "CSR", "ELL"}
    for name, call in ways.items():
        assert torch.allclose(call().double(), a.double() @ b.double(), atol=1e-4), name


def test_stale_times_of_a_layer_make_way_for_what_an_inference_record_has_of_the_same_gpu(keep):
    old = {"kind": "ffn_forward", "path": "twell", "workload": "independent, lognormal"}
    kept = [made.row(**old | {"tokens": tokens, "ms": 1.0, "device": each}) for tokens in (1, 8) for each in ("A", "B")]
    again = [made.row(**LAYER | {"device": "A"})]
    keep(
        made.record("portable", "2026-01-01T00:00:00Z", kept, kernels=("gone",)),
        made.record("inference", "2026-01-02T00:00:00Z", again, kernels=()),
    )
    found = [(row["device"], row["tokens"], row["ms"], row["path"]) for row in measure.recorded_layers(2048, 5632, 29)]
    assert sorted(found) == [("A", 1, 0.02, "twell"), ("B", 1, 1.0, "twell"), ("B", 8, 1.0, "twell")]


LAYER = {"path": "forced twell", "tokens": 1, "ms": 0.02, "dense": 0.04}


def test_cutting_a_trained_model_costs_more_and_more():
    rows = measure.cut_trained((0.98, 0.99), windows=8)
    assert rows[0]["more"] == 0 and 0.02 < rows[0]["density"] < 0.08
    assert [row["density"] for row in rows[1:]] == pytest.approx([0.02, 0.01], abs=0.003)
    assert 0 < rows[1]["more"] < rows[2]["more"] < 0.2
    assert rows[0]["error"] == 0 < rows[1]["error"] < rows[2]["error"] < 1
