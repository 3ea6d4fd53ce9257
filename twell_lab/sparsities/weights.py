"""SparseLinear: a linear layer that stores those of its weights that were kept.

    layer = SparseLinear.from_linear(linear, magnitude_mask(linear.weight, 0.9))
    y = layer(x)                                # 90% of the weights are zero, and not stored

With gradient="masked" the kept weights alone are parameters, and what is gone stays gone (Han et al., arXiv
1506.02626). With "dense" all weights stay parameters, forward uses the kept ones, and the gradient goes to all of them
as if none were zero (straight-through; Guo et al., arXiv 1608.04493), so that weights come back when the layer is asked
again (`update`). `sparsities.magnitude` does it to whole models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..formats.matrix import row_pointers, rows_of
from .checks import checked_linear, checked_weight, shown

PRODUCTS = ("dense", "csr")


class SparseLinear(nn.Module):
    """x W^T + b, with W stored as its kept values and their indices (CSR): x [..., in_features], y [..., out_features].

    stored: the kept weights [nnz] row by row, or with gradient="dense" all weights [out_features, in_features]; bias;
    column: int32 [nnz]; pointer: int32 [out_features + 1]. product: "dense" fills W with zeros for each call of torch's
    dense product; "csr" is torch's sparse product, which skips what is not kept, also where x is infinite or NaN."""

    column: Tensor
    pointer: Tensor

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mask: Tensor | None = None, *, gradient: str = "masked", product: str = "dense"
    ) -> SparseLinear:
        """Make one of an nn.Linear, whose values are copied. mask: bool [out, in], what is kept; None: no zeros.
        InputError for another mask, "dense" with "csr", and for what is no plain nn.Linear with a finite weight."""
        if (gradient, product) not in (("masked", "dense"), ("masked", "csr"), ("dense", "dense")):
            said = f"gradient is {gradient!r:.80} and product {product!r:.80}"
            raise InputError(f"{said}; accepted: 'masked' with 'dense' or 'csr', and 'dense' with 'dense'")
        weight, bias = checked_weight(checked_linear(linear).weight), linear.bias
        mask = weight != 0 if mask is None else _checked_mask(mask, weight.shape)
        layer = cls()
        (layer.out_features, layer.in_features), layer.gradient, layer.product = weight.shape, gradient, product
        stored = weight[mask] if gradient == "masked" else weight.clone(memory_format=torch.contiguous_format)
        layer.stored = nn.Parameter(stored, linear.weight.requires_grad)
        layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad)
        for name in ("pointer", "column"):
            layer.register_buffer(name, None)
        layer._index(mask)
        return layer.train(linear.training)

    def _index(self, mask: Tensor) -> None:
        self.pointer, self.column = row_pointers(mask.sum(1)).int(), mask.nonzero()[:, 1].int()

    @property
    def nnz(self) -> int:
        """Return how many weights are kept."""
        return self.column.numel()

    @property
    def weight(self) -> Tensor:
        """W, [out_features, in_features], made anew: the kept weights and zeros. Gradients go where `gradient` says."""
        if self.gradient == "dense":  # what is added is a number, so that the gradient goes to all
            return self.stored + torch.where(self.mask, 0, -self.stored).detach()
        return self._whole(self.stored)

    @property
    def mask(self) -> Tensor:
        """Return which weights are kept, bool [out_features, in_features], made anew."""
        return self._whole(torch.ones_like(self.column, dtype=torch.bool))

    def _whole(self, values: Tensor) -> Tensor:
        """Return [out_features, in_features] with values [nnz] where weights are kept, and zeros."""
        places = rows_of(self.pointer, self.nnz), self.column.long()
        return values.new_zeros(self.out_features, self.in_features).index_put(places, values)

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., out_features] of x [..., in_features]."""
        if self.product == "dense":
            return F.linear(x, self.weight, self.bias)
        shape = self.out_features, self.in_features
        weight = torch.sparse_csr_tensor(self.pointer, self.column, self.stored, shape, check_invariants=False)
        # Turned in a copy: an entry then reads the values of neighbouring tokens side by side, not each in a sector.
        y = (weight @ x.reshape(-1, self.in_features).t().contiguous()).t()
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def update(self, mask: Tensor) -> SparseLinear:
        """Keep the weights of a mask, bool [out, in], in place; returns the layer. With gradient="masked" weights can
        only go, and `stored` becomes a new, shorter Parameter: make the optimizer anew. InputError for another mask."""
        mask = _checked_mask(mask, (self.out_features, self.in_features))
        if self.gradient == "masked":
            stay = mask[self.mask]
            mask = self.mask & mask
            self.stored = nn.Parameter(self.stored.detach()[stay], self.stored.requires_grad)
        self._index(mask)
        return self

    def every(self) -> Tensor:
        """Return all weights that may be kept, [out, in], without their history; zeros for those that are gone."""
        return (self.stored if self.gradient == "dense" else self.weight).detach()

    def to_linear(self) -> nn.Linear:
        """Return an nn.Linear with copies of the kept weights, and zeros where none are."""
        weight = self.weight.detach()
        linear = nn.Linear(self.in_features, self.out_features, False, "meta", weight.dtype)
        linear.weight = nn.Parameter(weight, self.stored.requires_grad)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, nnz={self.nnz}"
        return f"{sizes}, gradient={self.gradient!r}, product={self.product!r}"


def _checked_mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        raise InputError(f"the mask is {shown(mask)}; torch.bool {[*shape]} is accepted")
    return mask
