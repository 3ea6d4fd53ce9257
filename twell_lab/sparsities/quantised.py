"""Fewer bits: weights as INT8 or FP8 (E4M3), one scale a row. Lossy: what it costs is measured (`output_error`).

    rows = quantise(layer.weight)                  # Rows: INT8 values, and one float32 scale a row
    with torch.no_grad():                          # it has no gradient
        y = int8_linear(x, rows, layer.bias)       # a dense INT8 layer: x is quantised too, one scale a token
    tl.plan(profile, model, paths=["twell", "int8", "twell_int8"])
    tl.sparsify(model, "twell_int8")               # the TwELL path with up and down rows in INT8

As paths of a feed-forward layer, taken where they were named: `int8` and `fp8` compute all neurons, on the tensor cores
for so few bits; they are what a sparse path with few bits has to beat. `twell_int8` computes the gate as it is, packs
what fires, and reads the rows of up and down as INT8, half the bytes of 16 bits. Its x and hidden values stay as they
are: only weights are rounded.

Method: symmetric, round to nearest, scale max |w| / 127 (448 in E4M3), as Jacob et al., arXiv 1712.05877 (for weights
of a row each), and Dettmers et al., arXiv 2208.07339 (a scale for each row of x as well).

**What fusing the dequantisation saves.** Weights that are turned back into 16 bits by an operation of their own are
read as 1 byte a value, written as 2 and read as 2: more than the 2 that were to be spared. Fused into the product they
stay 1 byte. The result of an INT8 product is int32. In torch's operations (torch._int_mm, and two that scale) 4 bytes
a value of it are written and read, and as many of what its first scale makes of it, before 2 are written; `traffic`
counts the former. `ops.int8_products` scales the sums where they are, and multiplies gate and up in one launch: on GPUs
from sm_80 on, for results of 16 bits and widths of multiples of 16, outside of compiled code. All else is torch's.

**2:4 with INT8** is what torch has for GPUs from sm_80 on (`torch._cslt_compress` and `torch._cslt_sparse_mm` of
cuSPARSELt) and torchao puts around a model (`torchao.quantization`, an INT8 configuration with a sparse layout). A zero
stays a zero when it is quantised, so a 2:4 weight stays 2:4 (`quantise` keeps it so); `two_four_int8` multiplies with
it.

**Load as sparse, compute as dense** (Xia et al., Flash-LLM, arXiv 2309.10285): with few tokens a layer waits for its
weights to come from memory. `Bitmap` holds those that are not zero and a bit for each place, and is expanded before a
dense product: bytes are spared, operations are not. That pays where it is expanded on the way into the product, as
`traffic` counts; expanded by an operation of its own, as here, it only spares memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import DeviceError, InputError
from ..formats.matrix import as_matrix, dtype_names
from ..layers.paths.converted import Converted, Products
from ..layers.paths.cost import Work
from ..layers.paths.twell import packed_cost
from ..layers.weights import Weights
from ..ops import checks, decode, int8_products, portable
from ..ops.activation import RELU, Activation
from ..ops.int8_rows import gated_int8
from ..ops.quantise_rows import quantise_rows
from .weights import checked_layer, checked_weight

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
WEIGHTS = (torch.bfloat16, torch.float16, torch.float32)
FP8_OLDEST = (8, 9)
MOST_COLUMNS = 2**31 // (127 * 127) - 1  # that an int32 sum of products holds
_ENTRIES_AT_ONCE = 4096
_ROWS_GAIN = 1.14  # over rows of 16 bits, on an H100: docs/kernels/smxx_gated_int8.md


# ---- rows with a scale ----


class Rows(NamedTuple):
    """A matrix of few bits: value [i, j] stands for values[i, j] * scale[i].

    values: int8 or float8_e4m3fn [rows, columns], contiguous; scale: float32 [rows]."""

    values: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Of values and scales."""
        return self.values.nbytes + self.scale.nbytes

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that this stands for, [rows, columns]."""
        return (self.values.float() * self.scale[:, None]).to(dtype)


def quantise(weight: Tensor, dtype: torch.dtype = torch.int8) -> Rows:
    """A matrix with one scale a row: symmetric, the largest magnitude of each row becomes the largest value, zeros stay
    zeros. An INT8 value is at most half a scale off.

    Args:
        weight: [rows, columns], floating-point values of 16 or 32 bits.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Raises:
        InputError: for another dtype, and for a weight that is no matrix, on meta or not finite.
    """
    if dtype not in LARGEST:
        raise InputError(f"dtype is {dtype!r:.80}; accepted: {dtype_names(LARGEST)}")
    matrix = checked_weight(weight)
    if matrix.dtype not in WEIGHTS:
        raise InputError(f"the weight holds {matrix.dtype}; accepted: {dtype_names(WEIGHTS)}")
    return _rows(matrix, dtype)


@torch.no_grad()
def _rows(matrix: Tensor, dtype: torch.dtype) -> Rows:
    """`quantise`, with nothing checked: a row that is not finite gets a scale that is not, which makes NaN of whatever
    it is multiplied with, as values are 0 there."""
    wide = matrix.detach().float().contiguous()  # which a turned weight is not
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    # Times the reciprocal, as a GPU divides by a number: a CPU would differ in the last place. Of tiny rows,
    # whose scale float32 could not hold as a normal number, nothing is left.
    scale = largest.mul(1 / LARGEST[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
    values = (wide / scale[:, None]).nan_to_num_(0.0)
    return Rows(values.round_().to(dtype) if dtype == torch.int8 else values.to(dtype), scale)


def _tokens(flat: Tensor, dtype: torch.dtype) -> Rows:
    """`_rows` of x, padded on a GPU to as many rows as torch's product takes there: for INT8 more than 16, in eights,
    for E4M3 a multiple of 16. On a GPU one kernel does it, bit for bit as torch's operations."""
    if not flat.is_cuda:
        return _rows(flat, dtype)
    least, step = (24, 8) if dtype == torch.int8 else (16, 16)
    padded = max(least, len(flat) + -len(flat) % step)
    if type(flat) is Tensor and not torch.compiler.is_compiling():
        return Rows(*quantise_rows(flat, dtype, padded))
    values, scale = _rows(flat, dtype)
    missing = padded - len(flat)
    return Rows(F.pad(values.view(torch.int8), (0, 0, 0, missing)).view(dtype), F.pad(scale, (0, missing)))


