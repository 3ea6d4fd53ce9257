"""How what is left of a layer behind its dense gate is launched for some hundred tokens (kernels/smxx_listed.cu).

CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors run in twell_lab.simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources
from ..cuda.launcher import aligned, kernel, multiprocessors
from ..cuda.macros import value
from ..cuda.tape import empty

FILE = "smxx_listed.cu"
MOST_TOKENS, _VECTOR = sources.number(FILE, "MOST_LISTED"), 8
_PARTS_BYTES = 15 << 17  # of the sums of parts of heavy rows: so much stays allocated between calls (cuda.tape)
_SIMULATED = 3  # multiprocessors


def takes(x: Tensor, up: Tensor, down_t: Tensor, down_bias: Tensor | None) -> bool:
    """Whether `listed` takes x [tokens, d_model] and these weights [d_ff, d_model]: 16-bit values, both widths
    multiples of 8, at most MOST_TOKENS tokens, and all that is read 16 bytes at a time aligned to them."""
    widths = all(n and n % _VECTOR == 0 for n in up.shape)
    return x.dtype.itemsize == 2 and widths and x.shape[0] <= MOST_TOKENS and aligned(x, up, down_t, down_bias)


def listed(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down_t: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    version: int | None = None,
) -> Tensor:
    """y [tokens, d_model] = (g * (x up^T + up_bias)) down_t + down_bias over the values g of `gate` that fire.

    x: [tokens, d_model]; gate: [tokens, d_ff], what the activation is applied to; up, down_t: [d_ff, d_model]; up None
    for a plain layer, y = g down_t + down_bias. bfloat16 or float16, contiguous. version: 1 (a block a token) or 2, the
    default (tokens for which many neurons fire are shared among all blocks; at most MOST_TOKENS tokens). The same input
    gives the same bits. Raises InputError for what the kernels do not take."""
    if x.dim() != 2 or down_t.dim() != 2:
        raise InputError(f"x is {list(x.shape)} and down_t {list(down_t.shape)}; two dimensions of each are accepted")
    if gate is None:
        raise InputError("gate is None; a tensor of [tokens, d_ff] is accepted, and for a plain layer up is None")
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    given = [t for t in (x, gate, up, down_t, up_bias, down_bias) if t is not None]
    if x.is_meta or any(t.device != x.device for t in given):
        where = ", ".join(str(t.device) for t in given)
        raise InputError(f"the tensors are on {where}; all on one GPU, or all on the CPU, are accepted")
    if version not in (None, 1, 2):
        raise InputError(f"version is {version}; 1 and 2 are accepted")
    if x.dtype not in (torch.bfloat16, torch.float16) or any(t.dtype != x.dtype for t in given):
        raise InputError(
            f"the types are {', '.join(str(t.dtype) for t in given)}; all bfloat16 or all float16 are accepted"
        )
    if not all(n and n % _VECTOR == 0 for n in (d_model, d_ff)) or (version != 1 and tokens > MOST_TOKENS):
        raise InputError(
            f"x is {list(x.shape)} and d_ff {d_ff}; widths that are multiples of {_VECTOR} are accepted, and up to "
            f"{MOST_TOKENS} tokens"
        )
    wanted = [*([(up, (d_ff, d_model))] if up is not None else []), (gate, (tokens, d_ff)), (down_t, (d_ff, d_model))]
    wanted += [(t, (n,)) for t, n in ((up_bias, d_ff), (down_bias, d_model)) if t is not None]
    if any(t.shape != shape for t, shape in wanted):
        raise InputError(
            f"the shapes are {', '.join(str(list(t.shape)) for t, _ in wanted)}; for x {list(x.shape)} and d_ff {d_ff} "
            f"{', '.join(str(list(shape)) for _, shape in wanted)} are accepted"
        )
    if not all(t.is_contiguous() for t in given) or not aligned(x, gate, up, down_t, down_bias):
        raise InputError("a tensor is not contiguous or does not start at a multiple of 16 bytes; both are needed")
    y = empty(tokens, d_model, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    defines = (*value(x.dtype), *(() if up is not None else (("GATED", 0),)))
    layer = (x, gate, up, down_t, up_bias, down_bias, y)
    if version == 1:
        kernel(FILE, "listed_v1", defines).launch(x.device, (tokens, 1), (*layer, d_model, d_ff))
        return y
    units = multiprocessors(x.device.index) if x.is_cuda else _SIMULATED
    counts = empty(2, tokens, dtype=torch.int32, device=x.device)
    many = (("RESIDENT", 4),) if tokens > 2 * units else ()
    kernel(FILE, "listed_v2", (*defines, *many)).launch(x.device, (tokens, 1), (*layer, counts, d_model, d_ff))
    blocks = max(units, min(2 * units, _PARTS_BYTES // (4 * d_model)))
    parts = empty(blocks, d_model, dtype=torch.float32, device=x.device)
    kernel(FILE, "listed_heavy", defines).launch(x.device, (blocks, 1), (*layer, counts, parts, tokens, d_model, d_ff))
    return y
