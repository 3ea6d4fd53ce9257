"""The feed-forward layer on a CPU, in torch operations that skip the zeros.

After the gate, one kept value ("entry") costs a row of `up`, gathered and multiplied, and a row of `down` transposed,
gathered, scaled and added. Entries are taken 128 at a time, so that what is gathered stays in the L2 cache.

Sums are one step wider than the values. For 16-bit values that is what torch's dense layer does too. For float32 it
means float64: two or three float32 terms can cancel so that the dense layer is exact by luck, and no other order of
adding them in float32 is sure to come as close. So for float32, where the gate's weights are given, the gate of an
entry is summed again in float64. Where all neurons are computed, the same operations as in torch's layer run on the
same tensors; or, if the tensors are not those of the layer (permuted, packed), the sums are float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from . import reference
from .activation import RELU, Activation

_ENTRIES_AT_ONCE = 128
# torch shares operations on more elements among its threads, which where others use the machine wait for each other: a
# single token's rows are taken as many at a time as stay below.
_ALONE = 32768
# Up to how many entries it is faster to skip the silent neurons (`_pays`). An entry takes about as long as the dense
# layer takes for _ENTRY_COST neurons, and up to _TOKENS_FREE tokens the dense layer takes as long as for one. Measured
# on two AVX-512 cores at d_model 2048, d_ff 5632.
_ENTRY_COST = 6.0
_TOKENS_FREE = {torch.float32: 9, torch.bfloat16: 24, torch.float16: 24}


class _AsPacked(Activation):
    """For values that went through an activation before they were packed: all that is not zero counts as it is, of
    either sign. The kernels that read packed values ask no activation either."""

    def value(self, first: Tensor) -> Tensor:
        """The value itself."""
        return first

    def _kept(self, first: Tensor, value: Tensor) -> Tensor:
        return first != 0  # NaN is not


PACKED = _AsPacked("packed")


def layer(x, gate, up, down, gate_bias, up_bias, down_bias, acts: Activation = RELU) -> Tensor:
    """Compute a layer: x [tokens, d_model] -> [tokens, d_model]; gate None for a plain layer. down: [d_model, d_ff],
    fastest where it is stored transposed. There torch's layer, which is stored as it was, adds in another order."""
    made_by, beside = ((up, up_bias), (None, None)) if gate is None else ((gate, gate_bias), (up, up_bias))
    follow = down.is_contiguous() or acts != RELU
    return after_gate(x, linear(x, *made_by), *beside, down, down_bias, made_by, follow, acts)


def after_gate(x, first, up, up_bias, down, down_bias, made_by=None, follow=False, acts: Activation = PACKED) -> Tensor:
    """Compute (act(first) * (x up^T + up_bias)) down^T + down_bias, or act(first) down^T + down_bias where up is None.

    first: [tokens, d_ff], the gate before the activation. made_by: the weight and bias from which it was computed with
    x, or None where its values are the input; then x may be None without up. follow: whether these tensors are those of
    torch's layer, so that the same operations give the same bits."""
    token, neuron, value = _entries(first, acts)
    # Rows that are not finite show in every neuron of an activation that returns to zero.
    shown = up is None and acts.falls_back and not math.isfinite(x.sum())
    if shown or not _pays(first, token.numel()):
        y = _dense(x, first, up, up_bias, down, down_bias, made_by, follow, acts)
    else:
        short = first.dtype != torch.float32
        wide = x if short or x is None else x.double()
        if not short and made_by is not None:  # 0 for an entry that was positive only because of rounding
            value = acts.value(_products(wide, token, neuron, *made_by))
        if up is not None:
            value = value * acts.of_up(_products(wide, token, neuron, up, up_bias))
        y = (_sum_short if short else _sum_wide)(value, token, neuron, down.t(), len(first), down_bias)
    # With an infinity or NaN in x its sum is not finite. (After an overflow it is not either; then no row is spoilt.)
    if up is not None and not math.isfinite(x.sum()):
        rows = reference.spoilt(x, acts.keeps(first))
        if acts.both:
            y[rows] = reference.gated(x[rows], first[rows], up, down, up_bias, down_bias, acts)
        else:
            y[rows] = torch.nan
    return y


