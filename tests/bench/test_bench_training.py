"""The tables of layers in inference and in training, tiny and on the CPU: what is compared, and what is refused."""

import dataclasses

import pytest
import torch

from twell_lab import simulator
from twell_lab.analysis import costs
from twell_lab.bench import forward, training
from twell_lab.bench.forward import Case
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock

TINY = Case(40, 8, d_model=32, d_ff=512)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """No GPU, clock or compiler, and the rates of an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def time_bursts(calls, *_, **__):
        return {name: ([2.0, 1.0, 3.0], [2.0, 1.0, 3.0]) for name, call in calls.items() if call(1) is not None}

    monkeypatch.setattr(clock, "time_bursts", time_bursts)
    monkeypatch.setattr(forward, "rates_here", lambda: costs.Rates("CPU", "bfloat16", 3e12, 7.4e12, 7e14, 2e-6))
    training._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)


def test_every_path_of_a_step_is_checked_and_says_what_it_is():
    rows = training.step_rows(dataclasses.replace(TINY, label="drawn"))
    paths = ["dense eager", "dense compiled", "forced dense", "forced twell", "planned", "planned compiled"]
    assert [row["path"] for row in rows] == paths
    for row in rows:
        assert row["kind"] == "training" and row["tokens"] == 40 and row["gated"]
        assert row["ms"] == 2.0 and row["x_dense"] == row["x_compiled"] == 1.0 and row["wall_ms"] == 2.0
        assert ("error_over_allowed" in row) == (row["path"] != "dense eager") and row["workload"] == "drawn"
    assert rows[4]["choice"] == rows[5]["choice"] and rows[4]["choice"] in ("twell", "dense")


def test_every_path_of_a_forward_is_checked_and_says_what_it_is():
    rows = forward.inference_rows(dataclasses.replace(TINY, autotuned=True))
    paths = ["dense eager", "dense compiled", "planned", "planned compiled", "dense max-autotune"]
    assert [row["path"] for row in rows] == [*paths, "forced dense", "forced twell", "forced hot_cold 256"]
    for row in rows:
        assert row["kind"] == "inference" and row["gated"] and row["workload"] == "independent, lognormal"
        assert ("error_over_allowed" in row) == (row["path"] != "dense eager") and ("choice" in row) == (
            row["path"].startswith("planned")
        )


def test_a_wrong_gradient_is_refused(monkeypatch):
    honest = training.our_layer

    def wrong(path):
        def layer(x, *given):
            y, l1 = honest(path)(x, *given)
            return y, l1 if path == "dense" else l1 + 1e4 * x.sum()

        return layer

    monkeypatch.setattr(training, "our_layer", wrong)
    with pytest.raises(clock.WrongResult, match="dx: off by .* nothing was timed"):
        training.step_rows(TINY)


def test_the_exact_gradients_are_autograds():
    torch.manual_seed(0)
    wide = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((96, 32), (96, 32), (32, 96))]
    x, dy = torch.randn(9, 32, dtype=torch.float64, requires_grad=True), torch.randn(9, 32, dtype=torch.float64)
    y, l1 = training.dense_layer(x, *wide)
    autograd = torch.autograd.grad([y, l1], [x, *wide], [dy, torch.full((), training.L1)])
    for a, b in zip(training.exact(wide, x.detach(), dy), [y, *autograd], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_so_many_neurons_fire_in_so_many_rows():
    fired = {}
    for case in (TINY, dataclasses.replace(TINY, heavy=8, fires=200)):
        layer, inputs, seen = case.draw()
        fired[case] = [layer.gate_proj(x) > 0 for x in (*inputs, *seen)]
    for before, after in zip(*fired.values(), strict=True):
        more = (after & ~before).sum(1)
        assert (more > 150).sum() == 8 and (more < 50).sum() == 32


def test_the_planned_path_follows_the_density(monkeypatch):
    first = torch.empty(5632, 2048, device="meta")
    for nnz, path in ((20, "twell"), (200, "dense")):
        assert training.planned(torch.full((64,), nnz), first) == path
    fired = torch.full((64,), 20)
    fired[::16] = 5000  # 331 on average
    assert training.planned(fired, first) == "dense"
    monkeypatch.setattr(training.switching.train_lost, "tensor_core_rows", lambda *_: 8)  # where tensor cores take them
    assert training.planned(fired, first) == "twell"


def test_layers_of_a_model_are_planned_one_by_one(monkeypatch):
    torch.manual_seed(0)
    config = ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=256, context=16)
    model = sparsify(LanguageModel(config), "twell")
    with torch.no_grad():
        model.layers[1].mlp.gate.weight.zero_()
    # half of the first layer fires, and nothing of the second
    monkeypatch.setattr(training.switching.Switch, "measure", lambda self: {f"layers.{i}.mlp": 50.0 for i in (0, 1)})
    assert training.switch_layers(model, model, torch.randint(0, 64, (3, 16))) == "1 dense, 1 twell"
    assert [found.module.learning for found in feed_forwards(model)] == ["dense", "twell"]


def test_whole_steps_of_a_model_on_every_path():
    config = ModelConfig(vocabulary=64, d_model=64, layers=2, heads=2, d_ff=256, context=32)
    rows = training.model_rows(config, 10, 2, "tiny", {})
    paths = ["dense compiled", "planned compiled", "planned, compiled by layer", "forced twell compiled"]
    assert [row["path"] for row in rows] == [*paths, "dense eager", "planned"]
    for row in rows:
        assert row["workload"] == "whole step, tiny" and row["layers"] == 2 and row["tokens"] == 64 and row["gated"]
        assert row["x_dense"] == row["x_compiled"] == 1.0 and row["nnz"] == pytest.approx(10, rel=0.3)
        assert ("choice" in row) == row["path"].startswith("planned")


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler (g++ or clang++)")
def test_versions_of_kernels_are_compared_before_they_are_timed(monkeypatch):
    small = {"d_model": 64, "d_ff": 512}
    monkeypatch.setattr(forward, "Case", lambda tokens, nnz, dtype: Case(tokens, nnz, dtype=dtype, **small))
    made = forward.kernel_versions(6, 4)
    versions = {"pack": 4, "down": 3, "gated": 4}
    assert [row["path"] for row in made] == [f"{name}_v{n + 1}" for name, most in versions.items() for n in range(most)]
    assert all(row["kind"] == "kernel" and row["tokens"] == 6 and row["d_ff"] == 512 for row in made)
