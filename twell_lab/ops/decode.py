"""decode: a whole sparse layer for 1 to 64 tokens in two launches (kernels/sm80_decode.cu).

The first computes the gate and, for what fires, up; the second reads the rows of down_t of what fires."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..cuda.launch import SHARED_BY_DEFAULT, Buffer, Entry, Layout, Macros, Source, aligned, value
from .activation import ACTIVATIONS, RELU, Activation, activation, rounded
from .reference import gated_ffn, plain_ffn

MOST_TOKENS = 64
VERSIONS = (1, 2)
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows
_BAND, _DOWN_WARPS = 16, 16  # neurons of a band; warps of a block of decode_down
_SIZES = ("BANDS", "BLOCK_WARPS", "STAGES", "BK", "RESIDENT")  # macros of the source
# Their values, by how many tokens a kernel is compiled for:
_SHAPES = {1: (1, 8, 4, 64, 3), 8: (1, 8, 2, 64, 3), 16: (1, 8, 2, 64, 3), 32: (3, 8, 2, 64, 1), 64: (3, 8, 2, 32, 1)}
_SMALLER = {32: (1, 8, 2, 32, 1), 64: (1, 8, 2, 32, 1)}  # the same on GPUs with 99 or 163 KiB of shared memory a block
# Lanes of a row of down_t, for activations other than the ReLU, which may leave half of the neurons firing.
_DOWN_LANES = {1: 4, 8: 8, 16: 16}


def _shape(rows: int, d_ff: int, capability: tuple[int, int], multiprocessors: int) -> tuple[int, ...]:
    """Return BANDS, BLOCK_WARPS, STAGES, BK and RESIDENT for at most `rows` tokens."""
    shape = _SHAPES[rows]
    if capability[0] not in (9, 10):
        return _SMALLER.get(rows, shape)
    if rows <= 16:
        return shape

    # A multiprocessor then holds one block, and reading the weights and x takes most of the time. So a block has three
    # bands or two, whichever leaves the busiest multiprocessor less to read.
    def busiest(bands: int) -> int:
        return -(-d_ff // (_BAND * bands * multiprocessors)) * (_BAND * bands + rows)

    return (min((shape[0], shape[0] - 1), key=busiest), *shape[1:])


@lru_cache(maxsize=1024)
def specialisation(dtype: torch.dtype, d_model: int, rows: int, shape: tuple, acts: Macros = ()) -> tuple[Macros, int]:
    """Return (macros, bytes of dynamic shared memory of decode_gate_v2) for `rows` tokens in this shape."""
    bands, warps, stages, step, _ = shape
    padded, neurons = -(-rows // 8) * 8, bands * _BAND
    shared = warps * max(stages * (neurons + rows) * step * 2, padded * (neurons + 4) * 4)
    macros = (*value(dtype), ("D_MODEL", d_model), ("TOKENS", rows), *zip(_SIZES, shape), *acts)
    if acts and rows in _DOWN_LANES:
        macros += (("DOWN_LANES", _DOWN_LANES[rows]),)
    macros += (("LAUNCH_SHARED", shared),)
    # With the kernel's static shared memory this may be more than a launch gets without permission. A number above
    # SHARED_BY_DEFAULT makes the launch ask for it.
    return macros, max(shared, SHARED_BY_DEFAULT + 16) if shared > SHARED_BY_DEFAULT - 16 * 1024 else shared


def _builds(dtype: torch.dtype, widths, capability: tuple[int, int]) -> list[Macros]:
    """List each width and number of tokens, in the shapes of every GPU; and for the other activations in those of this
    one."""
    if dtype.itemsize != 2:
        return []
    wide = [(rows, (bands, *_SHAPES[rows][1:])) for rows in (32, 64) for bands in (2, 3)]
    narrow = [(rows, _SHAPES[rows]) for rows in (1, 8, 16)]
    own = [*narrow, *(wide if capability[0] in (9, 10) else _SMALLER.items())]
    others = sorted({activation(kind) for kind in ACTIVATIONS} - {()}) + [activation("relu", both=True)]
    shapes: list[tuple] = [(shape, ()) for shape in (*narrow, *wide, *_SMALLER.items())]
    shapes += [(shape, acts) for acts in others for shape in own]
    widths = [width for width in widths if width % 8 == 0]
    return [specialisation(dtype, width, *shape, acts)[0] for width in widths for shape, acts in shapes]


DECODE = Source(
    "sm80_decode",
    {
        "decode_gate_v1": Entry(_BAND * 32, "pppppp2piif"),
        "decode_gate_v2": Entry(lambda macros: 32 * macros["BLOCK_WARPS"], "pppppp2piif"),
        "decode_down": Entry(_DOWN_WARPS * 32, "2pppi"),
    },
    builds=_builds,
    constants=(("BAND", _BAND), ("DOWN_WARPS", _DOWN_WARPS)),
    oldest=(8, 0),
)


def takes(capability: tuple[int, int], x: Buffer | Layout, up: Buffer | Layout) -> bool:
    """Return whether `decode` takes x [tokens, d_model] and up [d_ff, d_model]; gate and down_t must be of up's shape
    and type."""
    (tokens, d_model), d_ff = x.shape, up.shape[0]
    sizes = 1 <= tokens <= MOST_TOKENS and d_model > 0 and d_model % 8 == 0 and 1 <= d_ff < 2**27
    dense = (tokens == 1 or x.strides[0] == d_model) and x.strides[1] == 1 and up.strides == (d_model, 1)
    return sizes and dense and x.dtype == up.dtype and x.dtype.itemsize == 2 and aligned(x, up) and capability >= (8, 0)


def decode(
    call, x, gate, up, down_t, gate_bias=None, up_bias=None, down_bias=None, version=2, acts: Activation = RELU
) -> Buffer:
    """Add a sparse feed-forward layer for few tokens: x [tokens, d_model] -> y [tokens, d_model]; see `takes`.

    gate, up, down_t: [d_ff, d_model]; gate None for a plain layer, act(x up^T + up_bias) down^T + down_bias.
    version: 1 or 2. acts: what fires."""
    (d_ff, d_model), tokens = up.shape, len(x)
    rows = next(most for most in _SHAPES if tokens <= most)
    shape = _shape(rows, d_ff, call.capability, call.units)
    macros, shared = specialisation(x.dtype, d_model, rows, shape, activation(acts.kind, acts.both))
    neurons, shared = (_BAND * shape[0], shared) if version > 1 else (_BAND, 0)
    tiles, columns = -(-d_ff // _BAND), dict(macros).get("DOWN_LANES", 32) * 8  # of y, those of a block of decode_down
    values = call.empty(tokens, tiles * _BAND, dtype=torch.float32)
    masks = call.empty(tokens, tiles, dtype=torch.int16)
    y = call.empty(tokens, d_model, dtype=x.dtype)
    first, first_bias, second = (up, up_bias, None) if gate is None else (gate, gate_bias, up)
    weights, hidden = (first, first_bias, second, up_bias, down_t), (masks, values)
    of_gate = DECODE.kernel(f"decode_gate_v{version}", macros, shared, early=True)
    numbers = (None, tokens, d_ff, rounded(acts.threshold, x.dtype))  # None: nothing is counted
    call.launch(of_gate, (-(-d_ff // neurons), 1), x, *weights, hidden, *numbers)
    of_down = DECODE.kernel("decode_down", macros, early=True)
    call.launch(of_down, (-(-d_model // columns), tokens), hidden, down_t, down_bias, y, tiles)
    return y


def reference(x, gate, up, down_t, gate_bias=None, up_bias=None, down_bias=None, acts: Activation = RELU) -> Tensor:
    """Return what `decode` computes, from torch's operations."""
    if gate is None:
        return plain_ffn(x, up, down_t.t(), up_bias, down_bias, acts)
    return gated_ffn(x, gate, up, down_t.t(), gate_bias, up_bias, down_bias, acts)