def output_error(y: Tensor, exact: Tensor) -> float:
    """How far off an output is: the norm of the difference, over that of the exact one; 0 for two zeros. InputError for
    other shapes."""
    if y.shape != exact.shape:
        raise InputError(f"y is {list(y.shape)} and exact {list(exact.shape)}; one shape is accepted")
    off, norm = (y.double() - exact.double()).norm().item(), exact.double().norm().item()
    return off / norm if norm else 0.0 if not off else float("inf")


def traffic(tokens: int, d_in: int, d_out: int, *, density: float = 1.0, itemsize: int = 2) -> dict[str, float]:
    """Bytes from and to memory of x W^T, W [d_out, d_in], each tensor once, by how W is held.

    dense: values of `itemsize` bytes. int8, fused: INT8 that is dequantised inside the product; int8, apart: by an
    operation before it. int8 product, apart: INT8 times INT8, whose int32 result another operation scales. bitmap,
    fused and apart: `Bitmap` of a W with this density, expanded inside the product or before. Raises InputError for
    sizes below 1 and a density outside 0 to 1."""
    if min(tokens, d_in, d_out) < 1 or not 0 <= density <= 1 or itemsize < 1:
        raise InputError(
            f"tokens {tokens}, d_in {d_in}, d_out {d_out}, itemsize {itemsize} and density {density}; whole numbers "
            "from 1 up and a share from 0 to 1 are accepted"
        )
    size, x, y = d_in * d_out, tokens * d_in, tokens * d_out
    values, short = itemsize * (x + y), size + 4.0 * d_out
    bits = size * (density * itemsize + 1 / 8)
    return {
        "dense": values + itemsize * size,
        "int8, fused": values + short,
        "int8, apart": values + short + 2 * itemsize * size,
        "int8 product, apart": values + short + 2 * x + 8 * y,
        "bitmap, fused": values + bits,
        "bitmap, apart": values + bits + 2 * itemsize * size,
    }


# ---- dense layers of few bits ----


