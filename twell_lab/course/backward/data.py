"""The backward pass of a sparse layer, as notebook 11 computes it: a small layer, memory by tensor, and the least time
of a training step. Nothing is drawn.

A layer is y = h Wd^T with h = g * u, g = relu(x Wg^T), u = x Wu^T. dy is the gradient of the loss in y, and c * sum |h|
is added to the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...ops import survivors
from ..roofline.data import VALUE, Rates

# Rows of d_model values that a training step reads for each kept value, by part; seven in all.
READS = {"u": 1, "y": 1, "dh": 1, "dx": 2, "weight gradients": 2}


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


def dense_saved(tokens: int, d_model: int, d_ff: int, value: int = VALUE) -> dict[str, int]:
    """Bytes that torch's autograd keeps of a gated layer from forward to backward, without the weights.

    value: bytes of one value.
    """
    wide = value * tokens * d_ff
    return {"x": value * tokens * d_model, "relu(gate)": wide, "up": wide, "h": wide}


def sparse_saved(tokens: int, d_model: int, d_ff: int, value: int = VALUE) -> dict[str, int]:
    """Bytes that the sparse path keeps from forward to backward.

    The size of its lists depends on the shape alone, not on how many entries are used. down_t is down transposed, so
    that what a neuron adds to y is a row of it.
    """
    entries = survivors.capacity_for(tokens, d_ff)
    return {
        "x": value * tokens * d_model,
        "down_t": value * d_ff * d_model,
        "words": 4 * entries,
        "ups": 4 * entries,
        "spans": 8 * tokens,
        "kept": 4 * tokens,
        "lost": 4 * (tokens + 2),
    }


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


# ---- the least time of a step ----


def floors(reached: Rates, nnz: float, tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632) -> list[dict]:
    """The parts of a sparse training step: part, and ms, the least time at these rates.

    The gate is a product on the tensor cores. The others read a row of d_model values from the L2 cache each time that
    a kept value asks for it, and every array once from memory."""
    x, weights, row = VALUE * tokens * d_model, VALUE * d_ff * d_model, VALUE * d_model
    gate = max(2 * tokens * d_model * d_ff / reached.tensor, (x + weights) / reached.memory)
    found = [{"part": "gate, packed", "ms": 1e3 * gate}]
    for part, reads in READS.items():
        memory = x * (part != "u") + 3 * weights * (part == "weight gradients")
        seconds = max(reads * tokens * nnz * row / reached.l2, memory / reached.memory)
        found.append({"part": part, "ms": 1e3 * seconds})
    return found


def dense_floor(reached: Rates, tokens: int = 16384, d_model: int = 2048, d_ff: int = 5632) -> float:
    """Least ms of the dense step: nine products, three forward and six backward, on the tensor cores."""
    return 1e3 * 9 * 2 * tokens * d_model * d_ff / reached.tensor
