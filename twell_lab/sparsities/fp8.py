"""FP8: linear layers whose weight and input are rounded to E4M3 rows, one scale each. Lossy. GPUs from sm_89 on.

with torch.no_grad():                                                       # it has no gradient
    y = fp8_linear(x, quantise(layer.weight, torch.float8_e4m3fn), layer.bias)
tl.sparsify(model, "fp8")                                                   # as a path of feed-forward layers"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.parts import Weights
from .checks import check_gpu
from .products import Product, Products, hidden_of, tried
from .quantised import Rows, flattened, quantise, round_tokens

KIND = torch.float8_e4m3fn
OLDEST = (8, 9)


def fp8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias by an E4M3 product, with one scale a token: x [..., columns] -> [..., rows].

    On a GPU from sm_89 on torch._scaled_mm, rows and columns multiples of 16, whose result is rounded to bfloat16; on a
    CPU the same values multiplied in float32. Of a row of x that is not finite the result is NaN. InputError for other
    rows, shapes, and where a gradient is needed; DeviceError for an older GPU."""
    flat = flattened(x, rows, KIND, bias)
    if x.is_cuda:
        check_gpu("the weight", x.device, OLDEST, "FP8 products")
    return _product(round_tokens(flat, KIND), rows, flat, bias).view(*x.shape[:-1], len(rows.values))


def _product(short: Rows, rows: Rows, flat: Tensor, bias: Tensor | None) -> Tensor:
    """Return [tokens, rows] in the dtype of flat [tokens, columns], for its E4M3 rows, padded or not. On a GPU the
    product itself scales, adds a bias of bfloat16, and rounds to bfloat16."""
    if not short.values.is_cuda:
        y = short.values.float() @ rows.values.float().t() * short.scale[:, None] * rows.scale
        return (y if bias is None else y + bias).to(flat.dtype)
    scales, within = (short.scale[:, None], rows.scale[None]), bias is not None and bias.dtype == torch.bfloat16
    how = {"bias": bias if within else None, "out_dtype": torch.bfloat16}
    y = torch._scaled_mm(short.values, rows.values.t(), *scales, **how)[: len(flat)]
    return (y if within or bias is None else y.float() + bias).to(flat.dtype)


class Fp8(Products):
    """All neurons, by E4M3 products of weights and x (`fp8_linear`). Lossy. The layer owns the rows."""

    name = "fp8"
    exact = False

    def product(self, weight: Tensor) -> Product:
        check_gpu("the weight", weight.device, OLDEST, "FP8 products")
        if any(n % 16 or not n for n in weight.shape):
            raise InputError(f"the weight has shape {list(weight.shape)}; multiples of 16 are accepted")
        return tried(partial(fp8_linear, rows=quantise(weight, KIND)), weight, "torch's product of fp8")

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: list[Product | None]) -> Tensor:
        """Compute as of Products; x is rounded once for gate and up, and a row that is not finite needs no pass of its
        own: its scale makes NaN of all that follows."""
        if weights.gate is None or weights.gate is weights.up or None in form:
            return super().compute(layer, x, weights, form)
        gate, up, down = (product.keywords["rows"] for product in form)
        flat = x.reshape(-1, x.shape[-1])
        short = round_tokens(flat, KIND)
        first, beside = (_product(short, rows, flat, bias) for rows, bias in zip((gate, up), weights[3:5]))
        return fp8_linear(hidden_of(first, beside, weights, layer.acts), down, weights.down_bias).view(x.shape)
