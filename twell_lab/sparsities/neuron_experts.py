"""A layer's neurons as experts: each token is given the groups in which the most fires. Lossy.

    tl.sparsify(model, "experts")       # or tl.plan(..., paths=["experts"])

This is MoEfication (Zhang et al., arXiv 2110.01786) without training: neurons are grouped by their weights (`alike`),
and the gate, which is computed whole, is the router. What fires in groups that are not taken is missing. Little can be
gained, since a token's row and result are copied for each of its groups; the paths "twell" and "hot_cold" are the
finest grain, where nothing is copied or missing (`routed_by_firing`)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.parts import Weights
from ..layers.paths import Converted
from ..ops import checks
from .checks import check_count
from .experts import by_expert, grouped_linear, takes_grouped
from .products import hidden_of, spoilt

GROUPS, TAKEN = 32, 1 / 4  # of a layer's neurons, at most; and what share of them a token is given
_WIDE = 8  # neurons of a group are a multiple of this: 16 bytes of 16-bit values, for the grouped product
_TOKENS = 8192  # at a time: each is copied for each of its groups
_STEPS = 8  # of power iteration
Groups = tuple[Tensor, Tensor, Tensor | None, Tensor]


def alike(weight: Tensor, size: int) -> Tensor:
    """Find an order of a weight's rows in which those of each `size` places point in similar directions: int64 [rows].

    Rows of length 1 are cut in two where they differ most, along their first principal direction, and the halves again
    (Boley, "Principal Direction Divisive Partitioning", 1998). weight: [rows, columns], finite. size: 1 or more; the
    last group may have fewer rows."""
    matrix = F.normalize(weight.float(), dim=1)

    def split(rows: Tensor) -> list[Tensor]:
        if len(rows) <= size:
            return [rows]
        some = matrix[rows]
        some = some - some.mean(0)
        direction = some[some.square().sum(1).argmax()]
        for _ in range(_STEPS):
            direction = F.normalize(some.t() @ (some @ direction), dim=0)
        rows = rows[(some @ direction).argsort(stable=True)]
        middle = size * (-(-len(rows) // size) // 2)
        return split(rows[:middle]) + split(rows[middle:])

    return torch.cat(split(torch.arange(len(matrix), device=matrix.device)))


def sizes_of(d_ff: int) -> tuple[int, int, int]:
    """Return how many neurons a group has, how many groups there are, and how many of them a token is given."""
    size = _WIDE * max(1, -(-d_ff // (GROUPS * _WIDE)))
    groups = -(-d_ff // size)
    return size, groups, math.ceil(TAKEN * groups)


class AsExperts(Converted):
    """A layer's neurons as GROUPS experts or fewer, `alike` by their gate; each token is given the share TAKEN of them
    in which the most fires, by the sum of the gate's magnitudes. Lossy. Up and down run as grouped products
    (`takes_grouped`), for which the layer owns the weights a second time; elsewhere all is computed, and masked."""

    name = "experts"
    exact = False

    def make(self, weights: Weights) -> Groups:
        """Return the order of the neurons, int64 [d_ff]; and by groups, the last filled up with zeros, gate, or up in a
        plain layer, [groups * size, d_model], up of a gated layer, [groups, size, d_model], and down, [groups, d_model,
        size]."""
        alone = weights.gate is None or weights.gate is weights.up
        first = weights.up if alone else weights.gate
        size, groups, _ = sizes_of(len(first))
        order = alike(first, size)

        def grouped(weight: Tensor) -> Tensor:
            return F.pad(weight[order], (0, 0, 0, groups * size - len(order))).unflatten(0, (groups, size))

        down = grouped(weights.down.t()).transpose(1, 2).contiguous()
        return order, grouped(first).flatten(0, 1), None if alone else grouped(weights.up), down

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: Groups) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([self._few(layer, some, weights, form) for some in rows.split(_TOKENS)]).view(x.shape)

    def _few(self, layer: nn.Module, x: Tensor, weights: Weights, form: Groups) -> Tensor:
        order, first, beside, down = form
        groups, _, size = down.shape
        acts = layer.acts

        def in_order(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else F.pad(bias.index_select(0, order), (0, groups * size - len(order)))

        up_bias = in_order(weights.up_bias)
        gate = F.linear(x, first, up_bias if beside is None else in_order(weights.gate_bias))
        fired = hidden_of(None, gate, weights, acts) if beside is None else acts.dense(gate)
        fired = fired.view(len(x), groups, size)
        wide = torch.promote_types(x.dtype, torch.float32)
        strength = torch.linalg.vector_norm(fired, 1, dim=2, dtype=wide)
        chosen = strength.topk(sizes_of(len(order))[2], sorted=False).indices
        if takes_grouped(x, down) and (beside is None or takes_grouped(x, beside)):
            back, of, token, ends = by_expert(chosen, groups)
            hidden = fired.flatten(0, 1).index_select(0, token * groups + of)
            if beside is not None:
                up = grouped_linear(x.index_select(0, token), beside, ends)
                up = up if up_bias is None else up + up_bias.view(groups, size).index_select(0, of)
                hidden = hidden * acts.of_up(up)
            parts = grouped_linear(hidden, down, ends).index_select(0, back.argsort())
            y = parts.view(*chosen.shape, x.shape[1]).sum(1, dtype=wide).to(x.dtype)
        else:
            if beside is not None:
                fired = fired * acts.of_up(F.linear(x, beside.flatten(0, 1), up_bias).view(fired.shape))
            taken = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, chosen, True)
            hidden = torch.where(taken[..., None], fired, 0).flatten(1).index_select(1, order.argsort())
            y = F.linear(hidden, weights.down)
        return spoilt(y if weights.down_bias is None else y + weights.down_bias, x)


# ---- two grains of one idea, for teaching


class Routing(NamedTuple):
    """y: [tokens, d_model]. routed: how many tokens each group of cold neurons was given. work: the share of the dense
    layer's multiply-adds of up and down that was left."""

    y: Tensor
    routed: list[int]
    work: float


def routed_by_firing(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hot: int, grain: int) -> Routing:
    """Compute a ReLU-gated layer group by group: the first `hot` neurons for all tokens, groups of `grain` others for
    the tokens for which one of theirs fires, so that the result is the dense layer's. Grain 1 is the hot/cold split of
    this project; grain d_ff - hot is one cold expert. The host waits at each group.

    x: [tokens, d_model]; gate, up: [d_ff, d_model]; down: [d_model, d_ff]. InputError for other shapes, a `hot` that is
    not from 0 to d_ff, and a grain that is not from 1 up."""
    x, gate, up, down, *_ = checks.check_layer(x, gate, up, down)
    d_ff = len(gate)
    if x.dim() != 2 or type(hot) is not int or not 0 <= hot <= d_ff:
        raise InputError(f"x is {list(x.shape)} and hot {hot!r:.80}; [tokens, d_model] and 0 to {d_ff} are accepted")
    check_count("grain", grain)
    fires = F.linear(x, gate).relu()

    def group(neurons: slice, rows: Tensor | slice) -> Tensor:
        return F.linear(fires[rows, neurons] * F.linear(x[rows], up[neurons]), down[:, neurons])

    y, routed, done = group(slice(hot), slice(None)), [], hot * len(x)
    for first in range(hot, d_ff, grain):
        neurons = slice(first, min(first + grain, d_ff))
        rows = (fires[:, neurons] != 0).any(1).nonzero()[:, 0]
        y = y.index_add(0, rows, group(neurons, rows))
        routed.append(len(rows))
        done += len(rows) * (neurons.stop - first)
    return Routing(y, routed, done / max(1, d_ff * len(x)))
