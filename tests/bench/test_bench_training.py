"""The training tables, tiny and on the CPU, with clocks that count: what is compared, and what is refused."""

import copy

import pytest
import torch

from twell_lab.analysis import costs
from twell_lab.bench import training
from twell_lab.layers.find import feed_forwards
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock


@pytest.fixture
def stopped(monkeypatch):
    """No clock, no GPU memory, rates of an H100."""
    monkeypatch.setattr(
        clock,
        "time_cuda",
        lambda calls, rounds=0: {name: [2.0, 1.0, 3.0] for name, call in calls.items() if call(1) is not None},
    )
    monkeypatch.setattr(clock, "peak_bytes", lambda call: 1)
    monkeypatch.setattr(clock, "graphed", lambda call: call)
    monkeypatch.setattr(
        training.inference, "rates_here", lambda: costs.Rates("CPU", "bfloat16", 3e12, 7.4e12, 7e14, 2e-6)
    )
    monkeypatch.setattr(
        training, "_compiled", lambda path: training.dense_layer if path == "torch" else training.our_layer(path)
    )


def weights(d_model=32, d_ff=96, gated=True):
    torch.manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape) / 4).bfloat16()  # noqa: E731
    return draw(d_ff, d_model) if gated else None, draw(d_ff, d_model), draw(d_model, d_ff)


@pytest.mark.parametrize("gated", [True, False])
def test_every_path_is_checked_and_says_what_it_is(stopped, gated):
    inputs = [torch.randn(40, 32).bfloat16() for _ in range(2)]
    rows = training.compare(weights(gated=gated), inputs, "drawn", {"layer": 3})
    eager = ["dense eager", "forced dense", "forced twell", "planned"]
    assert [row["path"] for row in rows] == [
        "dense eager",
        "dense compiled",
        "forced dense",
        "forced twell",
        "planned",
        "planned compiled",
        *(f"{path} (graph)" for path in eager),
    ]
    for row in rows:
        assert row["kind"] == "training" and row["tokens"] == 40 and row["gated"] == gated and row["layer"] == 3
        assert row["ms"] == 2.0 and row["x_dense"] == 1.0 and row["peak_bytes"] == 1
        assert row["wall_ms"] > 0 and row["dense_wall_ms"] > 0 and row["host_us"] > 0
        assert row.get("x_compiled") == (None if "(graph)" in row["path"] else 1.0)
        assert ("error_over_allowed" in row) == (not row["path"].startswith("dense eager"))
    assert rows[4]["choice"] in ("twell", "dense")


def test_a_wrong_gradient_is_refused(stopped, monkeypatch):
    honest = training.our_layer

    def wrong(path):
        def layer(x, *given):
            y, l1 = honest(path)(x, *given)
            return y, l1 if path == "dense" else l1 + 1e4 * x.sum()

        return layer

    monkeypatch.setattr(training, "our_layer", wrong)
    with pytest.raises(clock.WrongResult, match="dx is off by .* nothing was timed"):
        training.compare(weights(), [torch.randn(40, 32).bfloat16()], "drawn")


