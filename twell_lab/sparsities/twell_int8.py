"""The TwELL path with its rows of up and down as INT8, one scale a neuron: half the bytes of 16 bits. Lossy.

    tl.sparsify(model, "twell_int8")
    y = rows_product(x, relu(x gate^T), quantise(up), quantise(down.t()))     # what it computes, by torch

The gate is computed as it is, so what fires is exact; what it adds is not. x and the hidden values stay as they are:
only weights are rounded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..cuda.launch import Buffer, Call, run
from ..layers.parts import Weights
from ..layers.paths import Path
from ..layers.paths.cost import Work
from ..layers.paths.path import Converted
from ..layers.paths.twell import packed_cost
from ..ops import checks, decode, int8
from ..ops.activation import RELU
from ..ops.pack import pack
from .products import hidden_of
from .quantised import Rows, check_weight, quantise

_ENTRIES_AT_ONCE = 4096
_ROWS_GAIN = 1.14  # over rows of 16 bits, on an H100: docs/kernels/smxx_gated_int8.md


@torch.no_grad()
def rows_product(
    x: Tensor,
    first: Tensor,
    up: Rows | None,
    down: Rows,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Compute what is left of a layer once its gate is known, with rows of few bits: y = (first * (x up^T + up_bias))
    down + down_bias, or without up y = first down + down_bias. Sums are float32, rounded once.

    Args:
        x: [tokens, d_model].
        first: [tokens, d_ff] after the activation, zero where a neuron is silent; such a neuron's rows are not read.
        up: INT8 rows [d_ff, d_model], one a neuron; None for a plain layer.
        down: INT8 rows [d_ff, d_model], down transposed.

    Returns:
        y [tokens, d_model] in x's dtype; NaN where a row of x is not finite.

    Raises:
        InputError: for shapes, dtypes and devices that do not fit together.
    """
    checks.check_tensor("x", x, dims=2)
    same = {"dtype": x.dtype, "device": x.device}
    checks.check_tensor("first", first, shape=(len(x), None), **same)
    tokens, d_model, d_ff = *x.shape, first.shape[1]
    for name, bias, length in (("up_bias", up_bias, d_ff), ("down_bias", down_bias, d_model)):
        if bias is not None:
            checks.check_tensor(name, bias, shape=(length,), **same)
    for name, rows in (("up", up), ("down", down)):
        wanted = torch.int8, (d_ff, d_model), (d_ff,), x.device
        if rows is None or (rows.values.dtype, rows.values.shape, rows.scale.shape, rows.values.device) == wanted:
            continue
        raise InputError(
            f"{name} is {rows.values.dtype} {list(rows.values.shape)} on {rows.values.device}; torch.int8 "
            f"{[d_ff, d_model]} on {x.device} is accepted"
        )
    y = torch.zeros(tokens, d_model, dtype=torch.float32, device=x.device)
    if down_bias is not None:
        y += down_bias
    token, neuron = first.nonzero(as_tuple=True)
    for t, n in zip(token.split(_ENTRIES_AT_ONCE), neuron.split(_ENTRIES_AT_ONCE)):
        hidden = first[t, n].float()
        if up is not None:
            dots = (up.values[n].float() * x[t].float()).sum(1) * up.scale[n]
            hidden = hidden * (dots if up_bias is None else dots + up_bias[n])
        y.index_add_(0, t, (hidden * down.scale[n])[:, None] * down.values[n].float())
    return (y + torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True) * 0).to(x.dtype)


def _packed(call: Call, x: Buffer, first: Buffer, up, down, up_bias, down_bias, tile: int, words: int, signed: bool):
    """Pack the gate and compute the rest from it."""
    packed = pack(call, first, tile, words, signed=signed)
    return int8.gated_int8(call, x, packed, first, up, down, up_bias, down_bias, tile, signed=signed)


class TwellInt8(Converted):
    """The path. With a ReLU on up (dReLU) it computes densely. The layer owns the rows."""

    name = "twell_int8"
    exact = False

    def fitted(self, weights: Weights) -> Path:
        for weight in (weights.up, weights.down):
            check_weight(weight)
        return super().fitted(weights)

    def make(self, weights: Weights) -> tuple[Rows | None, Rows]:
        return None if weights.gate is None else quantise(weights.up), quantise(weights.down.t())

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: tuple[Rows | None, Rows]) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias = weights
        acts, rows = layer.acts, x.reshape(-1, x.shape[-1])
        first = F.linear(rows, up, up_bias) if gate is None else F.linear(rows, gate, gate_bias)
        if acts.both:
            hidden = hidden_of(first, F.linear(rows, up, up_bias), weights, acts)
            return F.linear(hidden, down, down_bias).view(x.shape)
        up_bias = None if gate is None else up_bias
        if not x.is_cuda:
            return rows_product(rows, acts.applied(first), *form, up_bias, down_bias).view(x.shape)
        first = first if acts == RELU else acts.applied(first)  # the kernels ask whether it is positive
        of_up, of_down = (None if part is None else int8.Weight(*part) for part in form)
        given = (rows.contiguous(), first, of_up, of_down, up_bias, down_bias)
        return run(_packed, *given, layer.tile, layer.words, acts.falls_back).view(x.shape)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """Return the cost of TwELL where the gate's GEMM is torch's and what fires is packed from its result, with rows
        that are read as fast as measured: half the bytes of 16 bits do not take half the time."""
        firing, tokens = work.firing, work.tokens
        gemm = work.gemm(firing.d_ff, firing.d_model)
        # Which TwELL's own kernels for few tokens do without.
        gate = 2 * tokens * firing.d_ff * work.itemsize if tokens <= decode.MOST_TOKENS else 0
        parts = packed_cost(work, 0, False, gemm, gate, 3)
        return {**parts, "rows": parts["rows"] / (_ROWS_GAIN * work.itemsize / 2), "lost": 0.0}


PATHS = (TwellInt8(),)
