"""The backward pass of a sparse layer, as notebook 11 computes it: a small layer, and what is kept. Nothing is drawn.

A layer is y = h Wd^T with h = g * u, g = relu(x Wg^T), u = x Wu^T. dy is the gradient of the loss in y, and c * sum |h|
is added to the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

# ---- a layer small enough to draw ----


class Case(NamedTuple):
    """A gated layer, its input, and the gradient that comes back from above: all float64.

    x, dy: [tokens, d_model]; gate, up: [d_ff, d_model]; down: [d_model, d_ff].
    """

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    dy: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


def drawn(tokens: int = 24, d_model: int = 16, d_ff: int = 40, seed: int = 0) -> Case:
    """A random layer in which few neurons fire, two of them never; every eighth token makes many fire."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    gate, up = (torch.randn(d_ff, d_model, generator=generator, dtype=torch.float64) / 4 for _ in range(2))
    down = torch.randn(d_model, d_ff, generator=generator, dtype=torch.float64) / 6
    x[:, 0], gate[:, 0] = 1.2, -1.0  # a dimension that silences everybody, as a bias would,
    x[3::8, 0] = 0.2  # less so at some tokens,
    gate[[d_ff // 3, d_ff // 2], 0] = -9.0  # and altogether in two neurons
    return Case(x, gate, up, down, dy)


def exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, dy: Tensor, c: float) -> tuple[Tensor, ...]:
    """(dx, dgate, dup, ddown) by torch's autograd through the dense layer."""
    x, gate, up, down = leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, gate, up, down)]
    with torch.enable_grad():
        h = (x @ gate.T).relu() * (x @ up.T)
        return torch.autograd.grad((h @ down.T * dy).sum() + c * h.abs().sum(), leaves)


def worst(got: Iterable[Tensor], want: Iterable[Tensor]) -> float:
    """The largest |got - want| / |want| of these pairs of gradients."""
    pairs = ((mine.double(), right.double()) for mine, right in zip(got, want, strict=True))
    return max(float((mine - right).norm() / right.norm().clamp(min=1e-300)) for mine, right in pairs)


# ---- memory by tensor ----


@contextmanager
def saved_tensors(module: nn.Module) -> Iterator[list[dict]]:
    """A context in which what autograd saves is listed: shape and bytes. Tensors that share memory count once.

    The module's parameters are left out, since they are in memory anyway.
    """
    ours = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: list[dict] = []
    alive: list[Tensor] = []  # holds them, so that no memory is freed and used again while they are counted

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours and storage.nbytes():
            ours.add(storage.data_ptr())
            alive.append(tensor)
            found.append({"shape": list(tensor.shape), "bytes": storage.nbytes()})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
    alive.clear()
