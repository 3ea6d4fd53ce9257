"""Linear layers of INT8 rows whose int32 sums never leave the chip, and how their kernel is launched
(kernels/sm80_int8.cu).

CUDA tensors only, on torch's current stream; nothing waits for the GPU. What the kernel does not take (`takes`) is left
to its callers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, macros
from ..cuda.tape import empty

FILE = "sm80_int8.cu"
VERSIONS = (1, 2)
DTYPES = (torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability
STEP = 16  # of which in and out are multiples: bytes that are copied at once, and the most columns that a lane stores
_FEW = 16  # tokens up to which the smallest tile takes all
_MOST_TILES = 65535  # along y of a grid


class Weight(NamedTuple):
    """A weight of INT8 rows: value [i, j] stands for values[i, j] * scale[i].

    values: int8 [out, in]; scale: float32 [out]; bias: [out], of the result's dtype, or None."""

    values: Tensor
    scale: Tensor
    bias: Tensor | None = None


class Launch(NamedTuple):
    """What one product launches."""

    entry: str
    defines: tuple
    shared: int  # bytes of dynamic shared memory
    grid: tuple[int, int]
    arguments: tuple


def takes(x: Tensor, weight: Weight, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies rows x int8 [tokens, in] with this weight to a result of this dtype: bfloat16 or
    float16 on a GPU of compute capability 8.0 or more, in and out multiples of 16, a bias of the same dtype. Not in
    compiled code, which has to see torch's operations."""
    if not x.is_cuda or dtype not in DTYPES or type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    if _odd(weight, dtype, x.device):
        return False
    out, inner = weight.values.shape
    sizes = x.dim() == 2 and x.shape[1] == inner > 0 < out and not (inner % STEP or out % STEP)
    sizes = sizes and len(x) <= _FEW * _MOST_TILES and {x.dtype, weight.values.dtype} == {torch.int8}
    laid_out = x.is_contiguous() and weight.values.is_contiguous() and launcher.aligned(x, weight.values)
    return sizes and laid_out and launcher.capability(x.device.index) >= OLDEST


def _odd(weight: Weight, dtype: torch.dtype, device: torch.device) -> str:
    """What of a weight does not fit the rest of it, the device, or a result of this dtype; "" if all does."""
    if weight.values.dim() != 2 or weight.values.device != device:
        return f"values are {list(weight.values.shape)} on {weight.values.device}; [out, in] on {device}"
    out = weight.values.shape[:1]
    for name, t, wanted in (("scale", weight.scale, torch.float32), ("bias", weight.bias, dtype)):
        if t is not None and _unlike(t, wanted, out, device):
            return f"{name} is {t.dtype} {list(t.shape)} on {t.device}; contiguous {wanted} {list(out)} on {device}"
    return ""


def _unlike(t: Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> bool:
    return t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous()


def product(
    x: Tensor,
    scale: Tensor,
    weight: Weight,
    dtype: torch.dtype,
    tokens: int | None = None,
    version: int | None = None,
    tile: str | None = None,
) -> Tensor:
    """y [tokens, out] = (x * scale) W^T + bias, from exact int32 sums: float32(sum) * scale of the token, rounded, then
    times the scale of the column plus the bias, rounded once, and to dtype.

    Args:
        x: int8 [rows, in]; scale: float32 [rows]; only the first `tokens` rows count, None: all.
        weight: as `takes` takes it, of fewer columns than make an int32 sum overflow (`quantised.MOST_COLUMNS`).
        version: of the kernel, 1 or 2 as its source lists them; None: 2. tile: of macros.INT8_TILES; None: by tokens.

    Raises InputError for another version or tile, for a scale or a number of tokens that x does not have, and for what
    `takes` refuses."""
    return _run(x, scale, (weight,), dtype, tokens, version, tile)


def gate_up(
    x: Tensor,
    scale: Tensor,
    gate: Weight,
    up: Weight,
    dtype: torch.dtype,
    tokens: int | None = None,
    version: int | None = None,
    tile: str | None = None,
) -> Tensor:
    """h [tokens, out] = relu(g) * u, with g and u each as `product` gives them, rounded to dtype. Arguments and errors
    as there."""
    if gate.values.shape != up.values.shape:
        raise InputError(f"up is {list(up.values.shape)}; {list(gate.values.shape)}, as the gate, is accepted")
    return _run(x, scale, (gate, up), dtype, tokens, version, tile)


def _run(x, scale, weights, dtype, tokens, version, tile) -> Tensor:
    for weight in weights:
        if odd := _odd(weight, dtype, x.device):
            raise InputError(f"of the weight, {odd} is accepted")
    if _unlike(scale, torch.float32, x.shape[:1], x.device):
        raise InputError(
            f"scale is {scale.dtype} {list(scale.shape)} on {scale.device}; contiguous float32 {list(x.shape[:1])} on "
            f"{x.device} is accepted"
        )
    for weight in weights:
        if not takes(x, weight, dtype):
            raise InputError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}, the weight {list(weight.values.shape)} and the result "
                f"{dtype}; multiples of {STEP}, bfloat16 and float16 are accepted, on a GPU of compute capability 8.0 "
                "or more"
            )
    tokens = len(x) if tokens is None else tokens
    if not 0 <= tokens <= len(x):
        raise InputError(f"tokens is {tokens}; 0 to {len(x)}, the rows of x, are accepted")
    y = empty(tokens, len(weights[0].values), dtype=dtype, device=x.device)
    if y.numel():
        index = x.device.index
        tile = tile or tile_for(*y.shape, len(weights), launcher.multiprocessors(index))
        made = launch(x, scale, weights, y, tile, launcher.capability(index), version)
        launcher.kernel(FILE, made.entry, made.defines, made.shared).launch(x.device, made.grid, made.arguments)
    return y


def tile_for(tokens: int, out: int, weights: int, multiprocessors: int) -> str:
    """Of macros.INT8_TILES: the largest tile, where at least half of the multiprocessors get one, or a smaller one."""
    if tokens <= _FEW:
        return "few"
    rows, columns = 128, 256 // weights
    return "many" if 2 * -(-tokens // rows) * -(-out // columns) >= multiprocessors else "some"


def launch(
    x: Tensor,
    scale: Tensor,
    weights: tuple[Weight, ...],
    y: Tensor,
    tile: str,
    capability: tuple[int, int],
    version: int | None = None,
) -> Launch:
    """What computes y [tokens, out] of the first rows of x, of one weight or of gate and up."""
    if version not in (None, *VERSIONS) or tile not in macros.INT8_TILES:
        raise InputError(
            f"version is {version} and the tile {tile!r:.80}; {', '.join(map(str, VERSIONS))} and "
            f"{', '.join(macros.INT8_TILES)} are accepted"
        )
    version = version or VERSIONS[-1]
    defines, shared = macros.int8(y.dtype, len(weights) > 1, tile, capability)
    sizes, (tokens, out) = dict(defines), y.shape
    grid = -(-out * len(weights) // sizes["BN"]), -(-tokens // sizes["BM"])
    up = weights[1] if len(weights) > 1 else (None, None, None)
    arguments = (x, scale, *weights[0], y, tokens, x.shape[1], out, *up)
    return Launch(f"int8_v{version}", defines, shared if version == 2 else 0, grid, arguments)
