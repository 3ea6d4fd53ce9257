"""How the decode kernels are launched: a whole sparse layer for 1 to 64 tokens in two launches.

CUDA tensors only. Everything runs on torch's current stream and nothing waits for the GPU."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import decode as specialisation
from ..cuda.macros import decode_shape as shape_for
from ..cuda.macros import decode_tokens as rounded_up
from ..cuda.tape import empty
from .activation import RELU, Activation
from .checks import plain

MOST_TOKENS = 64
VERSIONS = (1, 2)
FILE = "sm80_decode.cu"
_TILE = sources.number(FILE, "BAND")
_HIDDEN = Struct("<QQ").pack  # the structure Hidden of the source: the addresses of masks and values


def takes(x: Tensor, up: Tensor) -> bool:
    """Whether `decode` takes x [tokens, d_model] and up [d_ff, d_model]; gate must be of up's shape and type."""
    if (
        x.dim() != 2
        or not 1 <= x.shape[0] <= MOST_TOKENS
        or not x.is_cuda
        or x.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    if x.shape[1] % 8 or x.shape[1] != up.shape[1] or x.dtype != up.dtype or not 1 <= up.shape[0] < 2**27:
        return False
    if not (launcher.aligned(x, up) and x.is_contiguous() and up.is_contiguous()):
        return False
    return launcher.capability(x.device.index) >= (8, 0)


class _Layer(NamedTuple):
    """The two kernels for layers of one shape on one device, their grids, and the threshold of the activation."""

    gate: launcher.Kernel
    down: launcher.Kernel
    blocks: int
    tiles: int
    slabs: int
    threshold: float


@lru_cache(maxsize=1024)
def _layer(
    index: int, dtype: torch.dtype, d_model: int, d_ff: int, rows: int, version: int, acts: Activation
) -> _Layer:
    if version not in VERSIONS:
        raise InputError(f"version is {version}; {VERSIONS[0]} to {VERSIONS[-1]} are accepted")
    shape = shape_for(rows, d_ff, launcher.capability(index), launcher.multiprocessors(index))
    defines, shared = specialisation(dtype, d_model, rows, shape, acts.macros)
    neurons, shared = (_TILE * dict(defines)["BANDS"], shared) if version > 1 else (_TILE, 0)
    gate = launcher.kernel(FILE, f"decode_gate_v{version}", defines, shared, early=True)
    down = launcher.kernel(FILE, "decode_down", defines, early=True)
    columns = sources.number(FILE, "DOWN_COLUMNS", defines)
    return _Layer(gate, down, -(-d_ff // neurons), -(-d_ff // _TILE), -(-d_model // columns), acts.bound(dtype))


def decode(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    stats: Tensor | None = None,
    version: int = VERSIONS[-1],
    acts: Activation = RELU,
) -> Tensor:
    """A sparse feed-forward layer for few tokens: x [tokens, d_model] -> y [tokens, d_model]; see `takes`.

    gate, up, down_t: [d_ff, d_model]; gate None for a plain layer, act(x up^T + up_bias) down^T + down_bias. stats:
    int64 [4] or None; the tokens and the kept values are added to its first two. version: 1 or 2. acts: what fires.
    """
    gate, down_t = plain(gate), plain(down_t)
    gate_bias, up_bias, down_bias = (b if b is None else b.contiguous() for b in (gate_bias, up_bias, down_bias))
    (d_ff, d_model), tokens, device = up.shape, len(x), x.device
    layer = _layer(device.index, x.dtype, d_model, d_ff, rounded_up(tokens), version, acts)
    values = empty(tokens, layer.tiles * _TILE, dtype=torch.float32, device=device)
    masks = empty(tokens, layer.tiles, dtype=torch.int16, device=device)
    y = empty(tokens, d_model, dtype=x.dtype, device=device)
    hidden = launcher.Structure(_HIDDEN, (masks, values))
    first, first_bias, second = (up, up_bias, None) if gate is None else (gate, gate_bias, up)
    weights = (first, first_bias, second, up_bias, down_t)
    layer.gate.launch(device, (layer.blocks, 1), (x, *weights, hidden, stats, tokens, d_ff, layer.threshold))
    layer.down.launch(device, (layer.slabs, tokens), (hidden, down_t, down_bias, y, layer.tiles))
    return y
