"""Activations other than ReLU that sparse layers compute: its square, FATReLU's threshold, SiLU and GELU with one (CATS),
and dReLU, which has a ReLU on up as well."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twell_lab.layers.anatomy import feed_forwards, is_threshold

import twell_lab as tl
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice, LayerPlan
from twell_lab.layers.lossy import ThresholdedActivation
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import cpu
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward, SquaredReLU

D_MODEL, D_FF = 16, 300


class FATReLU(nn.Module):
    """As the models' own code has it (ProSparse, MiniCPM-S)."""

    def __init__(self, threshold=0.05):
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        return torch.where(x < self.threshold, torch.zeros_like(x), x)


class AboveFATReLU(FATReLU):
    """Without the threshold itself, and with 0 for NaN."""

    def forward(self, x):
        return torch.where(x > self.threshold, x, 0.0)


class Double(GatedFeedForward):
    """Bamboo's and TurboSparse's dReLU."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


def layer(kind, act=None):
    torch.manual_seed(0)
    made = kind(D_MODEL, D_FF)
    if act is not None:
        made.act_fn = act
    return made


LAYERS = {
    "squared": lambda: layer(PlainFeedForward, SquaredReLU()),
    "threshold": lambda: layer(PlainFeedForward, FATReLU()),
    "gated threshold": lambda: layer(GatedFeedForward, FATReLU(0.3)),
    "torch's threshold": lambda: layer(GatedFeedForward, nn.Threshold(0.2, 0.0)),
    "threshold of zero": lambda: layer(GatedFeedForward, FATReLU(0.0)),
    "above": lambda: layer(GatedFeedForward, AboveFATReLU(0.3)),
    "plain, above": lambda: layer(PlainFeedForward, AboveFATReLU(0.3)),
    "dReLU": lambda: layer(Double),
    "relu of a threshold": lambda: layer(PlainFeedForward, ThresholdedActivation(nn.ReLU(), 0.3)),
    "silu": lambda: layer(GatedFeedForward, ThresholdedActivation(nn.SiLU(), 0.1)),
    "plain gelu": lambda: layer(PlainFeedForward, ThresholdedActivation(F.gelu, 0.1)),
    "gelu by tanh": lambda: layer(GatedFeedForward, ThresholdedActivation(nn.GELU("tanh"), 0.1)),
    "mish": lambda: layer(GatedFeedForward, ThresholdedActivation(nn.Mish(), 0.1)),
    "silu, no threshold": lambda: layer(GatedFeedForward, ThresholdedActivation(nn.SiLU(), 0.0)),
}
# No kernel computes these; a plain layer with `AboveFATReLU` gives numbers for a row of NaN.
ALONE = ["plain, above", "mish", "silu, no threshold"]


@pytest.fixture(autouse=True)
def over_the_entries(monkeypatch):
    monkeypatch.setattr(cpu, "_pays", lambda gate, entries: True)


@pytest.mark.parametrize("how", ["twell", "dense", None, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_as_near_to_the_exact_one_as_the_dense_layer(name, dtype, how):
    model = nn.Sequential(LAYERS[name]().to(dtype))
    x = torch.randn(50, D_MODEL, dtype=dtype)
    dense, exact = model(x), copy.deepcopy(model).double()(x.double())
    sparsify(model, how)
    assert isinstance(model[0], SparseFFN) and model[0].dense_alone == (name in ALONE)
    for _ in range(10):
        found = model(x)
    off, allowed = ((each.double() - exact).norm(dim=1) for each in (found, dense))
    ulp = torch.finfo(dtype).eps * exact.abs().amax(1)
    assert (off <= 2 * allowed + ulp).all()
    classes = model[0].status()["classes"]
    assert how == "auto" or {each["path"] for each in classes} == {"dense" if name in ALONE else how or "dense"}
    if name in ALONE:
        assert torch.equal(found, dense)
    assert torch.equal(densify(model)(x), dense)


@pytest.mark.parametrize("word", ["twell", "dense"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_what_is_told(name, word):
    dense = nn.Sequential(LAYERS[name]())
    sparse = sparsify(copy.deepcopy(dense), word)
    x = torch.randn(7, D_MODEL)
    for model in (dense, sparse):
        model(x).square().sum().backward()
    for p, q in zip(dense.parameters(), sparse.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5 * p.grad.abs().max().item())
    told = []
    for model in (dense, sparse) if name != "dReLU" else (sparse,):
        with tl.layer_terms(model) as terms:
            model(x)
        told.append((terms[0].l1.item(), terms[0].nnz.item()))
    hidden = []
    dense[0].down_proj.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    dense(x)
    wanted = (hidden[0].abs().sum(1).mean().item(), (hidden[0] != 0).sum(1).float().mean().item())
    assert all(each == pytest.approx(wanted, rel=1e-5) for each in told)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_rows_that_are_not_finite_and_large_ones(name, dtype):
    """As the dense layer has them, but where a gate overflows to minus infinity: that neuron is silent."""
    dense = LAYERS[name]().to(dtype)
    x = torch.randn(6, D_MODEL, dtype=dtype)
    x[1, 0], x[2, 3], x[3, 5] = torch.inf, -torch.inf, torch.nan
    sparse = SparseFFN.from_module(copy.deepcopy(dense))
    assert torch.equal(sparse(x).isnan(), dense(x).isnan())
    if dtype == torch.float16 and name == "silu":
        row = torch.ones(1, D_MODEL, dtype=dtype)
        dense.gate_proj.weight[0] = -60000.0
        found = SparseFFN.from_module(copy.deepcopy(dense))(row)
        assert dense(row).isnan().all() and found.isfinite().all()


@pytest.mark.parametrize("name", ["gated threshold", "above"])
def test_the_threshold_itself(name):
    """As the activation has it: x < threshold is silent in one, x <= threshold in the other."""
    dense = LAYERS[name]().bfloat16()
    bound = torch.tensor(0.3).bfloat16()
    with torch.no_grad():
        dense.gate_proj.weight.zero_()
        dense.gate_proj.weight[:, 0] = torch.stack([bound, torch.nextafter(bound, 2 * bound)]).repeat(D_FF // 2)
    x = torch.eye(1, D_MODEL).bfloat16()
    with torch.no_grad():
        hidden = dense.act_fn(dense.gate_proj(x))
        assert (hidden != 0).sum() == (D_FF if name == "gated threshold" else D_FF // 2)
        sparse = SparseFFN.from_module(dense)
        torch.testing.assert_close(sparse(x), dense(x))
    assert (sparse.acts.threshold < bound) == (name == "gated threshold")
    assert sparse.float().acts.threshold != pytest.approx(bound.item(), rel=1e-4)  # rounded to another type


@pytest.mark.parametrize("name", ["squared", "threshold", "gated threshold"])
def test_a_profile_counts_what_the_activation_keeps(name):
    model = nn.Sequential(LAYERS[name]())
    x = torch.randn(40, D_MODEL)
    first = getattr(model[0], "gate_proj", model[0].up_proj)
    kept = model[0].act_fn(first(x)) > 0
    for _ in range(2):
        (found,) = tl.profile(model, x).layers
        assert torch.equal(found.neuron_counts, kept.sum(0))
        sparsify(model, "twell")


def test_two_relus_are_not_profiled_by_the_gate_alone():
    with pytest.raises(InputError, match="Double. does not compute"):
        tl.profile(nn.Sequential(LAYERS["dReLU"]()), torch.randn(4, D_MODEL))


@pytest.mark.parametrize("name", ALONE)
def test_another_path_than_dense_is_refused(name):
    sparse = SparseFFN.from_module(LAYERS[name]())
    for plan in (Choice("twell"), Choice("hot_cold", 256)):
        with pytest.raises(InputError, match="does not compute .*; accepted: 'dense'"):
            sparse.follow(plan)
    assert sparse.always_dense()


@pytest.mark.parametrize("name", ["gated threshold", "silu"])
def test_a_plan_times_the_layer_with_its_own_activation(name):
    model = nn.Sequential(LAYERS[name]())
    x = torch.randn(64, D_MODEL)
    plan = tl.plan(tl.profile(model, x), model, tokens=(1, 8))
    assert {each.path for each in plan.layers[0].candidates} >= {"dense", "twell"}
    after = model(x)
    torch.testing.assert_close(sparsify(model, plan)(x), after, rtol=1e-4, atol=1e-5)


def test_a_threshold_that_no_kernel_knows_cannot_be_planned():
    model = nn.Sequential(LAYERS["mish"]())
    found = tl.profile(model, torch.randn(8, D_MODEL))
    with pytest.raises(InputError, match="'0' has an activation .ThresholdedActivation.*only"):
        tl.plan(found, model)
    forced = LayerPlan.forced(found.layers[0], Choice("twell"))
    with pytest.raises(InputError, match="accepted: 'dense'"):
        SparseFFN.from_module(model[0], plan=forced)


class Odd(FATReLU):
    def forward(self, x):
        return super().forward(x) - 0.01


@pytest.mark.parametrize(
    "act",
    [FATReLU(-0.1), FATReLU(float("nan")), FATReLU(None), FATReLU("0.1"), Odd(), nn.Threshold(0.1, 1.0), F.threshold],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_other_activations_with_a_threshold_are_none(act):
    assert not is_threshold(act)
    model = nn.Sequential(GatedFeedForward(D_MODEL, D_FF))
    vars(model[0]).pop("act_fn", None), model[0]._modules.pop("act_fn")
    model[0].act_fn = act
    with pytest.raises(InputError, match="no ReLU feed-forward layer"):
        feed_forwards(model)


def test_a_gated_layer_with_a_square_is_refused():
    with pytest.raises(InputError, match="use SquaredReLU"):
        sparsify(nn.Sequential(layer(GatedFeedForward, SquaredReLU())))


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_under_autocast_a_threshold_is_rounded_as_torch_rounds_it_there(kind):
    """0.3 lies between two bfloat16 values, and 0.3008 is the upper one."""
    dense = layer(kind, FATReLU(0.3))
    first = getattr(dense, "gate_proj", dense.up_proj).weight
    with torch.no_grad():
        first.zero_()
        first[:, 0] = torch.linspace(0.29, 0.31, D_FF)
    sparse, x = sparsify(nn.Sequential(copy.deepcopy(dense)), "twell"), torch.ones(5, D_MODEL)
    assert not sparse[0].dense_alone
    with torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(sparse(x), dense(x))
            torch.testing.assert_close(sparse(x), dense(x))


@pytest.mark.parametrize(
    "threshold, dtype", [(300.0, torch.bfloat16), (3e3, torch.float16), (2e7, torch.float32), (6.5e4, torch.float16)]
)
def test_thresholds_that_are_large_for_their_type(threshold, dtype):
    dense = layer(GatedFeedForward, FATReLU(threshold)).to(dtype)
    sparse = sparsify(nn.Sequential(copy.deepcopy(dense)), "twell")
    x = torch.randn(3, D_MODEL).to(dtype)
    with torch.no_grad():
        dense.gate_proj.weight[7] = sparse[0].gate_proj.weight[7] = threshold * torch.sign(x[0]) / 8
        torch.testing.assert_close(sparse(x), dense(x))


def test_a_threshold_that_is_changed_after_the_swap_has_no_effect():
    sparse = sparsify(nn.Sequential(layer(GatedFeedForward, FATReLU(0.3))).eval(), "twell")
    x = torch.randn(4, D_MODEL)
    before = sparse(x).detach()
    sparse[0].source.act_fn.threshold = 5.0
    torch.testing.assert_close(sparse(x).detach(), before)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), before)
    torch.testing.assert_close(sparse.to(torch.float32)(x).detach(), before)
