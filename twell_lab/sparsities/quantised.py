"""Fewer bits: weights as INT8 or FP8 (E4M3), one scale a row. Lossy: what it costs is measured (`output_error`).

    rows = quantise(layer.weight, torch.float8_e4m3fn)      # Rows: values, and one float32 scale a row
    y = fp8_linear(x, rows, layer.bias)                     # under torch.no_grad(): it has no gradient
    tl.sparsify(model, "fp8")                               # as a path of feed-forward layers

Method: symmetric, round to nearest, scale max |w| / 127 (448 in E4M3), as Jacob et al., arXiv 1712.05877, and Dettmers
et al., arXiv 2208.07339 (a scale for each row of x as well). `sparsities.int8` multiplies INT8 rows."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import InputError
from ..cuda.launch import run
from ..formats.matrix import check_tensor, dtype_names
from ..layers.parts import Weights
from ..ops import checks, int8
from .checks import check_gpu, checked_weight
from .products import Product, Products, hidden_of, tried

KIND, OLDEST = torch.float8_e4m3fn, (8, 9)  # FP8, and the compute capability from which on GPUs multiply it
LARGEST = {torch.int8: 127.0, KIND: 448.0}
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


class Rows(NamedTuple):
    """A matrix of few bits, values[i, j] * scale[i]. values: int8 or float8_e4m3fn [rows, columns], contiguous; scale:
    float32 [rows]."""

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scale.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix that this stands for, [rows, columns]."""
        return (self.values.float() * self.scale[:, None]).to(dtype)


def quantise(weight: Tensor, dtype: torch.dtype = torch.int8) -> Rows:
    """Round a weight [rows, columns], finite, of 16 or 32 bits to torch.int8 or torch.float8_e4m3fn: the largest
    magnitude of each row becomes the largest value, zeros stay zeros. InputError for others."""
    if dtype not in LARGEST:
        raise InputError(f"dtype is {dtype!r:.80}; accepted: {dtype_names(LARGEST)}")
    check_tensor("the weight", weight, dtypes=WEIGHTS)
    return round_rows(checked_weight(weight), dtype)


@torch.no_grad()
def round_rows(matrix: Tensor, dtype: torch.dtype) -> Rows:
    """Do what `quantise` does, with nothing checked: a row that is not finite gets a scale that is not, which makes NaN
    of whatever it is multiplied with, as values are 0 there."""
    wide = matrix.detach().float().contiguous()  # which a turned weight is not
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    # Times the reciprocal, as a GPU divides by a number. Of rows whose scale is no normal float32 nothing is left.
    scale = largest.mul(1 / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    values = (wide / scale[:, None]).nan_to_num_(0.0)
    return Rows(values.round_().to(dtype) if dtype == torch.int8 else values.to(dtype), scale)


def round_tokens(x: Tensor, dtype: torch.dtype) -> Rows:
    """Return `round_rows` of x [tokens, columns], padded on a GPU to as many rows as torch's product takes there: for
    INT8 more than 16, in eights, for E4M3 a multiple of 16. On a GPU one kernel does it, bit for bit as torch's
    operations."""
    if not x.is_cuda:
        return round_rows(x, dtype)
    least, step = (24, 8) if dtype == torch.int8 else (16, 16)
    padded = max(least, len(x) + -len(x) % step)
    if type(x) is Tensor and not torch.compiler.is_compiling():
        values, scale = run(int8.quantise_rows, x.contiguous(), dtype, padded)
        return Rows(values.view(dtype), scale)
    return round_rows(F.pad(x, (0, 0, 0, padded - len(x))), dtype)


def flattened(x: Tensor, rows: Rows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return x as [tokens, columns]. InputError unless it fits rows of this dtype, and nothing needs a gradient."""
    checks.check_tensor("x", x)
    out, inner = rows.values.shape
    if rows.values.dtype != dtype or x.shape[-1] != inner or checks.needs_gradient(x, bias):
        raise InputError(
            f"x is {list(x.shape)} and the rows hold {rows.values.dtype} {[out, inner]}; [..., {inner}] and {dtype} "
            "without gradients, which this product does not have, are accepted"
        )
    if bias is not None:
        checks.check_tensor("bias", bias, shape=(out,), device=x.device)
    return x.detach().reshape(-1, inner)


def output_error(y: Tensor, exact: Tensor) -> float:
    """Return how far off an output is: the norm of the difference, over that of the exact one; 0 for two zeros.
    InputError for other shapes."""
    if y.shape != exact.shape:
        raise InputError(f"y is {list(y.shape)} and exact {list(exact.shape)}; one shape is accepted")
    off, norm = (y.double() - exact.double()).norm().item(), exact.double().norm().item()
    return off / norm if norm else 0.0 if not off else float("inf")


def fp8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias by an E4M3 product, with one scale a token: x [..., columns] -> [..., rows].

    On a GPU from sm_89 on torch._scaled_mm, rows and columns multiples of 16, whose result is rounded to bfloat16. Of a
    row of x that is not finite the result is NaN. InputError for other rows, shapes, and where a gradient is needed;
    DeviceError for an older GPU."""
    flat = flattened(x, rows, KIND, bias)
    if x.is_cuda:
        check_gpu(x.device, OLDEST, "FP8 products")
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
        check_gpu(weight.device, OLDEST, "FP8 products")
        if any(n % 16 or not n for n in weight.shape):
            raise InputError(f"the weight has shape {list(weight.shape)}; multiples of 16 are accepted")
        return tried(partial(fp8_linear, rows=quantise(weight, KIND)), weight, "torch's product of fp8")

    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: list[Product | None]) -> Tensor:
        """Compute as Products do, but x is rounded once for gate and up, and scales spoil rows that are not finite."""
        if weights.gate is None or weights.gate is weights.up or None in form:
            return super().compute(layer, x, weights, form)
        gate, up, down = (product.keywords["rows"] for product in form)
        flat = x.reshape(-1, x.shape[-1])
        short = round_tokens(flat, KIND)
        first, beside = (_product(short, rows, flat, bias) for rows, bias in zip((gate, up), weights[3:5]))
        return fp8_linear(hidden_of(first, beside, weights, layer.acts), down, weights.down_bias).view(x.shape)
