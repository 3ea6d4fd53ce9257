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

from ..cuda.launcher import address
from ..formats.twell import word_dtype
from . import decode, hopper_dense, hopper_pack, portable
from .prepared import Kept, place, places

_NO_TAIL = (None, None, None)
_PIECE = (
    32768  # tokens of one pass: bounds the workspace; twice the waves of the GPU at 16,384 tokens, so little is lost
)
LEAST_TWELL = 2048  # tokens from which the 128 x 256 tiles of the packing GEMM fill enough of the GPU
LEAST_HOT = 512  # and with a hot part, whose float32 sums the portable kernels could not start from
LEAST_DENSE = 256  # and from which relu(gate) * up in one GEMM beats four operations of torch


calls = Kept()  # the calls that were prepared, by `key_of` them


def key_of(x, weights, stats, path, hot, tile, words):
    """What decides how a call runs: everything but where x, stats and what is made lie. None: it is not kept.

    x: [..., d_model]; weights: gate, up, down, down_t, gate_bias, up_bias, down_bias, or None for some."""
    if not x.is_contiguous():
        return None
    shape = x.shape
    counted = None if stats is None else (stats.shape, stats.dtype, stats.device)
    rows = shape[:-1].numel(), shape[-1], x.data_ptr() & 15, x.dtype, x.device
    return path, hot, tile, words, rows, counted, *map(place, weights)


def infer(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, path, hot, tile, words) -> Tensor:
    """One layer without gradients on the named path. x: [tokens, d_model]; gate is None for a plain layer."""
    weights = (gate, up, down, down_t, gate_bias, up_bias, down_bias)
    key = key_of(x, weights, stats, path, hot, tile, words)
    call = None if key is None else calls.get(key)
    if call is None:
        call = _prepare(x, weights, path, hot, tile, words)
        if key is not None:
            calls.put(key, call)
    return call.run(x, weights, stats)


class Call:
    """A call of `infer` that was looked at once: which kernels, their grids, and where the weights lie.

    flat: whether x has to have two dimensions; else any contiguous x of as many rows will do. checked: set by who
    knows that its arguments passed every check."""

    flat, checked = True, False

    def run(self, x: Tensor, weights: tuple, stats: Tensor | None) -> Tensor:
        raise NotImplementedError


def _prepare(x, weights, path, hot, tile, words) -> Call:
    gate, up, down, down_t, *biases = weights
    if path == "dense":
        return _Dense(x, gate, up, biases)
    if not hot and decode.takes(x, up) and (tile, words) == (256, 32):
        return _Decode(x, weights) if decode.fit(gate, down_t, *biases) else _DecodeCopying()
    if not _hopper(x, gate, up, down, hot, tile, words):
        return _Portable(x, weights, hot, tile, words)
    lies = all(t is None or t.is_contiguous() for t in (x, gate, up, down_t)) and hopper_dense.biases_fit(*biases)
    if lies and len(x) <= _PIECE:
        return Hopper(x, weights, hot)
    return _HopperPieces(hot)


class _Decode(Call):
    flat = False

    def __init__(self, x, weights):
        gate, up, _, down_t, *biases = weights
        self.made = decode.Decode(len(x), gate, up, down_t, *biases)

    def run(self, x, weights, stats):
        return self.made.run(x, stats)


class _DecodeCopying(Call):
    """Few tokens, and weights that the kernels cannot read where they lie."""

    def run(self, x, weights, stats):
        gate, up, _, down_t, *biases = weights
        return decode.decode(x, gate, up, down_t, *biases, stats)


class _HopperPieces(Call):
    """More tokens than one pass takes, or weights that lie otherwise than they do for the kernels."""

    def __init__(self, hot):
        self.hot = hot

    def run(self, x, weights, stats):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for piece, out in zip(x.split(_PIECE), y.split(_PIECE)):
            sm90(piece, *weights, stats, self.hot, out)
        return y


class _Dense(Call):
    """Every neuron: on Hopper relu(gate) * up in one GEMM, so that neither is written; elsewhere torch's operations."""

    def __init__(self, x, gate, up, biases):
        self.hidden = _Hidden(x, gate, up, *biases[:2])

    def run(self, x, weights, stats):
        gate, up, down, _, gate_bias, up_bias, down_bias = weights
        return linear(self.hidden.run(x, gate, up, gate_bias, up_bias), down, down_bias)


