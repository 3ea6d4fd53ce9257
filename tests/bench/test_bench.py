"""bench.ffn and bench.layer: the workload fires as it says, a wrong result is never timed, and the rows are complete."""

import json
import math

import pytest
import torch
from torch import nn

from twell_lab import bench, records
from twell_lab.bench import forward
from twell_lab.core import DeviceError, InputError
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock as clocks
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

TINY = dict(d_model=32, d_ff=64, nnz=4, device="cpu", seconds=0)


@pytest.mark.parametrize("d_ff", [100, 5632])
@pytest.mark.parametrize("share", [0.0, 0.005, 0.6])
@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
def test_rates_sum_to_the_mean_nnz(d_ff, share, kind):
    rates = clocks.firing_rates(d_ff, share * d_ff, kind)
    assert rates.shape == (d_ff,) and rates.dtype == torch.float64
    assert rates.sum().item() == pytest.approx(share * d_ff, rel=1e-3, abs=1e-12)
    assert rates.min() >= 0 and rates.max() <= 0.95
    if kind == "uniform":
        assert rates.unique().numel() == 1
    elif share:
        assert (rates == 0).sum() == round(0.3 * d_ff)
    with pytest.raises(InputError, match="workload is 'zipf'"):
        clocks.firing_rates(d_ff, 1, "zipf")


