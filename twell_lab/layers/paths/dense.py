"""dense: every neuron, through the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ops.activation import RELU
from ..parts import Weights
from .path import Path

if TYPE_CHECKING:
    from .cost import Work


class Dense(Path):
    """The dense module itself; on a Hopper GPU, from dispatch.LEAST_HIDDEN tokens, relu(gate) * up in one GEMM."""

    name = learns = "dense"
    packs = False

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        return super().forward(layer, x, weights, 0) if self._fuses(layer, x, weights) else layer.dense(x)

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor] | None:
        if self._fuses(layer, x, weights):
            from ...ops import dispatch

            return dispatch.prepare(x, weights, self.name, 0, layer.tile, layer.words, layer.acts)
        return layer.source.forward if layer.registered else None

    @staticmethod
    def _fuses(layer: nn.Module, x: Tensor, weights: Weights) -> bool:
        if not x.is_cuda or torch.compiler.is_compiling() or layer.acts != RELU or weights.gate is weights.up:
            return False
        from ...ops import dispatch

        return hides_host(x) and dispatch.fuses(weights.up)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        gemm, values = dense_parts(work)
        launches = 2 if work.fuses_dense else 5 if work.firing.gated else 3
        return {"gemm": gemm, "rows": 0.0, "memory": values, "launches": launches * work.rates.launch, "lost": 0.0}


def hides_host(x: Tensor) -> bool:
    """Return whether x has so many tokens that the GPU works longer than the host: where not, torch's own operations,
    which cost the host least, are the fastest dense layer."""
    from ...ops import dispatch

    return x.shape[:-1].numel() >= dispatch.LEAST_HIDDEN


def dense_parts(work: Work) -> tuple[float, float]:
    """Return the seconds of the GEMMs, and of relu and multiply over the values between them."""
    values = 0 if work.fuses_dense else (5 if work.firing.gated else 2) * work.tokens * work.firing.d_ff * work.itemsize
    return work.gemm(work.firing.d_ff, work.firing.d_model, work.gemms), values / work.rates.bandwidth
