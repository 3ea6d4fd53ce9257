"""The feed-forward layer on a CPU, in torch operations that skip the zeros.

After the gate, one kept value ("entry") costs a row of `up`, gathered and multiplied, and a row of `down_t`, gathered,
scaled and added to the output. Entries are taken 128 at a time, so that what is gathered stays in the L2 cache
instead of travelling to memory and back.

Sums are one step wider than the values. For 16-bit values that is what torch's dense layer does too. For float32 it
means float64: two or three float32 terms can cancel so that the dense layer is exact by luck, and no other order of
adding them in float32 is sure to come as close.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from . import reference

_ENTRIES_AT_ONCE = 128
# An entry costs about as much as the dense layer's work on this many of a neuron's two weight rows, and the
# dense layer's cost grows with tokens only past this many. Measured on two AVX-512 cores at d_model 2048,
# d_ff 5632; they decide when too many neurons fire for skipping to pay.
_ENTRY_COST = 6.0
_TOKENS_FREE = {torch.float32: 9, torch.bfloat16: 24, torch.float16: 24}


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_t: Tensor, up_bias=None, down_bias=None) -> Tensor:
    """(relu(gate) * (x up^T + up_bias)) down^T + down_bias; gate [tokens, d_ff] before the ReLU."""
    keep = reference.fires(gate)
    token, neuron = keep.nonzero(as_tuple=True)
    if _pays(gate, token.numel()):
        value = gate[token, neuron]
        sums = _gated_wide if x.dtype == torch.float32 else _gated_short
        y = sums(x, value, token, neuron, up, down_t, up_bias)
        y = y if down_bias is None else y + down_bias
    else:
        hidden = torch.where(keep, gate * linear(x, up, up_bias), torch.zeros_like(gate))
        y = linear(hidden, down, down_bias)
    if not x.isfinite().all():
        y[reference.spoilt(x, keep)] = torch.nan
    return y


def plain(gate: Tensor, down: Tensor, down_t: Tensor, bias=None) -> Tensor:
    """relu(gate) down^T + bias; gate [tokens, d_ff] before the ReLU."""
    token, neuron = reference.fires(gate).nonzero(as_tuple=True)
    if not _pays(gate, token.numel()):
        return linear(reference.relu(gate), down, bias)
    value, tokens = gate[token, neuron], gate.shape[0]
    if gate.dtype != torch.float32:
        y = _sum_short(value, token, neuron, down_t, tokens)
    else:
        wide = torch.zeros(tokens, down_t.shape[1], dtype=torch.float64)
        for t, n, v in _chunks(token, neuron, value):
            _add_wide(wide, v.double(), t, down_t[n])
        y = wide.float()
    return y if bias is None else y + bias


def _pays(gate: Tensor, entries: int) -> bool:
    tokens, d_ff = gate.shape
    return entries * _ENTRY_COST <= d_ff * max(1.0, tokens / _TOKENS_FREE[gate.dtype])


def _chunks(*lists: Tensor):
    return zip(*(each.split(_ENTRIES_AT_ONCE) for each in lists)) if lists[0].numel() else ()


def _gated_wide(x, value, token, neuron, up, down_t, up_bias) -> Tensor:
    """float32 values, float64 sums."""
    y, x = torch.zeros(x.shape[0], down_t.shape[1], dtype=torch.float64), x.double()
    for t, n, v in _chunks(token, neuron, value):
        hidden = _dots(x, up[n].double(), t)
        hidden = v * (hidden if up_bias is None else hidden + up_bias[n])
        _add_wide(y, hidden, t, down_t[n])
    return y.float()


def _gated_short(x, value, token, neuron, up, down_t, up_bias) -> Tensor:
    """16-bit values: torch's own GEMM and embedding_bag sum them in float32."""
    hidden = torch.empty_like(value)
    for t, n, v, out in _chunks(token, neuron, value, hidden):
        dots = _dots(x, up[n], t)
        torch.mul(v, dots if up_bias is None else dots + up_bias[n], out=out)
    return _sum_short(hidden, token, neuron, down_t, x.shape[0])


def _dots(x: Tensor, rows: Tensor, token: Tensor) -> Tensor:
    """x[token] . rows, one of each (tokens ascend).

    A small GEMM of the tokens concerned with all the rows computes some products nobody asked for; that is cheaper
    than gathering x, and sums in a wider type, which an elementwise product in 16 bits would not.
    """
    first, last = int(token[0]), int(token[-1])
    dots = linear(x[first : last + 1], rows)
    return dots[0] if first == last else dots[token - first, torch.arange(token.numel())]


def _add_wide(y: Tensor, hidden: Tensor, token: Tensor, rows: Tensor) -> None:
    """y[token] += hidden * rows, in y's dtype."""
    first, last = int(token[0]), int(token[-1])
    if first == last:
        y[first] += hidden @ rows.to(y.dtype)
        return
    spread = y.new_zeros(last - first + 1, token.numel())
    spread[token - first, torch.arange(token.numel())] = hidden
    y[first : last + 1].addmm_(spread, rows.to(y.dtype))


def _sum_short(hidden, token, neuron, down_t, tokens: int) -> Tensor:
    """For each token, the sum of hidden * down_t[neuron] over its entries (tokens ascend)."""
    if hidden.numel() == 0:
        return down_t.new_zeros(tokens, down_t.shape[1])
    first = torch.searchsorted(token, torch.arange(tokens))
    return embedding_bag(neuron, down_t, first, mode="sum", per_sample_weights=hidden)
