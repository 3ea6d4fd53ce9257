"""Each operation in a few lines of plain torch: what every kernel is checked against.

Call these with float64 tensors to get the reference a kernel's error is measured from. They compute the
textbook sums over the neurons that fire, so a value that would overflow inside a silent neuron does no
harm; and they follow the dense layer where an input row is not finite. Weights: gate and up [d_ff, d_model],
down [d_model, d_ff], as torch.nn.Linear stores them; x [tokens, d_model]; biases may be None.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def fires(gate: Tensor) -> Tensor:
    """Which neurons pack() keeps: positives and NaN, boolean, the shape of gate."""
    return ~(gate <= 0)


def relu(gate: Tensor) -> Tensor:
    """What unpacking gives back: gate where it fires, +0 elsewhere."""
    return torch.where(fires(gate), gate, torch.zeros_like(gate))


def gated_ffn(x, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None) -> Tensor:
    """(relu(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd  [tokens, d_model]."""
    return gated(x, linear(x, gate_weight, gate_bias), up_weight, down_weight, up_bias, down_bias)


def gated(x, gate, up_weight, down_weight, up_bias=None, down_bias=None) -> Tensor:
    """The part of the gated layer after the gate GEMM; gate is [tokens, d_ff], before the ReLU."""
    keep = fires(gate)
    hidden = torch.where(keep, gate * linear(x, up_weight, up_bias), torch.zeros_like(gate))
    y = linear(hidden, down_weight, down_bias)
    return torch.where(spoilt(x, keep)[:, None], torch.full_like(y, torch.nan), y)


def plain_ffn(x, up_weight, down_weight, up_bias=None, down_bias=None) -> Tensor:
    """relu(x Wu^T + bu) Wd^T + bd  [tokens, d_model]."""
    return linear(relu(linear(x, up_weight, up_bias)), down_weight, down_bias)


def spoilt(x: Tensor, keep: Tensor) -> Tensor:
    """Rows whose dense gated result is NaN throughout, boolean [tokens].

    In a row of x with an infinity or NaN every up value is infinite or NaN, and a silent neuron multiplies
    it by zero: NaN, which the down projection spreads over the row.
    """
    return ~x.isfinite().all(1) & ~keep.all(1)
