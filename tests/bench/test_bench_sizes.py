"""The records of drawn models, tiny and on the CPU; and how a GPU's clocks are asked, without one."""

import copy

import pytest
import torch

from twell_lab.analysis.profile import profile
from twell_lab.app import tables
from twell_lab.bench import drawn, models, workloads
from twell_lab.bench.workloads import Causal
from twell_lab.layers.choice import Choice
from twell_lab.layers.find import feed_forwards
from twell_lab.models.tiny import ModelConfig
from twell_lab.ops import clock as clocks
from twell_lab.records import Record

pytest.importorskip("transformers")
SIZES = ModelConfig(vocabulary=64, d_model=32, layers=3, heads=2, d_ff=256, context=24)
CPU = {"device": "cpu", "seconds": 0.0}


def test_gates_get_the_biases_with_which_as_many_neurons_fire_as_asked_for():
    model = drawn.llama(SIZES, "cpu")
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (16, 24))
    drawn.fire(model, lambda: model(tokens), [3.0, 10.0, 40.0])
    nnzs = [layer.mean_nnz for layer in profile(model, [tokens]).layers]
    assert nnzs == pytest.approx([3.0, 10.0, 40.0], rel=0.15)
    assert not any(layer.gate._forward_pre_hooks for layer in feed_forwards(model))


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's clocks and meter that count, graphs that call what they were made of, and models that are not compiled."""

    def time_cuda(calls, rounds=0):
        return {name: [2.0, 1.0 if "(graph)" in name else 3.0] for name, call in calls.items() if call(1) is not None}

    monkeypatch.setattr(clocks, "time_cuda", time_cuda)
    monkeypatch.setattr(clocks, "time_bursts", lambda calls, *_, **__: {name: ([0.5], [2.0]) for name in calls})
    monkeypatch.setattr(clocks, "graphed", lambda call, inputs=2: call)
    monkeypatch.setattr(clocks, "peak_bytes", lambda call: 1000)
    monkeypatch.setattr(workloads, "millijoules", lambda read, call: 600.0)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(models.Bench, "planned", lambda *_: Choice("twell"))


def test_a_workload_is_timed_as_plain_calls_graphs_and_compiled(gpu, monkeypatch):
    bench = models.Bench(SIZES, tokens=(24, 48), batches=(2,), compiled=True, **CPU)
    bench.names = ["planned", "planned for graphs"]
    bench.graphs, bench.meter = True, lambda: 0.0
    monkeypatch.setattr(clocks, "device_name", lambda device: "A GPU")
    plain = ["dense eager", "planned", "planned for graphs"]
    compiled = ["dense compiled", "planned for graphs compiled"]
    rows = bench.rows("model_decode", 2)
    assert [row["path"] for row in rows] == [*plain, *compiled, *(f"{path} (graph)" for path in plain + compiled)]
    for row in rows:
        graph = row["path"].endswith("(graph)")
        assert ("mj_per_token" in row) == graph and ("peak_bytes" in row) == ("gpu_ms" in row) == (not graph)
        assert row.get("mj_per_token", 300) == 300 and row.get("gpu_ms", 1.5) == 1.5 and row["head"]
        assert row["wall_ms"] > 0 and row["dense_wall_ms"] > 0 and ("x_compiled" in row) == (not graph)
        assert ("error_over_allowed" in row) == (not row["path"].startswith("dense eager"))
    headless = bench.rows("model_decode", 2, False, compiled=False)
    assert [row["path"] for row in headless] == [*plain, *(f"{path} (graph)" for path in plain)]
    assert not any("mj_per_token" in row for row in headless)
    monkeypatch.setattr(workloads.rows, "LARGE", 40)  # with more tokens nothing is captured
    many = bench.rows("model_forward", 48)
    assert [row["path"] for row in many] == ["dense eager", "planned", "dense compiled", "planned compiled"]
    assert all(row["mj_per_token"] == 600 / 48 for row in many)
    wrong = copy.deepcopy(bench.dense.model)
    wrong.lm_head.weight.data *= 1.01
    bench.sparse["planned"] = Causal(wrong)
    with pytest.raises(clocks.WrongResult, match="1 x 24 tokens: planned: the logits: off by"):
        bench.rows("model_forward", 24)


def test_the_record_of_a_size_measures_what_says_most_first(gpu):
    left_out = {}
    sections = models.of_size("1M", left_out, 2, compiled=False, **CPU)
    assert [*sections][:2] == ["many sequences", "decode, one sequence"]
    made = [row for name in ("decode, one sequence", "training step") for step in sections[name] for row in step()]
    assert [row["kind"] for row in made] == 2 * ["model_decode"] + 2 * ["model_training"]
    assert all(row["workload"].startswith("drawn 1M Llama, ") for row in made) and "CUDA graphs" in left_out
    largest = [{**row, "workload": row["workload"].replace("1M", "2B")} for row in made]
    lines = tables.model([Record.new(models.RECORD, "a test's own", largest)]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| decode step, batch 1", "| training step, 1 x 64 tokens"]
