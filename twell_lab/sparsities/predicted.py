"""Predicted neurons as a path: the gate's own truncated singular value decomposition chooses them. Lossy.

    tl.sparsify(model, "predicted")       # or tl.plan(..., paths=["predicted"])

There is nothing to train a predictor on but the weights. Predictors that were trained (sparsities.predictors) guess
better, and are applied to a model by themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.parts import Weights
from ..layers.paths import Converted
from .few_neurons import best_alone
from .products import spoilt

RANK, NEURONS = 1 / 4, 1 / 8  # of the path's predictors, as a share of d_model; and computed for a token, of d_ff


def truncated(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return narrow [rank, columns] and wide [rows, rank], whose product is the closest matrix of this rank to a finite
    weight [rows, columns] by the sum of squares: its truncated singular value decomposition, of weight's dtype.

    From the eigenvectors of weight^T weight, in float32. rank: 1 to the number of columns."""
    wide = weight.float()
    size = wide.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) if wide.numel() else 1.0
    scaled = wide / size  # whose squares float32 holds
    narrow = torch.linalg.eigh(scaled.t() @ scaled).eigenvectors[:, -rank:].t().contiguous()
    return narrow.to(weight.dtype), (wide @ narrow.t()).to(weight.dtype)


class Predicted(Converted):
    """For each token the share NEURONS of a layer's neurons, rounded up, that the `truncated` gate, of the share RANK
    of d_model, scores highest. Lossy.

    One token gathers their weights, those of down from a transpose that the layer owns; several, which have each their
    own, are computed densely and masked, and take longer than the dense layer. To make its form takes an
    eigendecomposition of d_model x d_model."""

    name = "predicted"
    exact = False

    def make(self, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
        """Return the truncated gate, narrow [rank, d_model] and wide [d_ff, rank], and down_t [d_ff, d_model]."""
        gate = weights.up if weights.gate is None else weights.gate
        down_t = weights.down.t().clone(memory_format=torch.contiguous_format)
        return *truncated(gate, math.ceil(RANK * gate.shape[1])), down_t

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: tuple[Tensor, ...]) -> Tensor:
        narrow, wide, down_t = form
        rows, bias = x.reshape(-1, x.shape[-1]), weights.up_bias if weights.gate is None else weights.gate_bias
        scores = F.linear(F.linear(rows, narrow), wide, bias)
        neurons = math.ceil(NEURONS * len(wide))
        return spoilt(best_alone(rows, scores, neurons, weights, layer.acts, down_t), rows).view(x.shape)
