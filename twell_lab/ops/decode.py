"""Launching the decode kernels: a whole sparse layer for 1 to 64 tokens in two launches, with little host time.

What a launch needs is worked out once for a shape and kept: a call fills in addresses. CUDA only; torch's current
stream, torch's allocator, no waiting for the GPU.
"""

from __future__ import annotations

from functools import cache, lru_cache
from struct import Struct
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import launcher, sources
from ..cuda.macros import decode as specialisation
from ..cuda.macros import decode_shape as shape_for
from ..cuda.macros import decode_tokens as rounded_up

MOST_TOKENS = 64
VERSIONS = (1, 2)
FILE = "sm80_decode.cu"
_TILE, _SLAB = (sources.number(FILE, name) for name in ("BAND", "SLAB"))
_addresses = Struct("<QQ").pack  # the structure Hidden of the source: where masks and values lie


def takes(x: Tensor, up: Tensor) -> bool:
    """Whether `decode` takes x [tokens, d_model] and up [d_ff, d_model]; gate is taken to be like up."""
    if (
        x.dim() != 2
        or not 1 <= x.shape[0] <= MOST_TOKENS
        or not x.is_cuda
        or x.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    if x.shape[1] % 8 or x.shape[1] != up.shape[1] or x.dtype != up.dtype or not 1 <= up.shape[0] < 2**27:
        return False
    aligned = x.data_ptr() % 16 == 0 and up.data_ptr() % 16 == 0 and x.is_contiguous() and up.is_contiguous()
    return aligned and _capability(x.device.index) >= (8, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class _Layer(NamedTuple):
    """The two kernels for layers of one shape on one device, and their grids."""

    gate: launcher.Kernel
    down: launcher.Kernel
    blocks: int
    tiles: int
    slabs: int


@lru_cache(maxsize=1024)
def _layer(index: int, dtype: torch.dtype, d_model: int, d_ff: int, rows: int, version: int) -> _Layer:
    if version not in VERSIONS:
        raise InputError(f"version is {version}; {VERSIONS[0]} to {VERSIONS[-1]} are accepted")
    shape = shape_for(rows, d_ff, _capability(index), launcher.multiprocessors(index))
    defines, shared = specialisation(dtype, d_model, rows, shape)
    neurons, shared = (_TILE * dict(defines)["BANDS"], shared) if version > 1 else (_TILE, 0)
    gate = launcher.kernel(FILE, f"decode_gate_v{version}", defines, shared, early=True)
    down = launcher.kernel(FILE, "decode_down", defines, early=True)
    return _Layer(gate, down, -(-d_ff // neurons), -(-d_ff // _TILE), -(-d_model // _SLAB))


def _fit(t: Tensor | None) -> bool:
    return t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)


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
) -> Tensor:
    """A sparse feed-forward layer for few tokens: x [tokens, d_model] -> y [tokens, d_model]; see `takes`.

    gate, up, down_t: [d_ff, d_model]; gate None: a plain layer, relu(x up^T + up_bias) down^T + down_bias. stats: int64
    [4], to which the tokens and the kept entries are added, or None.
    """
    if not (_fit(gate) and _fit(down_t)):  # rare: copies are contiguous and aligned
        gate, down_t = (t if _fit(t) else t.clone(memory_format=torch.contiguous_format) for t in (gate, down_t))
    biases = tuple(b if b is None or b.is_contiguous() else b.contiguous() for b in (gate_bias, up_bias, down_bias))
    return Decode(len(x), gate, up, down_t, *biases, version=version).run(x, stats)


class Decode:
    """Both launches for one layer's weights and so many tokens.

    Holds addresses, not tensors: whoever keeps one knows that the weights are still there. All are contiguous; gate, up
    and down_t start on 16 bytes."""

    def __init__(self, tokens, gate, up, down_t, gate_bias, up_bias, down_bias, version: int = VERSIONS[-1]):
        (d_ff, d_model), self.device = up.shape, up.device
        made = _layer(self.device.index, up.dtype, d_model, d_ff, rounded_up(tokens), version)
        self.gate, self.down = made.gate, made.down
        self.gate_grid, self.down_grid = (made.blocks, 1), (made.slabs, tokens)
        first, first_bias, second = (up, up_bias, None) if gate is None else (gate, gate_bias, up)
        self.weights = tuple(map(launcher.address, (first, first_bias, second, up_bias, down_t)))
        self.down_weights = launcher.address(down_t), launcher.address(down_bias)
        self.sizes, self.tiles = (tokens, d_ff), made.tiles
        # Of every token and neuron a float, of every token and tile a 16-bit mask.
        self.floats, self.masks = tokens * made.tiles * (_TILE + 1), tokens * made.tiles * _TILE * 4

    def run(self, x: Tensor, stats: Tensor | None) -> Tensor:
        """x: contiguous, so many tokens in any number of dimensions -> y, of the same shape."""
        work = torch.empty(self.floats, dtype=torch.float32, device=self.device)
        y = torch.empty_like(x)
        values = work.data_ptr()
        masks = values + self.masks
        hidden = _addresses(masks, values)
        self.gate.launch(self.device, self.gate_grid, (x, *self.weights, hidden, stats, *self.sizes))
        self.down.launch(self.device, self.down_grid, (hidden, *self.down_weights, y, self.tiles))
        return y


def fit(gate: Tensor | None, down_t: Tensor, *biases: Tensor | None) -> bool:
    """Whether these lie as `Decode` takes them; `decode` copies what does not."""
    return _fit(gate) and _fit(down_t) and all(b is None or b.is_contiguous() for b in biases)
