"""Models beside their layers, on made-up rows; the law that links them; and a small model timed here."""

import math

import pytest
import torch

from tests.course.recorded_rows import record
from twell_lab.analysis.profile import profile
from twell_lab.course.checks.speed import crossing, layer_needed, share_from
from twell_lab.course.recorded import GRAPH, LOGNORMAL
from twell_lab.course.speedups import data as speedups
from twell_lab.models.tiny import LanguageModel, ModelConfig

SIZES = {"device": "NVIDIA H100", "dtype": "bfloat16", "d_model": 64, "d_ff": 256, "gated": True}


def of_model(path, wall, ms=None, dense=10.0, kind="model_decode", label="decode step, batch 1", tokens=1, **more):
    ms = wall if ms is None else ms
    times = {"ms": ms, "dense_ms": dense, "x_dense": dense / ms, "wall_ms": wall, "wall_samples": [wall] * 3}
    about = {"layers": 4, "parameters": 10**9, "nnz": 8.0, "workload": f"Llama, {label}"}
    return (
        {**SIZES, "kind": kind, "tokens": tokens, "path": path, "samples": [ms] * 3, "head": True}
        | times
        | about
        | more
    )


def of_layer(path, wall, ms=None, dense=1.0, tokens=1, nnz=8.0, kind="inference"):
    ms = wall if ms is None else ms
    times = {"ms": ms, "wall_ms": wall, "dense_ms": dense, "x_dense": dense / ms}
    return {**SIZES, "kind": kind, "tokens": tokens, "path": path, "nnz": nnz, "workload": LOGNORMAL} | times


MODEL = [
    of_model("dense eager", 10.0, gpu_ms=5.0, weight_bytes=100 * 2**20),
    of_model("planned", 12.0, gpu_ms=4.0, weight_bytes=101 * 2**20),
    of_model(f"dense eager{GRAPH}", 5.0, dense=5.0),
    of_model(f"planned{GRAPH}", 4.5, dense=5.0),
    of_model(f"planned for graphs{GRAPH}", 4.0, dense=5.0),
]
LAYER = [
    of_layer("dense eager", 1.0),
    of_layer("planned", 0.5),
    of_layer(f"dense eager{GRAPH}", 0.5, dense=0.5),
    of_layer(f"planned{GRAPH}", 0.25, dense=0.5),
]


@pytest.fixture
def kept(keep):
    """Rows and layers of MODEL and LAYER, as a notebook reads them."""
    keep(record("bench-model", "2026-01-02T03:04:05Z", [*MODEL, *LAYER, {"attack": "no row of a device"}], ()))
    rows = speedups.recorded()
    return rows, speedups.layers_of(rows)


def test_the_law_and_its_inverses_agree():
    for share, times in ((0.2, 3.0), (0.9, 1.4), (0.5, 0.5)):
        model = speedups.amdahl(share, times)
        assert layer_needed(share, model) == pytest.approx(times)
        assert share_from(times, model) == pytest.approx(share)
    assert speedups.amdahl(0.5, math.inf) == 2 and speedups.amdahl(1.0, math.inf) == math.inf
    assert layer_needed(0.5, 2.5) is None


def test_a_crossing_lies_between_the_points_around_it():
    assert crossing([(10, 2.0), (20, 1.5), (30, 0.5)]) == 25
    assert crossing([(10, 2.0), (20, 1.0)]) is None and crossing([(10, 0.5), (20, 0.2)]) is None


def test_each_way_is_compared_with_dense_run_the_same_way_and_with_its_layers(kept):
    eager, graph = speedups.steps(*kept)
    assert [eager[key] for key in ("x", "low", "high")] == pytest.approx([10 / 12] * 3)
    assert [eager[key] for key in ("share", "layer_x", "predicted")] == pytest.approx([0.4, 2.0, 1.25])
    # Of two planned models the one that is planned for graphs counts; a graph's time is the device's.
    assert [graph[key] for key in ("x", "share", "layer_x")] == pytest.approx([1.25, 0.4, 2.0])
    assert (eager["why"], graph["why"]) == ("host", "as predicted") and "2026-01-02" in graph["where"]


def test_a_layer_with_another_nnz_or_number_of_tokens_does_not_stand_for_the_model(keep):
    for other in ({"nnz": 16.0}, {"tokens": 2}, {"d_ff": 128}):
        keep(record("bench-model", "2026-01-02T03:04:05Z", [*MODEL, *(row | other for row in LAYER)], ()))
        rows = speedups.recorded()
        assert {step["share"] for step in speedups.steps(rows, speedups.layers_of(rows))} == {None}


def test_a_model_is_timed_here():
    pytest.importorskip("transformers")
    small, ids = LanguageModel(ModelConfig(d_model=32, layers=1, heads=2, d_ff=64, context=16)), torch.arange(128)
    firing = profile(small, [ids.view(8, 16)])
    config = ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=128, context=16)
    rows = speedups.yours("cpu", firing, config, seconds=0.01)
    assert rows[0]["nnz"] / 128 == pytest.approx(firing.layers[0].density, rel=0.2)  # half, not the paper's 0.5%
    assert {row["head"] for row in rows} == {True, False} and {row["where"] for row in rows} == {"yours, now, on CPU"}
    for step in speedups.steps(rows, []):
        assert step["dense_ms"] == step["dense"]["wall_ms"] and step["low"] <= step["x"] <= step["high"]


def test_the_pieces_of_a_call_are_all_of_it(kept):
    parts = speedups.pieces(*kept)
    assert {(part["what"], part["path"]) for part in parts} == {
        ("decode step, batch 1", path) for path in ("dense eager", "planned")
    }
    assert sum(part["ms"] for part in parts) == pytest.approx(sum({part["whole"] for part in parts}))
