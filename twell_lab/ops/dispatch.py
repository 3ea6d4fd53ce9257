"""Which kernels run one feed-forward layer on a GPU: the one place that picks.

Three paths compute the same function:
  dense      every neuron, through the tensor cores;
  twell      the gate's positives packed while the gate GEMM still holds them, the rest of the layer for those alone;
  hot_cold   the neurons that fire most (the first `hot` rows of permuted weights) dense, the others packed; one sum.
Each runs on the best kernels that take the call: `sm90_` (Hopper), the decode kernels for few tokens, or the
portable kernels behind torch's own gate GEMM. Arguments are checked (ops.py) and contiguous, apart from `down`, which
may be a slice of columns; everything runs on torch's current stream, and nothing waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import decode, hopper_dense, hopper_pack, portable

_NO_TAIL = (None, None, None)
_PIECE = (
    32768  # tokens of one pass: bounds the workspace; twice the waves of the GPU at 16,384 tokens, so little is lost
)
_LEAST = 2048  # tokens from which the 128 x 256 tiles of the packing GEMM fill enough of the GPU
_LEAST_HOT = 512  # and with a hot part, whose float32 sums the portable kernels could not start from
LEAST_DENSE = 256  # and from which relu(gate) * up in one GEMM beats four operations of torch


def infer(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, path, hot, tile, words) -> Tensor:
    """One layer without gradients on the named path. x: [tokens, d_model]; gate is None for a plain layer."""
    if path == "dense":
        return dense(x, gate, up, down, gate_bias, up_bias, down_bias)
    weights = (gate, up, down, down_t, gate_bias, up_bias, down_bias)
    if not hot and decode.takes(x, up) and (tile, words) == (256, 32):
        return decode.decode(x, gate, up, down_t, gate_bias, up_bias, down_bias, stats)
    if not _hopper(x, gate, up, down, hot, tile, words):
        return _portable(x, *weights, stats, hot, tile, words)
    if x.shape[0] <= _PIECE:
        return sm90(x, *weights, stats, hot)
    y = torch.empty_like(x)
    for piece, out in zip(x.split(_PIECE), y.split(_PIECE)):
        sm90(piece, *weights, stats, hot, out)
    return y


def dense(x, gate, up, down, gate_bias, up_bias, down_bias) -> Tensor:
    """Every neuron: on Hopper relu(gate) * up in one GEMM, so that neither is written; elsewhere torch's operations."""
    return linear(_hidden(x, gate, up, gate_bias, up_bias), down, down_bias)


def fuses(weight: Tensor) -> bool:
    """Whether `dense` beats torch's operations on a layer with this gate or up weight, also compiled, from LEAST_DENSE
    tokens."""
    sizes = weight.dim() == 2 and all(n and n % hopper_pack.VECTOR == 0 for n in weight.shape)
    return sizes and hopper_pack.fits(weight)


def _hidden(x, gate, up, gate_bias, up_bias) -> Tensor:
    if x.shape[0] >= LEAST_DENSE and hopper_dense.takes(x, *(w for w in (gate, up) if w is not None)):
        return hopper_dense.gate_up(x, gate, up, gate_bias, up_bias)
    first = torch.relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
    return first if gate is None else first.mul_(linear(x, up, up_bias))


def _hopper(x, gate, up, down, hot, tile, words) -> bool:
    first = up if gate is None else gate
    if (
        (tile, words) != (256, 32)
        or x.shape[0] < (_LEAST_HOT if hot else _LEAST)
        or not portable.pooled_takes(x.dtype, x.shape[1])
    ):
        return False
    return hopper_pack.takes(x, first) and hopper_dense.takes(x, up, down)


def _split(hot, gate, up, down, down_t, gate_bias, up_bias):
    """The hot and the cold part of permuted weights: (gate, up, down, down_t, gate_bias, up_bias) each."""

    def part(rows):
        first = lambda t: None if t is None else t[rows]  # noqa: E731
        return first(gate), up[rows], down[:, rows], down_t[rows], first(gate_bias), first(up_bias)

    return part(slice(None, hot)), part(slice(hot, None))


def _start(h: Tensor, down: Tensor) -> Tensor:
    """What the hot neurons add to y, in float32, so that y is rounded once. h: [tokens, hot], down: [d_model, hot]."""
    return torch.mm(h, down.t(), out_dtype=torch.float32)


def sm90(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, hot, y=None, packs=hopper_pack) -> Tensor:
    """Packed inside the gate GEMM, finished by the readers with a pool; rows that the pool lost are computed densely.

    packs: hopper_pack, or ampere to time its GEMM in the same place.
    """
    tokens = x.shape[0]
    start = None
    if hot:
        warm, cold = _split(hot, gate, up, down, down_t, gate_bias, up_bias)
        start = _start(_hidden(x, warm[0], warm[1], warm[4], warm[5]), warm[2])
        gate, up, down, down_t, gate_bias, up_bias = cold
    lost = torch.empty(1 + tokens, dtype=torch.int32, device=x.device)
    lost_x = torch.empty_like(x)
    first, first_bias = (up, up_bias) if gate is None else (gate, gate_bias)
    packed, pool = packs.gate_pack(x, first, first_bias, lost)
    if gate is None:
        y = portable.down_pooled(x, packed, pool, down_t, down_bias, start, lost, lost_x, stats, y=y)
    else:
        y = portable.gated_pooled(x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x, stats, y=y)
    hopper_dense.finish_lost(lost, lost_x, gate, up, gate_bias, up_bias, down, down_bias, start, y)
    return y


def _portable(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, hot, tile, words) -> Tensor:
    """Hot or not, all are packed: these kernels round their sums to x's type, and a cold part that is rounded by itself
    may overflow float16 where the whole does not, or cancel against the hot one and leave its rounding."""
    return twell(x, gate, up, down_t, gate_bias, up_bias, down_bias, tile, words, stats, hot)


def twell(x, gate, up, down_t, gate_bias, up_bias, down_bias, tile, words, stats=None, hot=0) -> Tensor:
    """The portable kernels behind torch's gate GEMM: any width and dtype, any GPU from sm_75. hot: neurons that stats
    leave out."""
    g = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
    packed = portable.pack(g, tile, words)
    if stats is not None and x.shape[0] >= _LEAST:  # below, the extra launches would be felt
        _count(packed[:, hot // tile :], stats, words)
    if gate is None:
        return portable.down(packed, g, _NO_TAIL, down_t, down_bias, g.shape[1], tile)
    return portable.gated(x, packed, g, _NO_TAIL, up, down_t, up_bias, down_bias, tile)


def _count(packed: Tensor, stats: Tensor, words: int) -> None:
    """Add this call to stats: tokens, kept entries, rows with an overflowing tile, rows computed densely (none
    here)."""
    counts = packed[..., 0].long()
    seen = torch.stack(
        [counts.new_full((), packed.shape[0]), counts.sum(), (counts >= words).any(1).sum(), counts.new_zeros(())]
    )
    stats.add_(seen)
