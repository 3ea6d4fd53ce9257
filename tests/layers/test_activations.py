"""Activations other than ReLU that sparse layers compute: its square, FATReLU's threshold, SiLU and GELU with one
(CATS), and dReLU, which has a ReLU on up as well; and which of them kernels compute."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twell_lab.layers.activations import is_relu, is_squared, is_threshold, kernel_activation, kernel_inputs
from twell_lab.layers.find import survey
from twell_lab.layers.lossy import Cut, ThresholdedActivation
from twell_lab.layers.parts import FeedForward
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops.activation import RELU, Activation
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


# What kernels compute in its place; None: none does. A plain layer with `AboveFATReLU` gives numbers for a row of NaN.
LAYERS = {
    "squared": (lambda: layer(PlainFeedForward, SquaredReLU()), RELU),
    "threshold": (lambda: layer(PlainFeedForward, FATReLU()), 0.05),
    "gated threshold": (lambda: layer(GatedFeedForward, FATReLU(0.3)), 0.3),
    "torch's threshold": (lambda: layer(GatedFeedForward, nn.Threshold(0.2, 0.0)), 0.2),
    "threshold of zero": (lambda: layer(GatedFeedForward, FATReLU(0.0)), RELU),
    "above": (lambda: layer(GatedFeedForward, AboveFATReLU(0.3)), 0.3),
    "plain, above": (lambda: layer(PlainFeedForward, AboveFATReLU(0.3)), None),
    "dReLU": (lambda: layer(Double), Activation(both=True)),
    "relu of a threshold": (lambda: layer(PlainFeedForward, ThresholdedActivation(nn.ReLU(), 0.3)), 0.3),
    "silu": (lambda: layer(GatedFeedForward, ThresholdedActivation(nn.SiLU(), 0.1)), Activation("silu", 0.1)),
    "plain gelu": (lambda: layer(PlainFeedForward, ThresholdedActivation(F.gelu, 0.1)), Activation("gelu", 0.1)),
    "gelu by tanh": (
        lambda: layer(GatedFeedForward, ThresholdedActivation(nn.GELU("tanh"), 0.1)),
        Activation("gelu_tanh", 0.1),
    ),
    "mish": (lambda: layer(GatedFeedForward, ThresholdedActivation(nn.Mish(), 0.1)), None),
    "silu, no threshold": (lambda: layer(GatedFeedForward, ThresholdedActivation(nn.SiLU(), 0.0)), None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_kernels_compute_in_its_place(name):
    ((found,), reasons), wanted = survey(LAYERS[name][0]()), LAYERS[name][1]
    assert reasons == {} and found.both == (name == "dReLU")
    assert (found.gate is found.up) == (name == "squared")
    kernel = kernel_activation(found)
    if isinstance(wanted, float):
        assert kernel.kind == "above" and kernel.threshold == pytest.approx(wanted, rel=1e-6)
        wanted = kernel
    assert kernel == wanted
    assert kernel_activation(found._replace(cut=Cut(0.1, 0.1))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name, (_, kernel) in LAYERS.items() if kernel is not None])
@torch.no_grad()
def test_the_kernels_activation_keeps_the_same_values(name, dtype):
    (found,) = survey(LAYERS[name][0]().to(dtype))[0]
    acts, kernel = found.acts or torch.relu, kernel_activation(found)
    bound = torch.tensor(getattr(acts, "threshold", 0.0), dtype=dtype)
    step = torch.nextafter(bound, torch.tensor(torch.inf, dtype=dtype))
    x = torch.cat([torch.randn(2000, dtype=dtype), torch.stack([bound, -bound, step, torch.nextafter(bound, -step)])])
    assert torch.equal(kernel.applied(x) != 0, acts(x.clone()) != 0)
    torch.testing.assert_close(kernel.applied(x), acts(x.clone()))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_sparse_layer_computes_it(name):
    dense = LAYERS[name][0]()
    x = torch.randn(50, D_MODEL)
    exact = copy.deepcopy(dense).double()(x.double())
    off, allowed = ((y.double() - exact).norm(dim=1) for y in (SparseFFN.from_module(dense)(x), dense(x)))
    assert (off <= 2 * allowed + 1e-6 * exact.abs().amax(1)).all()


@pytest.mark.parametrize(
    "acts, kind",
    [(nn.ReLU(), "relu"), (torch.relu, "relu"), (F.relu, "relu"), (nn.SiLU(), "silu"), (nn.GELU("tanh"), "gelu_tanh")],
)
def test_thresholds_on_inputs_leave_the_activation_as_it_is(acts, kind):
    layer = FeedForward("", None, nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 2), acts, cut=Cut(0.1, 0.2))
    found = kernel_inputs(layer)
    assert (found.kind, found.inputs, found.hidden) == (kind, 0.1, 0.2)
    others = dict(both=True), dict(cut=None), dict(acts=nn.Mish()), dict(gate=layer.up)
    assert all(kernel_inputs(layer._replace(**other)) is None for other in others)


def shadowed(acts):
    acts.forward = torch.tanh
    return acts


@pytest.mark.parametrize(
    "acts, relu, squared, threshold",
    [
        (nn.ReLU(), True, False, False),
        (type("Renamed", (nn.ReLU,), {})(), True, False, False),
        (type("Other", (nn.ReLU,), {"forward": torch.tanh})(), False, False, False),
        (shadowed(nn.ReLU()), False, False, False),
        (SquaredReLU(), False, True, False),
        (shadowed(SquaredReLU()), False, False, False),
        (FATReLU(-0.1), False, False, False),
        (nn.Threshold(0.2, 0.5), False, False, False),
        (ThresholdedActivation(torch.tanh, 0.1), False, False, True),
        (type("FATReLU", (FATReLU,), {"forward": lambda self, x: x})(), False, False, False),
        (torch.tanh, False, False, False),
    ],
)
def test_what_an_activation_is(acts, relu, squared, threshold):
    assert (is_relu(acts), is_squared(acts), is_threshold(acts)) == (relu, squared, threshold)
