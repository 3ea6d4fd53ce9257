"""Which kernels run one feed-forward layer on which GPU in inference: the one place that picks. In training: ops.train.

Three paths compute the same function:
  dense      every neuron, through the tensor cores;
  twell      the gate GEMM packs its positive values before they are written, and the rest of the layer is computed for
             these alone;
  hot_cold   the neurons that fire most (the first `hot` rows of the weights) are computed as in dense, the others as in
             twell, and both are added up before y is rounded.
The kernels: on Hopper, with many tokens, `sm90_`; from Ampere on, with few tokens, `sm80_decode`; otherwise, from
Turing on, torch's own gate GEMM, and behind it those that list or pack its values (`smxx_`).

A tile that overflows costs time for its row, never a value, and the host does not learn of it. Where the gate packs (on
Hopper, from LEAST_PACKED tokens on), what does not fit goes into a pool (ops.gate_pack); a row that the pool cannot
hold, or that has more than HEAVY values, is finished by `down_rows`: from its kept values where such rows are few, from
the dense weights where they are many. Elsewhere kernels read from the gate what a tile could not hold. What runs
depends on the layouts of the tensors alone. So it is decided, and its launches are written, once for each
(`_prepared`); all layers of a shape share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..cuda.launch import Call, Layout, aligned, capability, layout, run
from ..formats.twell import TILE, WORDS
from . import decode, down, down_rows, down_sums, gate_pack, gate_up, gated, listed, pack
from .activation import RELU, Activation
from .checks import is_turned

_NO_TAIL = (None, None, None)
_PIECE = 32768  # tokens of one pass: more are computed in several passes, so that the workspace stays bounded
# Tokens from which torch's product of the gate and `spread` are faster than the decode kernels.
LEAST_SPREAD = 17
# Tokens from which the packing GEMM computes the gate, whose tiles of 128 x 256 then fill the GPU. For fewer torch's
# product and the kernel that lists its kept values are faster (docs/kernels/smxx_listed.md).
LEAST_PACKED = 2048
# A row with more kept values than this is handed on like the lost rows: the one warp that would walk it would hold up
# its launch. Few such rows are shared among all blocks of a launch, many are computed densely.
HEAVY = 128
LEAST_DENSE = 256  # tokens from which relu(gate) * up in one GEMM takes the GPU less time than four operations of torch
# Tokens from which the GPU works for so long that the host's time for it is hidden, also in a model whose host is
# behind: torch's operations cost the host less than that GEMM's call.
LEAST_HIDDEN = 4096

Weights = tuple[Layout | None, Layout, Layout, Layout | None, Layout | None, Layout | None]
Run = Any  # a Call, or one of the classes below: called with x and the weights, or bound to the weights


def infer(
    x, gate, up, down, gate_bias, up_bias, down_bias, path: str, hot=0, tile=TILE, words=WORDS, acts: Activation = RELU
) -> Tensor:
    """Compute one layer on a GPU, without gradients: x [..., d_model] -> [..., d_model]. gate: None for a plain layer.
    hot: with path "hot_cold" a multiple of 256. Nothing is checked."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if path != "dense" and not is_turned(down):
        down = down.t().contiguous().t()
    gate, up, *biases = (w if w is None else w.contiguous() for w in (gate, up, gate_bias, up_bias, down_bias))
    x, weights = x.contiguous(), (gate, up, down, *biases)
    return _for(x, weights, path, hot, tile, words, acts)(x, *weights)


def prepare(x: Tensor, weights: tuple, path: str, hot: int, tile: int, words: int, acts: Activation):
    """Return a function that computes `infer` for any x like this one, and for these weights: what a layer keeps, as
    long as they lie where they do. x: not empty, contiguous, as gate, up and biases; down: stored transposed for all
    paths but "dense" (checks.is_turned)."""
    return _for(x, weights, path, hot, tile, words, acts).bind(*weights)


