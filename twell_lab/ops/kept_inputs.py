"""Products that read the weights of kept inputs alone, for few tokens: how kernels/sm80_kept_inputs.cu is launched.

An input is kept unless its magnitude is below a threshold, as TEAL (Liu et al., arXiv 2408.14690) cuts the inputs of a
layer's projections. CUDA tensors only. Everything runs on torch's current stream and nothing waits for the GPU."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, macros, sources
from ..cuda.tape import empty
from .activation import CURVES

FILE = "sm80_kept_inputs.cu"
MOST_TOKENS = 4  # that the kernel takes
FEW = 2  # up to which a layer takes it: four tokens together keep nearly all inputs
VERSIONS = (1, 2)
KINDS = ("relu", *CURVES)  # activations, without a threshold of their own
_OLDEST = (8, 0)


class Kept(NamedTuple):
    """What a layer with thresholds on its inputs computes.

    kind: its activation, one of KINDS. inputs, hidden: the thresholds of what enters gate and up, and of what enters
    down; finite numbers from 0 up, which count as they are rounded to the type of the values, as where torch compares
    a tensor with a number."""

    kind: str
    inputs: float
    hidden: float


def few(x: Tensor) -> bool:
    """Whether x [..., d_model] has so few tokens, and is on a GPU."""
    return x.is_cuda and x.shape[:-1].numel() <= FEW


def takes(x: Tensor, gate_t: Tensor | None, up_t: Tensor, down_t: Tensor) -> bool:
    """Whether `layer` takes x [tokens, d_model] with the fast version; gate_t and up_t [d_model, d_ff], down_t [d_ff,
    d_model]."""
    weights = [t for t in (gate_t, up_t, down_t) if t is not None]
    return (
        x.dim() == 2
        and 1 <= x.shape[0] <= MOST_TOKENS
        and all(t.is_cuda and t.dtype == x.dtype and t.is_contiguous() for t in (x, *weights))
        and x.dtype in (torch.bfloat16, torch.float16)
        and not any(width % 8 for width in up_t.shape)
        and launcher.aligned(*weights)
        and launcher.capability(x.device.index) >= _OLDEST
    )


class _Launch(NamedTuple):
    kernel: launcher.Kernel
    blocks: int
    threshold: float


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, tokens: int, outputs: int, kind: str | None, paired: bool, threshold: float, version: int
):
    defines = macros.kept_inputs(dtype, tokens, paired, kind)
    kernel = launcher.kernel(FILE, f"kept_inputs_v{version}", defines, early=True)
    columns = sources.number(FILE, "SLAB" if version > 1 else "V1_THREADS", defines)
    return _Launch(kernel, -(-outputs // columns), torch.tensor(threshold, dtype=dtype, device="cpu").item())


def product(
    x: Tensor,
    first_t: Tensor,
    second_t: Tensor | None = None,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
    *,
    threshold: float,
    kind: str | None = None,
    version: int | None = None,
) -> Tensor:
    """x' first_t + first_bias, through the activation `kind` unless that is None, and with second_t times x' second_t +
    second_bias; x' is x with what is below the threshold in magnitude at zero. [tokens, outputs], in x's dtype.

    x: bfloat16 or float16 [tokens, inputs], 1 to 4 tokens; first_t, second_t: [inputs, outputs]; biases [outputs]. All
    contiguous, on one GPU from sm_80. version: 1, which takes any widths, or 2, which takes outputs that are multiples
    of 8, and aligned weights; None: the newest that takes them. Raises InputError for others."""
    if not 0 <= threshold < math.inf:
        raise InputError(f"threshold is {threshold}; finite numbers from 0 up are accepted")
    tensors = [t for t in (x, first_t, second_t, first_bias, second_bias) if t is not None]
    inputs, outputs = first_t.shape if first_t.dim() == 2 else (0, 0)
    tokens = x.shape[0] if x.dim() == 2 else 0
    shapes = [(tokens, inputs), *([(inputs, outputs)] * (1 + (second_t is not None)))]
    fits = all(t.is_contiguous() and t.dtype == x.dtype and t.is_cuda and t.device == x.device for t in tensors)
    fits = fits and all(tuple(t.shape) == shape for t, shape in zip(tensors, shapes))
    fits = fits and all(b is None or tuple(b.shape) == (outputs,) for b in (first_bias, second_bias))
    fits = fits and x.dtype in (torch.bfloat16, torch.float16) and launcher.capability(x.device.index) >= _OLDEST
    if not fits or not 1 <= tokens <= MOST_TOKENS or not outputs or kind not in (None, *KINDS):
        found = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in tensors)
        raise InputError(
            f"x, weights and biases are {found}, kind {kind!r:.80}; bfloat16 or float16 [1 to {MOST_TOKENS}, inputs], "
            "[inputs, outputs] and [outputs] on one GPU from sm_80, contiguous, and None or "
            f"{', '.join(KINDS)} are accepted"
        )
    if second_t is not None and kind is None:
        raise InputError(f"kind is None for two weights; {', '.join(KINDS)} are accepted")
    weights = [t for t in (first_t, second_t) if t is not None]
    versions = VERSIONS if outputs % 8 == 0 and launcher.aligned(*weights) else VERSIONS[:1]
    if version not in (None, *versions):
        raise InputError(f"version is {version}; for {outputs} outputs at this address {versions} are accepted")
    made = _launch(x.dtype, tokens, outputs, kind, second_t is not None, threshold, version or versions[-1])
    return _run(made, x, (first_t, second_t, first_bias, second_bias), outputs, version or versions[-1])


def _run(made: _Launch, x: Tensor, weights: tuple, outputs: int, version: int) -> Tensor:
    tokens, inputs = x.shape
    y = empty(tokens, outputs, dtype=x.dtype, device=x.device)
    grid = made.blocks, tokens if version == 1 else 1
    made.kernel.launch(x.device, grid, (x, *weights, y, tokens, inputs, outputs, made.threshold))
    return y


def layer(
    x: Tensor,
    gate_t: Tensor | None,
    up_t: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kept: Kept,
) -> Tensor:
    """A feed-forward layer with thresholds on its inputs, in two launches: x [tokens, d_model] -> [tokens, d_model]. h
    is rounded to x's type between them, as torch rounds it, and compared with its threshold as it is rounded.

    For what `takes` says; nothing is checked here. gate_t None: a plain layer."""
    (d_model, d_ff), tokens, version = up_t.shape, len(x), VERSIONS[-1]
    if gate_t is None:
        weights = (up_t, None, up_bias, None)
    else:
        weights = (gate_t, up_t, gate_bias, up_bias)
    first = _launch(x.dtype, tokens, d_ff, kept.kind, gate_t is not None, kept.inputs, version)
    second = _launch(x.dtype, tokens, d_model, None, False, kept.hidden, version)
    h = _run(first, x, weights, d_ff, version)
    return _run(second, h, (down_t, None, down_bias, None), d_model, version)