def dense(x, gate, up, down, gate_bias, up_bias, down_bias) -> Tensor:
    """Every neuron of a layer, x [tokens, d_model]."""
    weights = (gate, up, down, None, gate_bias, up_bias, down_bias)
    return _Dense(x, gate, up, (gate_bias, up_bias, down_bias)).run(x, weights, None)


class _Hidden:
    """relu(x gate^T) * (x up^T), or relu(x up^T), of these weights for so many tokens."""

    def __init__(self, x, gate, up, gate_bias, up_bias):
        biases = gate_bias, up_bias
        fused = x.shape[0] >= LEAST_DENSE and hopper_dense.takes(x, *(w for w in (gate, up) if w is not None))
        self.made, self.copying = None, fused and not hopper_dense.biases_fit(*biases)
        if fused and not self.copying:
            hopper_dense.check(x, gate, up, gate_bias=gate_bias, up_bias=up_bias)
            self.made = hopper_dense.GateUp(gate, up, *biases)
            self.maps = self.made.maps_of(x.shape[0], hopper_dense.row_of(x))

    def run(self, x, gate, up, gate_bias, up_bias) -> Tensor:
        if self.made is not None:
            return self.made.run(x, self.maps)
        if self.copying:
            return hopper_dense.gate_up(x, gate, up, gate_bias, up_bias)
        first = torch.relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
        return first if gate is None else first.mul_(linear(x, up, up_bias))


def fuses(weight: Tensor) -> bool:
    """Whether `dense` beats torch's operations on a layer with this gate or up weight, also compiled, from LEAST_DENSE
    tokens."""
    sizes = weight.dim() == 2 and all(n and n % hopper_pack.VECTOR == 0 for n in weight.shape)
    return sizes and hopper_pack.fits(weight)


