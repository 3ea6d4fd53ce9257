"""INT8: linear layers whose weight and input are rounded to INT8 rows, one scale each. Lossy.

    with torch.no_grad():                                  # it has no gradient
        y = int8_linear(x, quantise(layer.weight), layer.bias)
    tl.sparsify(model, "int8")                             # as a path of feed-forward layers

torch's operations (torch._int_mm, and two that scale) write and read the int32 sums. `ops.int8` scales them where they
are, on GPUs from sm_80 on, for results of 16 bits and widths of multiples of 16, outside of compiled code. **2:4 with
INT8**: a zero stays a zero when it is quantised; `two_four_int8` multiplies with such a weight by cuSPARSELt."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import DeviceError, InputError
from ..cuda.launch import capability, layout, run
from ..layers.parts import Weights
from ..ops import int8 as kernels
from ..ops.activation import RELU
from .checks import check_gpu
from .products import Product, Products, tried
from .quantised import Rows, flattened, quantise, round_tokens
from .two_four import check_two_four

MOST_COLUMNS = 2**31 // (127 * 127) - 1  # that an int32 sum of products holds


def int8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None, *, apart: bool = False) -> Tensor:
    """Return x W^T + bias by an INT8 product, whose sums are int32: x [..., columns], one scale a token, -> [...,
    rows].

    By the kernel of ops.int8 where that takes it, else, or where it is asked for `apart`, by torch._int_mm and two
    operations that scale. Of a row of x that is not finite the result is NaN. On a GPU: rows and columns multiples of
    8. InputError for other rows than INT8, more than MOST_COLUMNS columns, other shapes, and where a gradient is
    needed."""
    flat = flattened(x, rows, torch.int8, bias)
    if flat.shape[1] > MOST_COLUMNS:
        raise InputError(f"x has {flat.shape[1]} columns; up to {MOST_COLUMNS} are accepted, whose sum int32 holds")
    short, weight = round_tokens(flat, torch.int8), kernels.Weight(*rows, bias)
    if not apart and has_kernel(short.values, weight, flat.dtype):
        y = run(kernels.product, *short, weight, flat.dtype, len(flat))
    else:
        y = _scaled(_sums(short.values, rows.values)[: len(flat)], short, rows, flat.dtype, bias)
    return y.view(*x.shape[:-1], len(rows.values))


def has_kernel(values: Tensor, weight: kernels.Weight, dtype: torch.dtype) -> bool:
    """Return whether the kernel of ops.int8 multiplies int8 rows [tokens, in] with this weight to a result of
    `dtype`."""
    if not values.is_cuda or type(values) is not Tensor or torch.compiler.is_compiling():
        return False
    return kernels.takes(layout(values), kernels.Weight(*map(layout, weight)), dtype, capability(values.device.index))


def _sums(values: Tensor, weight: Tensor) -> Tensor:
    if weight.shape[1] == 1:  # of which torch 2.13's product on a CPU is wrong
        values, weight = F.pad(values, (0, 1)), F.pad(weight, (0, 1))
    return torch._int_mm(values, weight.t())


def _scaled(sums: Tensor, tokens: Rows, weights: Rows, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Return int32 sums times the scales of tokens and weights, plus the bias, rounded once, in two operations: the
    first reads them as they are and writes float32, the second writes `dtype`."""
    first = torch.mul(sums, tokens.scale[: len(sums), None])
    y = torch.empty_like(first, dtype=dtype)
    if bias is None:
        return torch.mul(first, weights.scale, out=y)
    return torch.addcmul(bias.float(), first, weights.scale, out=y)


def packed_two_four(rows: Rows) -> Tensor:
    """Return INT8 rows that are 2:4 as cuSPARSELt multiplies them: half of the values, and their places. InputError for
    rows that are not 2:4 or no multiples of 32; DeviceError where there is no cuSPARSELt."""
    check_two_four(rows.values.half())
    if any(n % 32 for n in rows.values.shape):
        raise InputError(f"the rows are {list(rows.values.shape)}; multiples of 32 are accepted")
    check_gpu("the weight", rows.values.device, kernels.OLDEST, "2:4 products of INT8 (cuSPARSELt)")
    if not torch.backends.cusparselt.is_available():
        raise DeviceError("this build of torch has no cuSPARSELt; one that has it is accepted")
    return torch._cslt_compress(rows.values)


def two_four_int8(x: Tensor, rows: Rows, packed: Tensor) -> Tensor:
    """Return x W^T for INT8 rows that are 2:4, by cuSPARSELt's product: x [..., columns] -> [..., rows], one scale a
    token; two operations scale the int32 sums. packed: `packed_two_four(rows)`. Raises as `int8_linear`."""
    flat = flattened(x, rows, torch.int8)
    short = round_tokens(flat, torch.int8)
    values = F.pad(short.values, (0, 0, 0, -len(short.values) % 32))
    sums = torch._cslt_sparse_mm(packed, values.t(), out_dtype=torch.int32)
    return _scaled(sums.t()[: len(flat)], short, rows, x.dtype, None).view(*x.shape[:-1], len(rows.values))


# ---- as a path


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
        near = (
            has_kernel(part.values, kernels.Weight(part.values, part.scale, bias), weights.up.dtype)
            for part, bias in zip(rows, weights[3:])
        )
        return products, rows if all(near) else None

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: tuple) -> Tensor:
        (products, whole), rows = form, x.reshape(-1, x.shape[-1])
        if whole is None or layer.acts != RELU or not 0 < len(rows) <= kernels.MOST_TOKENS:
            return super().compute(layer, x, weights, products)
        given = (kernels.Weight(part.values, part.scale, bias) for part, bias in zip(whole, weights[3:]))
        return run(kernels.layer, rows.contiguous(), *given).view(x.shape)
