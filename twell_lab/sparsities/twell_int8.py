"""The TwELL path with its rows of up and down as INT8, one scale a neuron: half the bytes of 16 bits. Lossy.

    tl.sparsify(model, "twell_int8")
    y = rows_product(x, relu(x gate^T), quantise(up), quantise(down.t()), None, None)     # what it computes, by torch

The gate is computed as it is, so what fires is exact; what it adds is not. x and the hidden values stay as they are:
only weights are rounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cuda.launch import Buffer, Call, run
from ..layers.parts import Weights
from ..layers.paths import Converted
from ..ops import int8
from ..ops.activation import RELU
from ..ops.pack import pack
from .products import hidden_of, spoilt
from .quantised import Rows, quantise


@torch.no_grad()
def rows_product(
    x: Tensor, first: Tensor, up: Rows | None, down: Rows, up_bias: Tensor | None, down_bias: Tensor | None
) -> Tensor:
    """Return what is left of a layer once its gate is computed: y = (first * (x up^T + up_bias)) down + down_bias, or
    without up y = first down + down_bias. Sums are float32, rounded once.

    x: [tokens, d_model]. first: [tokens, d_ff] after the activation. up: INT8 rows [d_ff, d_model], one a neuron, None
    for a plain layer. down: the same of down transposed. y: [tokens, d_model] in x's dtype, NaN where a row of x is not
    finite."""
    wide_up, wide_down = (None if bias is None else bias.float() for bias in (up_bias, down_bias))
    hidden = first.float() if up is None else first.float() * F.linear(x.float(), up.dense(), wide_up)
    return spoilt(F.linear(hidden, down.dense().t(), wide_down), x).to(x.dtype)


def _packed(call: Call, x: Buffer, first: Buffer, up, down, up_bias, down_bias, tile: int, words: int, signed: bool):
    """Pack the gate and compute the rest from it."""
    packed = pack(call, first, tile, words, signed=signed)
    return int8.gated_int8(call, x, packed, first, up, down, up_bias, down_bias, tile, signed=signed)


class TwellInt8(Converted):
    """The path. With a ReLU on up (dReLU) it computes densely. The layer owns the rows."""

    name = "twell_int8"
    exact = False

    def make(self, weights: Weights) -> tuple[Rows | None, Rows]:
        return None if weights.gate is None else quantise(weights.up), quantise(weights.down.t())

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: tuple[Rows | None, Rows]) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias = weights
        acts, rows = layer.acts, x.reshape(-1, x.shape[-1])
        first = F.linear(rows, up, up_bias) if gate is None else F.linear(rows, gate, gate_bias)
        if acts.both:
            hidden = hidden_of(first, F.linear(rows, up, up_bias), weights, acts)
            return F.linear(hidden, down, down_bias).view(x.shape)
        up_bias = None if gate is None else up_bias
        if not x.is_cuda:
            return rows_product(rows, acts.applied(first), *form, up_bias, down_bias).view(x.shape)
        first = first if acts == RELU else acts.applied(first)  # the kernels ask whether it is positive
        of_up, of_down = (None if part is None else int8.Weight(*part) for part in form)
        given = (rows.contiguous(), first, of_up, of_down, up_bias, down_bias)
        return run(_packed, *given, layer.tile, layer.words, acts.falls_back).view(x.shape)
