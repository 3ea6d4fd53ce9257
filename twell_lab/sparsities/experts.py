"""Mixture of experts: many feed-forward layers, of which a router gives each token a few; three ways to compute it.

    layer = ExpertsLayer(d_model, d_ff, experts=8, top_k=2)     # a Mixtral block, from random weights
    layer.experts.way = "loop"                                  # or "grouped" (at first), or "padded"

Method: Shazeer et al., arXiv 1701.06538; Fedus et al., "Switch Transformers", arXiv 2101.03961; the router is that of
Mixtral (Jiang et al., arXiv 2401.04088). All ways give the same result:

- "loop": one expert after the other, each for its tokens. As many products as experts, most of them small, and the
  device is waited for, because the host has to know how many tokens each expert has.
- "grouped": tokens are sorted by expert, and torch's grouped product multiplies every group by its own weight in one
  launch (torch.nn.functional.grouped_mm; MegaBlocks, Gale et al., arXiv 2211.15841). No token is padded or dropped, and
  nothing waits, where torch has a kernel for it (`takes_grouped`).
- "padded": each expert's tokens are filled up to those of the busiest one, and torch.bmm runs. What most tutorials do,
  with the exact capacity: no token is dropped, and all tokens to one expert cost as much as all tokens to all.

Weights lie as transformers' do, so that a state of its MixtralSparseMoeBlock loads, and `tl.sparsify` swaps the experts
one by one. transformers has "loop" and "grouped", too (`experts_implementation` "eager" and "grouped_mm").

`routed_by_firing` shows that experts and a hot/cold split are the same idea at two grains. Exact as it is there, it is
no path of a layer: how many tokens a group is given decides shapes, so that the host would wait in each call, and no
CUDA graph could hold it; without waiting there has to be room for every token in every group.

The path "experts", `tl.plan(..., paths=["experts"])` or `tl.sparsify(model, "experts")`, gives each token a fixed
number of groups instead, those in which the most fires. It is lossy: what fires in others is missing. This is
MoEfication (Zhang et al., arXiv 2110.01786) without training: neurons are grouped by their weights, and the gate, which
is computed whole, is the router. Little can be gained, since a token's row is copied for each of its groups, and so are
results. Take the layer of 2,048 x 5,632 that the benchmarks draw, with 29 neurons firing, its neurons in order of how
often they do: in groups of 64, 17% of the work of up and down is left, but a token is in 15 groups. For 16,384 tokens
that is 4 GB of gathered rows of x and of results, written and read, for which an H100 needs longer than for up and down
computed densely. The paths "twell" and "hot_cold" are the finest grain: nothing is copied, and nothing is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..layers.experts import mixed
from ..layers.paths import Path
from ..layers.paths.converted import Converted
from ..layers.paths.cost import Work
from ..layers.weights import Weights
from .weights import checked_layer, checked_weight

WAYS = ("grouped", "loop", "padded")
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU}
_grouped_mm = getattr(F, "grouped_mm", None)  # from torch 2.10 on


def takes_grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product is called for rows [rows, in] and a weight [experts, out, in]: torch 2.10 or
    newer; on a GPU bfloat16, from compute capability 8.0 on; on a CPU float32 and 16 bits, and bfloat16 alone in
    compiled code; rows of multiples of 16 bytes on either side. It is one kernel on GPUs of compute capability 9 and
    10; on others torch may go through the groups one by one, and wait for their ends, as is done here for all other
    tensors."""
    # In compiled code torch takes bfloat16 alone, on a CPU too.
    few = rows.is_cuda or torch.compiler.is_compiling()
    dtypes = (torch.bfloat16,) if few else (torch.bfloat16, torch.float16, torch.float32)
    if _grouped_mm is None or rows.dtype not in dtypes or weight.dtype != rows.dtype or not weight[0].numel():
        return False
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    # Gradients are multiplied with the weight turned, so both of its widths count.
    return all(width * rows.itemsize % 16 == 0 for width in weight.shape[1:])