def test_the_exact_gradients_are_autograds():
    wide = tuple(w.double().requires_grad_() for w in weights())
    x, dy = torch.randn(9, 32, dtype=torch.float64, requires_grad=True), torch.randn(9, 32, dtype=torch.float64)
    y, l1 = training.dense_layer(x, *wide)
    autograd = torch.autograd.grad([y, l1], [x, *wide], [dy, torch.full((), training.L1)])
    for a, b in zip(training.exact(wide, x.detach(), dy), [y, *autograd]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def drawn(tokens, d_model, d_ff, nnz, kind="lognormal"):
    """As bench.inference draws a layer, small and on the CPU."""
    layer, inputs = clock.workload(min(tokens, 40), 16, 512, 8, kind, torch.bfloat16, "cpu")
    return layer, inputs, inputs[:2]


@pytest.fixture
def tiny(stopped, monkeypatch):
    monkeypatch.setattr(training.inference, "drawn", drawn)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    return training


@pytest.mark.parametrize("tables", ["training", "inference"])
def test_tables_of_every_number_of_tokens(tiny, tables):
    steps = (tiny if tables == "training" else tiny.inference).SECTIONS["tokens"]
    assert len(steps) == 7 and counts_of(steps) == [1, 16, 64, 256, 2048, 16384, 131072]
    rows = steps[1]()
    paths = {row["path"] for row in rows}
    assert {"dense eager", "dense compiled", "planned", "planned compiled", "planned (graph)", "forced twell"} <= paths
    for row in rows:
        assert row["workload"] == "independent, lognormal" and row["kind"] in (tables, "plan")
        if row["kind"] == tables:
            assert row["tokens"] == 16 and row["wall_ms"] > 0 and row["dense_wall_ms"] > 0 and row["host_us"] > 0


def counts_of(steps):
    return [next(each for each in (*step.args, *step.keywords.values()) if type(each) is int) for step in steps]


@pytest.mark.parametrize("tables", ["training", "inference"])
def test_tables_of_heavy_rows(tiny, tables, monkeypatch):
    module = tiny if tables == "training" else tiny.inference
    assert [step.args for step in module.SECTIONS["heavy rows"]] == [
        (0, 1500),
        *((heavy, 1500) for heavy in (1, 8, 64, 512)),
        *((heavy, 5632) for heavy in (1, 8, 64, 512)),
    ]
    nnz = {}
    for heavy, firing in ((0, 300), (8, 512)):
        rows = module.heavy_rows(heavy, firing)
        called = f"heavy rows: {heavy}" + (", all neurons" if firing == 512 else "")
        assert {row["workload"] for row in rows} == {called}
        assert {(row["heavy_rows"], row["heavy_nnz"]) for row in rows} == {(heavy, firing if heavy else None)}
        assert {"dense eager", "forced twell", "planned"} <= {row["path"] for row in rows}
        nnz[heavy, firing] = rows[0]["nnz"]
    assert nnz[8, 512] - nnz[0, 300] == pytest.approx(8 / 40 * 512, rel=0.1)


def test_the_planned_path_follows_the_density(stopped, monkeypatch):
    first = torch.empty(5632, 2048, device="meta")
    for nnz, path in ((20, "twell"), (200, "dense")):
        assert training.planned(torch.full((64,), nnz), first, True) == path
    fired = torch.full((64,), 20)
    fired[::16] = 5000  # 331 on average
    assert training.planned(fired, first, True) == "dense"
    monkeypatch.setattr(training.switching.train_lost, "tensor_core_rows", lambda *_: 8)  # where tensor cores take them
    assert training.planned(fired, first, True) == "twell"


def test_layers_of_a_model_are_planned_one_by_one(stopped):
    torch.manual_seed(0)
    model = sparsify(
        LanguageModel(ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=256, context=16)), "twell"
    )
    with torch.no_grad():
        model.layers[1].mlp.gate.weight.zero_()
    limit = training.switching.break_even(training.inference.rates_here(), 32, 256)
    assert 0 < limit < 100  # half of the first layer fires, and nothing of the second
    assert training.plan(model, torch.randint(0, 64, (3, 16))) == "1 of 2 layers sparse"
    assert [found.module.learning for found in feed_forwards(model)] == ["dense", "twell"]


def test_how_far_two_models_gradients_are_apart():
    config = ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=96, context=16)
    torch.manual_seed(0)
    dense = LanguageModel(config)
    windows = torch.randint(0, 64, (3, 17))
    same, other = sparsify(copy.deepcopy(dense), "twell"), copy.deepcopy(dense)
    assert training.gradients_apart(same, dense, windows) < 1e-5
    assert training.gradients_apart(torch.compile(dense, backend="eager"), dense, windows) < 1e-5
    with torch.no_grad():
        other.layers[0].mlp.up_proj.weight[3] *= 1.5
    assert training.gradients_apart(other, dense, windows) > 1e-2
    assert all(p.grad is None for p in (*same.parameters(), *dense.parameters()))
