"""The operator of a layer that is being trained: its output, its L1 norm, and gradients, all without the silent
neurons.

`train_forward` keeps, for the backward pass, the entries that fired and nothing as wide as d_ff: for each row of x its
survivors' columns, gate values and up values (twell_lab.ops.train_rows). `train_backward` makes every gradient from
them:

  dh = dy . down[:, j] + dl1 * sign(h)    where neuron j fired, and nowhere else; L1 reaches the gate through h = g * u
  dg = dh * u,  du = dh * g
  dx = dg gate + du up                    rows of the weights, per token
  dgate = dg^T x,  dup = du^T x,  ddown = dy^T h     rows of x and dy, per neuron: through a sparse transpose

Rows that do not fit into the compact form are computed from the dense weights, on the device and exactly (train_lost).
On a CPU, for float32 and for shapes that the kernels do not take, the same operators compute the gate again and use
torch's own operations. Method: arXiv 2603.23198, section 3.3 (there with a fixed number of entries for each row, and a
dense tail for what exceeds it).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.nn import Parameter
from torch.nn.functional import linear

from ..core import InputError
from ..cuda import launcher
from ..cuda.tape import Tape
from ..formats import twell
from . import (
    ampere,
    checks,
    hopper_pack,
    reference,
    train_columns,
    train_dense,
    train_lost,
    train_rows,
    transpose,
)
from .kept import Kept, place

PATHS = ("dense", "twell")
_VECTOR = 8  # d_model and d_ff are multiples of it where the gate GEMM packs

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "train_forward(Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? "
    "down_bias) -> "
    "(Tensor y, Tensor l1, Tensor kept, Tensor down_t, Tensor spans, Tensor words, Tensor ups, Tensor lost)"
)
_library.define(
    "train_backward(Tensor dy, Tensor? dl1, Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, "
    "Tensor? up_bias, "
    "Tensor? down_bias, Tensor kept, Tensor down_t, Tensor spans, Tensor words, Tensor ups, Tensor lost) -> Tensor[]"
)
_library.define(
    "train_dense(Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? "
    "down_bias) -> "
    "(Tensor y, Tensor l1, Tensor kept, Tensor g, Tensor u)"
)
_library.define(
    "train_dense_backward(Tensor dy, Tensor? dl1, Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, "
    "Tensor? up_bias, Tensor? down_bias, Tensor g, Tensor u) -> Tensor[]"
)


def train_ffn(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    path: str = "twell",
) -> tuple[Tensor, Tensor, Tensor]:
    """One feed-forward layer with gradients: (y, l1, kept).

    x: [..., d_model]; gate and up [d_ff, d_model], down [d_model, d_ff]; gate None for a plain layer. y: [...,
    d_model]. l1: float32 [...], the sum over neurons of |h| at each token, differentiable: add it to the loss with any
    factor. kept: int32 [...], how many neurons fired. path: "twell" computes and differentiates only neurons that fire;
    "dense" all of them, with one kernel forward and one backward for what lies between the matrix products. Both give
    the same function and the same gradients. Under torch.autocast everything is cast first, as
    torch.nn.functional.linear does. Raises InputError for arguments that do not fit together."""
    return train_layer(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)[:3]


def train_layer(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    path: str = "twell",
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `train_ffn` returns, and how many tokens did not fit into the compact form and were computed from the dense
    weights: an int32 scalar on the device; None where there is no compact form (path "dense", and where `takes` is
    False)."""
    y, l1, kept, listed = _trained(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)
    lost = None if listed is None or not listed.shape[0] else listed[0]
    return y, l1.view(x.shape[:-1]), kept.view(x.shape[:-1]), lost


def train_output(*arguments: Tensor | None, path: str) -> Tensor:
    """The first of what `train_layer` returns, for a layer that reports nothing: each of the others costs the host a
    view."""
    return _trained(*arguments, path=path)[0]


# Calls that have passed every check of `train_layer`: by what of x the checks look at, and the weights.
_checked = Kept()