def _hopper(x, gate, up, down, hot, tile, words) -> bool:
    first = up if gate is None else gate
    if (
        (tile, words) != (256, 32)
        or x.shape[0] < (LEAST_HOT if hot else LEAST_TWELL)
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
    x, gate, up, down_t = (t if t is None else t.contiguous() for t in (x, gate, up, down_t))
    gate_bias, up_bias, down_bias = map(hopper_dense.fitting, (gate_bias, up_bias, down_bias))
    weights = (gate, up, down, down_t, gate_bias, up_bias, down_bias)
    if not len(x):
        return torch.empty_like(x) if y is None else y
    key = (None if packs is hopper_pack else "sm80", *key_of(x, weights, stats, "sm90", hot, 256, 32))
    call = calls.get(key)
    if call is None:
        calls.put(key, call := Hopper(x, weights, hot, packs))
    return call.run(x, weights, stats, y)


class Hopper(Call):
    """One pass of the packed path on Hopper: the gate GEMM that packs, the readers, and the rows that the pool lost.

    What lies between its kernels is one piece of memory: h of the lost rows is written where the packed words were,
    which nobody reads by then. Everything is contiguous, but for `down`."""

    def __init__(self, x, weights, hot, packs=hopper_pack):
        tokens, d_model = x.shape
        self.hot, self.flat, self.device = hot, bool(hot), x.device
        self.warm = None
        if hot:
            (gate, up, _, _, gate_bias, up_bias), _ = _split(hot, *weights[:6])
            self.warm = _Hidden(x, gate, up, gate_bias, up_bias)
            _, (gate, up, down, down_t, gate_bias, up_bias) = _split(hot, *weights[:6])
        else:
            gate, up, down, down_t, gate_bias, up_bias = weights[:6]
        down_bias, first = weights[6], up if gate is None else gate
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        packs.check(x, first)
        hopper_dense.check(x, gate, up, down, **biases)
        portable.check_rows(x, (x, up, down_t, down_bias))
        d_ff, value = up.shape[0], x.dtype.itemsize
        self.packed = packs.GatePack(tokens, d_model, first, up_bias if gate is None else gate_bias)
        sizes, kinds = (x.dtype, tokens, d_model, d_ff, self.device), (up, down_t, up_bias, down_bias)
        if gate is None:
            self.readers, kinds = portable.DownPooled(*sizes), (down_t, down_bias)
        else:
            self.readers = portable.GatedPooled(*sizes)
        self.gated, self.weights = gate is not None, tuple(map(address, kinds))
        made = hopper_dense.GateUp(gate, up, gate_bias, up_bias)
        self.finish = hopper_dense.FinishLost(tokens, d_model, made, down, down_bias)
        words, pool = (4 * n for n in portable.packed_sizes(tokens, d_ff))
        between = self.readers.room if self.gated else (0, 0)
        h, parts = self.finish.room
        kept, end = places(0, 4 * (1 + tokens), tokens * d_model * value, parts)
        first_use, first_end = places(end, words, pool, *between)
        self.places, self.bytes = (*kept, *first_use, end), max(first_end, end + h)

    def run(self, x, weights, stats, y=None):
        start = None
        if self.hot:
            gate, up, down, _, gate_bias, up_bias, _ = weights
            warm = down[:, : self.hot]
            if self.warm.made is None:
                gate, up, gate_bias, up_bias = (
                    t if t is None else t[: self.hot] for t in (gate, up, gate_bias, up_bias)
                )
            start = _start(self.warm.run(x, gate, up, gate_bias, up_bias), warm)
        memory = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        y = torch.empty_like(x) if y is None else y
        base = memory.data_ptr()
        lost, lost_x, parts, packed, pool, hidden, beside, h = [base + at for at in self.places]
        at, out, begun = x.data_ptr(), y.data_ptr(), address(start)
        self.packed.launch(at, packed, pool, lost)
        if self.gated:
            between = (begun, lost, lost_x, stats, hidden, beside)
            self.readers.launch(out, at, packed, pool, *self.weights, *between)
        else:
            self.readers.launch(out, at, packed, pool, *self.weights, begun, lost, lost_x, stats)
        self.finish.launch(lost, lost_x, begun, out, h, parts)
        return y


class _Portable(Call):
    """Hot or not, all are packed: these kernels round their sums to x's type, and a cold part that is rounded by itself
    may overflow float16 where the whole does not, or cancel against the hot one and leave its rounding."""

    def __init__(self, x, weights, hot, tile, words):
        self.how = tile, words, hot
        gate, up, _, down_t, gate_bias, up_bias, down_bias = weights
        d_ff, d_model = up.shape
        lies = all(t is None or t.is_contiguous() for t in (x, up, down_t, up_bias, down_bias))
        self.pack = None
        if not lies or not len(x):
            return
        tokens, tiles = len(x), -(-d_ff // tile)
        portable.check_tiles(tokens, d_ff, tile, words)
        vectors = portable.in_vectors(x.dtype, d_ff, tile)
        self.pack = portable.Pack(x.dtype, tokens, d_ff, tile, words, vectors, x.device)
        self.packed = (tokens, tiles, words), word_dtype(x.dtype)
        sizes = x.dtype, tokens, d_model, d_ff, tile, words
        self.counted = (tokens >= LEAST_TWELL, hot // tile, words)
        if gate is None:
            aligned = portable._aligned(down_t, down_bias)
            self.rows = portable.TokenRows("down", 2, *sizes, aligned, x.device)
        else:
            aligned = portable._aligned(x, up, down_t, down_bias)
            self.rows = portable.TokenRows("gated", 3, *sizes, aligned, x.device)

    def run(self, x, weights, stats):
        gate, up, _, down_t, gate_bias, up_bias, down_bias = weights
        if self.pack is None:
            tile, words, hot = self.how
            return twell(x, gate, up, down_t, gate_bias, up_bias, down_bias, tile, words, stats, hot)
        g = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
        shape, dtype = self.packed
        packed = torch.empty(shape, dtype=dtype, device=x.device)
        self.pack.launch(g, packed)
        enough, first, words = self.counted
        if stats is not None and enough:
            _count(packed[:, first:], stats, words)
        y = torch.empty_like(x)
        if gate is None:
            self.rows.launch(packed, g, *_NO_TAIL, down_t, down_bias, y)
        else:
            self.rows.launch(x, packed, g, *_NO_TAIL, up, down_t, up_bias, down_bias, y)
        return y


def twell(x, gate, up, down_t, gate_bias, up_bias, down_bias, tile, words, stats=None, hot=0) -> Tensor:
    """The portable kernels behind torch's gate GEMM: any width and dtype, any GPU from sm_75. hot: neurons that stats
    leave out."""
    g = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
    packed = portable.pack(g, tile, words)
    if stats is not None and x.shape[0] >= LEAST_TWELL:  # below, the extra launches would be felt
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
