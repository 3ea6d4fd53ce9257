"""INT8: linear layers whose weight and input are rounded to INT8 rows, one scale each. Lossy.

    with torch.no_grad():                                  # it has no gradient
        y = int8_linear(x, quantise(layer.weight), layer.bias)
    tl.sparsify(model, "int8")                             # as a path of feed-forward layers
    tl.sparsify(model, "twell_int8")                       # the TwELL path, its rows of up and down as INT8

torch's operations (torch._int_mm, and two that scale) write and read the int32 sums. `ops.int8` scales them where they
are, on GPUs from sm_80 on, for results of 16 bits and widths of multiples of 16, outside of compiled code."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..cuda.launch import Buffer, Call, capability, layout, run
from ..layers.parts import Weights
from ..layers.paths import Converted
from ..ops import int8 as kernels
from ..ops.activation import RELU
from ..ops.pack import pack
from .products import Product, Products, hidden_of, spoilt, tried
from .quantised import Rows, flattened, quantise, round_tokens

MOST_COLUMNS = 2**31 // (127 * 127) - 1  # that an int32 sum of products holds


def int8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None, *, apart: bool = False) -> Tensor:
    """Return x W^T + bias by an INT8 product, whose sums are int32, with one scale a token: x [..., columns] -> [...,
    rows]. By the kernel of ops.int8 where that takes it, else, or where it is asked for `apart`, by torch._int_mm and
    two operations that scale. Of a row of x that is not finite the result is NaN. On a GPU: multiples of 8. InputError
    for other rows, more than MOST_COLUMNS columns, other shapes, and where a gradient is needed."""
    flat = flattened(x, rows, torch.int8, bias)
    if flat.shape[1] > MOST_COLUMNS:
        raise InputError(f"x has {flat.shape[1]} columns; up to {MOST_COLUMNS} are accepted, whose sum int32 holds")
    short, weight = round_tokens(flat, torch.int8), kernels.Weight(*rows, bias)
    if not apart and has_kernel(short.values, weight, flat.dtype):
        y = run(kernels.product, *short, weight, flat.dtype, len(flat))
    else:
        values, others = short.values, rows.values
        if others.shape[1] == 1:  # of which torch 2.13's product on a CPU is wrong
            values, others = F.pad(values, (0, 1)), F.pad(others, (0, 1))
        y = _scaled(torch._int_mm(values, others.t())[: len(flat)], short, rows, flat.dtype, bias)
    return y.view(*x.shape[:-1], len(rows.values))


def has_kernel(values: Tensor, weight: kernels.Weight, dtype: torch.dtype) -> bool:
    """Return whether the kernel of ops.int8 multiplies int8 rows [tokens, in] with this weight to such a result."""
    if not values.is_cuda or type(values) is not Tensor or torch.compiler.is_compiling():
        return False
    return kernels.takes(layout(values), kernels.Weight(*map(layout, weight)), dtype, capability(values.device.index))


def _scaled(sums: Tensor, tokens: Rows, weights: Rows, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return int32 sums times the scales of tokens and weights, plus the bias, rounded once, in two operations."""
    first = torch.mul(sums, tokens.scale[: len(sums), None])
    y = torch.empty_like(first, dtype=dtype)
    if bias is None:
        return torch.mul(first, weights.scale, out=y)
    return torch.addcmul(bias.float(), first, weights.scale, out=y)


# ---- as paths


class Int8(Products):
    """All neurons, by INT8 products of weights and x (`int8_linear`). Lossy. The layer owns the rows."""

    name = "int8"
    exact = False

    def product(self, weight: Tensor) -> Product:
        if weight.is_cuda and any(n % 8 or not n for n in weight.shape):
            raise InputError(f"the weight has shape {list(weight.shape)}; multiples of 8 are accepted on a GPU")
        rows = quantise(weight)
        tried(partial(int8_linear, rows=rows, apart=True), weight, "torch's product of int8")
        return partial(int8_linear, rows=rows)

    def make(self, weights: Weights) -> tuple[list[Product | None], tuple[Rows, ...] | None]:
        """Return products, and the rows of a gated layer that the kernel of ops.int8 takes, else None."""
        products = super().make(weights)
        if not weights.up.is_cuda or weights.gate is None or weights.gate is weights.up or None in products:
            return products, None
        rows = tuple(product.keywords["rows"] for product in products)
        given = [kernels.Weight(part.values, part.scale, bias) for part, bias in zip(rows, weights[3:])]
        near = (has_kernel(part.values, weight, weights.up.dtype) for part, weight in zip(rows, given))
        return products, rows if all(near) else None

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: tuple) -> Tensor:
        (products, whole), rows = form, x.reshape(-1, x.shape[-1])
        if whole is None or layer.acts != RELU or not 0 < len(rows) <= kernels.MOST_TOKENS:
            return super().compute(layer, x, weights, products)
        given = (kernels.Weight(part.values, part.scale, bias) for part, bias in zip(whole, weights[3:]))
        return run(kernels.layer, rows.contiguous(), *given).view(x.shape)


@torch.no_grad()
def rows_product(
    x: Tensor, first: Tensor, up: Rows | None, down: Rows, up_bias: Tensor | None, down_bias: Tensor | None
) -> Tensor:
    """Return y = (first * (x up^T + up_bias)) down + down_bias, or without up first down + down_bias, [tokens,
    d_model], in x's dtype; NaN where a row of x is not finite. Sums are float32, rounded once. first: [tokens, d_ff],
    the gate after the activation. up: INT8 rows [d_ff, d_model], one a neuron. down: the same of down transposed."""
    wide_up, wide_down = (None if bias is None else bias.float() for bias in (up_bias, down_bias))
    hidden = first.float() if up is None else first.float() * F.linear(x.float(), up.dense(), wide_up)
    return spoilt(F.linear(hidden, down.dense().t(), wide_down), x).to(x.dtype)


def _packed(call: Call, x: Buffer, first: Buffer, up, down, up_bias, down_bias, tile: int, words: int, signed: bool):
    packed = pack(call, first, tile, words, signed=signed)
    return kernels.gated_int8(call, x, packed, first, up, down, up_bias, down_bias, tile, signed=signed)


class TwellInt8(Converted):
    """The TwELL path with INT8 rows of up and down (`rows_product`), half the bytes of 16 bits. Lossy: what fires is
    exact, what it adds is not. With a ReLU on up (dReLU) it computes densely. The layer owns the rows."""

    name = "twell_int8"
    exact = False

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
        of_up, of_down = (None if part is None else kernels.Weight(*part) for part in form)
        given = (rows.contiguous(), first, of_up, of_down, up_bias, down_bias)
        return run(_packed, *given, layer.tile, layer.words, acts.falls_back).view(x.shape)
