"""The feed-forward layer on a CPU, in torch operations that skip the zeros.

After the gate, one kept value ("entry") costs a row of `up`, gathered and multiplied, and a row of `down_t`, gathered,
scaled and added to the output. Entries are taken 128 at a time, so that what is gathered stays in the L2 cache
instead of travelling to memory and back.

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
# token's rows are taken as many at a time as stay below.
_ALONE = 32768
_TOKENS_ALONE = 1
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


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor | None,
    down_t: Tensor,
    up_bias,
    down_bias,
    made_by=None,
    follow=True,
    acts: Activation = RELU,
) -> Tensor:
    """(act(gate) * (x up^T + up_bias)) down^T + down_bias; gate [tokens, d_ff] before the activation.

    down: None where only its transpose is given. made_by: the weight and bias from which gate was computed with x, or
    None where the values of gate itself are the input. follow: whether these tensors are those of torch's layer, so
    that the same operations give the same bits."""
    token, neuron, value = _entries(gate, acts)
    if _pays(gate, token.numel()):
        if x.dtype == torch.float32:
            value = value if made_by is None else _summed_again(x, token, neuron, *made_by, acts)
            y = _gated_wide(x, value, token, neuron, up, down_t, up_bias, down_bias, acts)
        else:
            y = _gated_short(x, value, token, neuron, up, down_t, up_bias, down_bias, acts)
    elif not follow and x.dtype == torch.float32:
        x, gate, up, down_t, up_bias, down_bias, *made_by = _double(
            x, gate, up, down_t, up_bias, down_bias, *made_by or ()
        )
        first = linear(x, *made_by) if made_by else gate
        return reference.gated(x, first, up, down_t.t(), up_bias, down_bias, acts).float()
    else:
        kept = acts.keeps(gate)
        hidden = torch.where(kept, acts.value(gate) * acts.of_up(linear(x, up, up_bias)), torch.zeros_like(gate))
        y = linear(hidden, _as_stored(down, down_t), down_bias)
    # With an infinity or NaN in x its sum is not finite. (After an overflow it is not either; then no row is spoilt.)
    if not math.isfinite(x.sum()):
        rows = reference.spoilt(x, acts.keeps(gate))
        if acts.both:
            y[rows] = reference.gated(x[rows], gate[rows], up, _as_stored(down, down_t), up_bias, down_bias, acts)
        else:
            y[rows] = torch.nan
    return y


def plain(
    gate: Tensor,
    down: Tensor | None,
    down_t: Tensor,
    bias,
    x: Tensor | None = None,
    made_by=None,
    follow=True,
    acts: Activation = RELU,
) -> Tensor:
    """act(gate) down^T + bias; gate [tokens, d_ff] before the activation. down, made_by, follow: see gated; x: what
    gate was computed from."""
    token, neuron, value = _entries(gate, acts)
    # Rows that are not finite show in every neuron of an activation that returns to zero.
    spoilt = acts.falls_back and x is not None and not math.isfinite(x.sum())
    if spoilt or not _pays(gate, token.numel()):
        if not follow and gate.dtype == torch.float32:
            x, gate, down_t, bias, *made_by = _double(x, gate, down_t, bias, *made_by or ())
            return linear(acts.dense(linear(x, *made_by) if made_by else gate), down_t.t(), bias).float()
        return linear(acts.dense(gate), _as_stored(down, down_t), bias)
    tokens = gate.shape[0]
    if gate.dtype != torch.float32:
        return _sum_short(value, token, neuron, down_t, tokens, bias)
    value = value if made_by is None else _summed_again(x, token, neuron, *made_by, acts)
    y = _start_wide(tokens, down_t, bias)
    for t, n, v in _chunks(token, neuron, value, rows=_at_once(tokens, down_t.shape[1])):
        _add_wide(y, v.double(), t, down_t.index_select(0, n))
    return y.float()


def layer(x, gate, up, down, gate_bias, up_bias, down_bias, acts: Activation = RELU) -> Tensor:
    """Compute a layer: x [tokens, d_model] -> [tokens, d_model]; gate None for a plain layer. down: [d_model, d_ff],
    fastest where it is stored transposed. There torch's layer, which is stored as it was, adds in another order."""
    follow = down.is_contiguous() or acts != RELU
    if gate is None:
        return plain(linear(x, up, up_bias), down, down.t(), down_bias, x, (up, up_bias), follow, acts)
    first = linear(x, gate, gate_bias)
    return gated(x, first, up, down, down.t(), up_bias, down_bias, (gate, gate_bias), follow, acts)


def _entries(gate: Tensor, acts: Activation = RELU) -> tuple[Tensor, Tensor, Tensor]:
    """(token, neuron, value) of what fires, tokens ascending. relu leaves NaN as it is, and NaN is not zero.

    For one token, starting an operation takes longer than the operation itself, so there are as few as possible.
    """
    fired = torch.relu(gate) if acts.kind == "relu" else acts.applied(gate)
    token, neuron = fired.nonzero(as_tuple=True)
    return token, neuron, fired[0].index_select(0, neuron) if gate.shape[0] == 1 else fired[token, neuron]