def _for(x: Tensor, weights: tuple, *how) -> Run:
    d_model = x.shape[-1]
    rows = Layout((x.numel() // d_model, d_model), (d_model, 1), x.dtype, x.data_ptr() & 15)
    return _prepared(x.device, rows, tuple(map(layout, weights)), *how)


@lru_cache(maxsize=1024)
def _prepared(
    device: torch.device, x: Layout, weights: Weights, path: str, hot: int, tile: int, words: int, acts: Activation
) -> Run:
    if path == "dense":
        return _dense(device, x, weights, acts)
    call = Call(device)
    rows, gate, up, down_, *biases = given = [call.input(each) for each in (x, *weights)]
    usual, lies = (tile, words) == (TILE, WORDS), aligned(*weights)
    spreads = acts == RELU and listed.takes(rows, up, down_.t(), biases[2], listed.MOST_SPREAD)
    few = len(rows) < LEAST_SPREAD or not spreads
    if not hot and usual and lies and few and decode.takes(call.capability, rows, up):
        call.returns(decode.decode(call, rows, gate, up, down_.t(), *biases, acts=acts))
        return call
    # Values of either sign are so many that packing them pays for few tokens alone. And in plain layers a row of x that
    # is not finite shows in every neuron, which its packed row does not say.
    if acts.falls_back and (gate is None or len(rows) > decode.MOST_TOKENS):
        return _dense(device, x, weights, acts)
    large = len(rows) >= LEAST_PACKED and down.pooled_takes(rows.dtype, rows.shape[1])
    packs = large and gate_pack.takes_sm90(call.capability, rows, up if gate is None else gate)
    if acts == RELU and usual and lies and packs and gate_up.takes(call.capability, rows, up, down_.t()):
        call.returns(_packed(call, *given, hot=hot))
        return call
    return _after_gate(device, x, weights, tile, words, acts)


# ---- the packed path on Hopper


def _packed(call: Call, x, gate, up, down_, gate_bias, up_bias, down_bias, hot: int, packs=gate_pack.gate_pack_sm90):
    """Write the packed path: the gate GEMM packs its result, the kernels that read a pool compute the rest, and rows
    that the pool could not hold are computed densely. hot: how many neurons, the first ones, are computed densely
    before. packs: the operation that packs."""
    y, down_t = call.empty(*x.shape, dtype=x.dtype), down_.t()
    for first in range(0, len(x), _PIECE):
        rows, out, start = x[first : first + _PIECE], y[first : first + _PIECE], None
        of_neurons = (gate, up, gate_bias, up_bias, down_t)
        if hot:
            *of_hidden, hot_down_t = (b if b is None else b[:hot] for b in of_neurons)
            start = down_sums.down_sums(call, gate_up.gate_up(call, rows, *of_hidden), hot_down_t)
        cold = [b if b is None else b[hot:] for b in of_neurons]
        cold_gate, cold_up, cold_gate_bias, cold_up_bias, cold_down_t = cold
        lost = call.empty(1 + len(rows), dtype=torch.int32)
        lost_x = call.empty(*rows.shape, dtype=x.dtype)
        kept, bias = (cold_up, cold_up_bias) if gate is None else (cold_gate, cold_gate_bias)
        packed, pool = packs(call, rows, kept, bias, lost)
        rest = (start, lost, lost_x, out, HEAVY)
        if gate is None:
            down.down_pooled(call, rows, packed, pool, cold_down_t, down_bias, *rest)
        else:
            gated.gated_pooled(call, rows, packed, pool, cold_up, cold_down_t, cold_up_bias, down_bias, *rest)
        layer = (cold_gate, cold_up, cold_gate_bias, cold_up_bias, cold_down_t, down_bias)
        down_rows.finish_lost(call, lost, lost_x, *layer, start, out, packed, pool)
    return y


# ---- after torch's own gate GEMM


class AfterGate(NamedTuple):
    """torch's gate GEMM, then the kernels that list its kept values, for some hundred tokens, or pack them: any width
    and type, any GPU from sm_75.

    Hot neurons are packed like the others: these kernels round their sums to x's type. A sum over the cold neurons that
    is rounded before the hot part is added may overflow float16 where the whole sum does not."""

    call: Call
    acts: Activation

    def __call__(self, x, gate, up, down_, gate_bias, up_bias, down_bias) -> Tensor:
        first = linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias)
        first = first if self.acts.kind == "relu" else self.acts.applied(first)
        return self.call(x, first, up, down_, up_bias, down_bias)

    def bind(self, gate, up, down_, gate_bias, up_bias, down_bias) -> Callable[[Tensor], Tensor]:
        call, acts = self.call.bind(up, down_, up_bias, down_bias), self.acts
        weight, bias = (up, up_bias) if gate is None else (gate, gate_bias)
        if acts.kind == "relu":
            return lambda x: call(x, linear(x, weight, bias))
        return lambda x: call(x, acts.applied(linear(x, weight, bias)))


def _after_gate(device: torch.device, x: Layout, weights: Weights, tile, words, acts: Activation, may_list=True) -> Run:
    gate, up, down_, _, up_bias, down_bias = weights
    d_ff = up.shape[0]
    call = Call(device)
    rows, kept = call.input(x), call.input(Layout((x.shape[0], d_ff), (d_ff, 1), x.dtype, 0))
    up_, down_t, up_bias_, down_bias_ = (call.input(each) for each in (up, down_, up_bias, down_bias))
    down_t, signed = down_t.t(), acts.falls_back
    if may_list and not acts.both and not signed and listed.takes(rows, up_, down_t, down_bias_):
        left = (None, down_t, None, down_bias_) if gate is None else (up_, down_t, up_bias_, down_bias_)
        lists = listed.spread if len(rows) <= listed.MOST_SPREAD else listed.listed
        y = lists(call, rows, kept, *left)
    else:
        packed = pack.pack(call, kept, tile, words, signed=signed)
        if gate is None:
            y = down.down(call, packed, kept, _NO_TAIL, down_t, down_bias_, d_ff, tile, signed=signed)
        else:
            left = (up_, down_t, up_bias_, down_bias_)
            y = gated.gated(call, rows, packed, kept, _NO_TAIL, *left, tile, signed=signed, both=acts.both)
    call.returns(y)
    return AfterGate(call, acts)


# ---- dense


class Fused(NamedTuple):
    """Every neuron, on Hopper: relu(gate) * up in one GEMM that writes neither factor, then torch's product."""

    call: Call

    def __call__(self, x, gate, up, down_, gate_bias, up_bias, down_bias) -> Tensor:
        h = self.call(x, gate, up, gate_bias, up_bias)
        return linear(h, down_, down_bias).view(x.shape)

    def bind(self, gate, up, down_, gate_bias, up_bias, down_bias) -> Callable[[Tensor], Tensor]:
        call = self.call.bind(gate, up, gate_bias, up_bias)
        return lambda x: linear(call(x), down_, down_bias).view(x.shape)


class ByTorch(NamedTuple):
    """Every neuron, by torch's operations."""

    acts: Activation

    def __call__(self, x, *weights) -> Tensor:
        return by_torch(x, *weights, acts=self.acts)

    def bind(self, *weights) -> Callable[[Tensor], Tensor]:
        return lambda x: by_torch(x, *weights, acts=self.acts)


def _dense(device: torch.device, x: Layout, weights: Weights, acts: Activation) -> Run:
    call = Call(device)
    rows, gate, up = (call.input(each) for each in (x, *weights[:2]))
    biases = tuple(call.input(each) for each in weights[3:5])
    there = (rows, *(b for b in (gate, up) if b is not None))
    if len(rows) < LEAST_DENSE or acts != RELU or not gate_up.takes(call.capability, *there, biases=biases):
        return ByTorch(acts)
    call.returns(gate_up.gate_up(call, rows, gate, up, *biases))
    return Fused(call)


def by_torch(x, gate, up, down_, gate_bias, up_bias, down_bias, acts: Activation = RELU) -> Tensor:
    """Compute the layer by torch's operations: x [..., d_model] -> [..., d_model]."""
    first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
    if gate is None:
        return linear(acts.dense(first), down_, down_bias)
    # What falls back is asked neuron by neuron: torch's own curve of a gate that overflowed far below zero is NaN.
    hidden = acts.applied(first) if acts.falls_back else acts.dense(first)
    return linear(hidden.mul_(acts.of_up(linear(x, up, up_bias))), down_, down_bias)


def fuses(weight: Tensor) -> bool:
    """Return whether the dense path is faster than torch's operations, also when those are compiled, for a layer with
    this gate or up weight and at least LEAST_HIDDEN tokens."""
    return weight.is_cuda and gate_up.takes(capability(weight.device.index), layout(weight), layout(weight))


def sm90(x, gate, up, down_, gate_bias, up_bias, down_bias, hot: int, packs=gate_pack.gate_pack_sm90) -> Tensor:
    """Compute a layer on the packed path on Hopper, also where others would be chosen. packs: the packing operation."""
    return run(_packed, x, gate, up, down_, gate_bias, up_bias, down_bias, hot=hot, packs=packs)


def portable(x, gate, up, down_, gate_bias, up_bias, down_bias, tile: int = TILE, words: int = WORDS) -> Tensor:
    """Compute a layer by the portable kernels after torch's gate GEMM, also where others would be chosen, and in the
    simulator: x [tokens, d_model] -> [tokens, d_model]."""
    weights = tuple(map(layout, (gate, up, down_, gate_bias, up_bias, down_bias)))
    after = _after_gate(x.device, layout(x), weights, tile, words, RELU, may_list=False)
    return after(x, gate, up, down_, gate_bias, up_bias, down_bias)
