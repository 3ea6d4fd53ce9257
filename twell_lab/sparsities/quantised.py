"""Fewer bits: weights as INT8 or FP8 (E4M3), one scale a row. Lossy: what it costs is measured (`output_error`).

    rows = quantise(layer.weight)      # Rows: INT8 values, and one float32 scale a row
    near = rows.dense()                # what they stand for
    half = Bitmap.of(pruned)           # exact, for weights with zeros; half.dense() gives them back

Method: symmetric, round to nearest, scale max |w| / 127 (448 in E4M3), as Jacob et al., arXiv 1712.05877, and Dettmers
et al., arXiv 2208.07339 (a scale for each row of x as well). `sparsities.int8`, `fp8` and `twell_int8` multiply
them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import InputError
from ..cuda.launch import run
from ..formats.matrix import as_matrix, check_tensor, dtype_names
from ..ops import checks, int8
from .checks import checked_weight

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)


class Rows(NamedTuple):
    """A matrix of few bits: value [i, j] stands for values[i, j] * scale[i].

    values: int8 or float8_e4m3fn [rows, columns], contiguous; scale: float32 [rows]."""

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
    """Round a matrix to few bits with one scale a row: symmetric, the largest magnitude of each row becomes the largest
    value, zeros stay zeros. weight: [rows, columns], finite, of 16 or 32 bits. dtype: torch.int8 or
    torch.float8_e4m3fn. InputError for others."""
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
    # Times the reciprocal, as a GPU divides by a number: a CPU would differ in the last place. Of tiny rows,
    # whose scale float32 could not hold as a normal number, nothing is left.
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


# ---- half of the weights, without rounding


class Bitmap(NamedTuple):
    """A matrix loaded as sparse, to be computed as dense (Xia et al., Flash-LLM, arXiv 2309.10285). Expanded by an
    operation of its own, as here, it only spares memory. values: those that are not zero, [nnz], in row order; bits:
    uint8 [ceil(rows * columns / 8)], one for each place, the first in the lowest bit; shape: (rows, columns)."""

    values: Tensor
    bits: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> Bitmap:
        """Make that of a matrix, exactly, zeros as +0. Waits for the device. InputError for what is no dense matrix."""
        matrix = as_matrix(matrix).detach()
        there = matrix != 0
        places = F.pad(there.flatten(), (0, -there.numel() % 8)).view(-1, 8)
        return cls(matrix[there], (places * _powers(places)).sum(1, dtype=torch.uint8), tuple(matrix.shape))

    def dense(self) -> Tensor:
        """Return the matrix, [rows, columns]."""
        rows, columns = self.shape
        there = (self.bits[:, None] & _powers(self.bits)).view(-1)[: rows * columns] != 0
        return self.values.new_zeros(self.shape).masked_scatter_(there.view(self.shape), self.values)


def _powers(like: Tensor) -> Tensor:
    return 1 << torch.arange(8, dtype=torch.uint8, device=like.device)