def int8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None, *, apart: bool = False) -> Tensor:
    """x W^T + bias by an INT8 product, whose sums are int32: x [..., columns], one scale a token, -> [..., rows]. By
    the kernel of `ops.int8_products` where that takes it, else, or where it is asked for `apart`, by torch._int_mm and
    two operations that scale.

    Of a row of x that is not finite the result is NaN. On a GPU: sm_75 and newer, rows and columns multiples of 8.
    Raises InputError for other rows than INT8, more than MOST_COLUMNS columns, shapes that do not fit, and where x or
    the bias needs a gradient."""
    flat = _flat(x, rows, torch.int8, bias)
    if flat.shape[1] > MOST_COLUMNS:
        raise InputError(f"x has {flat.shape[1]} columns; up to {MOST_COLUMNS} are accepted, whose sum int32 holds")
    y = _int8_product(_tokens(flat, torch.int8), rows, flat, bias, apart)
    return y.view(*x.shape[:-1], len(rows.values))


def _int8_product(short: Rows, rows: Rows, flat: Tensor, bias: Tensor | None, apart: bool = False) -> Tensor:
    """[tokens, rows] in the dtype of flat [tokens, columns], for its INT8 rows, padded or not."""
    values, weight = short.values, rows.values
    fused = int8_products.Weight(rows.values, rows.scale, bias)
    if not apart and int8_products.takes(values, fused, flat.dtype):
        return int8_products.product(values, short.scale, fused, flat.dtype, len(flat))
    if weight.shape[1] == 1:  # of which torch 2.13's product on a CPU is wrong
        values, weight = F.pad(values, (0, 1)), F.pad(weight, (0, 1))
    sums = torch._int_mm(values, weight.t())[: len(flat)]
    return _scaled(sums, short.scale[: len(flat)], rows.scale, flat.dtype, bias)


