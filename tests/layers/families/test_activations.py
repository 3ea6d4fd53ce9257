"""Activations other than ReLU that sparse layers compute: its square, FATReLU's threshold, and dReLU, which has one on
up as well."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twell_lab as tl
from twell_lab.core.errors import InputError
from twell_lab.layers.anatomy import feed_forwards, is_threshold
from twell_lab.layers.choice import Choice, LayerPlan
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
    "dReLU": lambda: layer(Double),
}
ALONE = [name for name in LAYERS if name != "squared"]


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
    if name in ALONE:
        assert torch.equal(found, dense) and model[0].status()["classes"][0]["path"] == "dense"
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


@pytest.mark.parametrize("name", ["gated threshold", "dReLU"])
def test_another_path_than_dense_is_refused(name):
    sparse = SparseFFN.from_module(LAYERS[name]())
    for plan in (Choice("twell"), Choice("hot_cold", 256)):
        with pytest.raises(InputError, match="does not compute (FATReLU|two ReLUs); 'dense' is accepted"):
            sparse.follow(plan)
    assert sparse.always_dense()


def test_a_threshold_cannot_be_planned():
    model = nn.Sequential(LAYERS["gated threshold"]())
    found = tl.profile(model, torch.randn(8, D_MODEL))
    with pytest.raises(InputError, match="'0' has an activation with a threshold .FATReLU.*only"):
        tl.plan(found, model)
    forced = LayerPlan.forced(found.layers[0], Choice("twell"))
    with pytest.raises(InputError, match="'dense' is accepted"):
        SparseFFN.from_module(model[0], plan=forced)


class Odd(FATReLU):
    def forward(self, x):
        return super().forward(x) - 0.01


@pytest.mark.parametrize(
    "act",
    [FATReLU(-0.1), FATReLU(float("nan")), FATReLU(None), FATReLU("0.1"), Odd(), nn.Threshold(0.1, 1.0), F.threshold],
    ids=str,
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
