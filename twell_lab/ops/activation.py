"""What fires in a layer, and with which value: its activation, as torch's operations and the kernels compute it.

The C++ home of the same is kernels/activation.cuh."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError

if TYPE_CHECKING:
    from ..cuda.launch import Macros

# Those that return to zero far below it, without a threshold.
CURVES = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
ACTIVATIONS = ("relu", "above", *CURVES)


def activation(kind: str, both: bool = False) -> Macros:
    """Return the macros of activation.cuh for an activation of this kind, with a ReLU on up as well or not."""
    acts: Macros = () if kind == "relu" else ((f"ACTS_{kind.upper()}", True),)
    return (*acts, ("BOTH", True)) if both else acts


def rounded(threshold: float, dtype: torch.dtype) -> float:
    """Return a threshold as kernels get it for values of this type."""
    return torch.tensor(threshold, dtype=dtype, device="cpu").item()


class Activation(NamedTuple):
    """The activation of a layer, which decides who fires, and with which value.

    kind: "relu"; "above", which keeps g where g > threshold, a number from 0 up (FATReLU: ProSparse, arXiv 2402.13516);
    "silu", "gelu" or "gelu_tanh", which keep the value of that function, of either sign, where its magnitude is at
    least the threshold, a number above 0 (CATS: arXiv 2404.08763). both: whether up goes through a ReLU as well (dReLU:
    TurboSparse, arXiv 2406.05955), in gated layers with "relu" alone.

    As torch compares a tensor with a number, the threshold counts as it is rounded to the type of the values."""

    kind: str = "relu"
    threshold: float = 0.0
    both: bool = False

    def check(self, gated: bool) -> None:
        """Raise InputError for what no kernel computes."""
        if self.kind not in ACTIVATIONS:
            raise InputError(f"activation is {self.kind!r:.80}; {', '.join(map(repr, ACTIVATIONS))} are accepted")
        if not isinstance(self.threshold, float) or not 0 <= self.threshold < inf:
            raise InputError(f"threshold is {self.threshold!r:.80}; a finite number from 0 up is accepted")
        if self.kind == "relu" and self.threshold:
            raise InputError(f"threshold is {self.threshold} for a relu; 0 is accepted, and others with 'above'")
        if self.falls_back and not self.threshold:
            raise InputError(f"threshold is 0 for {self.kind}; a number above 0 is accepted")
        if self.both and not (gated and self.kind == "relu"):
            raise InputError(f"both is True for {self.kind}; it is accepted for the relu of a gated layer")

    @property
    def falls_back(self) -> bool:
        return self.kind in CURVES

    def value(self, first: Tensor) -> Tensor:
        """Return the value of each neuron if it fires: the activation without its threshold."""
        return CURVES[self.kind](first) if self.falls_back else torch.relu(first)

    def keeps(self, first: Tensor) -> Tensor:
        """Who fires, boolean. first: the gate [..., d_ff] before the activation, or up in a plain layer. NaN fires.

        Minus infinity, which may be a large number rounded to 16 bits, is silent, as such a number is; torch's own
        silu and gelu of it are NaN."""
        return self._kept(first, self.value(first))

    def _kept(self, first: Tensor, value: Tensor) -> Tensor:
        if self.falls_back:
            return ~(value.abs() < self.threshold) & (first != -inf)
        return ~(first <= self.threshold)

    def applied(self, first: Tensor) -> Tensor:
        """The value where a neuron fires, +0 elsewhere."""
        value = self.value(first)
        return torch.where(self._kept(first, value), value, torch.zeros_like(value))

    def dense(self, first: Tensor) -> Tensor:
        """Return what a dense layer of torch's operations has after the activation, also of minus infinity."""
        if self.falls_back:
            value = self.value(first)
            return value.masked_fill(value.abs() < self.threshold, 0)
        return torch.relu(first) if self.kind == "relu" else self.applied(first)

    def of_up(self, up: Tensor) -> Tensor:
        """Return what a value of up counts as in the product."""
        return torch.relu(up) if self.both else up


RELU = Activation()


class SquaredReLU(nn.Module):
    """relu(x)^2, element by element (So et al., "Primer", arXiv 2109.08668): the same neurons fire, more steeply.

    Sparse layers compute it in plain layers, as relu(x) * x; a gated layer with it is refused."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()