def _grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [rows, in], sorted by expert, each times the weight of its expert [experts, out, in], transposed.

    ends: int32 [experts], where each expert's rows end; what lies past the last is anything."""
    if len(rows) and takes_grouped(rows, weight):
        return _grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    start, made = 0, []
    for expert, end in enumerate(ends.tolist()):
        made.append(F.linear(rows[start:end], weight[expert]))
        start = end
    return torch.cat([*made, rows.new_zeros(len(rows) - start, weight.shape[1])])


class Experts(nn.Module):
    """Gated feed-forward layers, each for the tokens that chose it: act(x Wg^T) * (x Wu^T) Wd^T.

    Parameters:
        gate_up_proj: [experts, 2 d_ff, d_model], each expert's Wg above its Wu.
        down_proj: [experts, d_model, d_ff].

    Args:
        d_model, d_ff, experts: 1 or more.
        activation: "silu" or "relu".
        way: one of WAYS; may be set later.
        device, dtype: of the parameters.

    Raises:
        InputError: for other values.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        experts: int,
        activation: str = "silu",
        way: str = "grouped",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, given in (("d_model", d_model), ("d_ff", d_ff), ("experts", experts)):
            _check_count(name, given)
        if activation not in ACTIVATIONS:
            raise InputError(f"activation is {activation!r:.80}; accepted: {', '.join(ACTIVATIONS)}")
        self.way = way
        self._check_way()
        drawn = lambda *shape: nn.Parameter(torch.randn(shape, device=device, dtype=dtype) * shape[2] ** -0.5)  # noqa: E731
        self.gate_up_proj, self.down_proj = drawn(experts, 2 * d_ff, d_model), drawn(experts, d_model, d_ff)
        self.act_fn = ACTIVATIONS[activation]()

    def _check_way(self) -> None:
        if self.way not in WAYS:
            raise InputError(f"way is {self.way!r:.80}; accepted: {', '.join(WAYS)}")

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of what each token's experts give, weighted.

        Args:
            x: [tokens, d_model], in the parameters' dtype.
            chosen: int64 [tokens, top_k], numbers of experts, no token the same one twice. Numbers that no expert has
                add nothing.
            weights: [tokens, top_k], floating-point; the sum is taken in the wider of its dtype and x's.

        Returns:
            [tokens, d_model], in x's dtype.

        Raises:
            InputError: for other shapes and dtypes.
        """
        self._check_way()
        experts, d_model = self.down_proj.shape[:2]
        if x.dim() != 2 or x.shape[1] != d_model or x.dtype != self.down_proj.dtype:
            raise InputError(f"x is {x.dtype} {list(x.shape)}; {self.down_proj.dtype} [tokens, {d_model}] is accepted")
        if chosen.dim() != 2 or len(chosen) != len(x) or chosen.dtype != torch.int64 or not chosen.shape[1]:
            raise InputError(f"chosen is {chosen.dtype} {list(chosen.shape)}; int64 [{len(x)}, top_k] is accepted")
        if weights.shape != chosen.shape or not weights.dtype.is_floating_point:
            wanted = f"floating-point {list(chosen.shape)}"
            raise InputError(f"weights is {weights.dtype} {list(weights.shape)}; {wanted} is accepted")
        somebody = (chosen >= 0) & (chosen < experts)
        chosen = torch.where(somebody, chosen, experts)
        if self.way == "loop":
            return mixed(x, chosen, weights, experts, lambda expert, rows, _: self._one(expert, rows))
        order = chosen.reshape(-1).argsort(stable=True)  # by expert; nobody's come last
        of = chosen.reshape(-1)[order]
        ends = torch.searchsorted(of, torch.arange(experts, device=x.device), right=True)
        rows = x[order // chosen.shape[1]]
        if rows.requires_grad:  # what is nobody's gets no gradient, whatever the products left past the last end
            rows = torch.where((of < experts)[:, None], rows, 0)
        made = self._padded(rows, of, ends) if self.way == "padded" else self._grouped(rows, ends.to(torch.int32))
        back = made[order.argsort()].view(*chosen.shape, d_model)
        share = torch.where(somebody, weights, 0)[..., None]
        return (torch.where(somebody[..., None], back, 0) * share).sum(1).to(x.dtype)

    def _one(self, expert: int, rows: Tensor) -> Tensor:
        return F.linear(self._hidden(F.linear(rows, self.gate_up_proj[expert])), self.down_proj[expert])

    def _hidden(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _grouped(self, rows: Tensor, ends: Tensor) -> Tensor:
        return _grouped_linear(self._hidden(_grouped_linear(rows, self.gate_up_proj, ends)), self.down_proj, ends)

    def _padded(self, rows: Tensor, of: Tensor, ends: Tensor) -> Tensor:
        """rows, sorted, of experts `of`, which end at `ends`. Waits for the largest number of rows of one expert."""
        experts = len(ends)
        starts = F.pad(ends, (1, 0))
        capacity = int(ends.diff(prepend=starts[:1]).max())
        place = of * capacity + torch.arange(len(rows), device=rows.device) - starts[of]
        place = torch.where(of < experts, place, experts * capacity)  # one row more, for what is nobody's
        padded = rows.new_zeros(experts * capacity + 1, rows.shape[1]).index_copy(0, place, rows)
        hidden = self._hidden(padded[:-1].view(experts, capacity, rows.shape[1]) @ self.gate_up_proj.transpose(1, 2))
        made = (hidden @ self.down_proj.transpose(1, 2)).flatten(0, 1)
        return F.pad(made, (0, 0, 0, 1))[place]

    def extra_repr(self) -> str:
        experts, d_model, d_ff = self.down_proj.shape
        return f"experts={experts}, d_model={d_model}, d_ff={d_ff}, way={self.way!r}"


class ExpertsLayer(nn.Module):
    """A router and its experts, in the place of a feed-forward layer: x [..., d_model] -> [..., d_model].

    The router is Mixtral's: a softmax over all experts in float32, of which each token takes the top_k largest, their
    weights scaled to a sum of 1.

    Args:
        d_model, d_ff, experts, activation, way, device, dtype: as of `Experts`.
        top_k: experts of each token, 1 to `experts`.

    Raises:
        InputError: for other values.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        experts: int = 8,
        top_k: int = 2,
        *,
        activation: str = "silu",
        way: str = "grouped",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.experts = Experts(d_model, d_ff, experts, activation, way, device, dtype)
        _check_count("top_k", top_k, experts)
        self.top_k = top_k
        self.gate = nn.Linear(d_model, experts, bias=False, device=device, dtype=dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token of x [tokens, d_model] its experts, int64 [tokens, top_k], and their weights, float32."""
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k, dim=-1)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[1] != self.gate.in_features:
            raise InputError(f"x is {list(x.shape)}; [..., {self.gate.in_features}] is accepted")
        return self.experts(rows, *self.route(rows)).view(x.shape)


# ---- hot and cold, and experts: the same idea at two grains ----


class Routing(NamedTuple):
    """What `routed_by_firing` computed.

    y: [tokens, d_model]. routed: int64 [groups], how many tokens each group of cold neurons was given. work: the share
    of the dense layer's multiply-adds of up and down that was left."""

    y: Tensor
    routed: Tensor
    work: float


def routed_by_firing(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hot: int, grain: int) -> Routing:
    """A ReLU-gated layer as one expert for all tokens and others that are given tokens by what fires.

    The first `hot` neurons are an expert that every token takes (a "shared expert"). The others are cut into groups of
    `grain`, and a token is given to a group if one of its neurons fires for it. The result is the dense layer's at
    every grain, because what is not routed is zero:

    - grain 1 is the hot/cold split of this project: every cold neuron an expert of its own, the fewest operations, and
      rows that only ordinary cores can take.
    - grain d_ff - hot is one cold expert, as large as those of a mixture of experts: dense products on tensor cores,
      and nearly every token needs it.

    A mixture of experts takes the coarse grain and trains a router to guess, before anything is computed, which few
    groups matter; here the gate is the router, exact and at the price of the gate's product. For teaching: a loop over
    the groups, which waits for the device at each.

    Args:
        x: [tokens, d_model].
        gate, up: [d_ff, d_model]. down: [d_model, d_ff]. Their neurons in an order in which the hot ones come first.
        hot: 0 to d_ff. grain: 1 or more.

    Raises:
        InputError: for other numbers, and shapes that do not fit.
    """
    shapes = [list(each.shape) for each in (x, gate, up, down)]
    if (
        x.dim() != 2
        or gate.dim() != 2
        or shapes[1:] != [shapes[1], shapes[1], shapes[1][::-1]]
        or shapes[0][1] != shapes[1][1]
    ):
        raise InputError(
            f"x, gate, up and down are {', '.join(map(str, shapes))}; [tokens, d_model], [d_ff, d_model] twice and "
            "[d_model, d_ff] are accepted"
        )
    d_ff = len(gate)
    if type(hot) is not int or not 0 <= hot <= d_ff:
        raise InputError(f"hot is {hot!r:.80}; a number of neurons from 0 to {d_ff} is accepted")
    _check_count("grain", grain)
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
    return Routing(y, counts, done / everything if (everything := d_ff * len(x)) else 0.0)


def _check_count(name: str, given: int, most: int | None = None) -> None:
    if type(given) is not int or given < 1 or (most is not None and given > most):
        accepted = "a whole number from 1 up" if most is None else f"a whole number from 1 to {most}"
        raise InputError(f"{name} is {given!r:.80}; {accepted} is accepted")


# ---- as a path ----

GROUPS, TAKEN = 32, 1 / 4  # of a layer's neurons, at most; and what share of them a token is given
_WIDE = 8  # neurons of a group are a multiple of this: 16 bytes of 16-bit values, for the grouped product
_TOKENS = 8192  # at a time: each is copied for each of its groups
_STEPS = 8  # of power iteration


def alike(weight: Tensor, size: int) -> Tensor:
    """An order of a weight's rows in which those of each `size` places point in similar directions.

    Rows of length 1 are cut in two where they differ most, along their first principal direction, and the halves again
    (Boley, "Principal Direction Divisive Partitioning", 1998), so that groups are equally large.

    Args:
        weight: [rows, columns], floating-point values of 16 bits or more.
        size: 1 or more; the last group may have fewer rows.

    Returns:
        int64 [rows], on weight's device.

    Raises:
        InputError: for another size, and for a weight that is no matrix, on meta or not finite.
    """
    _check_count("size", size)
    matrix = F.normalize(checked_weight(weight).float(), dim=1)
    done, left = [], [torch.arange(len(matrix), device=matrix.device)]
    while left:
        rows = left.pop()
        if len(rows) <= size:
            done.append(rows)
            continue
        some = matrix[rows]
        some = some - some.mean(0)
        direction = some[some.square().sum(1).argmax()]
        for _ in range(_STEPS):
            direction = F.normalize(some.t() @ (some @ direction), dim=0)
        rows = rows[(some @ direction).argsort(stable=True)]
        middle = size * (-(-len(rows) // size) // 2)
        left += [rows[middle:], rows[:middle]]
    return torch.cat(done) if done else torch.empty(0, dtype=torch.int64, device=matrix.device)


class AsExperts(Converted):
    """A layer's neurons as GROUPS experts or fewer, `alike` by their gate; each token is given the share TAKEN of them
    in which the most fires, by the sum of the gate's magnitudes. Lossy, unless what fires for a token lies in these.

    The gate is computed for all neurons; up and down as grouped products (`takes_grouped`), for which it holds the
    weights a second time. Where there is no grouped product everything is computed, and what is not taken is masked:
    the same result. Nothing waits for the device."""

    name = "experts"
    exact = False

    @staticmethod
    def sizes_of(d_ff: int) -> tuple[int, int, int]:
        """How many neurons a group has, how many groups there are, and how many of them a token is given."""
        size = _WIDE * max(1, -(-d_ff // (GROUPS * _WIDE)))
        groups = -(-d_ff // size)
        return size, groups, max(1, math.ceil(TAKEN * groups))

    def fitted(self, weights: Weights) -> Path:
        checked_layer(weights)
        return self

    def form_bytes(self, weights: Weights) -> int:
        size, groups, _ = self.sizes_of(len(weights.up))
        matrices = 2 if weights.gate is None or weights.gate is weights.up else 3
        return matrices * groups * size * weights.up.shape[1] * weights.up.itemsize + 8 * len(weights.up)

    def convert(self, weights: Weights) -> tuple[Any, Sequence[Tensor]]:
        self.fitted(weights)
        alone = weights.gate is None or weights.gate is weights.up
        first = weights.up if alone else weights.gate
        size, groups, _ = self.sizes_of(len(first))
        order = alike(first, size)
        lie = lambda weight: F.pad(weight[order], (0, 0, 0, groups * size - len(order))).unflatten(0, (groups, size))  # noqa: E731
        up = None if alone else lie(weights.up)
        made = order, lie(first).flatten(0, 1), up, lie(weights.down.t()).transpose(1, 2).contiguous()
        return made, [each for each in made if each is not None]

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.cat([self._few(layer, some, weights, value) for some in rows.split(_TOKENS)]).view(x.shape)

    def _few(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias, _ = weights
        order, first, beside, back = value
        groups, _, size = back.shape
        acts, both = layer.formula["acts"], layer.formula["both"]
        lie = lambda bias: F.pad(bias.index_select(0, order), (0, groups * size - len(order)))  # noqa: E731
        first_bias, up_bias = (
            None if b is None else lie(b) for b in (gate_bias if beside is not None else up_bias, up_bias)
        )
        fired = acts(F.linear(x, first, first_bias))
        fired = (fired.square() if gate is up else fired).view(len(x), groups, size)
        wide = torch.promote_types(x.dtype, torch.float32)
        strength = torch.linalg.vector_norm(fired, 1, dim=2, dtype=wide)
        chosen = strength.topk(self.sizes_of(len(order))[2], sorted=False).indices
        if takes_grouped(x, back) and (beside is None or takes_grouped(x, beside)):
            by_group = chosen.reshape(-1).argsort(stable=True)
            of, token = chosen.reshape(-1)[by_group], by_group // chosen.shape[1]
            ends = torch.searchsorted(of, torch.arange(groups, device=x.device), right=True).to(torch.int32)
            hidden = fired.flatten(0, 1).index_select(0, token * groups + of)
            if beside is not None:
                other = _grouped_linear(x.index_select(0, token), beside, ends)
                other = other if up_bias is None else other + up_bias.view(groups, size).index_select(0, of)
                hidden = hidden * (acts(other) if both else other)
            made = _grouped_linear(hidden, back, ends).index_select(0, by_group.argsort())
            y = made.view(*chosen.shape, -1).sum(1, dtype=wide).to(x.dtype)
        else:
            if beside is not None:
                other = F.linear(x, beside.flatten(0, 1), up_bias).view(fired.shape)
                fired = fired * (acts(other) if both else other)
            taken = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, chosen, True)
            hidden = torch.where(taken[..., None], fired, 0).flatten(1).index_select(1, order.argsort())
            y = F.linear(hidden, down)
        y = y if down_bias is None else y + down_bias
        # What is not taken does not see that 0 * inf is NaN, as the dense layer does.
        return y + torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True) * 0

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """As of grouped products. Rows of x are read, written and read again for each group of a token; so are results,
        which are put in order and summed."""
        d_ff, d_model, rates = work.firing.d_ff, work.firing.d_model, work.rates
        size, groups, taken = self.sizes_of(d_ff)
        products = 2 if work.firing.gated else 1
        operations = 2 * work.tokens * taken * size * d_model * products
        touched = 1 - (1 - taken / groups) ** work.tokens
        read = products * groups * size * d_model * work.itemsize * touched
        copied = (3 * (products - 1) + 4) * work.tokens * taken * d_model * work.itemsize
        return {
            "gemm": work.gemm(d_ff, d_model) + max(operations / rates.matmul, read / rates.bandwidth),
            "rows": copied / rates.bandwidth,
            "memory": 3 * work.tokens * d_ff * work.itemsize / rates.bandwidth,
            "launches": 25 * rates.launch,
            "lost": 0.0,
        }


PATHS = (AsExperts(),)
