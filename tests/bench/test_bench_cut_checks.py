"""What is asked of kernels for layers with thresholds before they are timed, with stand-ins for the kernels: right ones,
which round less often than torch does, and ones with a fault each."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import twell_lab as tl
from twell_lab.bench import cut_checks, models
from twell_lab.bench.causal import Causal
from twell_lab.bench.cut_checks import CutLayer, forward_ratio, hard_inputs, has_thresholds, inputs_of, model_ratio
from twell_lab.bench.workloads import Tokens
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.thresholds import calibrate
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock

SIZES = ModelConfig(d_model=48, layers=3, heads=2, d_ff=200, context=24, vocabulary=64)
CACHED = 8


class Standin(nn.Module):
    """A layer with thresholds as a kernel may compute it: in float32, with hidden values rounded once. So of the values
    at the threshold it keeps others than torch does. fault: what it does wrong."""

    def __init__(self, layer, fault=""):
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, x):
        layer, cut = self.layer, self.layer.cut
        act = getattr(layer.acts, "activation", torch.relu if layer.acts is None or not cut else layer.acts)
        bound = cut.hidden if cut else layer.acts.threshold
        if self.fault == "another threshold":
            bound = bound * 1.1
        bound = torch.tensor(bound, dtype=x.dtype)
        if cut:
            x = self.dropped(cut.of_input(x), "an input more")
            if self.fault == "ties dropped":
                x = x.masked_fill(x.abs() == torch.tensor(cut.input, dtype=x.dtype), 0)
        if self.fault == "NaN dropped":
            x = x.nan_to_num(nan=0.0)
        kind, x = x.dtype, x.float()
        value = act(linear(x, layer.gate.weight.float()))
        if not cut:
            value = value.masked_fill(value.abs() < bound, 0)
        up = linear(x, layer.up.weight.float())
        hidden = (value * (up * 1.02 if self.fault == "wrong scale" else up)).to(kind)
        if cut:
            hidden = hidden.masked_fill(hidden.abs() < bound, 0)
        hidden = self.dropped(hidden, "a hidden value more")
        return linear(hidden.float(), layer.down.weight.float()).to(kind)

    def dropped(self, values, fault):
        """Without the value of the first token that is half as large as the largest."""
        if self.fault != fault:
            return values
        values = values.clone()
        first = values.view(-1, values.shape[-1])[0]
        if first.isfinite().all():
            first[(first.abs() - first.abs().max() / 2).abs().argmin()] = 0
        return values


class Cut:
    """A random model with thresholds: in float32, in bfloat16, and that with stand-ins."""

    def __init__(self, method, sparsity, seed=0, act=nn.SiLU):
        torch.manual_seed(seed)
        self.plain = LanguageModel(SIZES).eval().requires_grad_(False)
        for layer in self.plain.layers:
            layer.mlp.act_fn = act().eval()
            for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                nn.init.normal_(part.weight, std=1.5 / part.in_features**0.5)
        text = torch.randint(64, (20_000,), generator=torch.Generator().manual_seed(seed))
        found = calibrate(self.plain, text[:960].view(40, 24).split(8), method=method).at(sparsity)
        self.exact = Causal(found.apply(copy.deepcopy(self.plain)))
        self.dense = Causal(found.apply(copy.deepcopy(self.plain).bfloat16()))
        self.cache = Causal(copy.deepcopy(self.plain).bfloat16())
        self.tokens = Tokens(64, torch.device("cpu"), text)
        self.layers = feed_forwards(self.dense.model)

    def sparse(self, fault=""):
        model = copy.deepcopy(self.dense.model)
        for found, layer in zip(feed_forwards(model), model.layers):
            layer.mlp = Standin(found, fault)
        return Causal(model)

    def steps(self, count, batch=1):
        ids = self.tokens.windows(self.tokens.MEASURED, count * batch, CACHED).split(batch)
        return [(some[:, -1:], self.cache.keep(some[:, :-1])) for some in ids]

    def ratio(self, sparse, batch=4):
        return model_ratio(self.exact, self.dense, sparse, self.cache, self.tokens, batch, CACHED)


def layer_ratios(cut, fault, batch=1):
    steps = cut.steps(6, batch)
    entered = inputs_of(cut.layers, lambda: [cut.dense.stepper()(*each) for each in steps])
    for layer in cut.layers:
        xs = entered[layer.name]
        assert len(xs) == 6 and xs[0].shape == (batch, 1, 48)
        yield CutLayer(layer).ratio(Standin(layer, fault), [*xs, *hard_inputs(layer, xs[0])])


METHODS = [("cats", 0.5), ("teal", 0.9)]


@torch.no_grad()
@pytest.mark.parametrize("method, sparsity", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_a_right_layer_passes(method, sparsity, seed):
    assert max(layer_ratios(Cut(method, sparsity, seed), "", batch=1 + seed)) <= 1


FAULTS = ["a hidden value more", "wrong scale", "another threshold", "NaN dropped"]
OF_TEAL = ["an input more", "ties dropped"]


@torch.no_grad()
@pytest.mark.parametrize(
    "method, fault", [*((m, f) for m in ("cats", "teal") for f in FAULTS), *(("teal", f) for f in OF_TEAL)]
)
def test_a_fault_in_a_layer_is_found(method, fault):
    assert min(layer_ratios(Cut(method, 0.9), fault)) > 1


@torch.no_grad()
@pytest.mark.parametrize("method, sparsity", METHODS)
def test_a_right_model_passes(method, sparsity):
    cut = Cut(method, sparsity)
    ratio, read = cut.ratio(cut.sparse(), 32)
    assert ratio <= 1 and read >= cut_checks.LEAST


@torch.no_grad()
@pytest.mark.parametrize("method, sparsity", METHODS)
@pytest.mark.parametrize("where", ["the last norm", "attention"])
def test_a_fault_outside_the_layers_is_found(method, sparsity, where):
    cut = Cut(method, sparsity)
    sparse = cut.sparse()
    if where == "attention":
        sparse.model.layers[1].attention.out_proj.weight.mul_(1.5)
    else:
        sparse.model.norm.weight.mul_(1.05)
    assert cut.ratio(sparse, 32)[0] > 1.2


@torch.no_grad()
def test_logits_that_are_no_number_are_wrong():
    cut = Cut("cats", 0.5)
    sparse = cut.sparse()
    sparse.model.norm.weight[0] = math.nan
    assert cut.ratio(sparse, 32)[0] == math.inf


# ---- forwards ----


@torch.no_grad()
@pytest.mark.parametrize("method, sparsity", METHODS)
def test_a_forward_of_a_right_model_passes(method, sparsity):
    cut = Cut(method, sparsity)
    given = cut.exact, cut.dense, cut.sparse(), cut.tokens
    ratio, read = forward_ratio(*given, 2, 24)
    assert 0.5 < ratio <= 1 and read >= cut_checks.SEQUENCES[0]


@torch.no_grad()
@pytest.mark.parametrize("where", ["wrong scale", "attention"])
def test_a_fault_is_found_in_a_forward(where):
    cut = Cut("teal", 0.9)
    sparse = cut.sparse(where)
    if where == "attention":
        sparse.model.layers[1].attention.out_proj.weight.mul_(1.5)
    assert forward_ratio(cut.exact, cut.dense, sparse, cut.tokens, 2, 24)[0] > 1.2


# ---- a model that is to be timed ----


def bench(model, monkeypatch, fault="", **changes):
    """tl.bench.model of a dense model with thresholds, whose sparse layers are computed by stand-ins."""

    def forward(self, x):
        (layer,) = feed_forwards(self, only=None)
        return Standin(layer, fault)(x)

    monkeypatch.setattr(SparseFFN, "forward", forward)
    return tl.bench.model(
        model,
        **{"tokens": (24,), "batches": (1,), "cached": CACHED, "seconds": 0.0, "progress": False, "plan": PLAN}
        | changes,
    )


PLAN = tl.Choice("dense")  # which takes every layer; the stand-ins compute them


@pytest.mark.parametrize("method, sparsity", METHODS)
def test_a_right_model_is_timed_though_a_few_tokens_speak_against_it(method, sparsity, monkeypatch):
    cut = Cut(method, sparsity)
    text = cut.tokens.text
    record = bench(cut.dense.model, monkeypatch, text=text)
    assert len(record.rows) == 2 * 2 * 2
    for row in record.rows:
        what = "tokens" if row["kind"] == "model_decode" else "sequences"
        if row["path"] != "dense eager":
            assert 0 < row["layer_over_allowed"] <= 1 and 0.5 < row["error_over_allowed"] <= 1
            assert row[f"compared_{what}"] >= (cut_checks.LEAST if what == "tokens" else cut_checks.SEQUENCES[0])


@pytest.mark.parametrize("fault", ["a hidden value more", "an input more"])
def test_a_wrong_layer_is_not_timed(fault, monkeypatch):
    said = r"1 x 24 tokens: forced dense: layers.\d.mlp is off by .* times what is allowed: nothing was timed"
    with pytest.raises(clock.WrongResult, match=said):
        bench(Cut("teal", 0.5).dense.model, monkeypatch, fault)


def test_a_relu_model_is_judged_as_before(monkeypatch):
    torch.manual_seed(0)
    model = LanguageModel(SIZES).eval().requires_grad_(False)
    assert not any(map(has_thresholds, feed_forwards(model)))
    monkeypatch.setattr(models, "Judge", lambda _: pytest.fail("it was made"))
    record = tl.bench.model(model, tokens=(24,), batches=(), seconds=0.0, progress=False, plan=PLAN)
    assert all("compared_sequences" not in row for row in record.rows)