def _dense(x, first, up, up_bias, down, down_bias, made_by, follow: bool, acts: Activation) -> Tensor:
    """Compute `after_gate` for all neurons."""
    dtype = first.dtype
    if not follow and dtype == torch.float32:
        tensors = (x, first, up, up_bias, down, down_bias, *(made_by or ()))
        x, first, up, up_bias, down, down_bias, *made_by = (t if t is None else t.double() for t in tensors)
        first = linear(x, *made_by) if made_by else first
    if up is None:
        return linear(acts.dense(first), down, down_bias).to(dtype)
    hidden = acts.value(first) * acts.of_up(linear(x, up, up_bias))
    return linear(torch.where(acts.keeps(first), hidden, torch.zeros_like(first)), down, down_bias).to(dtype)


def _entries(first: Tensor, acts: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """(token, neuron, value) of what fires, tokens ascending. relu leaves NaN as it is, and NaN is not zero.

    For one token, starting an operation takes longer than the operation itself, so there are as few as possible."""
    fired = torch.relu(first) if acts.kind == "relu" else acts.applied(first)
    token, neuron = fired.nonzero(as_tuple=True)
    return token, neuron, fired[0].index_select(0, neuron) if len(first) == 1 else fired[token, neuron]


def _pays(first: Tensor, entries: int) -> bool:
    """Return whether skipping the silent neurons is faster than computing all."""
    tokens, d_ff = first.shape
    return entries * _ENTRY_COST <= d_ff * max(1.0, tokens / _TOKENS_FREE[first.dtype])


def _chunks(tokens: int, width: int, *lists: Tensor):
    """The lists, cut into parts of as many entries as rows of this width are gathered at a time."""
    rows = max(1, min(_ENTRIES_AT_ONCE, _ALONE // width)) if tokens == 1 else _ENTRIES_AT_ONCE
    return zip(*(each.split(rows) for each in lists)) if lists[0].numel() else ()


def _span(token: Tensor, tokens: int) -> tuple[int, int]:
    """The first and last of some ascending tokens, of `tokens` in all."""
    return (0, 0) if tokens == 1 else (int(token[0]), int(token[-1]))


def _products(x: Tensor, token: Tensor, neuron: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x[token[i]] . weight[neuron[i]] + bias[neuron[i]] of each entry, in x's type.

    A small GEMM multiplies all tokens of some entries with all their rows, also pairs that are not needed. That is
    cheaper than gathering x, and it sums in a wider type, which an elementwise product in 16 bits would not."""
    made = []
    for tokens, neurons in _chunks(*x.shape, token, neuron):
        first, last = _span(tokens, len(x))
        rows = weight.index_select(0, neurons).to(x.dtype)
        dots = linear(x[first : last + 1], rows, None if bias is None else bias[neurons].to(x.dtype))
        one = first == last
        made.append(dots[0] if one else dots[tokens - first, torch.arange(len(tokens), device="cpu")])
    return made[0] if len(made) == 1 else torch.cat([x.new_empty(0), *made])


def _sum_wide(hidden, token, neuron, down_t, tokens: int, bias) -> Tensor:
    """Compute `_sum_short` of float32 values, in float64."""
    y = torch.zeros(tokens, down_t.shape[1], dtype=torch.float64, device="cpu")
    y = y if bias is None else y + bias
    for t, n, h in _chunks(*y.shape, token, neuron, hidden.double()):
        first, last = _span(t, tokens)
        rows = down_t.index_select(0, n).double()
        if first == last:
            y[first] += h @ rows
            continue
        spread = y.new_zeros(last - first + 1, t.numel())
        spread[t - first, torch.arange(t.numel(), device="cpu")] = h
        y[first : last + 1].addmm_(spread, rows)
    return y.float()


def _sum_short(hidden, token, neuron, down_t, tokens: int, bias) -> Tensor:
    """For each token, the bias and the sum of hidden * down_t[neuron] over its entries (tokens ascend)."""
    if hidden.numel() == 0:
        y = down_t.new_zeros(tokens, down_t.shape[1])
        return y if bias is None else y + bias
    first = token.new_zeros(1) if tokens == 1 else torch.searchsorted(token, torch.arange(tokens, device="cpu"))
    if bias is not None:
        # The bias is treated as a neuron that fires with 1 on every token, before the token's entries. Added to a
        # rounded sum, it could nearly cancel that sum, and the rounding error would remain.
        used, place = neuron.unique(return_inverse=True)
        down_t = torch.cat([down_t[used], bias[None]])
        entries = torch.arange(token.numel(), device="cpu") + token + 1
        first = first + torch.arange(tokens, device="cpu")
        neuron = token.new_full((token.numel() + tokens,), used.numel()).index_copy_(0, entries, place)
        hidden = hidden.new_ones(neuron.shape).index_copy_(0, entries, hidden)
    return embedding_bag(neuron, down_t, first, mode="sum", per_sample_weights=hidden)
