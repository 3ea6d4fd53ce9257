"""Each operation in a few lines of plain torch: what every kernel is checked against.

Call these with float64 tensors to get the reference from which a kernel's error is measured. They sum over the
neurons that fire, so that a value that would overflow inside a silent neuron does no harm; where an input row is
not finite, they give what the dense layer gives. Weights: gate and up [d_ff, d_model],
down [d_model, d_ff], as torch.nn.Linear stores them; x [tokens, d_model]; biases may be None."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .activation import RELU, Activation, SquaredReLU

ACTIVATIONS = {"relu": nn.ReLU, "relu2": SquaredReLU}


class GatedFeedForward(nn.Module):
    """down(relu(gate(x)) * up(x)): [..., d_model] -> [..., d_model]. activation: a key of ACTIVATIONS."""

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu") -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False)
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.act_fn = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainFeedForward(nn.Module):
    """down(relu(up(x))): [..., d_model] -> [..., d_model]. activation: a key of ACTIVATIONS."""

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu") -> None:
        super().__init__()
        self.up_proj = nn.Linear(d_model, d_ff, bias=False)
        self.down_proj = nn.Linear(d_ff, d_model, bias=False)
        self.act_fn = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)))


relu = RELU.applied  # the gate where it fires, +0 elsewhere: what a packed gate holds


def gated_ffn(x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None, acts: Activation = RELU) -> Tensor:
    """(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd  [tokens, d_model]."""
    return gated(x, linear(x, gate, gate_bias), up, down, up_bias, down_bias, acts)


def gated(x, gate, up_weight, down_weight, up_bias=None, down_bias=None, acts: Activation = RELU) -> Tensor:
    """The part of the gated layer after the gate GEMM; gate is [tokens, d_ff], before the activation."""
    keep, up = acts.keeps(gate), linear(x, up_weight, up_bias)
    value, zero = acts.value(gate), torch.zeros_like(gate)
    hidden = torch.where(keep, value * acts.of_up(up), zero)
    if acts.both:  # what up silences counts for nothing, unless x is not finite: then all is multiplied
        whole = x.isfinite().all(1)[:, None]
        hidden = torch.where(whole & (up <= 0), zero, torch.where(whole, hidden, value * torch.relu(up)))
    y = linear(hidden, down_weight, down_bias)
    if acts.both:
        return y
    return torch.where(spoilt(x, keep)[:, None], torch.full_like(y, torch.nan), y)


def plain_ffn(x, up_weight, down_weight, up_bias=None, down_bias=None, acts: Activation = RELU) -> Tensor:
    """act(x Wu^T + bu) Wd^T + bd  [tokens, d_model]."""
    return linear(acts.dense(linear(x, up_weight, up_bias)), down_weight, down_bias)


def spoilt(x: Tensor, keep: Tensor) -> Tensor:
    """Rows whose dense gated result is NaN throughout, boolean [tokens].

    In a row of x with an infinity or NaN every up value is infinite or NaN, and a silent neuron multiplies
    it by zero: NaN, which the down projection spreads over the row.
    """
    return ~x.isfinite().all(1) & ~keep.all(1)
