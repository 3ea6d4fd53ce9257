"""The record of a whole model, tiny and on the CPU: what fires, what is compared, and what is refused."""

import copy
import functools

import pytest
import torch

from twell_lab import records
from twell_lab.analysis.profile import profile
from twell_lab.bench import drawn, energy, workloads
from twell_lab.bench import llama as tables
from twell_lab.bench.causal import Causal
from twell_lab.layers.find import feed_forwards
from twell_lab.ops import clock as clocks

pytest.importorskip("transformers")
TINY = drawn.Shape(
    layers=3,
    d_model=32,
    d_ff=256,
    heads=2,
    vocabulary=64,
    context=24,
    sequences=12,
    cached=16,
    least=3,
    most=40,
    mean=16,
    device="cpu",
)


@pytest.fixture
def stopped(monkeypatch):
    """No GPU: a clock and a meter that count, graphs that call what they were made of, and models that are not
    compiled."""

    def time_cuda(calls, rounds=0):
        return {name: [2.0, 1.0 if "(graph)" in name else 3.0] for name, call in calls.items() if call(1) is not None}

    monkeypatch.setattr(clocks, "time_cuda", time_cuda)
    monkeypatch.setattr(clocks, "graphed", lambda call, inputs=2: call)
    monkeypatch.setattr(clocks, "peak_bytes", lambda call: 1000)
    monkeypatch.setattr(energy, "meter", lambda device: (lambda: 0.0, ""))
    monkeypatch.setattr(
        energy, "millijoules", lambda read, calls, wait, samples: dict.fromkeys(calls, [600.0] * samples)
    )
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    monkeypatch.setattr(tables, "CLASSES", (1, 8))


@pytest.fixture(scope="module")
def models():
    """In float32, in which a CPU multiplies fast, and planned without a clock; the record's is in bfloat16, and timed."""
    plan = workloads.planner.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_compile_all", lambda *_: None)
        patch.setattr(drawn, "fired", functools.partial(drawn.fired, dtype=torch.float32))
        patch.setattr(workloads.planner, "plan", lambda *given, **how: plan(*given, **how | {"measure": False}))
        return tables.recorded(TINY, classes=(1, 8))


def test_gates_get_the_biases_with_which_as_many_neurons_fire_as_asked_for():
    model = drawn.llama(TINY)
    torch.manual_seed(1)
    tokens = torch.randint(0, 64, (16, 24))
    drawn.fire(model, tokens, [3.0, 10.0, 40.0])
    found = [layer.mean_nnz for layer in profile(model, [tokens]).layers]
    assert found == pytest.approx([3.0, 10.0, 40.0], rel=0.15)
    assert not any(layer.gate._forward_pre_hooks for layer in feed_forwards(model))
    assert all((layer.gate.bias < 0).any() for layer in feed_forwards(model))


def test_every_section_gives_rows_that_a_record_takes(stopped, models, monkeypatch):
    monkeypatch.setattr(tables, "recorded", lambda shape: models)
    found = {name: [row for step in steps for row in step()] for name, steps in tables.sections(TINY).items()}
    paths = {name: [row["path"] for row in rows] for name, rows in found.items()}
    ways = ["dense eager", "planned", "planned for graphs"]
    replayed = [*ways, *(f"{way} (graph)" for way in ways)]
    assert paths["plan"] == ["plan", "plan for graphs"] and found["plan"][0]["classes"] == [1, 8]
    assert paths["one sequence"] == replayed and paths["decode"] == 2 * replayed
    assert paths["many sequences"] == ["dense eager", "planned"]
    for name in ("many sequences, compiled", "one sequence, compiled"):
        assert paths[name] == ["dense compiled", "planned compiled"]
    compiled = ["dense compiled", "planned for graphs compiled"]
    assert paths["decode, compiled"] == 2 * [*compiled, *(f"{way} (graph)" for way in compiled)]
    assert [row["tokens"] for row in found["decode"]] == [1] * 6 + [16] * 6
    assert {row["cached"] for row in found["decode"]} == {16}
    for name, each in found.items():  # energy is read where the GPU does not wait for the host
        read = [row["path"] for row in each if "mj_per_token" in row]
        busy = paths[name] if name.startswith("many") else [path for path in paths[name] if path.endswith("(graph)")]
        assert read == (busy if name.startswith(("many", "decode")) else [])
        assert all(row["mj_per_token"] == 600 / row["tokens"] for row in each if "mj_per_token" in row)
    rows = [row for each in found.values() for row in each]
    for row in rows:
        assert row["layers"] == 3 and len(row["nnz_layers"]) == 3 and row["dtype"] == "float32"
        if row["path"] in paths["plan"]:
            assert row["kind"] == "model_plan"
            continue
        decodes = "decode" in row["workload"]
        assert row["kind"] == ("model_decode" if decodes else "model_forward") and row["head"]
        assert row["wall_ms"] > 0 and row["dense_wall_ms"] > 0 and 0 < row["host_us"] <= 1e3 * row["wall_ms"]
        assert ("error_over_allowed" in row) == (not row["path"].startswith("dense eager"))
    eager = {row["path"]: row for row in found["one sequence"]}
    assert eager["planned"]["gpu_ms"] == eager["planned (graph)"]["ms"] == 1.5
    assert sum(map(int, eager["planned"]["choice"].replace(",", "").split()[::2])) == 3
    flat = records.flat_rows([records.Record.new("model", "a test's own", rows)])
    assert all(row["wall_ms"] for row in flat if row["path"] not in paths["plan"])


def test_wrong_logits_are_not_timed(stopped, models, monkeypatch):
    monkeypatch.setattr(clocks, "time_cuda", lambda *_, **__: pytest.fail("it was timed"))
    wrong, off = copy.copy(models), copy.deepcopy(models.dense.model)
    off.model.layers[1].mlp.down_proj.weight.data *= 100
    wrong.sparse = {**models.sparse, "planned": Causal(off)}
    with pytest.raises(clocks.WrongResult, match="2 x 24 tokens: planned: the logits are off by"):
        tables.prefill_rows(wrong, 2)
    with pytest.raises(clocks.WrongResult, match="decode step, batch 2: planned: the logits are off by"):
        tables.decode_rows(wrong, 2, 16)
