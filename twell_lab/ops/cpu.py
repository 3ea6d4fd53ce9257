"""The feed-forward layer on a CPU, in torch operations that skip the zeros.

After the gate, one kept value ("entry") costs a row of each weight, gathered and multiplied. Entries are taken 128 at a
time, so that what is gathered stays in the L2 cache.

Sums are one step wider than the values. For 16-bit values that is what torch's dense layer does too. For float32 it
means float64: two or three float32 terms can cancel so that the dense layer is exact by luck, and no other order of
adding them in float32 is sure to come as close. So for float32, where the gate's weights are given, the gate of an
entry is summed again in float64. Where all neurons are computed, the same operations as in torch's layer run on the
same tensors; or, if the tensors are not those of the layer (permuted, packed), the sums of float32 are float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import reference
from .activation import RELU, Activation

_ENTRIES_AT_ONCE = 128
# torch shares operations on more elements among its threads, which where others use the machine wait for each other: a
# single token's rows of float32 are taken as many at a time as stay below.
_ALONE = 32768
# Up to how many entries it is faster to skip the silent neurons. An entry takes about as long as the dense
# layer takes for _ENTRY_COST neurons, and up to _TOKENS_FREE tokens the dense layer takes as long as for one. Measured
# on two AVX-512 cores at d_model 2048, d_ff 5632.
_ENTRY_COST = 6.0
_TOKENS_FREE = {torch.float32: 9, torch.bfloat16: 24, torch.float16: 24}


class _AsPacked(Activation):
    """For values that went through an activation before they were packed: all that is not zero counts as it is, of
    either sign. The kernels that read packed values ask no activation either."""

    def value(self, first: Tensor) -> Tensor:
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
    (tokens, d_ff), finite = first.shape, x is None or math.isfinite(x.sum())
    fired = torch.relu(first) if acts.kind == "relu" else acts.applied(first)
    token, neuron = fired.nonzero(as_tuple=True)  # tokens ascend; relu leaves NaN as it is, and NaN is not zero
    skips = len(token) * _ENTRY_COST <= d_ff * max(1.0, tokens / _TOKENS_FREE[first.dtype])
    # Rows that are not finite show in every neuron of a plain layer with an activation that returns to zero.
    if (up is None and acts.falls_back and not finite) or not skips:
        return _dense(x, first, up, up_bias, down, down_bias, made_by, follow, acts)
    y = _sparse(x, first, up, up_bias, down, down_bias, made_by, acts, token, neuron)
    # With an infinity or NaN in x its sum is not finite. (After an overflow it is not either; then no row is spoilt.)
    if up is not None and not finite:
        rows = reference.spoilt(x, acts.keeps(first))
        y[rows] = reference.gated(x[rows], first[rows], up, down, up_bias, down_bias, acts)
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
    return reference.gated(x, first, up, down, up_bias, down_bias, acts).to(dtype)


def _sparse(x, first, up, up_bias, down, down_bias, made_by, acts: Activation, token, neuron) -> Tensor:
    """Compute `after_gate` for the neurons that fire, which are listed with their tokens.

    A small GEMM multiplies all tokens of some entries with all their rows, also pairs that are not needed. That is
    cheaper than gathering x, and it sums in a wider type, which an elementwise product in 16 bits would not."""
    (tokens, _), (d_model, _), down_t = first.shape, down.shape, down.t()
    short = first.dtype != torch.float32
    x, wide = x if short or x is None else x.double(), torch.float32 if short else torch.float64
    y = torch.zeros(tokens, d_model, dtype=wide, device="cpu")
    y = y if down_bias is None else y + down_bias
    step = _ENTRIES_AT_ONCE if tokens > 1 or short else max(1, min(_ENTRIES_AT_ONCE, _ALONE // d_model))
    for start in range(0, len(token), step):
        t, n = token[start : start + step], neuron[start : start + step]
        low, high = (0, 1) if tokens == 1 else (int(t[0]), int(t[-1]) + 1)
        place = (0,) if high - low == 1 else (t - low, torch.arange(len(t), device="cpu"))

        def products(weight: Tensor, bias: Tensor | None) -> Tensor:
            rows, offsets = weight.index_select(0, n).to(x.dtype), None if bias is None else bias[n].to(x.dtype)
            return linear(x[low:high], rows, offsets)[place]

        # Made again, the gate is below 0 for an entry that was positive only because of rounding.
        value = acts.value(first[t, n] if short or not made_by else products(*made_by))
        value = value if up is None else value * acts.of_up(products(up, up_bias))
        spread = y.new_zeros(high - low, len(n))
        spread[place] = value.to(wide)
        y[low:high].addmm_(spread, down_t.index_select(0, n).to(wide))
    return y.to(first.dtype)