def _scaled(sums: Tensor, tokens: Tensor, weights: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """int32 sums times the scales of tokens and weights, plus the bias, rounded once, in two operations: the first
    reads them as they are and writes float32, the second writes `dtype`."""
    first = torch.mul(sums, tokens[:, None])
    y = torch.empty_like(first, dtype=dtype)
    if bias is None:
        return torch.mul(first, weights, out=y)
    return torch.addcmul(bias.float(), first, weights, out=y)


def fp8_linear(x: Tensor, rows: Rows, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias by an E4M3 product, with one scale a token: x [..., columns] -> [..., rows]. On a GPU from sm_89 on
    torch._scaled_mm, rows and columns multiples of 16, whose result is rounded to bfloat16; on a CPU the same values
    multiplied in float32. Of a row of x that is not finite the result is NaN.

    Raises InputError for other rows than E4M3, shapes that do not fit, and where x or the bias needs a gradient;
    DeviceError for an older GPU."""
    flat = _flat(x, rows, torch.float8_e4m3fn, bias)
    if x.is_cuda:
        _check_fp8(x.device)
    return _fp8_product(_tokens(flat, torch.float8_e4m3fn), rows, flat, bias).view(*x.shape[:-1], len(rows.values))


def _fp8_product(short: Rows, rows: Rows, flat: Tensor, bias: Tensor | None) -> Tensor:
    """[tokens, rows] in the dtype of flat [tokens, columns], for its E4M3 rows, padded or not. On a GPU the product
    itself scales, adds a bias of bfloat16, and rounds to bfloat16."""
    if not short.values.is_cuda:
        y = short.values.float() @ rows.values.float().t() * short.scale[:, None] * rows.scale
        return (y if bias is None else y + bias).to(flat.dtype)
    scales, within = (short.scale[:, None], rows.scale[None]), bias is not None and bias.dtype == torch.bfloat16
    y = torch._scaled_mm(
        short.values, rows.values.t(), *scales, bias=bias if within else None, out_dtype=torch.bfloat16
    )[: len(flat)]
    return (y if within or bias is None else y.float() + bias).to(flat.dtype)


def _flat(x: Tensor, rows: Rows, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    if rows.values.dtype != dtype:
        raise InputError(f"the rows hold {rows.values.dtype}; {dtype} is accepted")
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != rows.values.shape[1] or x.dtype not in WEIGHTS:
        what = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {what}; {dtype_names(WEIGHTS)} [..., {rows.values.shape[1]}] is accepted")
    if checks.needs_gradient(x, bias):
        raise InputError(
            "x or bias needs a gradient, which this product does not have; torch.no_grad and .detach() are accepted"
        )
    return x.detach().reshape(-1, x.shape[-1])


def _check_fp8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < FP8_OLDEST:
        where = f"on {device}" if capability is None else "on a GPU of compute capability {}.{}".format(*capability)
        raise DeviceError(f"the weight is {where}; GPUs of 8.9 and newer have FP8 products")


def packed_two_four(rows: Rows) -> Tensor:
    """INT8 rows that are 2:4 as cuSPARSELt multiplies them (`two_four_int8`): half of the values, and their places.

    Raises InputError for rows that are not 2:4 or no multiples of 32; DeviceError for a CPU, a GPU before sm_80 and a
    torch without cuSPARSELt."""
    from .two_four import OLDEST, check_two_four

    values = rows.values
    check_two_four(values.half())
    if any(each % 32 for each in values.shape):
        raise InputError(f"the rows are {list(values.shape)}; multiples of 32 are accepted")
    capability = torch.cuda.get_device_capability(values.device) if values.is_cuda else (0, 0)
    if capability < OLDEST or not torch.backends.cusparselt.is_available():
        raise DeviceError(
            f"the rows are on {values.device}; accepted: a GPU of 8.0 or newer and a torch with cuSPARSELt"
        )
    return torch._cslt_compress(values)


def two_four_int8(x: Tensor, rows: Rows, packed: Tensor | None = None) -> Tensor:
    """x W^T for INT8 rows that are 2:4, by torch's product of cuSPARSELt: x [..., columns] -> [..., rows], one scale a
    token. By cuSPARSELt's usual algorithm; two operations scale the int32 sums.

    packed: of `packed_two_four(rows)`; None: it is made in each call. Raises as `int8_linear` and `packed_two_four`."""
    flat = _flat(x, rows, torch.int8)
    packed = packed_two_four(rows) if packed is None else packed
    short = _tokens(flat, torch.int8)
    values = F.pad(short.values, (0, 0, 0, -len(short.values) % 32))
    sums = torch._cslt_sparse_mm(packed, values.t(), out_dtype=torch.int32)
    y = _scaled(sums.t()[: len(flat)], short.scale[: len(flat)], rows.scale, x.dtype, None)
    return y.view(*x.shape[:-1], len(rows.values))


# ---- load as sparse, compute as dense ----


class Bitmap(NamedTuple):
    """A matrix as the values that are not zero, in row order, and a bit for each place.

    values: [nnz]; bits: uint8 [ceil(rows * columns / 8)], the first place in the lowest bit; shape: (rows, columns)."""

    values: Tensor
    bits: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Tensor) -> Bitmap:
        """Those of a matrix, exactly, zeros as +0. Waits for the device. InputError for what is no dense matrix."""
        matrix = as_matrix(matrix).detach()
        there = matrix.reshape(-1) != 0
        places = F.pad(there, (0, -there.numel() % 8)).view(-1, 8)
        bits = (places * cls._weights(places)).sum(1, dtype=torch.uint8)
        return cls(matrix.reshape(-1)[there], bits, (matrix.shape[0], matrix.shape[1]))

    @staticmethod
    def _weights(like: Tensor) -> Tensor:
        return 1 << torch.arange(8, dtype=torch.uint8, device=like.device)

    @property
    def nbytes(self) -> int:
        """Of values and bits."""
        return self.values.nbytes + self.bits.nbytes

    def dense(self) -> Tensor:
        """The matrix, [rows, columns]."""
        there = (self.bits[:, None] & self._weights(self.bits)).view(-1)[: self.shape[0] * self.shape[1]] != 0
        return self.values.new_zeros(self.shape).masked_scatter_(there.view(self.shape), self.values)


# ---- as paths ----


@cache
def _refused(kind: torch.dtype, device: torch.device) -> str:
    """Why torch's product of this type does not run on this GPU; "" where it does. One small product is tried, once."""
    linear = int8_linear if kind == torch.int8 else fp8_linear
    try:
        linear(torch.zeros(1, 64, device=device), quantise(torch.ones(64, 64, device=device), kind))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return str(error).splitlines()[0][:200]
    return ""


class _Product(NamedTuple):
    """The product with one weight of few bits."""

    linear: Callable[..., Tensor]
    rows: Rows

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, self.rows, bias)

    def of(self, short: Rows, flat: Tensor, bias: Tensor | None) -> Tensor:
        """As of x, which is [tokens, columns], with its rows already rounded (`_tokens`)."""
        product = _int8_product if self.rows.values.dtype == torch.int8 else _fp8_product
        return product(short, self.rows, flat, bias)


class Int8(Products):
    """All neurons, by INT8 products of weights and x (`int8_linear`). Lossy."""

    name = "int8"
    exact = False
    held = torch.int8
    linear = staticmethod(int8_linear)
    _between = (
        16  # bytes a value that the sums, and the first of what scales them, write and read in torch's operations
    )
    _launches = 5  # x, the product, two that scale, and half of what multiplies gate and up

    def product(self, weight: Tensor):
        self.weigh(weight)
        rows = quantise(weight, self.held)
        return _Product(self.linear, rows), rows

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        """As of Products; on a GPU x is rounded once for gate and up, and a row that is not finite needs no pass of its
        own: its scale makes NaN of all that follows."""
        gate, up, down = value
        acts: Activation = layer.acts
        gated = weights[0] is not None and weights[0] is not weights[1]
        if not x.is_cuda or acts != RELU or acts.both or not gated or gate is None or up is None or down is None:
            return super().compute(layer, x, weights, value)
        flat = x.reshape(-1, x.shape[-1])
        short = _tokens(flat, self.held)
        first, second = (
            int8_products.Weight(each.rows.values, each.rows.scale, bias)
            for each, bias in zip((gate, up), weights[3:5])
        )
        both = all(int8_products.takes(short.values, each, x.dtype) for each in (first, second))
        if self.held == torch.int8 and both:
            hidden = int8_products.gate_up(*short, first, second, x.dtype, len(flat))
        else:
            hidden = gate.of(short, flat, weights[3]).relu_().mul_(up.of(short, flat, weights[4]))
        return down(hidden, weights[5]).view(x.shape)

    def weigh(self, weight: Tensor) -> tuple[int]:
        if weight.dtype not in WEIGHTS:
            raise InputError(f"the weight holds {weight.dtype}; accepted: {dtype_names(WEIGHTS)}")
        if weight.is_cuda and any(each % 8 or not each for each in weight.shape):
            raise InputError(f"the weight has shape {list(weight.shape)}; multiples of 8 are accepted on a GPU")
        if weight.shape[1] > MOST_COLUMNS:
            raise InputError(f"the weight has {weight.shape[1]} columns; up to {MOST_COLUMNS} are accepted")
        if weight.is_cuda and (refused := _refused(self.held, weight.device)):
            raise DeviceError(f"torch's {self.name} product does not run on this device: {refused}")
        return (weight.numel() + 4 * len(weight),)

    def seconds(self, work: Work, n: int, k: int, counted: tuple[int]) -> float:
        """Half of the operations' time in E4M3, and all of it in INT8, whose products (torch's and ours, mma.sync) were
        no faster than those of 16 bits on an H100; and x is read, written as one byte and read, the result written.
        What the kernel takes moves no sums and needs three launches less."""
        fused = (
            self.held == torch.int8 and work.itemsize == 2 and not (n % int8_products.STEP or k % int8_products.STEP)
        )
        between, launches = (0, self._launches - 3) if fused else (self._between, self._launches)
        moved = counted[0] + work.tokens * (k * (work.itemsize + 2) + n * (between + work.itemsize))
        operations = work.tokens * n * k * (2 if self.held == torch.int8 else 1)
        product = max(operations / work.rates.matmul, moved / work.rates.bandwidth)
        return product + launches * work.rates.launch


class Fp8(Int8):
    """All neurons, by E4M3 products of weights and x (`fp8_linear`). Lossy. GPUs from sm_89 on."""

    name = "fp8"
    held = torch.float8_e4m3fn
    linear = staticmethod(fp8_linear)
    _between = 0
    _launches = 3

    def weigh(self, weight: Tensor) -> tuple[int]:
        _check_fp8(weight.device)
        if any(each % 16 or not each for each in weight.shape):
            raise InputError(f"the weight has shape {list(weight.shape)}; multiples of 16 are accepted")
        return super().weigh(weight)


class TwellInt8(Converted):
    """The TwELL path with its rows of up and down as INT8, one scale a neuron: what fires is exact, what it adds is
    not. Lossy. With a ReLU on up (dReLU) it computes densely."""

    name = "twell_int8"
    exact = False

    def fitted(self, weights: Weights):
        for weight in (weights.up, weights.down):
            if weight.dtype not in WEIGHTS:
                raise InputError(f"the weight holds {weight.dtype}; accepted: {dtype_names(WEIGHTS)}")
        checked_layer(weights)
        return self

    def form_bytes(self, weights: Weights) -> int:
        rows = (weights.up.numel(), weights.down.numel()) if weights.gate is not None else (weights.down.numel(),)
        return sum(rows) + 4 * len(rows) * len(weights.up)

    def convert(self, weights: Weights) -> tuple[Any, Sequence[Tensor]]:
        self.fitted(weights)
        up = None if weights.gate is None else quantise(weights.up)
        down = quantise(weights.down.t())
        return (up, down), [*(up or ()), *down]

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias, _ = weights
        acts: Activation = layer.acts
        if acts.both:
            return F.linear(
                acts.dense(F.linear(x, gate, gate_bias)) * acts.of_up(F.linear(x, up, up_bias)), down, down_bias
            )
        flat = x.reshape(-1, x.shape[-1])
        first = F.linear(flat, up if gate is None else gate, up_bias if gate is None else gate_bias)
        first = first if x.is_cuda and acts == RELU else acts.applied(first)  # the kernels ask whether it is positive
        rows_up, rows_down = value
        up_bias = None if gate is None else up_bias
        if not x.is_cuda:
            return rows_product(flat, first, rows_up, rows_down, up_bias, down_bias).view(x.shape)
        tile, signed = layer.tile, acts.falls_back
        packed = portable.pack(first, tile, layer.words, signed=signed)
        y = gated_int8(flat, packed, first, rows_up, rows_down, up_bias, down_bias, tile, signed=signed)
        return y.view(x.shape)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """As TwELL's where the gate's GEMM is torch's and what fires is packed from its result, with rows that are read
        as fast as measured: half the bytes of 16 bits do not take half the time."""
        firing, tokens = work.firing, work.tokens
        gemm = work.gemm(firing.d_ff, firing.d_model)
        # Which TwELL's own kernels for few tokens do without.
        gate = 2 * tokens * firing.d_ff * work.itemsize if tokens <= decode.MOST_TOKENS else 0
        parts = packed_cost(work, 0, False, gemm, gate, 3)
        return {**parts, "rows": parts["rows"] / (_ROWS_GAIN * work.itemsize / 2), "lost": 0.0}


@torch.no_grad()
def rows_product(
    x: Tensor,
    first: Tensor,
    up: Rows | None,
    down: Rows,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """What is left of a layer once its gate is known, with rows of few bits: y = (first * (x up^T + up_bias)) down +
    down_bias, or without up y = first down + down_bias. Sums are float32, rounded once.

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
    checks.check_tensor("x", x, 2)
    checks.check_together(x, x.dtype, first=first, up_bias=up_bias, down_bias=down_bias)
    checks.check_shape("first", first, (len(x), None))
    tokens, d_model, d_ff = *x.shape, first.shape[1]
    checks.check_bias("up_bias", up_bias, d_ff)
    checks.check_bias("down_bias", down_bias, d_model)
    for name, rows in (("up", up), ("down", down)):
        if rows is None:
            continue
        if rows.values.dtype != torch.int8 or rows.values.shape != (d_ff, d_model) or rows.values.device != x.device:
            raise InputError(
                f"{name} is {rows.values.dtype} {list(rows.values.shape)} on {rows.values.device}; torch.int8 "
                f"{[d_ff, d_model]} on {x.device} is accepted"
            )
        checks.check_bias(f"{name}.scale", rows.scale, d_ff)
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


PATHS = (Int8(), Fp8(), TwellInt8())
