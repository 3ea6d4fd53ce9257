"""Which path each layer takes while a model is trained: the dense one, until so few of its neurons fire that the sparse
one is faster.

What each path costs at a token, with weights of d_model x d_ff and n neurons firing:
  dense   nine GEMMs (plain: six) of 2 d_model d_ff operations, and the middle of the layer, 11 (5) values of d_ff
  sparse  one GEMM, and for each of the n entries 7 rows (plain: 5) of d_model values through the cache: up and down
          forwards; down, gate and up backwards; x and dy for the weights' gradients (plain: all but up forwards, and
          gate)
So there is a break-even, whatever the number of tokens. A "lost" row, a token that the sparse path finishes from the
dense weights, costs as much as if a share of the layer's neurons fired: LOST_TO_TENSOR_CORES of them for as many tokens
as these take, LOST for the others.

Under torch.compile a changed path is another graph: compile a model's layers one by one, so that two graphs serve all
of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import DENSE, HEAVY, SPARSE, LayerTerm
from ..ops import survivors, train, train_lost
from . import costs

MARGIN = 0.1  # a layer changes its path when it is this far past the break-even: noise alone does not change it back
# The share of the room for entries up to which the sparse path is taken. With MARGIN a layer still changes over before
# rows do not fit, which costs much more.
ROOM_USED = 0.9
# Of d_ff. On an H100 a lost row takes 1.2 us on tensor cores (one of 512 among 16,384), otherwise 5 us where 4% of the
# neurons fire in it, 7 where 10%, 10 where 30% do; an entry takes 3 to 4 ns.
LOST_TO_TENSOR_CORES, LOST = HEAVY, 0.3
_REST = 6  # d_model values a token that the sparse path moves besides: x, y, dy and dx, some of them twice


def break_even(rates: costs.Rates, d_model: int, d_ff: int, gated: bool = True) -> float:
    """Return the neurons firing at a token below which a training step of a layer is faster on the sparse path."""
    size = getattr(torch, rates.dtype).itemsize
    gemm = 2 * d_model * d_ff / rates.matmul
    gemms, values, rows = (9, 11, 7) if gated else (6, 5, 5)
    dense = gemms * gemm + values * d_ff * size / rates.bandwidth
    packed = 2 * d_ff * 4 / 8 / rates.bandwidth  # the words are written whole
    fixed = gemm + packed + _REST * d_model * size / rates.bandwidth
    return max(0.0, (dense - fixed) / (rows * d_model * size / rates.l2))


def switch(model: nn.Module, terms: Iterable[LayerTerm], *, below: float | dict[str, float]) -> dict[str, str]:
    """Set the training path of every SparseFFN of the model that has a term (layers.terms) of one forward pass; reading
    the terms waits for the device. Returns {layer: new path} of the layers whose path changed.

    below: the break-even, one number or one for each layer, in neurons firing at a token."""
    found, changes = {layer.name: layer.module for layer in feed_forwards(model)}, {}
    for term in terms:
        if not isinstance(layer := found.get(term.name), SparseFFN):
            continue
        limit = below[term.name] if isinstance(below, dict) else below
        spent, now = cost(term, layer.up.weight), layer.learning or SPARSE
        path = SPARSE if spent < limit * (1 - MARGIN) else DENSE if not spent <= limit * (1 + MARGIN) else now
        if layer.learning != path:
            layer.learn(path)
        if path != now:
            changes[term.name] = path
    return changes


def cost(term: LayerTerm, weight: Tensor) -> float:
    """Return what a token costs on the sparse path, in neurons firing, for a layer with this up projection."""
    most = 1 / train_lost.TOKENS_A_ROW
    lost = 0.0 if term.lost is None else float(term.lost)
    entries, fast = float(term.nnz), min(lost, most)
    if term.heavy is not None and float(term.heavy) <= most and train_lost.tensor_core_rows(1, weight.device):
        entries, fast = float(term.light), max(fast, float(term.heavy))
    return entries + weight.shape[0] * (LOST_TO_TENSOR_CORES * fast + LOST * max(0.0, lost - fast))


class Switch:
    """`switch` with the break-evens of this model on its device, which are measured when the first terms come, unless
    `below` has them. The dense path does not see lost tokens: a layer that goes back to it because of them gets what a
    token seemed to cost without them as its new break-even."""

    def __init__(self, model: nn.Module, below: dict[str, float] | None = None) -> None:
        self.model, self.below = model, below and {**below}

    def see(self, terms: Iterable[LayerTerm]) -> dict[str, str]:
        """Set the layers' paths by the terms of one forward pass; returns the changes, as `switch` does."""
        self.below, terms = self.below or self.measure(), list(terms)
        changes = switch(self.model, terms, below=self.below)
        weights = {layer.name: layer.up.weight for layer in feed_forwards(self.model)}
        for term in terms:
            if changes.get(term.name) == DENSE and term.lost is not None and term.lost > 0:
                self.below[term.name] = min(self.below[term.name], cost(term._replace(lost=None), weights[term.name]))
        return changes

    def measure(self, tokens: int = 4096) -> dict[str, float]:
        """Return the break-even of each layer, from rates measured on its device now: at most the number for which the
        kernels have room, and 0, for never, where they do not take the layer. tokens: of a forward pass of training."""
        layers = feed_forwards(self.model)
        weight = layers[0].up.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        rates, limits = costs.measure_rates(weight.device, dtype), {}
        for layer in layers:
            d_ff, d_model = layer.up.weight.shape
            takes = train.takes(weight.device, dtype, tokens, d_model, d_ff)
            most = ROOM_USED * survivors.capacity_for(tokens, d_ff) / tokens
            limits[layer.name] = min(break_even(rates, d_model, d_ff, layer.gate is not None), most) if takes else 0.0
        return limits