def _summed_again(
    x: Tensor, token: Tensor, neuron: Tensor, weight: Tensor, bias: Tensor | None, acts: Activation
) -> Tensor:
    """The gate of each entry after the activation, in float64; 0 for an entry that was positive only because of
    rounding. Another threshold than the ReLU's has decided already, on the values as they were rounded."""
    x = x.double()
    made = [
        _dots(x, weight.index_select(0, n).double(), None if bias is None else bias[n].double(), t)
        for t, n in _chunks(token, neuron, rows=_at_once(len(x), weight.shape[1]))
    ]
    return acts.value(torch.cat([x.new_empty(0), *made]))


def _double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


def _as_stored(down: Tensor | None, down_t: Tensor) -> Tensor:
    """down, contiguous as the dense layer stores it: for a transposed view the GEMM would sum in another order."""
    return down_t.t().contiguous() if down is None else down


def _pays(gate: Tensor, entries: int) -> bool:
    """Return whether skipping the silent neurons is faster than computing all."""
    tokens, d_ff = gate.shape
    return entries * _ENTRY_COST <= d_ff * max(1.0, tokens / _TOKENS_FREE[gate.dtype])


def _chunks(*lists: Tensor, rows: int = _ENTRIES_AT_ONCE):
    """The lists, cut into parts of `rows` entries."""
    return zip(*(each.split(rows) for each in lists)) if lists[0].numel() else ()


def _at_once(tokens: int, width: int) -> int:
    """Of how many entries rows of this width are gathered at a time."""
    return max(1, min(_ENTRIES_AT_ONCE, _ALONE // width)) if tokens <= _TOKENS_ALONE else _ENTRIES_AT_ONCE


def _gated_wide(x, value, token, neuron, up, down_t, up_bias, down_bias, acts) -> Tensor:
    """float32 values, float64 sums; value is of either."""
    if x.shape[0] == 1:
        y, token = _start_wide(1, down_t, down_bias)[0], x[0].double()
        for n, v in _chunks(neuron, value, rows=_at_once(1, up.shape[1])):
            hidden = torch.mv(up.index_select(0, n).double(), token)
            hidden = v * acts.of_up(hidden if up_bias is None else hidden + up_bias[n])
            y += hidden @ down_t.index_select(0, n).double()
        return y.float()[None]
    y, x = _start_wide(x.shape[0], down_t, down_bias), x.double()
    for t, n, v in _chunks(token, neuron, value, rows=_at_once(len(y), up.shape[1])):
        bias = None if up_bias is None else up_bias[n].double()
        _add_wide(y, v * acts.of_up(_dots(x, up.index_select(0, n).double(), bias, t)), t, down_t.index_select(0, n))
    return y.float()


def _gated_short(x, value, token, neuron, up, down_t, up_bias, down_bias, acts) -> Tensor:
    """16-bit values: torch's own GEMM and embedding_bag sum them in float32, biases included."""
    hidden = _hidden_short(x, value, token, neuron, up, up_bias, acts)
    return _sum_short(hidden, token, neuron, down_t, x.shape[0], down_bias)


def _hidden_short(x, value, token, neuron, up, up_bias, acts: Activation = RELU) -> Tensor:
    hidden = [
        v * acts.of_up(_dots(x, up.index_select(0, n), None if up_bias is None else up_bias[n], t))
        for t, n, v in _chunks(token, neuron, value, rows=_at_once(x.shape[0], up.shape[1]))
    ]
    return hidden[0] if len(hidden) == 1 else torch.cat([value[:0], *hidden])


def _span(token: Tensor, tokens: int) -> tuple[int, int]:
    """The first and last of some ascending tokens, of `tokens` in all."""
    return (0, 0) if tokens == 1 else (int(token[0]), int(token[-1]))


def _dots(x: Tensor, rows: Tensor, bias: Tensor | None, token: Tensor) -> Tensor:
    """x[token[i]] . rows[i] + bias[i] for each i; tokens ascend.

    A small GEMM multiplies all these tokens with all the rows, also pairs that are not needed. That is cheaper than
    gathering x, and it sums in a wider type, which an elementwise product in 16 bits would not.
    """
    first, last = _span(token, x.shape[0])
    dots = linear(x[first : last + 1], rows, bias)
    return dots[0] if first == last else dots[token - first, torch.arange(token.numel(), device="cpu")]


def _start_wide(tokens: int, down_t: Tensor, bias: Tensor | None) -> Tensor:
    """The float64 sums [tokens, d_model] before the first entry: the bias, or zero."""
    y = torch.zeros(tokens, down_t.shape[1], dtype=torch.float64, device="cpu")
    return y if bias is None else y + bias


def _add_wide(y: Tensor, hidden: Tensor, token: Tensor, rows: Tensor) -> None:
    """y[token] += hidden * rows, in y's dtype."""
    first, last = _span(token, y.shape[0])
    if first == last:
        y[first] += hidden @ rows.to(y.dtype)
        return
    spread = y.new_zeros(last - first + 1, token.numel())
    spread[token - first, torch.arange(token.numel(), device="cpu")] = hidden
    y[first : last + 1].addmm_(spread, rows.to(y.dtype))


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
