"""Which kernels run one feed-forward layer on a GPU: the one place that picks.

Three paths compute the same function:
  dense      every neuron, through the tensor cores;
  twell      the gate GEMM packs its positive values before they are written, and the rest of the layer is computed for
             these alone;
  hot_cold   the neurons that fire most (the first `hot` rows of permuted weights) are computed as in dense, the others
             as in twell, and both are added up before y is rounded.
Each runs on the best kernels that take the call: `sm90_` (Hopper), the decode kernels for few tokens, or, after torch's
own gate GEMM, the kernels that list or pack its values. The operators (inference.py, operators.py) have checked the
arguments and made them contiguous, apart from `down`, which only the dense path reads. Everything runs on torch's
current stream, and nothing waits for the GPU.

The choice for a call, and the launches that it made, are kept in `calls` under `key_of` the call: the next call with
the same key replays the launches (twell_lab.cuda.tape).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cuda.tape import Tape, empty
from . import decode, hopper_dense, hopper_pack, listed, portable
from .activation import RELU, Activation
from .kept import Kept, place

_NO_TAIL = (None, None, None)
_PIECE = 32768  # tokens of one pass: more are computed in several passes, so that the workspace stays bounded
# Tokens from which the packing GEMM computes the gate, whose tiles of 128 x 256 then fill the GPU. For fewer torch's
# product and the kernel that lists its kept values are faster (docs/kernels/smxx_listed.md).
LEAST_PACKED = 2048
LEAST_COUNTED = 2048  # tokens from which the portable kernels count for `stats`: for fewer it would take too much time
# A row with more kept values than this is handed on like the lost rows: the one warp that would walk it would hold up
# its launch. Few such rows are shared among all blocks of a launch, many are computed densely: the GEMMs take less of
# the GPU's time for them than reading so many rows of up and down.
HEAVY = 128
LEAST_DENSE = 256  # tokens from which relu(gate) * up in one GEMM takes the GPU less time than four operations of torch
# Tokens from which the GPU works for so long that the host's time for it is hidden, also in a model whose host is
# behind: torch's operations cost the host less than that GEMM's call.
LEAST_HIDDEN = 4096


calls = Kept()  # a Call for each key of `key_of`


def key_of(x, weights, stats, path, hot, tile, words, acts=RELU):
    """Everything that decides which kernels a call launches and with which arguments, without the addresses of x and
    stats. None where the call cannot be kept.

    x: [..., d_model]; weights: gate, up, down, down_t, gate_bias, up_bias, down_bias, some of them None."""
    if not x.is_contiguous():
        return None
    shape = x.shape
    counted = None if stats is None else (stats.shape, stats.stride(), stats.dtype, stats.device)
    rows = shape[:-1].numel(), shape[-1], x.data_ptr() & 15, x.dtype, x.device
    return path, hot, tile, words, acts, rows, counted, *map(place, weights)


def infer(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, path, hot, tile, words, *acts) -> Tensor:
    """One layer without gradients on the named path: x [tokens, d_model] -> [tokens, d_model]. gate: None for a plain
    layer. acts: the fields of an Activation, or nothing for the ReLU. The other arguments: as twell_lab.ops.infer takes
    them."""
    weights, how = (gate, up, down, down_t, gate_bias, up_bias, down_bias), (path, hot, tile, words, Activation(*acts))
    return _kept(key_of(x, weights, stats, *how), lambda: _chosen(x, weights, *how)).run(x, weights, stats)


def _kept(key: Hashable, make: Callable[[], Call]) -> Call:
    """The Call kept under this key. Where there is none, a new one, kept from now on unless the key is None."""
    call = None if key is None else calls.get(key)
    if call is None:
        call = make()
        if key is not None:
            calls.put(key, call)
    return call


class Call:
    """How calls of `infer` with the same key run: the choices made for the first of them, and its recorded launches.
    It keeps no tensor alive.

    checked: whether these arguments passed every check of twell_lab.ops.infer, which sets it."""

    checked = False

    def run(self, x: Tensor, weights: tuple, stats: Tensor | None) -> Tensor:
        """x: [tokens, d_model] -> [tokens, d_model]."""
        raise NotImplementedError

    def again(self, x: Tensor, weights: tuple, stats: Tensor | None) -> Tensor:
        """The same for an x of any number of dimensions, contiguous: [..., d_model] -> [..., d_model]."""
        if x.dim() == 2:
            return self.run(x, weights, stats)
        return self.run(x.view(-1, x.shape[-1]), weights, stats).view(x.shape)


def _chosen(x, weights, path, hot, tile, words, acts) -> Call:
    gate, up, _, down_t, *_ = weights
    if path == "dense":
        return _Dense(x, gate, up, acts)
    if not hot and decode.takes(x, up) and (tile, words) == (256, 32):
        return _Decode(acts)
    # Values of either sign are so many that packing them pays for few tokens alone. And in plain layers a row of x that
    # is not finite shows in every neuron, which its packed row does not say.
    if acts.falls_back and (gate is None or x.shape[0] > decode.MOST_TOKENS):
        return _Dense(x, gate, up, acts)
    if acts == RELU and _hopper(x, gate, up, down_t, hot, tile, words):
        return _Hopper(hot)
    if _lists(x, weights, acts):
        return _Listed(acts)
    return _Portable(hot, tile, words, acts)


class _Decode(Call):
    """The decode kernels, for few tokens."""

    def __init__(self, acts: Activation) -> None:
        self.acts, self.tape = acts, Tape()

    def run(self, x, weights, stats):
        gate, up, _, *rest = weights
        return self.tape.play(self._decode, (x, stats), (gate, up, *rest))

    def again(self, x, weights, stats):
        y = self.tape.replayed((x, stats))  # to see x as a matrix, and y as x, takes as long as a launch
        return super().again(x, weights, stats) if y is None else y

    def _decode(self, x, stats, *weights) -> Tensor:
        return decode.decode(x, *weights, stats, acts=self.acts)


class _Dense(Call):
    """Every neuron: on Hopper relu(gate) * up in one GEMM that writes neither factor, elsewhere, and for other
    activations, torch's operations."""

    def __init__(self, x, gate, up, acts: Activation = RELU) -> None:
        self.acts, self.tape = acts, Tape()
        weights = [w for w in (gate, up) if w is not None]
        self.fused = x.shape[0] >= LEAST_DENSE and acts == RELU and hopper_dense.takes(x, *weights)

    def run(self, x, weights, stats):
        gate, up, down, _, gate_bias, up_bias, down_bias = weights
        of_hidden = (gate, up, gate_bias, up_bias)
        h = self.tape.play(hopper_dense.gate_up, (x,), of_hidden) if self.fused else self._hidden(x, *of_hidden)
        return linear(h, down, down_bias)

    def _hidden(self, x, gate, up, gate_bias, up_bias) -> Tensor:
        first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
        if gate is None:
            return self.acts.dense(first)
        # What falls back is asked neuron by neuron: torch's own curve of a gate that overflowed far below zero is NaN.
        value = self.acts.applied(first) if self.acts.falls_back else self.acts.dense(first)
        return value.mul_(self.acts.of_up(linear(x, up, up_bias)))


