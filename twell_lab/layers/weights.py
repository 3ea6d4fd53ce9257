"""The tensors of one feed-forward layer, travelling as one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .parts import Projection, weights_of


class Weights(NamedTuple):
    """A layer's weights and biases, in the order in which the operators take them.

    gate, up: [d_ff, d_model], gate None for a plain layer, and up itself for one whose ReLU is squared; down: [d_model,
    d_ff]; biases [d_ff], [d_ff], [d_model], or None."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(cls, gate: Projection | None, up: Projection, down: Projection) -> Weights:
        """Return the weights of three projections, each read once: reading a parametrized weight makes a new tensor."""
        (up_weight, up_bias), (down_weight, down_bias) = weights_of(up), weights_of(down)
        gate_weight, gate_bias = (up_weight, up_bias) if gate is up else weights_of(gate)
        return cls(gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)  # type: ignore[arg-type]

    def named(self) -> dict[str, Tensor]:
        """Return those that are there, by name."""
        return {name: t for name, t in zip(NAMES, self) if t is not None}


NAMES = Weights._fields
