"""dense: every neuron, through the tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...ops import checks, dispatch
from ...ops.activation import RELU
from ..again import Known
from ..lossy import Cut
from ..weights import Weights
from .cost import Work
from .path import Path


class Dense(Path):
    """Torch's operations; on a Hopper GPU, from dispatch.LEAST_HIDDEN tokens, relu(gate) * up in one GEMM. In a CUDA
    graph that would gain from fewer tokens on, but a graph gives the bits of a plain call."""

    name = learns = "dense"
    packs = False

    def prepare(self, layer: nn.Module, weights: Weights) -> tuple[None, list]:
        layer.fuses_dense = dispatch.fuses(weights.up)
        return None, []

    def moved(self, layer: nn.Module, weights: Weights) -> None:
        self.prepare(layer, weights)

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Tensor:
        # A forward that is being compiled sees no addresses, and takes the last answer.
        if hides_host(x) and not torch.compiler.is_compiling() and layer.fuses_dense != dispatch.fuses(weights.up):
            self.prepare(layer, weights)
        if self._fuses(layer, x, weights):
            return super().forward(layer, x, weights, hot, None)
        return by_torch(
            x, weights, **layer.formula
        )  # whose operations torch's compiler fuses, and which cost the host least

    def again(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Known | None:
        return super().again(layer, x, weights, hot, None) if self._fuses(layer, x, weights) else again(**layer.formula)

    def _fuses(self, layer: nn.Module, x: Tensor, weights: Weights) -> bool:
        # A square needs one product of the two; and the kernel computes nothing but the ReLU.
        return hides_host(x) and layer.fuses_dense and layer.acts == RELU and weights.gate is not weights.up

    def ready(self, layer: nn.Module, weights: Weights) -> Weights:
        return weights

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        gemm, values = dense_parts(work)
        return {
            "gemm": gemm,
            "rows": 0.0,
            "memory": values,
            "launches": (2 if fused(work) else 5 if work.firing.gated else 3) * work.rates.launch,
            "lost": 0.0,
        }


def hides_host(x) -> bool:
    """Whether x has so many tokens that the GPU works longer than the host: where not, torch's own operations, which
    cost the host least, are the fastest dense layer."""
    return isinstance(x, Tensor) and x.shape[:-1].numel() >= dispatch.LEAST_HIDDEN


def by_torch(
    x: Tensor,
    weights: Weights,
    seen: Callable[[Tensor], Tensor] | None = None,
    acts: Callable[[Tensor], Tensor] = torch.relu,
    both: bool = False,
    cut: Cut | None = None,
) -> Tensor:
    """The layer by torch's operations, which also have gradients: x [..., d_model] -> [..., d_model]. seen: takes the
    hidden activations [..., d_ff], and returns what goes into the down projection. acts: the activation, which in
    a gated layer with `both` is also that of up. cut: thresholds on x and on the hidden activations. Raises InputError
    for shapes that do not fit together."""
    gate, up, down, gate_bias, up_bias, down_bias, _ = weights
    checks.check_tensor("x", x)
    checks.check_weights(x.shape[-1], up.shape[0], gate, up, down, gate_bias, up_bias, down_bias)
    if x.dtype != up.dtype and not torch.is_autocast_enabled(x.device.type):
        checks.check_together(x, x.dtype, up=up)
    return _computed(x, weights, seen, acts, both, cut)


def again(acts: Callable[[Tensor], Tensor] = torch.relu, both: bool = False, cut: Cut | None = None) -> Known:
    """by_torch for any x like one that was computed before."""
    return Known(lambda x, weights: _computed(x, weights, None, acts, both, cut))


def _computed(x: Tensor, weights: Sequence[Tensor | None], seen, acts, both: bool, cut: Cut | None) -> Tensor:
    hidden = hidden_of(x, weights, acts, both, cut)
    return linear(hidden if seen is None else seen(hidden), weights[2], weights[5])


def hidden_of(x: Tensor, weights: Sequence[Tensor | None], acts, both: bool = False, cut: Cut | None = None) -> Tensor:
    """What enters `down`, [..., d_ff], by torch's operations; arguments as `by_torch` has them."""
    gate, up, _, gate_bias, up_bias, _, _ = weights
    x = x if cut is None else cut.of_input(x)
    if gate is None:
        hidden = acts(linear(x, up, up_bias))
    elif gate is up:
        hidden = acts(linear(x, up, up_bias)).square()
    else:
        beside = linear(x, up, up_bias)
        hidden = acts(linear(x, gate, gate_bias)) * (acts(beside) if both else beside)
    return hidden if cut is None else cut.of_hidden(hidden)


def fused(work: Work) -> bool:
    """Whether the kernel runs that computes relu(gate) * up in one GEMM."""
    return work.fuses(dispatch.LEAST_HIDDEN)


def dense_parts(work: Work) -> tuple[float, float]:
    """Seconds of the GEMMs, and of relu and multiply over the values between them."""
    values = 0 if fused(work) else (5 if work.firing.gated else 2) * work.tokens * work.firing.d_ff * work.itemsize
    return work.gemm(work.firing.d_ff, work.firing.d_model, work.gemms), values / work.rates.bandwidth
