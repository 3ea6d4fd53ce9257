"""Whole models on a GPU: graphs, compiled code, peak memory, the energy of a token, a step of training; and the
recordings that are made of them, at a small size."""

from collections import Counter

import pytest
import torch

import twell_lab as tl
from twell_lab.bench import losses, models, workloads
from twell_lab.layers.choice import Choice
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training.config import TrainConfig

pytestmark = pytest.mark.gpu
SIZES = ModelConfig(vocabulary=1024, d_model=512, layers=3, heads=8, d_ff=2048, context=512)


def test_a_drawn_model_in_every_way():
    pytest.importorskip("transformers")
    record = tl.bench.model(SIZES, tokens=(512,), batches=(1, 8), graphs=True, training=True, seconds=0, progress=False)
    paths = ["dense eager", "planned", "planned for graphs"]
    replayed = [*paths, *(f"{path} (graph)" for path in paths)]
    forward, decode, training = (
        [row for row in record.rows if row["kind"] == kind]
        for kind in ("model_forward", "model_decode", "model_training")
    )
    assert [row["path"] for row in forward] == 2 * replayed and [row["path"] for row in decode] == 4 * replayed
    assert [row["path"] for row in training] == ["dense eager", "planned"]
    assert "left_out" not in record.notes and record.kernels
    for row in record.rows:
        graph = row["path"].endswith("(graph)")
        assert row["dtype"] == "bfloat16" and row["device"] == torch.cuda.get_device_name() and row["wall_ms"] > 0
        assert ("peak_bytes" in row) != graph and ("gpu_ms" in row) == (not graph and row["kind"] != "model_training")
        if row["kind"] != "model_training":
            assert row.get("error_over_allowed", 0) <= 1 and row["nnz"] == pytest.approx(10.5, rel=0.5)


@pytest.mark.parametrize("path", ["twell", "int8", "twell_int8"])
def test_a_model_of_this_project_on_a_path_by_name(path):
    torch.manual_seed(0)
    model, left_out = LanguageModel(SIZES).cuda().bfloat16().eval(), {}
    how = {"text": torch.randint(1024, (20_000,)), "plan": path, "seconds": 0, "left_out": left_out}
    bench = models.Bench(model, tokens=(64,), batches=(8,), **how)
    rows = [row for key in bench.works for row in bench.rows(*key)]
    ways = {"dense eager", f"forced {Choice(path)}"}
    assert not left_out and {row["path"] for row in rows} == ways | {f"{way} (graph)" for way in ways}
    assert {row["choice"] for row in rows if "forced" in row["path"]} == {f"3 {Choice(path)}"}
    assert all(0 < row["error"] < 1 for row in rows)


def test_a_step_of_the_record_of_a_size_is_compiled_and_captured():
    pytest.importorskip("transformers")
    left_out = {}
    steps = models.of_size("1M", left_out, 2, seconds=0)
    rows = [row for name in ("decode, one sequence",) for step in steps[name] for row in step()]
    ways = ["dense eager", "planned", "planned for graphs", "dense compiled", "planned for graphs compiled"]
    assert [row["path"] for row in rows] == [*ways, *(f"{way} (graph)" for way in ways)]
    assert not left_out


def test_the_energy_of_calls_is_read():
    read, why = workloads.meter(torch.device("cuda"))
    if read is None:
        pytest.skip(why)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    facts = workloads.energy_facts(read, {"square": lambda turn: x @ x}, samples=5, tokens=1)
    # 137 GFLOP: no GPU takes less than 0.1 pJ, or more than 100, for each.
    median, spread = facts["square"]["mj_per_token"], facts["square"]["mj_spread"]
    assert 10 < median < 1e4 and spread < 0.3 * median


def test_every_step_of_the_record_of_thresholds(monkeypatch):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"kept_inputs needs sm_80; this is {torch.cuda.get_device_name()}")
    monkeypatch.setattr(losses, "CUT_SPARSITIES", (0.5, 0.9))
    sizes = {"d_model": 512, "layers": 2, "heads": 8, "d_ff": 2048, "context": 64}
    config = TrainConfig(**sizes, batch=16, steps=100, lr=1e-3, eval_windows=40, dtype="bfloat16")
    steps = losses.thresholds(config=config)["thresholds"]
    made = [row for step in steps for row in step()]
    for path, methods in Counter(losses.SPARSE.values()).items():
        rows = [row for row in made if row["path"] == path]
        assert [row["tokens"] for row in rows] == [1] * 2 * methods
        assert all(0 < row["layer_over_allowed"] <= 1 for row in rows)  # a kernel adds in another order than torch
