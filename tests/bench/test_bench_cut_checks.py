"""What is asked of kernels for layers with thresholds before they are timed, with stand-ins for the kernels: right ones,
which round less often than torch does, and ones with a fault each."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import twell_lab as tl
from twell_lab.bench.cut_checks import hard_inputs, has_thresholds, layer_ratio
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.thresholds import calibrate
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import clock

SIZES = ModelConfig(d_model=48, layers=3, heads=2, d_ff=200, context=24, vocabulary=64)
METHODS = [("cats", 0.5), ("teal", 0.9)]
FAULTS = ["a hidden value more", "wrong scale", "another threshold", "NaN dropped"]
OF_TEAL = ["an input more", "ties dropped"]


class Standin(nn.Module):
    """A layer with thresholds as a kernel may compute it: in float32, with hidden values rounded once. So of the values
    at the threshold it keeps others than torch does. fault: what it does wrong."""

    def __init__(self, layer, fault=""):
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, x):
        layer, cut = self.layer, self.layer.cut
        act = getattr(layer.acts, "activation", torch.relu if layer.acts is None or not cut else layer.acts)
        bound = (cut.hidden if cut else layer.acts.threshold) * (1.1 if self.fault == "another threshold" else 1)
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


def cut_model(method, sparsity, seed=0):
    """A random SiLU model in bfloat16 with thresholds, and a text."""
    torch.manual_seed(seed)
    model = LanguageModel(SIZES).eval().requires_grad_(False)
    for layer in model.layers:
        layer.mlp.act_fn = nn.SiLU().eval()
        for part in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            nn.init.normal_(part.weight, std=1.5 / part.in_features**0.5)
    text = torch.randint(64, (20_000,))
    found = calibrate(model, text[:960].view(40, 24).split(8), method=method).at(sparsity)
    return found.apply(copy.deepcopy(model).bfloat16()), text


def worst_ratios(model, text, fault, rows=16):
    """For each layer the worst ratio of its stand-in, on what enters it."""
    layers, entered = feed_forwards(model), {}

    def enters(module, args):
        entered.setdefault(module, args[0])

    for layer in layers:
        layer.module.register_forward_pre_hook(enters)
    with torch.no_grad():
        model(text[: 24 * rows].view(rows, 24))
        for layer in layers:
            x = entered[layer.module]
            yield max(layer_ratio(layer, Standin(layer, fault), each) for each in (x, *hard_inputs(layer, x)))


@pytest.mark.parametrize("method, sparsity", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_a_right_layer_passes(method, sparsity, seed):
    assert max(worst_ratios(*cut_model(method, sparsity, seed), "")) <= 1


@pytest.mark.parametrize(
    "method, fault", [*((m, f) for m in ("cats", "teal") for f in FAULTS), *(("teal", f) for f in OF_TEAL)]
)
def test_a_fault_in_a_layer_is_found(method, fault):
    assert min(worst_ratios(*cut_model(method, 0.9), fault)) > 1


@pytest.mark.parametrize("shape", [(0, 24), (3, 1), (2, 5, 24)])
def test_hard_inputs_of_any_shape(shape):
    layer = feed_forwards(cut_model("teal", 0.5)[0])[0]
    x = torch.ones(shape).transpose(0, -2)
    tied, spoilt = hard_inputs(layer, x)
    assert tied.shape == spoilt.shape == x.shape and spoilt.isnan().sum() == min(1, x.numel())


# ---- a model that is to be timed ----


@pytest.fixture
def bench(monkeypatch):
    """tl.bench.model of a dense model with thresholds, whose sparse layers are computed by stand-ins."""

    def timed(model, text, fault=""):
        def forward(self, x):
            (layer,) = feed_forwards(self, only=None)
            return Standin(layer, fault)(x)

        monkeypatch.setattr(SparseFFN, "forward", forward)
        how = {"tokens": (24,), "batches": (1,), "cached": 8, "seconds": 0.0, "progress": False}
        return tl.bench.model(model, text=text, plan=tl.Choice("dense"), **how)  # which takes every layer

    return timed


@pytest.mark.parametrize("method, sparsity", METHODS)
@pytest.mark.parametrize("seed", range(2))
def test_a_right_model_is_timed_and_a_wrong_layer_is_not(method, sparsity, seed, bench):
    model, text = cut_model(method, sparsity, seed)
    rows = [row for row in bench(model, text).rows if row["path"] != "dense eager"]
    assert len(rows) == 4 and all(0 < row["layer_over_allowed"] <= 1 for row in rows)
    said = r"1 x 24 tokens: forced dense: layers.\d.mlp is off by .* times what is allowed: nothing was timed"
    with pytest.raises(clock.WrongResult, match=said):
        bench(model, text, "a hidden value more")


def test_a_relu_model_is_judged_by_its_logits():
    torch.manual_seed(0)
    model = LanguageModel(SIZES).eval().requires_grad_(False)
    assert not any(map(has_thresholds, feed_forwards(model)))
    record = tl.bench.model(model, tokens=(24,), batches=(), seconds=0.0, progress=False, plan=tl.Choice("dense"))
    assert all("layer_over_allowed" not in row for row in record.rows)
