"""Mixture of experts: many feed-forward layers, of which a router gives each token a few; three ways to compute it.

    layer = ExpertsLayer(d_model, d_ff, experts=8, top_k=2)     # a Mixtral block, from random weights
    layer.experts.way = "loop"                                  # or "grouped" (at first), or "padded"

Method: Shazeer et al., arXiv 1701.06538; router and weights are those of Mixtral (Jiang et al., arXiv 2401.04088),
whose block's state loads. Tokens are sorted by expert, and all ways give the same result:

- "loop": one expert after the other. The host has to know how many tokens each has.
- "grouped": torch's grouped product multiplies every group of tokens by its own weight in one launch
  (torch.nn.functional.grouped_mm; MegaBlocks, Gale et al., arXiv 2211.15841), and nothing waits (`takes_grouped`).
- "padded": each expert's tokens are filled up to those of the busiest one, and torch.bmm runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..ops import checks
from .checks import check_count

WAYS = ("grouped", "loop", "padded")
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU}
_grouped_mm = getattr(F, "grouped_mm", None)  # from torch 2.10 on


def takes_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product takes rows [rows, in] and a weight [experts, out, in]: torch 2.10 or
    newer; bfloat16, on GPUs from 8.0 on; on a CPU, but for compiled code, float32 and float16, too; in and out of
    multiples of 16 bytes."""
    few = rows.is_cuda or torch.compiler.is_compiling()
    dtypes = (torch.bfloat16,) if few else (torch.bfloat16, torch.float16, torch.float32)
    if _grouped_mm is None or rows.dtype not in dtypes or weight.dtype != rows.dtype or not weight[0].numel():
        return False
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    # Gradients are multiplied with the weight turned, so both of its widths count.
    return all(width * rows.itemsize % 16 == 0 for width in weight.shape[1:])


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort choices [tokens, top_k] by expert. Return their places before, experts and tokens, and where each
    expert's end, int32 [experts]."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.searchsorted(flat[order], torch.arange(experts, device=chosen.device), right=True)
    return order, flat[order], order // chosen.shape[1], ends.to(torch.int32)


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, *, loop: bool = False) -> Tensor:
    """Return rows [rows, in], sorted by expert, each times the weight of its expert [experts, out, in], transposed.
    ends: int32 [experts], where each expert's rows end. loop: whether also where there is a grouped product."""
    if not loop and len(rows) and takes_grouped(rows, weight):
        return _grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    stops = ends.tolist()
    return torch.cat([F.linear(rows[start:end], one) for start, end, one in zip([0, *stops], stops, weight)])


class Experts(nn.Module):
    """Gated feed-forward layers, each for the tokens that chose it: act(x Wg^T) * (x Wu^T) Wd^T. gate_up_proj [experts,
    2 d_ff, d_model] has each expert's Wg above its Wu; down_proj is [experts, d_model, d_ff]. activation: "silu" or
    "relu". way: one of WAYS; may be set later. like: device and dtype."""

    def __init__(
        self, d_model: int, d_ff: int, experts: int, activation: str = "silu", way: str = "grouped", **like: Any
    ) -> None:
        super().__init__()
        for name, given in (("d_model", d_model), ("d_ff", d_ff), ("experts", experts)):
            check_count(name, given)
        if activation not in ACTIVATIONS:
            raise InputError(f"activation is {activation!r:.80}; accepted: {', '.join(ACTIVATIONS)}")
        self.way, self.act_fn = way, ACTIVATIONS[activation]()
        for name, shape in (("gate_up_proj", (2 * d_ff, d_model)), ("down_proj", (d_model, d_ff))):
            weight = torch.randn(experts, *shape, **like) * shape[1] ** -0.5
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of what the experts of each token give, weighted: [tokens, d_model], in x's dtype.

        x: [tokens, d_model], in the parameters' dtype. chosen: int64 [tokens, top_k], of experts that there are.
        weights: [tokens, top_k]. InputError for another way."""
        if self.way not in WAYS:
            raise InputError(f"way is {self.way!r:.80}; accepted: {', '.join(WAYS)}")
        order, of, token, ends = by_expert(chosen, len(self.down_proj))
        if self.way == "padded":
            y = self._padded(x[token], of, ends)
        else:
            linear = partial(grouped_linear, ends=ends, loop=self.way == "loop")
            y = linear(self._hidden(linear(x[token], self.gate_up_proj)), self.down_proj)
        back = y[order.argsort()].view(*chosen.shape, x.shape[1])
        return (back * weights[..., None]).sum(1).to(x.dtype)

    def _hidden(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _padded(self, rows: Tensor, of: Tensor, ends: Tensor) -> Tensor:
        """Rows, sorted, of experts `of`, which end at `ends`. Waits for the largest number of rows of one expert."""
        starts = F.pad(ends, (1, 0)).long()
        capacity = int(starts.diff().max())
        place = of * capacity + torch.arange(len(rows), device=rows.device) - starts[of]
        padded = rows.new_zeros(len(ends) * capacity, rows.shape[1]).index_copy(0, place, rows)
        hidden = self._hidden(padded.view(len(ends), capacity, rows.shape[1]) @ self.gate_up_proj.transpose(1, 2))
        return (hidden @ self.down_proj.transpose(1, 2)).flatten(0, 1)[place]


class ExpertsLayer(nn.Module):
    """A router and its experts, in the place of a feed-forward layer: x [..., d_model] -> [..., d_model].

    The router is Mixtral's: a softmax over all experts in float32, of which each token takes the top_k largest, their
    weights scaled to a sum of 1. how: further arguments of `Experts`, whose errors it raises."""

    def __init__(self, d_model: int, d_ff: int, experts: int = 8, top_k: int = 2, **how: Any) -> None:
        super().__init__()
        self.experts = Experts(d_model, d_ff, experts, **how)
        check_count("top_k", top_k, experts)
        self.top_k = top_k
        down = self.experts.down_proj
        self.gate = nn.Linear(d_model, experts, bias=False, device=down.device, dtype=down.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return of each token of x [tokens, d_model] its experts, int64 [tokens, top_k], and their weights,
        float32."""
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k, dim=-1)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, *self.route(rows)).view(x.shape)


class Routing(NamedTuple):
    """y: [tokens, d_model]. work: the share of the dense layer's multiply-adds of up and down that was left."""

    y: Tensor
    work: float


def routed_by_firing(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hot: int, grain: int) -> Routing:
    """Compute a ReLU-gated layer with its neurons as experts: the first `hot` for all tokens, groups of `grain` others
    for the tokens for which one of theirs fires, so that the result is the dense layer's. Grain 1 is the hot/cold split
    of this project; grain d_ff - hot is one cold expert. The host waits at each group.

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

    y, done = group(slice(hot), slice(None)), hot * len(x)
    for first in range(hot, d_ff, grain):
        neurons = slice(first, min(first + grain, d_ff))
        rows = (fires[:, neurons] != 0).any(1).nonzero()[:, 0]
        y = y.index_add(0, rows, group(neurons, rows))
        done += len(rows) * (neurons.stop - first)
    return Routing(y, done / max(1, d_ff * len(x)))