def dense(x, gate, up, down, gate_bias, up_bias, down_bias) -> Tensor:
    """The dense path: x [tokens, d_model] -> [tokens, d_model]."""
    return _Dense(x, gate, up).run(x, (gate, up, down, None, gate_bias, up_bias, down_bias), None)


def fuses(weight: Tensor) -> bool:
    """Whether `dense` is faster than torch's operations, also when those are compiled, for a layer with this gate or up
    weight and at least LEAST_DENSE tokens."""
    sizes = weight.dim() == 2 and all(n and n % hopper_pack.VECTOR == 0 for n in weight.shape)
    return sizes and hopper_pack.fits(weight)


def _hopper(x, gate, up, down_t, hot, tile, words) -> bool:
    first = up if gate is None else gate
    if (tile, words) != (256, 32) or x.shape[0] < LEAST_PACKED or not portable.pooled_takes(x.dtype, x.shape[1]):
        return False
    return hopper_pack.takes(x, first) and hopper_dense.takes(x, up, down_t)


class _Hopper(Call):
    """The packed path on Hopper: the gate GEMM packs its result, the portable kernels that read a pool compute the
    rest, and rows that the pool could not hold are computed densely.

    hot: how many neurons, the first ones, are computed densely before. packs: the module whose gate_pack is used,
    hopper_pack, or ampere to compare the two."""

    def __init__(self, hot: int, packs=hopper_pack) -> None:
        self.hot, self.packs, self.tape = hot, packs, Tape()

    def again(self, x, weights, stats):
        y = self.tape.replayed((x, stats))
        return super().again(x, weights, stats) if y is None else y

    def run(self, x, weights, stats):
        return self.tape.play(self._passes, (x, stats), weights)

    def _passes(self, x, stats, *weights) -> Tensor:
        y = empty(*x.shape, dtype=x.dtype, device=x.device)
        for piece, out in zip(x.split(_PIECE), y.split(_PIECE)):
            self._pass(piece, out, stats, *weights)
        return y

    def _pass(self, x, y, stats, gate, up, down, down_t, gate_bias, up_bias, down_bias) -> None:
        """At most _PIECE tokens, written into y."""
        x, gate, up, down_t = (t if t is None else t.contiguous() for t in (x, gate, up, down_t))
        start, of_neurons = None, (gate, up, gate_bias, up_bias, down_t)
        if self.hot:
            *of_hidden, hot_down_t = (t if t is None else t[: self.hot] for t in of_neurons)
            start = hopper_dense.down_sums(hopper_dense.gate_up(x, *of_hidden), hot_down_t)
        gate, up, gate_bias, up_bias, down_t = (t if t is None else t[self.hot :] for t in of_neurons)
        gate_bias, up_bias, down_bias = map(hopper_dense.fitting, (gate_bias, up_bias, down_bias))
        (tokens, d_model), device = x.shape, x.device
        lost = empty(1 + tokens, dtype=torch.int32, device=device)
        lost_x = empty(tokens, d_model, dtype=x.dtype, device=device)
        first, bias = (up, up_bias) if gate is None else (gate, gate_bias)
        packed, pool = self.packs.gate_pack(x, first, bias, lost)
        rest = (start, lost, lost_x, stats, None, y, HEAVY)
        if gate is None:
            portable.down_pooled(x, packed, pool, down_t, down_bias, *rest)
        else:
            portable.gated_pooled(x, packed, pool, up, down_t, up_bias, down_bias, *rest)
        layer = (gate, up, gate_bias, up_bias, down_t, down_bias)
        hopper_dense.finish_lost(lost, lost_x, *layer, start, y, packed, pool)