@pytest.mark.parametrize("kind", ["lognormal", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workload_fires_as_it_says(kind, dtype):
    tokens, d_model, d_ff, nnz = 600, 1024, 512, 25
    layer, inputs = clocks.workload(tokens, d_model, d_ff, nnz, kind, dtype, "cpu")
    assert len(inputs) >= 2 and all(x.shape == (tokens, d_model) and x.dtype == dtype for x in inputs)
    assert not torch.equal(inputs[0], inputs[1])
    assert layer.gate_proj.weight.dtype == dtype and not any(p.requires_grad for p in layer.parameters())
    fired = torch.stack([layer.gate_proj(x) > 0 for x in inputs]).double().flatten(0, 1)
    rates = clocks.firing_rates(d_ff, nnz, kind)
    # Rows of the gate differ in length by 1/sqrt(2 d_model), which moves each neuron's rate by some 10%.
    assert fired.sum(1).mean().item() == pytest.approx(nnz, rel=0.06)
    assert not fired[:, rates == 0].any()
    often = rates > 0.02
    off = (fired.mean(0) - rates)[often] / (rates * (1 - rates) / len(fired)).sqrt()[often]
    assert off.abs().median() < 4 and ((fired.mean(0) - rates)[often] / rates[often]).abs().max() < 0.6
    # Independent neurons: the variances of single neurons add up to that of the count.
    single = fired.mean(0) * (1 - fired.mean(0))
    assert 0.8 < (fired.sum(1).var() / single.sum()).item() < 1.25


def test_a_workload_is_its_seed():
    drawn = (clocks.workload(3, 16, 20, 2, "lognormal", torch.float32, "cpu", seed=seed) for seed in (0, 0, 1))
    for a, b, c in zip(*([*layer.parameters(), *inputs] for layer, inputs in drawn), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    "changed, told",
    [
        *(({name: value}, f"{name} is {value!r}") for name in ("tokens", "d_model", "d_ff") for value in (0, True)),
        ({"d_model": 7}, "d_model is 7"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        *(({"nnz": nnz}, f"nnz is {nnz}; 0 to") for nnz in (-1, 64, math.nan, math.inf)),
    ],
)
def test_values_that_are_refused(changed, told):
    with pytest.raises(InputError, match=told):
        bench.ffn(**{"tokens": 1, **TINY, **changed})


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "gpu", "meta", 3.5])
def test_a_device_that_is_not_there(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=f"device is '{device}'; accepted here: cpu$"):
        bench.ffn(1, **{**TINY, "device": device})


class OffBy(SparseFFN):
    """A sparse layer with a wrong row: `error` is a function of row number `row`."""

    row, error = 0, None

    def forward(self, x):
        y = super().forward(x).clone()
        y[self.row] = self.error(y[self.row])
        return y


def pair(kind=GatedFeedForward, tokens=20, dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    dense = kind(32, 64).requires_grad_(False)
    if bias:
        for projection in (m for m in dense.children() if isinstance(m, nn.Linear)):
            projection.bias = nn.Parameter(torch.randn(projection.out_features), requires_grad=False)
    dense = dense.to(dtype)
    return dense, OffBy.from_module(dense), torch.randn(tokens, 32).to(dtype)


ERRORS = {
    "a little": lambda row: row + 0.02 * row.abs().amax(),
    "one value": lambda row: row + 0.1 * row.abs().amax() * (torch.arange(row.numel()) == 5),
    "NaN": lambda row: row * math.nan,
    "infinite": lambda row: row + math.inf,
    "missing": torch.zeros_like,
    "negated": torch.neg,
}


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
@pytest.mark.parametrize("error", ERRORS)
def test_a_wrong_row_is_found_and_named(kind, error):
    dense, broken, x = pair(kind)
    for broken.row in (0, 13, 19):
        broken.error = ERRORS[error]
        with pytest.raises(clocks.WrongResult, match=f"row {broken.row} is off by .* nothing was timed"):
            clocks.check(dense, broken, x)


RUNS = [lambda: bench.ffn(4, **TINY), lambda: bench.layer(pair()[0], pair()[2])]


@pytest.mark.parametrize("run", RUNS, ids=["ffn", "layer"])
def test_nothing_is_timed_after_a_wrong_result(run, monkeypatch):
    monkeypatch.setattr(forward, "SparseFFN", OffBy)
    monkeypatch.setattr(OffBy, "error", staticmethod(torch.neg))
    monkeypatch.setattr(clocks, "time_bursts", lambda *_, **__: pytest.fail("a wrong result was timed"))
    with pytest.raises(clocks.WrongResult):
        run()


@pytest.mark.parametrize(
    "samples, median, spread", [([1, 2], 1.5, 0.5), ([5, 1, 3, 2, 4], 3, 2), ([1] * 9 + [100], 1, 0)]
)
def test_quartiles_by_hand(samples, median, spread):
    assert clocks.quartiles(samples) == (pytest.approx(median), pytest.approx(spread))


def assert_complete(record, tokens, d_model, d_ff, dtype, paths):
    assert record.name == "ffn" and [row["path"] for row in record.rows] == paths
    dense_ms = {row["path"]: row["ms"] for row in record.rows}
    for row in record.rows:
        assert (row["kind"], row["device"], row["dtype"]) == ("ffn_forward", "CPU", dtype)
        assert (row["tokens"], row["d_model"], row["d_ff"]) == (tokens, d_model, d_ff)
        assert len(row["samples"]) >= 2 and min(row["samples"]) > 0
        assert (row["ms"], row["spread"]) == pytest.approx(clocks.quartiles(row["samples"]), rel=1e-2, abs=1e-5)
        assert row["dense_ms"] == dense_ms["dense eager"]
        assert row["x_dense"] == pytest.approx(row["dense_ms"] / row["ms"])
        assert row["path"].startswith("dense eager") or 0 <= row["error_over_allowed"] <= 1.0
    assert record.rows[0]["path"] == "dense eager" and record.rows[0]["x_dense"] == 1.0
    flat = records.flat_rows([record])
    assert len(flat) == len(paths)
    for row in flat:
        assert set(row) == set(records.FLAT_KEYS)
        assert not {key for key, value in row.items() if value is None} - {"commit"}
        assert row["stale"] is False
    json.dumps(flat, allow_nan=False)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_record_of_a_drawn_layer(tokens, dtype, tmp_path):
    record = bench.ffn(tokens, dtype=dtype, **TINY)
    name = "float32" if dtype is None else str(dtype).removeprefix("torch.")
    assert_complete(record, tokens, 32, 64, name, ["dense eager", "twell"])
    assert record.rows[0]["workload"] == "independent, lognormal"
    again = records.load(record.save(tmp_path))
    assert again.rows == record.rows


def test_the_compiled_dense_layer_beside_them(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    record = bench.ffn(2, compiled=True, **TINY)
    assert_complete(record, 2, 32, 64, "float32", ["dense eager", "twell", "dense compiled"])


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
@pytest.mark.parametrize("bias", [False, True])
def test_a_record_of_a_real_layer(kind, bias):
    dense, _, x = pair(kind, bias=bias)
    record = bench.layer(dense, x, label="layer 3", seconds=0)
    assert_complete(record, 20, 32, 64, "float32", ["dense eager", "twell"])
    assert record.rows[0]["workload"] == "layer 3"
    first = dense.gate_proj if kind is GatedFeedForward else dense.up_proj
    assert record.rows[0]["nnz"] == pytest.approx((first(x) > 0).sum(1).double().mean().item(), abs=0.006)
    assert type(dense) is kind and not any(isinstance(m, SparseFFN) for m in dense.modules())


def test_what_is_no_layer_or_no_input():
    dense, sparse, x = pair()
    for wrong, told in (
        (x[0], r"x is \[32\]"),
        (x[:0], r"x is \[0, 32\]"),
        (x[None], r"x is \[1, 20, 32\]"),
        ([1.0], "x is list"),
        (None, "x is NoneType"),
    ):
        with pytest.raises(InputError, match=told):
            bench.layer(dense, wrong, seconds=0)
    for wrong_input in (x.double(), x[:, :-1]):
        with pytest.raises(InputError, match="x is torch.float(64|32) .*; accepted: torch.float32"):
            bench.layer(dense, wrong_input, seconds=0)
    with pytest.raises(InputError, match="no ReLU feed-forward layer in Linear"):
        bench.layer(nn.Linear(32, 32), x, seconds=0)
    model = LanguageModel(ModelConfig(d_model=32, layers=2, heads=2, d_ff=64, context=8))
    with pytest.raises(InputError, match=r"LanguageModel holds a feed-forward layer, layers\.0\.mlp"):
        bench.layer(model, x, seconds=0)
    with pytest.raises(InputError, match="OffBy is no feed-forward layer"):
        bench.layer(sparse, x, seconds=0)
