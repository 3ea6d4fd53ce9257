"""Launching the decode kernels: a whole sparse layer for 1 to 64 tokens in two launches, with little host time.

What a launch needs is worked out once for a shape and kept: a call fills in addresses. CUDA only; torch's current
stream, torch's allocator, no waiting for the GPU.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import launcher

MOST_TOKENS = 64
VERSIONS = (1, 2)
FILE = "sm80_decode.cu"
_TILE, _SLAB, _DOWN_THREADS = 16, 256, 512  # as in the source
_NAMES = ("BANDS", "BLOCK_WARPS", "STAGES", "BK", "RESIDENT")  # macros of the source, by tokens rounded up:
_SHAPES = {1: (1, 8, 4, 64, 3), 8: (1, 8, 2, 64, 3), 16: (1, 8, 2, 64, 3), 32: (3, 8, 2, 64, 1), 64: (3, 8, 2, 32, 1)}
_SMALLER = {32: (1, 8, 2, 32, 1), 64: (1, 8, 2, 32, 1)}  # where a block has 99 or 163 KiB of shared memory, not 227


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


def rounded_up(tokens: int) -> int:
    """The number of tokens a kernel is compiled for."""
    return 1 if tokens == 1 else 8 if tokens <= 8 else 16 if tokens <= 16 else 32 if tokens <= 32 else 64


def shape_for(rows: int, d_ff: int, capability: tuple[int, int], multiprocessors: int) -> tuple[int, ...]:
    """What `_NAMES` are for `rows` tokens, as `rounded_up` gives them.

    From 17 tokens on a multiprocessor holds one block, and what it reads of the weights and of x is what takes the
    time: of three tiles a block and two, whichever leaves the busiest one less to read."""
    shape = _SHAPES[rows]
    if capability[0] not in (9, 10):
        return _SMALLER.get(rows, shape)
    if rows <= 16:
        return shape

    def busiest(tiles: int) -> int:
        return -(-d_ff // (_TILE * tiles * multiprocessors)) * (_TILE * tiles + rows)

    return (min((shape[0], shape[0] - 1), key=busiest), *shape[1:])


def specialisation(dtype: torch.dtype, d_model: int, rows: int, shape: tuple[int, ...]) -> tuple[tuple, int]:
    """(macros, bytes of dynamic shared memory of decode_gate_v2) for `rows` tokens and a shape from `shape_for`."""
    tiles, warps, stages, piece, _ = shape
    stage = (_TILE * tiles + rows) * piece * 2
    parts = warps * 8 * -(-rows // 8) * (_TILE * tiles + 4) * 4
    shared = max(warps * stages * stage, parts)
    if shared > launcher._SHARED_BY_DEFAULT - 16 * 1024:
        shared = max(
            shared, launcher._SHARED_BY_DEFAULT + 16
        )  # with its static part it passes what needs no permission: so ask
    value = ("VALUE_BF16" if dtype == torch.bfloat16 else "VALUE_FP16", True)
    return (value, ("D_MODEL", d_model), ("TOKENS", rows), *zip(_NAMES, shape)), shared


def builds(dtype: torch.dtype, d_models) -> list[tuple[str, tuple]]:
    """(file, macros) of everything that `decode` may compile for these widths, on any GPU that it runs on."""
    wide = [(rows, (tiles, *_SHAPES[rows][1:])) for rows in (32, 64) for tiles in (2, 3)]
    shapes = [*((rows, _SHAPES[rows]) for rows in (1, 8, 16)), *wide, *_SMALLER.items()]
    widths = [d for d in d_models if d % 8 == 0]
    return [(FILE, specialisation(dtype, d, rows, shape)[0]) for d in widths for rows, shape in shapes]


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
    shape = shape_for(rows, d_ff, _capability(index), launcher._multiprocessors(index))
    defines, shared = specialisation(dtype, d_model, rows, shape)
    found = dict(defines)
    neurons, threads = (_TILE * found["BANDS"], 32 * found["BLOCK_WARPS"]) if version > 1 else (_TILE, 32 * _TILE)
    shared = shared if version > 1 else 0
    gate = launcher.kernel(FILE, f"decode_gate_v{version}", defines, "PPPPPPHPii", threads, shared, early=True)
    down = launcher.kernel(FILE, "decode_down", defines, "HPPPi", _DOWN_THREADS, early=True)
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
        self.gate.launch(self.device, self.gate_grid, (x, *self.weights, masks, values, stats, *self.sizes))
        self.down.launch(self.device, self.down_grid, (masks, values, *self.down_weights, y, self.tiles))
        return y


def fit(gate: Tensor | None, down_t: Tensor, *biases: Tensor | None) -> bool:
    """Whether these lie as `Decode` takes them; `decode` copies what does not."""
    return _fit(gate) and _fit(down_t) and all(b is None or b.is_contiguous() for b in biases)
