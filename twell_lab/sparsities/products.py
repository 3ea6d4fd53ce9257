"""A path that puts other products in the place of a layer's three projections, or of some of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import TwellError
from ..layers.parts import Weights
from ..layers.paths import Converted, Path
from ..ops.activation import Activation
from .checks import refusals

Product = Callable[..., Tensor]  # x [..., k], bias=[n] or None -> [..., n]


class Products(Converted):
    """The layer with other products where the path has them. Its form has one of gate, up and down each, None where
    that is dense."""

    @abstractmethod
    def product(self, weight: Tensor) -> Product:
        """Return x [..., k], bias= -> x weight^T + bias, of a weight [n, k]. Raises a TwellError for a weight that the
        path does not take."""

    def fitted(self, weights: Weights) -> Path:
        super().fitted(weights)
        self.make(weights)
        return self

    def make(self, weights: Weights) -> Any:
        products: list[Product | None] = [None] * 3
        refused = []
        for at, weight in enumerate(weights[:3]):
            if weight is not None and (at > 0 or weight is not weights.up):
                try:
                    products[at] = self.product(weight.detach())
                except TwellError as error:
                    refused.append(error)
        if products == [None] * 3:
            raise refused[0]
        return products

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: Any) -> Tensor:
        def projected(at: int, rows: Tensor) -> Tensor:
            product, bias = form[at], weights[at + 3]
            return F.linear(rows, weights[at], bias) if product is None else product(rows, bias=bias)

        gated = weights.gate is not None and weights.gate is not weights.up
        first = projected(0, x) if gated else None
        y = projected(2, hidden_of(first, projected(1, x), weights, layer.acts))
        return spoilt(y, x).contiguous()  # some products lie turned


@torch.no_grad()
def tried(product: Product, weight: Tensor, what: str) -> Product:
    """Return a product with this weight [n, k], once it ran on a row. DeviceError where torch's kernels refuse that."""
    with refusals(what):
        product(weight.new_zeros(1, weight.shape[1]))
    return product


def hidden_of(gate: Tensor | None, up: Tensor, weights: Weights, acts: Activation) -> Tensor:
    """Return what enters `down`, from what the projections gave; gate: None where it is up or is not there."""
    if gate is not None:
        return acts.dense(gate) * acts.of_up(up)
    fired = acts.dense(up)
    return fired if weights.gate is None else fired.square()


def spoilt(y: Tensor, x: Tensor) -> Tensor:
    """Return y with NaN in the rows in which x is not finite, as the dense layer has it for 0 * inf."""
    return y + torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True) * 0
