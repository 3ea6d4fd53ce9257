"""The operator of a layer that is being trained: its output, its L1 norm, and gradients, on one of two paths.

"twell" keeps, for the backward pass, the entries that fired and nothing as wide as d_ff: for each row of x its
survivors' columns, gate values and up values (ops.survivors). Every gradient is made from them:

  dh = dy . down[:, j] + dl1 * sign(h)    where neuron j fired, and nowhere else; L1 reaches the gate through h = g * u
  dg = dh * u,  du = dh * g
  dx = dg gate + du up                    rows of the weights, per token
  dgate = dg^T x,  dup = du^T x,  ddown = dy^T h     rows of x and dy, per neuron: through a sparse transpose

A tile that overflows puts its values into a pool (ops.gate_pack). A row that the pool, or the compact form behind it,
cannot hold is called lost, and is put on a list (ops.survivors). It is computed from the dense weights, on the device:
its result is exact, only later (ops.train_lost). Method: arXiv 2603.23198, section 3.3
(there with a fixed number of entries for each row, and a dense tail for what exceeds it). On a CPU, for float32 and for
shapes that the kernels do not take, the gate is computed again in the backward pass, by torch's operations.

"dense" computes all neurons by torch's products, with one kernel between them in each direction (ops.train_dense)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.nn.functional import linear

from ..core import InputError
from ..cuda.launch import Buffer, Call, Layout, capability, lie, run
from ..formats.twell import fires
from . import survivors as kept_entries
from .checks import check_layer, transformed, watched
from .columns import weight_gradients
from .gate_pack import gate_pack_sm80, gate_pack_sm90, takes_sm90
from .survivors import Survivors, capacity_for
from .train_dense import dense_gradients, dense_hidden, gradients_reference, hidden_reference, wide
from .train_lost import FEW_HEAVY, lost_backward, lost_forward, tensor_core_rows
from .train_rows import hidden_gradient, input_gradient, transposed, up_values, weighted_rows

PATHS = ("dense", "twell")
_VECTOR = 8  # d_model and d_ff are multiples of it where the gate GEMM packs
_OLDEST = {torch.bfloat16: (8, 0), torch.float16: (7, 5)}  # compute capability, by type of values

_library = torch.library.Library("twell_lab", "FRAGMENT")
_LAYER = "Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias"
# facts: see `train`. first, second: down transposed on the sparse path; gate's and up's values on the dense one.
_SAVED = "Tensor facts, Tensor first, Tensor second"
_library.define(f"train({_LAYER}, str path) -> (Tensor y, Tensor l1, {_SAVED})")
_library.define(f"train_backward(Tensor dy, Tensor? dl1, {_LAYER}, {_SAVED}, str path) -> Tensor[]")


def train_ffn(
    x: Tensor, gate, up: Tensor, down: Tensor, gate_bias=None, up_bias=None, down_bias=None, *, path: str = "twell"
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one feed-forward layer with gradients: (y, l1, kept).

    x: [..., d_model]; gate and up [d_ff, d_model], down [d_model, d_ff]; gate None for a plain layer. y: [...,
    d_model]. l1: float32 [...], the sum over neurons of |h| at each token, differentiable: add it to the loss with any
    factor. kept: int32 [...], how many neurons fired. path: "twell" computes and differentiates only neurons that fire;
    "dense" all of them, with one kernel forward and one backward for what lies between the matrix products. Both give
    the same function and the same gradients. Under torch.autocast everything is cast first, as
    torch.nn.functional.linear does. Raises InputError for arguments that do not fit together."""
    y, l1, facts = train(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)
    return y, l1.view(x.shape[:-1]), counts(facts, l1.numel())[0].view(x.shape[:-1])


