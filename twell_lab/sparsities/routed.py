"""Hot and cold, and experts: the same idea at two grains.

    routing = routed_by_firing(x, gate, up, down, hot=256, grain=64)
    routing.y, routing.work            # the dense layer's result, and the share of its work that was left

A layer's neurons as one expert for all tokens (the first `hot`) and others, groups of `grain` neurons, that a token is
given to if one of their neurons fires for it. What is not routed is zero, so the result is the dense layer's at every
grain. Grain 1 is the hot/cold split of this project; grain d_ff - hot is one cold expert, dense products that nearly
every token needs. A mixture of experts trains a router to guess; here the gate is the router, at the price of its
product. It is for teaching, and no path of a layer: the host waits at each group."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import InputError
from ..ops import checks
from .checks import check_count


class Routing(NamedTuple):
    """y: [tokens, d_model]. routed: int64 [groups], how many tokens each group of cold neurons was given. work: the
    share of the dense layer's multiply-adds of up and down that was left."""

    y: Tensor
    routed: Tensor
    work: float


def routed_by_firing(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hot: int, grain: int) -> Routing:
    """Compute a ReLU-gated layer group by group.

    x: [tokens, d_model]; gate, up: [d_ff, d_model]; down: [d_model, d_ff]: their neurons in an order in which the hot
    ones come first. hot: 0 to d_ff. grain: 1 or more. InputError for other numbers, and shapes that do not fit."""
    x, gate, up, down, *_ = checks.check_layer(x, gate, up, down)
    d_ff = len(gate)
    if x.dim() != 2 or type(hot) is not int or not 0 <= hot <= d_ff:
        raise InputError(f"x is {list(x.shape)} and hot {hot!r:.80}; [tokens, d_model] and 0 to {d_ff} are accepted")
    check_count("grain", grain)
    fires = F.linear(x, gate).relu()

    def group(first: int, last: int, rows: Tensor | slice) -> Tensor:
        hidden = fires[rows, first:last] * F.linear(x[rows], up[first:last])
        return F.linear(hidden, down[:, first:last])

    y, routed = group(0, hot, slice(None)), []
    for first in range(hot, d_ff, grain):
        rows = (fires[:, first : first + grain] != 0).any(1).nonzero()[:, 0]
        y = y.index_add(0, rows, group(first, first + grain, rows))
        routed.append((len(rows), min(grain, d_ff - first)))
    done = hot * len(x) + sum(tokens * neurons for tokens, neurons in routed)
    counts = torch.tensor([tokens for tokens, _ in routed], dtype=torch.int64)
    return Routing(y, counts, done / size if (size := d_ff * len(x)) else 0.0)
