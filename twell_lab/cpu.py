"""The feed-forward layer on a CPU, in torch operations that skip the zeros.

After the gate, one kept value ("entry") costs a row of `up`, gathered and multiplied, and a row of `down_t`, added
to the output by embedding_bag, torch's fused gather-and-sum. Entries are taken 128 at a time, so that what is
gathered stays in the L2 cache instead of travelling to memory and back.
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


def gated(x: Tensor, gate: Tensor, up: Tensor, down_t: Tensor, up_bias=None, down_bias=None) -> Tensor:
    """(relu(gate) * (x up^T + up_bias)) down_t + down_bias; gate [tokens, d_ff] before the ReLU."""
    keep = reference.fires(gate)
    token, neuron = keep.nonzero(as_tuple=True)
    if _pays(x, gate, token.numel()):
        value = gate[token, neuron]
        if token.numel():
            value *= _up_at(x, token, neuron, up, up_bias)
        y = _sum_rows(value, token, neuron, down_t, down_bias, x.shape[0])
    else:
        hidden = torch.where(keep, gate * linear(x, up, up_bias), torch.zeros_like(gate))
        y = linear(hidden, down_t.t(), down_bias)
    if not x.isfinite().all():
        y[reference.spoilt(x, keep)] = torch.nan
    return y


def down(gate: Tensor, down_t: Tensor, bias=None) -> Tensor:
    """relu(gate) down_t + bias; gate [tokens, d_ff] before the ReLU."""
    token, neuron = reference.fires(gate).nonzero(as_tuple=True)
    if _pays(gate, gate, token.numel()):
        return _sum_rows(gate[token, neuron], token, neuron, down_t, bias, gate.shape[0])
    return linear(reference.relu(gate), down_t.t(), bias)


def _pays(x: Tensor, gate: Tensor, entries: int) -> bool:
    tokens, d_ff = gate.shape
    return entries * _ENTRY_COST <= d_ff * max(1.0, tokens / _TOKENS_FREE[x.dtype])


def _up_at(x: Tensor, token: Tensor, neuron: Tensor, up: Tensor, bias: Tensor | None) -> Tensor:
    """x[token] . up[neuron] + bias[neuron] for each entry (tokens ascend)."""
    parts = []
    for t, n in zip(token.split(_ENTRIES_AT_ONCE), neuron.split(_ENTRIES_AT_ONCE)):
        first, last = int(t[0]), int(t[-1])
        rows = up[n]
        if x.dtype == torch.float32:
            # torch sums pairwise: closer to the exact sum than a small GEMM, whose order depends on its shape.
            dots = rows.mul_(x[t] if first < last else x[first]).sum(-1)
        else:
            # A product of 16-bit values would be rounded before it is summed; a small GEMM of the chunk's tokens
            # with the chunk's rows sums in fp32, and its unwanted products are cheap.
            dots = linear(x[first : last + 1], rows)
            dots = dots[0] if first == last else dots[t - first, torch.arange(n.numel())]
        parts.append(dots if bias is None else dots + bias[n])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sum_rows(value, token, neuron, down_t, bias, tokens: int) -> Tensor:
    """For each token, the sum of value * down_t[neuron] over its entries (tokens ascend)."""
    if value.numel() == 0:
        y = down_t.new_zeros(tokens, down_t.shape[1])
    else:
        first = torch.searchsorted(token, torch.arange(tokens))
        y = embedding_bag(neuron, down_t, first, mode="sum", per_sample_weights=value)
    return y if bias is None else y + bias