def train(x: Tensor, *weights: Tensor | None, path: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y, of the shape of x; l1, [tokens]; and facts, int32, for `counts`."""
    if path not in PATHS:
        raise InputError(f"path is {path!r}; {', '.join(map(repr, PATHS))} are accepted")
    x, *weights = check_layer(x, *weights)
    if transformed() or path == "dense" and (not x.is_cuda or torch.compiler.is_compiling()):
        return _by_torch(x, *weights)
    if watched(x, *weights):
        return torch.ops.twell_lab.train(x, *weights, path)[:3]
    return _Train.apply(_step(path, x, *weights), x, *weights)


def counts(facts: Tensor, tokens: int) -> tuple[Tensor, Tensor | None]:
    """Return how many neurons fired, int32 [tokens], and how many tokens did not fit into the compact form, a scalar or
    None, from the facts of so many tokens. Who does not ask is spared these views, as dear to the host as a launch."""
    return facts[:tokens], facts[lie(4 * tokens)[1] // 4] if len(facts) > tokens else None


def prepare(x: Tensor, *weights: Tensor | None, path: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function that does `train`, and checks nothing, for any x like this one: a plain tensor on a GPU. The
    weights have to stay of these shapes, types and strides."""
    step = _step(path, x, *weights)
    return lambda x: _Train.apply(step, x, *weights)


# ---- the sparse path


def takes(device: torch.device, dtype: torch.dtype, tokens: int, d_model: int, d_ff: int) -> bool:
    """Return whether the sparse kernels train a layer of these sizes on this device, for so many tokens at once."""
    if device.type != "cuda" or dtype not in _OLDEST or not tokens or d_ff % _VECTOR:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return kept_entries.takes(dtype, tokens, d_model, d_ff) and capability(index) >= _OLDEST[dtype]


def _input(call: Call, dtype: torch.dtype, *shape: int) -> Buffer:
    return call.input(Layout(shape, (shape[1], 1) if len(shape) == 2 else (1,), dtype, 0))


def _together(call: Call, s: Survivors, memory: Buffer | None = None) -> Buffer:
    """The facts of a step: all that its backward pass needs of the survivors."""
    return call.together(s.kept, s.lost, s.spans, s.words, s.ups, memory=memory)


def _length(tokens: int, d_ff: int, gated: bool) -> int:
    """How many int32 values `_together` takes."""
    entries = capacity_for(tokens, d_ff)
    values = tokens, tokens + 2, 2 * tokens, entries, entries if gated else 0
    return lie(*(4 * n for n in values))[-1] // 4


class _Sparse:
    """A step by the kernels, of a layer of these sizes: one call in each direction. biased: which biases there are.
    turned: down has the strides of a transpose, and so has its gradient."""

    path = "twell"

    def __init__(self, device, dtype, tokens, d_model, d_ff, gated: bool, biased: tuple, turned: bool) -> None:
        self.turned, matrix = turned, (d_ff, d_model)

        def layer(call: Call, down: tuple[int, int]) -> list[Buffer | None]:
            """Add x and the weights."""
            shapes = ((tokens, d_model), matrix, matrix, down, (d_ff,), (d_ff,), (d_model,))
            there = (True, gated, True, True, *biased)
            return [_input(call, dtype, *shape) if has else call.input(None) for has, shape in zip(there, shapes)]

        self.forward_call = call = Call(device)
        x, gate, up, down, *biases = layer(call, matrix if turned else matrix[::-1])
        down_t = down if turned else transposed(call, down)
        first, bias = (gate, biases[0]) if gated else (up, biases[1])
        packs = gate_pack_sm90 if takes_sm90(call.capability, x, first) else gate_pack_sm80
        packed, pool = packs(call, x, first, bias)
        s, y = forward_rows(call, packed, pool, x, gate, up, down_t, *biases)
        call.returns((y, s.l1, _together(call, s), None if turned else down_t), like=(x,))

        self.backward_call = call = Call(device)
        x, gate, up, down_t, *biases, _ = layer(call, matrix)
        entries = capacity_for(tokens, d_ff)
        shapes = (tokens, 2), (entries,), (tokens + 2,), (tokens,)
        spans, words, lost, kept = (call.empty(*shape, dtype=torch.int32) for shape in shapes)
        ups = call.empty(entries, dtype=torch.float32) if gated else None
        s = Survivors(spans, words, ups, lost, kept, None)
        _together(call, s, _input(call, torch.int32, _length(tokens, d_ff, gated)))
        dy, dl1 = _input(call, dtype, tokens, d_model), _input(call, torch.float32, tokens)  # dl1 may be None
        dx, dgate, dup, ddown_t, *of_biases = backward_rows(call, s, dy, dl1, x, gate, up, down_t, *biases)
        ddown = ddown_t if turned else transposed(call, ddown_t)
        call.returns((dx, dgate, dup, ddown, *of_biases), like=(x, gate, up, down_t))

    def forward(self, x, gate, up, down, *biases) -> tuple[Tensor | None, ...]:
        """y, l1, facts, and what else is saved."""
        down = down.t() if self.turned else down
        return *self.forward_call(*_read(x, gate, up, down, *biases)), None

    def backward(self, dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, facts, down_t, _):
        """The gradients of the seven inputs."""
        if down_t is None or self.turned:  # down has the strides of a transpose, or had them in the forward pass
            down_t = down.t()
        given = _read(x, gate, up, down_t, gate_bias, up_bias, None, facts, dy, dl1)
        dx, dgate, dup, ddown, *of_biases = self.backward_call(*given)
        of_down = None if down_bias is None else _rows(dy).sum(0)
        return dx, dgate, dup, ddown.t() if self.turned else ddown, *of_biases, of_down


@lru_cache(maxsize=256)
def _sparse(device, dtype, tokens, d_model, d_ff, *how) -> _Sparse | None:
    """The step for these sizes; None for what the kernels do not take."""
    if not takes(device, dtype, tokens, d_model, d_ff):
        return None
    return _Sparse(device, dtype, tokens, d_model, d_ff, *how)


def forward_rows(call: Call, packed, pool, x, gate, up, down_t, gate_bias, up_bias, down_bias):
    """Add what follows the packed gate to a call: (Survivors, y)."""
    most = tensor_core_rows(len(x), call.device)
    s = kept_entries.survivors(call, x, packed, pool, len(up), gate is not None, few=FEW_HEAVY, most=most)
    if gate is not None:
        up_values(call, x, s, up, up_bias)
    y = weighted_rows(call, s, down_t, down_bias)
    lost_forward(call, s.lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, s.l1, s.kept)
    return s, y


def backward_rows(call: Call, s: Survivors, dy, dl1, x, gate, up, down_t, gate_bias, up_bias) -> tuple:
    """Add the backward pass to a call: (dx, dgate, dup, ddown_t, dgate_bias, dup_bias)."""
    dh = hidden_gradient(call, dy, s, down_t, dl1)
    gradients = weight_gradients(call, x, dy, s, dh, len(up), gate_bias is not None or up_bias is not None)
    dx = input_gradient(call, s, dh, gate, up)
    lost_backward(call, s.lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients)
    *matrices, dgate_bias, dup_bias = gradients
    return dx, *matrices, None if gate_bias is None else dgate_bias, None if up_bias is None else dup_bias


def _read(*tensors: Tensor | None) -> list[Tensor | None]:
    """These tensors as kernels read them, contiguous and aligned to 16 bytes: themselves, or copies."""
    return [
        t
        if t is None or t.is_contiguous() and not t.data_ptr() & 15
        else t.clone(memory_format=torch.contiguous_format)
        for t in tensors
    ]


# ---- the dense path: torch's GEMMs, and one fused kernel between them (h is not kept, but computed again)


def _by_torch(x, gate, up, down, gate_bias, up_bias, down_bias):
    """(y, l1, facts) of x [..., d_model], differentiable any number of times."""
    first = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    kept = fires(first.detach()).sum(-1, dtype=torch.int32)
    return linear(h, down, down_bias), h.abs().sum(-1, dtype=wide(h)).flatten(), kept.flatten()


def _gate_and_up(x, gate, up, gate_bias, up_bias) -> tuple[Tensor, Tensor | None]:
    """g and u: the gate before its ReLU, and up. For a plain layer: up before its ReLU, and None."""
    if gate is None:
        return linear(x, up, up_bias), None
    return linear(x, gate, gate_bias), linear(x, up, up_bias)


def _rows(x: Tensor) -> Tensor:
    """x [..., d_model] as [tokens, d_model]."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class _Dense(NamedTuple):
    """A step on all neurons. path: "dense" saves g and u, "twell" computes them again."""

    path: str

    def forward(self, x, gate, up, down, gate_bias, up_bias, down_bias) -> tuple[Tensor | None, ...]:
        """y, l1, facts, g, u."""
        rows = _rows(x)
        with torch.autocast(x.device.type, enabled=False):
            g, u = _gate_and_up(rows, gate, up, gate_bias, up_bias)
            h, l1, kept = run(dense_hidden, g, u) if g.is_cuda else hidden_reference(g, u)
            saved = (g, u) if self.path == "dense" else (None, None)
            # No view, so that it may be changed in place.
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            if down_bias is None:
                torch.mm(h, down.t(), out=_rows(y))
            else:
                torch.addmm(down_bias, h, down.t(), out=_rows(y))
            return y, l1, kept, *saved

    def backward(self, dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, _, g, u):
        """The gradients of the seven inputs."""
        shape, x, dy = x.shape, _rows(x), _rows(dy)
        with torch.autocast(x.device.type, enabled=False):
            if g is None:
                g, u = _gate_and_up(x, gate, up, gate_bias, up_bias)
            dh = dy @ down
            h, dg, du = run(dense_gradients, g, u, dh, *_read(dl1)) if g.is_cuda else gradients_reference(g, u, dh, dl1)
            ddown = dy.t() @ h
            del h
            if gate is None:
                dgate, dup, dx = None, dg.t() @ x, dg @ up
            else:
                dgate, dup = dg.t() @ x, du.t() @ x
                dx = torch.addmm(dg @ gate, du, up) if x.is_cuda else dg @ gate + du @ up
            of_up = dg if gate is None else du
            summed = ((gate_bias, dg), (up_bias, of_up), (down_bias, dy))
            of_biases = (None if bias is None else values.sum(0) for bias, values in summed)
            return dx.view(shape), dgate, dup, ddown, *of_biases


# ---- both paths, as an operator of torch's and as a function


def _step(path: str, x, gate, up, down, *biases) -> _Sparse | _Dense:
    """The step of a layer: all that it depends on is their sizes."""
    if path == "dense" or not x.is_cuda:
        return _Dense(path)
    d_ff, d_model = up.shape
    how = gate is not None, tuple([bias is not None for bias in biases]), down.stride() == (1, d_model)
    return _sparse(x.device, x.dtype, x.numel() // d_model, d_model, d_ff, *how) or _Dense(path)


def _there(like: Tensor, tensors) -> list[Tensor]:
    """These tensors, with empty ones for None: an operator has no None among its results."""
    return [like.new_empty(0) if t is None else t for t in tensors]


@torch.library.impl(_library, "train", "CompositeExplicitAutograd")
def _operator(*arguments):
    *layer, path = arguments
    return tuple(_there(layer[0], _step(path, *layer).forward(*layer)))


@torch.library.impl(_library, "train_backward", "CompositeExplicitAutograd")
def _backward_operator(dy, dl1, *arguments):
    *layer, facts, first, second, path = arguments
    saved = (t if t.numel() else None for t in (first, second))
    return _there(dy, _step(path, *layer).backward(dy, dl1, *layer, facts, *saved))


@torch.library.register_fake("twell_lab::train", lib=_library)
def _(x, gate, up, down, gate_bias, up_bias, down_bias, path):
    tokens, (d_ff, d_model), gated = math.prod(x.shape[:-1]), up.shape, gate is not None
    length, first, second = tokens, (0,), (0,)
    if path == "dense":
        first, second = (tokens, d_ff), (tokens, d_ff) if gated else (0,)
    elif takes(x.device, x.dtype, tokens, d_model, d_ff):
        length, first = _length(tokens, d_ff, gated), (0,) if down.stride() == (1, d_model) else (d_ff, d_model)
    l1, facts = x.new_empty(tokens, dtype=wide(x)), x.new_empty(length, dtype=torch.int32)
    return x.new_empty(x.shape), l1, facts, x.new_empty(first), x.new_empty(second)


@torch.library.register_fake("twell_lab::train_backward", lib=_library)
def _(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, facts, first, second, path):
    made = [x.new_empty(0 if t is None else t.shape) for t in (x, gate, up, down, gate_bias, up_bias, down_bias)]
    tokens, (d_ff, d_model) = math.prod(x.shape[:-1]), up.shape
    if path == "twell" and down.stride() == (1, d_model) and takes(x.device, x.dtype, tokens, d_model, d_ff):
        made[3] = x.new_empty(up.shape).t()
    return made


def _keep(ctx, step: _Sparse | _Dense | str, inputs, saved, told) -> None:
    """Keep inputs and `saved` for the backward pass. step: the path, of the operator. told: outputs of no gradient."""
    ctx.step = step
    ctx.mark_non_differentiable(*told)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *saved)


def _gradients(ctx, dy: Tensor | None, dl1: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs."""
    everything = ctx.saved_tensors  # read only once: under torch.utils.checkpoint a second time would be an error
    inputs, step = everything[:7], ctx.step
    dy = torch.zeros_like(inputs[0]) if dy is None else dy  # only l1 was used
    # With create_graph the gradients are themselves differentiated; with batched tensors there are many dy at once.
    if torch.is_grad_enabled() or _batched(dy) or _batched(dl1):
        return _differentiable_gradients(dy, dl1, inputs)
    if not isinstance(step, str) and not watched(dy, dl1):
        return step.backward(dy, dl1, *everything)
    saved, path = _there(inputs[0], everything[7:]), step if isinstance(step, str) else step.path
    made = torch.ops.twell_lab.train_backward(dy.contiguous(), dl1, *inputs, *saved, path)
    return tuple(None if t is None else d for t, d in zip(inputs, made))


def _batched(t: Tensor | None) -> bool:
    return t is not None and (is_batchedtensor(t) or is_legacy_batchedtensor(t))


def _differentiable_gradients(dy: Tensor, dl1: Tensor | None, inputs) -> tuple[Tensor | None, ...]:
    """The same gradients by torch's operations on all neurons, so that autograd can differentiate them again."""
    further = torch.is_grad_enabled()
    with torch.autocast(dy.device.type, enabled=False), torch.enable_grad():
        # Views, so that each gets its own gradient, also where one input is computed from another or is the same.
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y, l1, _ = _by_torch(*inputs)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        results, upstream = ([y], [dy]) if dl1 is None else ([y, l1], [dy, dl1])
        found = iter(torch.autograd.grad(results, wanted, upstream, create_graph=further))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


torch.library.register_autograd(
    "twell_lab::train",
    lambda ctx, dy, dl1, *_: (*_gradients(ctx, dy, dl1), None),
    setup_context=lambda ctx, inputs, output: _keep(ctx, inputs[-1], inputs[:-1], output[2:], output[2:]),
    lib=_library,
)


class _Train(torch.autograd.Function):
    """The operator without torch's dispatcher, which takes the host three times as long: (y, l1, facts)."""

    @staticmethod
    def forward(ctx, step, *inputs):
        y, l1, *saved = step.forward(*inputs)
        _keep(ctx, step, inputs, saved, saved[:1])
        return y, l1, saved[0]

    @staticmethod
    def backward(ctx, dy, dl1, _):
        return None, *_gradients(ctx, dy, dl1)