def sm90(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, hot, packs=hopper_pack) -> Tensor:
    """The packed path on Hopper, also where others would be chosen: x [tokens, d_model] -> [tokens, d_model]. hot,
    packs: see _Hopper."""
    weights = (gate, up, down, down_t, gate_bias, up_bias, down_bias)
    if not len(x):
        return torch.empty_like(x)
    x = x.contiguous()
    key = key_of(x, weights, stats, packs.__name__, hot, 256, 32)
    return _kept(key, lambda: _Hopper(hot, packs)).run(x, weights, stats)


def _first(x, weights, acts: Activation) -> Tensor:
    """What is packed or listed: the gate, or in a plain layer up, with what the activation makes of it. x may have any
    number of dimensions."""
    gate, up, _, _, gate_bias, up_bias, _ = weights
    g = linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)
    return g if acts.kind == "relu" else acts.applied(g)


def _lists(x, weights, acts: Activation) -> bool:
    _, up, _, down_t, _, _, down_bias = weights
    return x.is_cuda and not acts.both and not acts.falls_back and listed.takes(x, up, down_t, down_bias)


class _Listed(Call):
    """torch's gate GEMM, then the kernels that take its result as it is: for some hundred tokens. The hot neurons are
    computed like the others, see _Portable."""

    def __init__(self, acts: Activation = RELU) -> None:
        self.acts, self.tape = acts, Tape()

    def run(self, x, weights, stats):
        _, up, _, down_t, _, up_bias, down_bias = weights
        left = (None, down_t, None, down_bias) if weights[0] is None else (up, down_t, up_bias, down_bias)
        return self.tape.play(listed.listed, (x, _first(x, weights, self.acts)), left)

    def again(self, x, weights, stats):
        y = self.tape.replayed((x, _first(x, weights, self.acts))) if self.tape.recorded else None
        return super().again(x, weights, stats) if y is None else y


class _Portable(Call):
    """torch's gate GEMM, then the portable kernels: any width and type, any GPU from sm_75.

    The hot neurons are packed like the others: these kernels round their sums to x's type. A sum over the cold neurons
    that is rounded before the hot part is added may overflow float16 where the whole sum does not; and where the two
    parts nearly cancel, the error of that rounding would remain."""

    def __init__(self, hot: int, tile: int, words: int, acts: Activation = RELU) -> None:
        self.hot, self.tile, self.words, self.tape = hot, tile, words, Tape()
        self.acts, self.how = acts, {"signed": acts.falls_back}

    def run(self, x, weights, stats):
        gate, up, _, down_t, _, up_bias, down_bias = weights
        left = (down_t, down_bias) if gate is None else (up, down_t, up_bias, down_bias)
        made = (x, _first(x, weights, self.acts))
        y, packed = self.tape.play(self._plain if gate is None else self._gated, made, left)
        if stats is not None and x.shape[0] >= LEAST_COUNTED:
            _count(packed[:, self.hot // self.tile :], stats, self.words)
        return y

    def _plain(self, x, g, down_t, down_bias) -> tuple[Tensor, Tensor]:
        packed = portable.pack(g, self.tile, self.words, **self.how)
        return portable.down(packed, g, _NO_TAIL, down_t, down_bias, g.shape[1], self.tile, **self.how), packed

    def _gated(self, x, g, up, down_t, up_bias, down_bias) -> tuple[Tensor, Tensor]:
        packed, how = portable.pack(g, self.tile, self.words, **self.how), {**self.how, "both": self.acts.both}
        return portable.gated(x, packed, g, _NO_TAIL, up, down_t, up_bias, down_bias, self.tile, **how), packed


def twell(x, gate, up, down_t, gate_bias, up_bias, down_bias, tile, words) -> Tensor:
    """The portable kernels after torch's gate GEMM, also where others would be chosen: x [tokens, d_model] -> [tokens,
    d_model]."""
    x, weights = x.contiguous(), (gate, up, None, down_t, gate_bias, up_bias, down_bias)
    key = key_of(x, weights, None, "portable", 0, tile, words)
    return _kept(key, lambda: _Portable(0, tile, words)).run(x, weights, None)


def _count(packed: Tensor, stats: Tensor, words: int) -> None:
    """Add this call to stats: tokens, kept values, rows with a tile that overflows, rows computed densely (0 here)."""
    counts = packed[..., 0].long()
    seen = torch.stack(
        [counts.new_full((), packed.shape[0]), counts.sum(), (counts >= words).any(1).sum(), counts.new_zeros(())]
    )
    stats.add_(seen)
