"""A path that puts other products in the place of a layer's three projections, or of some of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import DeviceError, TwellError
from ..layers.parts import Weights
from ..layers.paths import Path
from ..layers.paths.path import Converted
from ..ops.activation import Activation
from .checks import refusals

Product = Callable[..., Tensor]  # x [..., k], bias=[n] or None -> [..., n]


class Products(Converted):
    """The layer with other products where the path has them, and dense ones elsewhere.

    A subclass says which weights it takes (`check`), and what it makes of one (`product`)."""

    @abstractmethod
    def check(self, weight: Tensor) -> None:
        """Raise a TwellError for a weight that the path does not take."""

    @abstractmethod
    def product(self, weight: Tensor) -> Product:
        """Return x [..., k], bias= -> x weight^T + bias, of a weight [n, k] that passed `check`."""

    def check_runs(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise DeviceError where torch's product does not run on this GPU: one small product is tried, once."""
        if device.type == "cuda" and (why := _refusal(type(self), device, dtype)):
            raise DeviceError(why)

    def fitted(self, weights: Weights) -> Path:
        _where_taken(self.check, weights)
        return super().fitted(weights)

    def make(self, weights: Weights) -> Any:
        def taken(weight: Tensor) -> Product:
            self.check(weight)
            return self.product(weight)

        return _where_taken(taken, weights)

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: Any) -> Tensor:
        def projected(at: int, rows: Tensor) -> Tensor:
            product, bias = form[at], weights[at + 3]
            return F.linear(rows, weights[at], bias) if product is None else product(rows, bias=bias)

        gated = weights.gate is not None and weights.gate is not weights.up
        first = projected(0, x) if gated else None
        y = projected(2, hidden_of(first, projected(1, x), weights, layer.acts))
        return spoilt(y, x).contiguous()  # some products lie turned


def hidden_of(gate: Tensor | None, up: Tensor, weights: Weights, acts: Activation) -> Tensor:
    """Return what enters `down` of a layer with these weights, from what its projections gave; gate: None where it is
    up or is not there."""
    if gate is not None:
        return acts.dense(gate) * acts.of_up(up)
    fired = acts.dense(up)
    return fired if weights.gate is None else fired.square()


def spoilt(y: Tensor, x: Tensor) -> Tensor:
    """Return y with NaN in the rows in which x is not finite, as the dense layer has it for 0 * inf."""
    return y + torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True) * 0


@cache
def _refusal(path: type[Products], device: torch.device, dtype: torch.dtype) -> str:
    weight = torch.eye(64, device=device, dtype=dtype)
    try:
        with torch.no_grad(), refusals(f"torch's product of {path.name}"):
            path().product(weight)(weight[:1])
    except TwellError as error:
        return str(error)
    return ""


def _where_taken(of: Callable[[Tensor], Any], weights: Weights) -> list[Any]:
    """Return of(weight) of gate, up and down, None where it raises a TwellError, unless it does so for all."""
    results: list[Any] = [None] * 3
    refused = []
    gate, up, down = weights[:3]
    asked = [(at, w) for at, w in enumerate((None if gate is up else gate, up, down)) if w is not None]
    for at, weight in asked:
        try:
            results[at] = of(weight.detach())
        except TwellError as error:
            refused.append(error)
    if len(refused) == len(asked):
        raise refused[0]
    return results