def _trained(x, *weights, path: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y, of the shape of x; l1 and kept, of one dimension; and the list of lost rows, None where there is none."""
    given = (_rows(x), *weights) if path in PATHS and _plain(x, *weights) else None
    key = given and (path, given[0].shape, given[0].stride(), x.dtype, x.device, *map(place, weights))
    if key and _checked.get(key):
        made = (_Sparse if path == "twell" else _Dense).apply(*given)
    else:
        x, *weights, _ = checks.layer(x, *weights)
        if path not in PATHS:
            raise InputError(f"path is {path!r}; {', '.join(map(repr, PATHS))} are accepted")
        made = _anew(_rows(x), *weights, path=path)
        if key:
            _checked.put(key, True)
    y, l1, kept, listed = made
    return y if x.dim() == 2 else y.view(x.shape), l1, kept, listed


def _anew(*arguments, path: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What `_trained` returns, for checked arguments that may be of any kind: x [tokens, d_model], and the weights."""
    x = arguments[0]
    if checks.transformed() or path == "dense" and (not x.is_cuda or torch.compiler.is_compiling()):
        return *_by_torch(*arguments), None
    if not checks.watched(*arguments):
        return (_Sparse if path == "twell" else _Dense).apply(*arguments)
    if path == "dense":
        return *torch.ops.twell_lab.train_dense(*arguments)[:3], None
    y, l1, kept, *_, listed = torch.ops.twell_lab.train_forward(*arguments)
    return y, l1, kept, listed


def _rows(x: Tensor) -> Tensor:
    """x [..., d_model] as [tokens, d_model]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _plain(x, *weights) -> bool:
    """Whether this is a call in plain eager code on a GPU, of tensors that a key tells apart."""
    return (
        not torch.compiler.is_compiling()
        and checks.plain_eager()
        and x is not None
        and all(
            t is None or (type(t) is Tensor or type(t) is Parameter) and t.layout == torch.strided
            for t in (x, *weights)
        )
        and x.is_cuda
        and x.dim() > 0
    )


def takes(x: Tensor, gate: Tensor | None, up: Tensor) -> bool:
    """Whether the sparse kernels train this layer: x [tokens, d_model] and the weights, 16-bit values on one GPU."""
    d_ff, d_model = up.shape
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not x.shape[0]:
        return False
    if d_ff % _VECTOR or not train_rows.takes(x.dtype, x.shape[0], d_model, d_ff):
        return False
    supported = (8, 0) if x.dtype == torch.bfloat16 else (7, 5)
    return launcher.capability(x.device.index) >= supported


# ---- the sparse path ----


_tapes = Kept()  # (forward, backward) Tape of each layer, by the addresses of its weights and the layout of x


def _tapes_of(x, *weights) -> tuple[Tape, Tape] | None:
    """The tapes of this layer, forward and backward, for an x of this layout; None where the kernels do not take it."""
    key = (x.shape, x.stride(), x.data_ptr() & 15, x.dtype, x.device, *map(place, weights))
    tapes = _tapes.get(key)
    if tapes is None and takes(x, *weights[:2]):
        checks.check_weights(x.shape[1], len(weights[1]), *weights)
        _tapes.put(key, tapes := (Tape(), Tape()))
    return tapes


@torch.library.impl(_library, "train_forward", "CUDA")
@torch.no_grad()
def _forward_cuda(x, gate, up, down, gate_bias, up_bias, down_bias):
    weights = (gate, up, down, gate_bias, up_bias, down_bias)
    tapes = _tapes_of(x, *weights)
    if tapes is None:
        return _forward_dense(x, *weights)
    y, l1, kept, down_t, spans, words, ups, lost = tapes[0].play(_forward_sparse, (x,), weights)
    return y, l1, kept, down_t, spans, words, x.new_empty(0, dtype=torch.float32) if ups is None else ups, lost


def _forward_sparse(x, gate, up, down, gate_bias, up_bias, down_bias) -> tuple[Tensor | None, ...]:
    x, gate, up, gate_bias, up_bias, down_bias = map(checks.plain, (x, gate, up, gate_bias, up_bias, down_bias))
    down_t = transpose.transposed(down)
    first, bias, *multiplied = (up, up_bias, None, None) if gate is None else (gate, gate_bias, up, up_bias)
    packs = hopper_pack if hopper_pack.takes(x, first) else ampere
    packed = packs.gate_pack(x, first, bias)
    s = train_rows.survivors(x, *packed, *multiplied, up.shape[0], few=train_lost.FEW_HEAVY, most=train_lost.held(x))
    y = train_rows.weighted_rows(s, down_t, down_bias)
    train_lost.lost_forward(s.lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, s.l1, s.kept)
    return y, s.l1, s.kept, down_t, s.spans, s.words, s.ups, s.lost


@torch.library.impl(_library, "train_backward", "CUDA")
@torch.no_grad()
def _backward_cuda(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, kept, down_t, spans, words, ups, lost):
    weights = (gate, up, down, gate_bias, up_bias, down_bias)
    tapes = _tapes_of(x, *weights)
    if tapes is None:
        return _backward_dense(dy, dl1, x, *weights)
    dy = checks.plain(dy)
    inputs = (dy, checks.plain(dl1), x, kept, down_t, spans, words, None if gate is None else ups, lost)
    found = tapes[1].play(_backward_sparse, inputs, weights)
    return [_or_nothing(x, t) for t in (*found, None if down_bias is None else dy.sum(0))]


def _backward_sparse(
    dy, dl1, x, kept, down_t, spans, words, ups, lost, gate, up, down, gate_bias, up_bias, down_bias
) -> tuple[Tensor | None, ...]:
    x, gate, up, gate_bias, up_bias = map(checks.plain, (x, gate, up, gate_bias, up_bias))
    s = train_rows.Survivors(spans, words, ups, lost, kept, None)
    dh = train_rows.hidden_gradient(dy, s, down_t, dl1)
    biased = gate_bias is not None or up_bias is not None
    gradients = train_columns.weight_gradients(x, dy, s, dh, up.shape[0], biased)
    dx = train_rows.input_gradient(s, dh, gate, up)
    train_lost.lost_backward(lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients)
    dgate, dup, ddown_t, dgate_bias, dup_bias = gradients
    biases = None if gate_bias is None else dgate_bias, None if up_bias is None else dup_bias
    return dx, dgate, dup, transpose.transposed(ddown_t), *biases


def _or_nothing(like: Tensor, t: Tensor | None) -> Tensor:
    """t, or an empty tensor for None, which an operator cannot return."""
    return like.new_empty(0) if t is None else t


# ---- the same operator by torch's operations: on a CPU, and for what the kernels do not take ----


@torch.library.impl(_library, "train_forward", "CPU")
@torch.no_grad()
def _forward_dense(*arguments):
    y, l1, kept, _, _ = _dense_forward(*arguments)
    return y, l1, kept, *_nothing(arguments[0])


def _nothing(x: Tensor) -> list[Tensor]:
    """Empty tensors in the place of what the sparse path keeps; the backward pass then computes the gate again."""
    return [x.new_empty(0, dtype=dtype) for dtype in (x.dtype, torch.int32, torch.int32, torch.float32, torch.int32)]


@torch.library.impl(_library, "train_backward", "CPU")
@torch.no_grad()
def _backward_dense_cpu(
    dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, kept, down_t, spans, words, ups, lost
):
    return _backward_dense(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias)


def _backward_dense(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias):
    g, u = _gate_and_up(x, gate, up, gate_bias, up_bias)
    return _dense_backward(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, g, _or_nothing(x, u))


# ---- the dense path: torch's GEMMs, and one fused kernel between them (h is not kept, but computed again) ----


def _by_torch(x, gate, up, down, gate_bias, up_bias, down_bias):
    """(y, l1, kept), differentiable any number of times."""
    first = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    return (
        linear(h, down, down_bias),
        h.abs().sum(1, dtype=_wide(h)),
        twell.fires(first.detach()).sum(1, dtype=torch.int32),
    )


_NOTHING: AbstractContextManager = nullcontext()


def _uncast(kind: str) -> AbstractContextManager:
    """A context without autocast on this kind of device. It is mostly off already, which costs less to see."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def _gate_and_up(x, gate, up, gate_bias, up_bias) -> tuple[Tensor, Tensor | None]:
    """g and u: the gate before its ReLU, and up. For a plain layer: up before its ReLU, and None."""
    with _uncast(x.device.type):
        if gate is None:
            return linear(x, up, up_bias), None
        return linear(x, gate, gate_bias), linear(x, up, up_bias)


@torch.library.impl(_library, "train_dense", "CPU")
@torch.library.impl(_library, "train_dense", "CUDA")
@torch.no_grad()
def _dense_forward(x, gate, up, down, gate_bias, up_bias, down_bias):
    g, u = _gate_and_up(x, gate, up, gate_bias, up_bias)
    h, l1, kept = _middle(g, u)
    # On a CPU a silent neuron's zero is not multiplied by an infinite u; the GPU's kernel does it, as torch does.
    if u is not None and not x.is_cuda:
        spoilt = reference.spoilt(x, twell.fires(g))
        h[spoilt], l1[spoilt] = torch.nan, torch.nan
    with _uncast(x.device.type):
        return linear(h, down, down_bias), l1, kept, g, _or_nothing(x, u)


@torch.library.impl(_library, "train_dense_backward", "CPU")
@torch.library.impl(_library, "train_dense_backward", "CUDA")
@torch.no_grad()
def _dense_backward(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, g, u):
    with _uncast(x.device.type):
        h, dg, du = _middle_gradients(g, None if gate is None else u, dy @ down, dl1)
        ddown = dy.t() @ h
        del h
        if gate is None:
            dgate, dup, dx = None, dg.t() @ x, dg @ up
        else:
            dgate, dup, dx = (
                dg.t() @ x,
                du.t() @ x,
                torch.addmm(dg @ gate, du, up) if x.is_cuda else dg @ gate + du @ up,
            )
        biases = (
            None if gate_bias is None else dg.sum(0),
            None if up_bias is None else (dg if gate is None else du).sum(0),
            None if down_bias is None else dy.sum(0),
        )
        return [_or_nothing(x, t) for t in (dx, dgate, dup, ddown, *biases)]


_middle_tapes = Kept()  # a Tape of each kernel between the products, by the layout of its inputs


def _played(run: Callable, *inputs: Tensor | None):
    """run(*inputs), by a tape of its own for each layout of the inputs."""
    key = (run, *(t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in inputs))
    tape = _middle_tapes.get(key)
    if tape is None:
        _middle_tapes.put(key, tape := Tape())
    return tape.play(run, inputs)


def _middle(g: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(h, l1, kept) from g and u as `_gate_and_up` returns them."""
    if g.is_cuda:
        return _played(train_dense.dense_hidden, g, u)
    keep = twell.fires(g)
    h = torch.where(keep, g if u is None else g * u, g.new_zeros(()))
    return h, h.abs().sum(1, dtype=_wide(g)), keep.sum(1, dtype=torch.int32)


def _middle_gradients(g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None):
    """(h, dg, du) from dh, the gradient of the loss in h, and dl1, that in l1. dh may be overwritten."""
    if g.is_cuda:
        return _played(train_dense.dense_gradients, g, u, dh, None if dl1 is None else dl1.contiguous())
    keep, zero = twell.fires(g), g.new_zeros(())
    h = torch.where(keep, g if u is None else g * u, zero)
    if dl1 is not None:
        dh = (dh + dl1[:, None] * h.sign()).to(dh.dtype)
    if u is None:
        return h, torch.where(keep, dh, zero), None
    return h, torch.where(keep, dh * u, zero), torch.where(keep, dh * g, zero)


def _wide(t: Tensor) -> torch.dtype:
    """The type of sums over neurons: float64 for float64, otherwise float32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


# ---- shapes for torch.compile ----


@torch.library.register_fake("twell_lab::train_forward", lib=_library)
def _(x, gate, up, down, gate_bias, up_bias, down_bias):
    new = lambda *shape, dtype: x.new_empty(shape, dtype=dtype)  # noqa: E731
    facts = (new(x.shape[0], dtype=_wide(x)), new(x.shape[0], dtype=torch.int32))
    if not takes(x, gate, up):
        return x.new_empty(x.shape), *facts, *_nothing(x)
    room = train_rows.capacity_for(x.shape[0], up.shape[0])
    return (
        x.new_empty(x.shape),
        *facts,
        new(*up.shape, dtype=x.dtype),
        new(x.shape[0], 2, dtype=torch.int32),
        new(room, dtype=torch.int32),
        new(0 if gate is None else room, dtype=torch.float32),
        new(x.shape[0] + 2, dtype=torch.int32),
    )


@torch.library.register_fake("twell_lab::train_backward", lib=_library)
def _(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, kept, down_t, spans, words, ups, lost):
    like = lambda t: x.new_empty(0 if t is None else t.shape)  # noqa: E731
    return [like(t) for t in (x, gate, up, down, gate_bias, up_bias, down_bias)]


@torch.library.register_fake("twell_lab::train_dense", lib=_library)
def _(x, gate, up, down, gate_bias, up_bias, down_bias):
    wide = (x.shape[0], up.shape[0])
    return (
        x.new_empty(x.shape),
        x.new_empty(x.shape[0], dtype=_wide(x)),
        x.new_empty(x.shape[0], dtype=torch.int32),
        x.new_empty(wide),
        x.new_empty(0 if gate is None else wide),
    )


@torch.library.register_fake("twell_lab::train_dense_backward", lib=_library)
def _(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, g, u):
    return [x.new_empty(0 if t is None else t.shape) for t in (x, gate, up, down, gate_bias, up_bias, down_bias)]


# ---- autograd ----


# Each operator exists twice: in torch.library, for calls that are watched (torch.compile, a tensor subclass, a mode),
# and as a plain autograd.Function, which costs the host a third of the time.


def _keeping(ctx, inputs, output):
    _, _, *saved = output
    _keep(ctx, inputs, saved, saved)


def _keep(ctx, inputs, saved, told) -> None:
    """Keep inputs and `saved` for the backward pass; `told` are the outputs that have no gradient."""
    ctx.mark_non_differentiable(*told)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *saved)


def _gradients(name: str, ctx, dy, dl1, saved_for: slice):
    """The gradients of all inputs by the operator `name`. saved_for: which of the saved outputs it takes."""
    everything = ctx.saved_tensors  # read only once: under torch.utils.checkpoint a second time would be an error
    inputs, saved = everything[:7], everything[7:]
    dy = torch.zeros_like(inputs[0]) if dy is None else dy  # only l1 was used
    # With create_graph the gradients are themselves differentiated; with batched tensors there are many dy at once.
    if torch.is_grad_enabled() or any(
        t is not None and (is_batchedtensor(t) or is_legacy_batchedtensor(t)) for t in (dy, dl1)
    ):
        return _differentiable_gradients(dy, dl1, inputs)
    given = (dy.contiguous(), dl1, *inputs, *saved[saved_for])
    if checks.watched(dy, dl1, *inputs):
        made = getattr(torch.ops.twell_lab, name)(*given)
    else:
        made = _BACKWARD[name][dy.device.type](*given)
    return tuple(None if t is None else d for t, d in zip(inputs, made))


def _differentiable_gradients(dy, dl1, inputs):
    """The same gradients by torch's operations on all neurons, so that autograd can differentiate them again."""
    again = torch.is_grad_enabled()
    with torch.autocast(dy.device.type, enabled=False), torch.enable_grad():
        # Views, so that each gets its own gradient, also where one input is computed from another or is the same.
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y, l1, _ = _by_torch(*inputs)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        results, upstream = ([y], [dy]) if dl1 is None else ([y, l1], [dy, dl1])
        found = iter(torch.autograd.grad(results, wanted, upstream, create_graph=again))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def _backward(ctx, dy, dl1, *_):
    return _gradients("train_backward", ctx, dy, dl1, slice(0, None))


def _dense_layer_backward(ctx, dy, dl1, *_):
    return _gradients("train_dense_backward", ctx, dy, dl1, slice(1, None))


_BACKWARD = {
    "train_backward": {"cuda": _backward_cuda, "cpu": _backward_dense_cpu},
    "train_dense_backward": {"cuda": _dense_backward, "cpu": _dense_backward},
}
torch.library.register_autograd("twell_lab::train_forward", _backward, setup_context=_keeping, lib=_library)
torch.library.register_autograd("twell_lab::train_dense", _dense_layer_backward, setup_context=_keeping, lib=_library)


class _Sparse(torch.autograd.Function):
    """train_forward and its gradient: (y, l1, kept, lost)."""

    @staticmethod
    def forward(ctx, *arguments):
        y, l1, kept, *saved = (_forward_cuda if arguments[0].is_cuda else _forward_dense)(*arguments)
        _keep(ctx, arguments, (kept, *saved), (kept, saved[-1]))
        return y, l1, kept, saved[-1]

    backward = staticmethod(_backward)


class _Dense(torch.autograd.Function):
    """train_dense and its gradient: (y, l1, kept, None)."""

    @staticmethod
    def forward(ctx, *arguments):
        y, l1, kept, *saved = _dense_forward(*arguments)
        _keep(ctx, arguments, (kept, *saved), (kept,))
        return y, l1, kept, None

    backward = staticmethod(_dense_layer_backward)
