"""The operator of a layer that is not being trained, on one of three paths (see twell_lab.ops.dispatch).

`torch.ops.twell_lab.infer` is registered for CPU and CUDA, with a fake implementation for torch.compile; it has no
gradient. `infer_counted` also adds counts of tokens and kept values to `stats`, so that a layer knows how many neurons
fire without a second pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from ..core import InputError
from ..formats import twell
from ..formats.twell import TILE, WORDS, check_geometry
from . import checks, cpu, dispatch, reference
from .activation import RELU, Activation

PATHS = ("dense", "twell", "hot_cold")
STATS = ("tokens", "kept", "pooled", "lost")  # what the four counters of `stats` count

_library = torch.library.Library("twell_lab", "FRAGMENT")
_WEIGHTS = (
    "Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? down_t, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias"
)
_HOW = "str path, int hot, int tile, int words, str acts='relu', float threshold=0.0, bool both=False"
# Two operators, because torch.compile does not take one that writes to an argument which may be None.
_library.define(f"infer({_WEIGHTS}, {_HOW}) -> Tensor")
_library.define(f"infer_counted({_WEIGHTS}, Tensor(a!) stats, {_HOW}) -> Tensor")


def infer(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    down_t: Tensor | None = None,
    stats: Tensor | None = None,
    path: str = "twell",
    hot: int = 0,
    tile: int = TILE,
    words: int = WORDS,
    acts: Activation = RELU,
) -> Tensor:
    """(act(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias on the named path, without gradients.

    x: [..., d_model] -> [..., d_model]; gate: None for a plain layer, where up goes through the activation. acts: the
    activation, a ReLU unless it is given (twell_lab.ops.activation).
    path: "dense" computes every neuron; "twell" only those that fire; "hot_cold" the first `hot` neurons densely and
    the others as twell does. For hot_cold, permute gate, up, down, down_t and the biases so that the neurons that fire
    most come first; `hot` is a multiple of 256. down_t: down transposed and contiguous, if the caller keeps one; with
    it hot_cold does not read `down`, which need not be permuted then. stats: contiguous int64 [4] on x's device, or
    None; tokens, kept values of the packed neurons, rows that overflowed into the pool and rows that were computed
    densely are added to it, where the kernels count them. Under torch.autocast everything is cast first. Raises
    InputError for arguments that do not fit, and where a gradient would be needed: `gated_ffn` and `plain_ffn` have
    one."""
    seen = x, (gate, up, down, down_t, gate_bias, up_bias, down_bias), stats, path, hot, tile, words, acts
    if not torch.compiler.is_compiling() and (y := _again(*seen)) is not None:
        return y
    check_geometry(tile, words)
    tensors = checks.layer(x, gate, up, down, gate_bias, up_bias, down_bias, down_t)
    x, gate, up, down, gate_bias, up_bias, down_bias, down_t = tensors
    _check_path(path, hot, up.shape[0], tile)
    _check_stats(stats, x)
    if acts is not RELU:
        _check_activation(acts, gate is not None)
    if checks.needs_gradient(*tensors):
        raise InputError(
            "infer has no gradient and an argument requires one; gated_ffn and plain_ffn are differentiable"
        )
    checks.refuse_transforms("infer")
    if path != "dense":
        down_t = checks.transposed(down, down_t)
    rows = x.reshape(-1, x.shape[-1])
    if rows.is_cuda:  # on a CPU the strides stay: with other strides torch's dense layer adds in another order
        rows, gate, up = rows.contiguous(), None if gate is None else gate.contiguous(), up.contiguous()
    counted = () if stats is None else (stats,)
    arguments = (rows, gate, up, down, down_t, gate_bias, up_bias, down_bias, *counted, path, hot, tile, words)
    if acts is not RELU:
        arguments = (*arguments, *acts)  # torch 2.11 cannot trace the sum of a tuple and an Activation
    # As in operators.py: torch's dispatcher is needed only where somebody watches the call, and costs time.
    kinds = torch.ops.twell_lab if checks.watched(*tensors) else _CUDA if rows.is_cuda else _CPU
    y = (kinds.infer_counted if counted else kinds.infer)(*arguments).view(x.shape)
    if kinds is _CUDA:
        _remember(*seen)
    return y


def prepared(
    x,
    weights: Sequence[Tensor | None],
    copied: dict[int, Tensor],
    stats,
    path: str,
    hot: int,
    tile: int,
    words: int,
    acts: Activation = RELU,
) -> Callable[[Tensor, list[Tensor | None]], Tensor] | None:
    """`infer` for any x like this one and these very weights, which it is given again, with nothing checked; None where
    this call has not passed every check before. weights: gate, up, down, gate_bias, up_bias, down_bias, down_t. copied:
    what is read in the place of a weight, by its number among these. stats: see `infer`. No weight is kept alive."""
    if type(x) is not Tensor or not x.is_contiguous():
        return None
    gate, up, down, *biases, down_t = (copied.get(number, t) for number, t in enumerate(weights))
    call = _kept_call(x, (gate, up, down, down_t, *biases), stats, path, hot, tile, words, acts)
    if call is None or not call.checked:
        return None
    places = [*copied.items()]

    def run(x: Tensor, weights: list[Tensor | None]) -> Tensor:
        for number, place in places:
            weights[number] = place
        gate, up, down, gate_bias, up_bias, down_bias, down_t = weights
        return call.again(x, (gate, up, down, down_t, gate_bias, up_bias, down_bias), stats)

    return run


def _again(x, weights, stats, *how) -> Tensor | None:
    """The result, if a call with the same key (dispatch.key_of) has passed every check before; otherwise None.

    What the checks depend on and the key does not hold is looked at here."""
    tensors = (x, stats, *weights)
    if any(t is not None and type(t) is not Tensor and type(t) is not Parameter for t in tensors):
        return None
    if x is None or not x.is_cuda:
        return None
    if torch._C._len_torch_dispatch_stack() > 0 or checks.transformed() or torch.is_autocast_enabled("cuda"):
        return None
    if checks.needs_gradient(*tensors):
        return None
    call = _kept_call(x, weights, stats, *how)
    if call is None or not call.checked:
        return None
    return call.again(x, weights, stats)


def _remember(x, weights, stats, *how) -> None:
    """Note that the call with this key passed every check, so that `_again` runs the next one. Where weights had to be
    cast or copied there is no call with this key: the kernels got the copies, at other addresses."""
    if (call := _kept_call(x, weights, stats, *how)) is not None:
        call.checked = True


def _kept_call(x, weights, stats, *how):
    try:
        key = dispatch.key_of(x, weights, stats, *how)
        return None if key is None else dispatch.calls.get(key)
    except (RuntimeError, TypeError, IndexError):  # tensors without address, strides or dimensions; unhashable values
        return None


def _check_activation(acts, gated: bool) -> None:
    if not isinstance(acts, Activation):
        raise InputError(f"acts is a {type(acts).__name__}; an Activation is accepted")
    acts.check(gated)


def _check_path(path: str, hot: int, d_ff: int, tile: int) -> None:
    if path not in PATHS:
        raise InputError(f"path is {path!r}; {', '.join(map(repr, PATHS))} are accepted")
    if isinstance(hot, bool) or not isinstance(hot, int):
        raise InputError(f"hot is {hot!r}; a whole number is accepted")
    if path != "hot_cold" and hot != 0:
        raise InputError(f"hot is {hot} on path {path!r}; 0 is accepted, and other values on 'hot_cold' only")
    if path == "hot_cold" and (hot % 256 or not 0 < hot < d_ff):
        raise InputError(f"hot is {hot} of {d_ff} neurons; multiples of 256 above 0 and below {d_ff} are accepted")


def _check_stats(stats: Tensor | None, x: Tensor) -> None:
    if stats is None:
        return
    if not isinstance(stats, Tensor) or stats.dtype != torch.int64 or tuple(stats.shape) != (len(STATS),):
        what = f"{stats.dtype} {list(stats.shape)}" if isinstance(stats, Tensor) else type(stats).__name__
        raise InputError(f"stats is {what}; an int64 tensor of {len(STATS)} is accepted")
    if not stats.is_contiguous():  # the kernels get its address alone
        raise InputError(f"stats has strides {stats.stride()}; a contiguous tensor is accepted")
    if stats.device != x.device:
        raise InputError(f"stats is on {stats.device} but the input is on {x.device}; one device is accepted")


@torch.no_grad()
def _cuda(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, *how):
    down_t, gate_bias, up_bias, down_bias = map(checks.plain, (down_t, gate_bias, up_bias, down_bias))
    return dispatch.infer(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, *how)


@torch.no_grad()
def _cpu(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, path, hot, tile, words, *acts):
    acts = Activation(*acts)
    with torch.autocast("cpu", enabled=False):  # the arguments were cast already
        first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
        if path == "dense":
            hidden = acts.dense(first)
            return linear(hidden if gate is None else hidden * acts.of_up(linear(x, up, up_bias)), down, down_bias)
        if stats is not None:
            kept = acts.keeps(first[:, hot:])
            stats += stats.new_tensor([x.shape[0], int(kept.sum()), 0, 0])
        # For float32 all neurons are packed, as on a GPU: those sums are float64, and a GEMM's are not. So they are for
        # other activations than the ReLU, whose hot part no kernel computes.
        if not hot or x.dtype == torch.float32 or acts != RELU:
            same = None if hot else down  # otherwise the neurons of down_t are permuted, and those of down may not be
            return _cpu_packed(x, first, gate, up, same, down_t, gate_bias, up_bias, down_bias, not hot, acts)
        bias = None if up_bias is None else up_bias[:hot]
        hidden = reference.relu(first[:, :hot])
        if gate is not None:
            hidden = torch.where(
                twell.fires(first[:, :hot]), hidden * linear(x, up[:hot], bias), torch.zeros_like(hidden)
            )
        start = hidden.float() @ down_t[:hot].float()  # float32, so that the whole sum is rounded only once
        cold_up, cold_bias = (None, None) if gate is None else (up[hot:], None if up_bias is None else up_bias[hot:])
        y = cpu.added_to(start, x, first[:, hot:].contiguous(), cold_up, down_t[hot:], cold_bias, down_bias)
        if gate is not None and not x.isfinite().all():
            y[reference.spoilt(x, twell.fires(first))] = torch.nan
        return y


def _cpu_packed(x, first, gate, up, down, down_t, gate_bias, up_bias, down_bias, follow, acts):
    if gate is None:
        return cpu.plain(first, down, down_t, down_bias, x, (up, up_bias), follow, acts)
    return cpu.gated(x, first, up, down, down_t, up_bias, down_bias, (gate, gate_bias), follow, acts)


class _Implementation:
    """Registers `run` as both operators for the dispatch key `key`; `infer` and `infer_counted` call it directly."""

    def __init__(self, run, key: str) -> None:
        self.infer = lambda *a: run(*a[:8], None, *a[8:])
        self.infer_counted = run
        torch.library.impl(_library, "infer", key)(self.infer)
        torch.library.impl(_library, "infer_counted", key)(self.infer_counted)


_CUDA, _CPU = _Implementation(_cuda, "CUDA"), _Implementation(_cpu, "CPU")


@torch.library.register_fake("twell_lab::infer", lib=_library)
def _(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, path, hot, tile, words, *acts):
    return x.new_empty(x.shape)


@torch.library.register_fake("twell_lab::infer_counted", lib=_library)
def _(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, stats, path, hot, tile, words, *acts):
    return x.new_empty(x.shape)
