"""The operator of a layer that is being trained: its output, its L1 norm, and gradients, on one of two paths.

"twell" keeps, for the backward pass, the entries that fired and nothing as wide as d_ff: for each row of x its
survivors' columns, gate values and up values (ops.survivors). Every gradient is made from them:

  dh = dy . down[:, j] + dl1 * sign(h)    where neuron j fired, and nowhere else; L1 reaches the gate through h = g * u
  dg = dh * u,  du = dh * g
  dx = dg gate + du up                    rows of the weights, per token
  dgate = dg^T x,  dup = du^T x,  ddown = dy^T h     rows of x and dy, per neuron: through a sparse transpose

A tile that holds more values than it has words for puts the rest into the pool (ops.gate_pack). A row that the pool or
the compact form cannot hold is lost (ops.survivors says when): it is computed from the dense weights, on the device and
exactly (ops.train_lost). Method: arXiv 2603.23198, section 3.3 (there with a fixed number of entries for each row, and
a dense tail for what exceeds it). On a CPU, for float32 and for shapes that the kernels do not take, the gate is
computed again in the backward pass, by torch's operations.

"dense" computes all neurons by torch's products, with one kernel between them in each direction (ops.train_dense).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.nn import Parameter
from torch.nn.functional import linear

from ..core import InputError
from ..cuda.launch import Buffer, Call, Layout, capability
from ..formats.twell import fires
from . import survivors as kept_entries
from .checks import check_layer, plain_eager, transformed, watched
from .columns import weight_gradients
from .gate_pack import gate_pack_sm80, gate_pack_sm90, takes_sm90
from .survivors import Survivors, capacity_for
from .train_dense import dense_gradients, dense_hidden
from .train_lost import FEW_HEAVY, lost_backward, lost_forward, tensor_core_rows
from .train_rows import hidden_gradient, input_gradient, up_values, weighted_rows
from .transpose import transposed

PATHS = ("dense", "twell")
_VECTOR = 8  # d_model and d_ff are multiples of it where the gate GEMM packs
_OLDEST = {torch.bfloat16: (8, 0), torch.float16: (7, 5)}  # compute capability, by type of values
Weights = tuple[Tensor | None, ...]  # gate, up, down, gate_bias, up_bias, down_bias

_library = torch.library.Library("twell_lab", "FRAGMENT")
_LAYER = "Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias"
# first, second: down transposed and up's values on the sparse path; gate's and up's values on the dense one.
_SAVED = "Tensor kept, Tensor first, Tensor second, Tensor spans, Tensor words, Tensor lost"
_library.define(f"train({_LAYER}, str path) -> (Tensor y, Tensor l1, {_SAVED})")
_library.define(f"train_backward(Tensor dy, Tensor? dl1, {_LAYER}, {_SAVED}, str path) -> Tensor[]")


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
    """Compute one feed-forward layer with gradients: (y, l1, kept).

    x: [..., d_model]; gate and up [d_ff, d_model], down [d_model, d_ff]; gate None for a plain layer. y: [...,
    d_model]. l1: float32 [...], the sum over neurons of |h| at each token, differentiable: add it to the loss with any
    factor. kept: int32 [...], how many neurons fired. path: "twell" computes and differentiates only neurons that fire;
    "dense" all of them, with one kernel forward and one backward for what lies between the matrix products. Both give
    the same function and the same gradients. Under torch.autocast everything is cast first, as
    torch.nn.functional.linear does. Raises InputError for arguments that do not fit together."""
    return train_layer(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)[:3]


def train_layer(
    x: Tensor, gate, up: Tensor, down: Tensor, gate_bias=None, up_bias=None, down_bias=None, *, path: str = "twell"
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute what `train_ffn` returns, and how many tokens did not fit into the compact form and were computed from
    the dense weights: an int32 scalar on the device; None where there is no compact form (path "dense", and where
    `takes` is False)."""
    y, l1, kept, lost = train(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)
    return y, l1.view(x.shape[:-1]), kept.view(x.shape[:-1]), None if lost is None else lost[0]


def train(x: Tensor, *weights: Tensor | None, path: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute y, of the shape of x; l1 and kept, [tokens]; and the list of lost rows (Survivors), None where there is
    none. For those who need no views of the others: each costs the host as much as a launch."""
    if path not in PATHS:
        raise InputError(f"path is {path!r}; {', '.join(map(repr, PATHS))} are accepted")
    shape = x.shape if isinstance(x, Tensor) else None
    if not _plain(x, *weights):
        x, *weights = check_layer(x, *weights)
        made = _checked(_rows(x), *weights, path=path)
    else:
        made = _Train.apply(path, _rows(x), *weights)
    y, l1, kept, lost = made
    return y if len(shape) == 2 else y.view(shape), l1, kept, lost


def _rows(x: Tensor) -> Tensor:
    """x [..., d_model] as [tokens, d_model]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _plain(x, gate, up, down, gate_bias, up_bias, down_bias) -> bool:
    """Return whether this is a call in plain eager code, of tensors on one GPU that fit together."""
    if torch.compiler.is_compiling() or not plain_eager() or not isinstance(up, Tensor) or up.dim() != 2:
        return False
    d_ff, d_model = up.shape
    if type(x) not in (Tensor, Parameter) or not x.is_cuda or x.dim() == 0 or x.shape[-1] != d_model or not up.numel():
        return False
    dtype, device, matrix = x.dtype, x.device, (d_ff, d_model)
    return dtype in (torch.bfloat16, torch.float16, torch.float32) and all(
        t is None
        or type(t) in (Tensor, Parameter)
        and (t.shape == shape and t.dtype == dtype and t.device == device and t.layout == torch.strided)
        for t, shape in (
            (gate, matrix),
            (up, matrix),
            (down, (d_model, d_ff)),
            (gate_bias, (d_ff,)),
            (up_bias, (d_ff,)),
            (down_bias, (d_model,)),
        )
    )


def _checked(x: Tensor, *weights: Tensor | None, path: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute what `train` returns for x [tokens, d_model] and weights that were checked, of any kind."""
    if transformed() or path == "dense" and (not x.is_cuda or torch.compiler.is_compiling()):
        return *_by_torch(x, *weights), None
    if not watched(x, *weights):
        return _Train.apply(path, x, *weights)
    y, l1, kept, *_, lost = torch.ops.twell_lab.train(x, *weights, path)
    return y, l1, kept, lost if lost.shape[0] else None


# ---- the sparse path


def takes(device: torch.device, dtype: torch.dtype, tokens: int, d_model: int, d_ff: int) -> bool:
    """Return whether the sparse kernels train a layer of these sizes on this device, for so many tokens at once."""
    if device.type != "cuda" or dtype not in _OLDEST or not tokens or d_ff % _VECTOR:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return kept_entries.takes(dtype, tokens, d_model, d_ff) and capability(index) >= _OLDEST[dtype]


def _sizes(x: Tensor, gate, up: Tensor, down: Tensor, gate_bias, up_bias, down_bias) -> tuple:
    """Return all that the calls of a layer depend on: kernels get contiguous tensors, of down the transpose if it has
    the strides of one."""
    biased = gate_bias is not None, up_bias is not None, down_bias is not None
    return x.device, x.dtype, *x.shape, up.shape[0], gate is not None, biased, down.stride() == (1, x.shape[1])


def _input(call: Call, dtype: torch.dtype, *shape: int) -> Buffer:
    return call.input(Layout(shape, (shape[1], 1) if len(shape) == 2 else (1,), dtype, 0))


@lru_cache(maxsize=256)
def _forward_call(device, dtype, tokens, d_model, d_ff, gated: bool, biased: tuple, turned: bool) -> Call | None:
    """The launches of a forward pass; None for what the kernels do not take. turned: down has the strides of a
    transpose."""
    if not takes(device, dtype, tokens, d_model, d_ff):
        return None
    call, matrix = Call(device), (d_ff, d_model)
    x, up = _input(call, dtype, tokens, d_model), _input(call, dtype, *matrix)
    down = _input(call, dtype, *(matrix if turned else matrix[::-1]))
    gate = _input(call, dtype, *matrix) if gated else call.input(None)
    biases = [_input(call, dtype, n) if has else call.input(None) for has, n in zip(biased, (d_ff, d_ff, d_model))]
    down_t = down if turned else transposed(call, down)
    first, bias = (gate, biases[0]) if gated else (up, biases[1])
    packs = gate_pack_sm90 if takes_sm90(call.capability, x, first) else gate_pack_sm80
    packed, pool = packs(call, x, first, bias)
    s, y = forward_rows(call, packed, pool, x, gate, up, down_t, *biases)
    call.returns((y, s.l1, s.kept, None if turned else down_t, s.ups, s.spans, s.words, s.lost))
    return call


def forward_rows(call: Call, packed, pool, x, gate, up, down_t, gate_bias, up_bias, down_bias):
    """Add what follows the packed gate to a call: (Survivors, y)."""
    most = tensor_core_rows(len(x), call.device)
    s = kept_entries.survivors(call, x, packed, pool, len(up), gate is not None, few=FEW_HEAVY, most=most)
    if gate is not None:
        up_values(call, x, s, up, up_bias)
    y = weighted_rows(call, s, down_t, down_bias)
    lost_forward(call, s.lost, x, gate, up, down_t, gate_bias, up_bias, down_bias, y, s.l1, s.kept)
    return s, y


@lru_cache(maxsize=256)
def _backward_call(device, dtype, tokens, d_model, d_ff, gated: bool, biased: tuple, turned: bool, slope: bool) -> Call:
    """The launches of a backward pass; slope: with a gradient in l1. Of a turned down the gradient is too."""
    call, entries = Call(device), capacity_for(tokens, d_ff)
    spans, words, lost, kept = (
        _input(call, torch.int32, *shape) for shape in ((tokens, 2), (entries,), (tokens + 2,), (tokens,))
    )
    ups = _input(call, torch.float32, entries) if gated else call.input(None)
    dy, x = (_input(call, dtype, tokens, d_model) for _ in range(2))
    dl1 = _input(call, torch.float32, tokens) if slope else call.input(None)
    up, down_t = (_input(call, dtype, d_ff, d_model) for _ in range(2))
    gate = _input(call, dtype, d_ff, d_model) if gated else call.input(None)
    biases = [_input(call, dtype, d_ff) if has else call.input(None) for has in biased[:2]]
    s = Survivors(spans, words, ups, lost, kept, None)
    dx, dgate, dup, ddown_t, *of_biases = backward_rows(call, s, dy, dl1, x, gate, up, down_t, *biases)
    call.returns((dx, dgate, dup, ddown_t if turned else transposed(call, ddown_t), *of_biases))
    return call


def backward_rows(call: Call, s: Survivors, dy, dl1, x, gate, up, down_t, gate_bias, up_bias) -> tuple:
    """Add the backward pass to a call: (dx, dgate, dup, ddown_t, dgate_bias, dup_bias)."""
    dh = hidden_gradient(call, dy, s, down_t, dl1)
    gradients = weight_gradients(call, x, dy, s, dh, len(up), gate_bias is not None or up_bias is not None)
    dx = input_gradient(call, s, dh, gate, up)
    lost_backward(call, s.lost, x, dy, dl1, gate, up, down_t, gate_bias, up_bias, dx, *gradients)
    *matrices, dgate_bias, dup_bias = gradients
    return dx, *matrices, None if gate_bias is None else dgate_bias, None if up_bias is None else dup_bias


def _contiguous(t: Tensor | None) -> Tensor | None:
    """t itself if it is contiguous and aligned to 16 bytes, as kernels read it; otherwise a copy that is."""
    if t is None or t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _sparse_forward(x, gate, up, down, *biases) -> tuple[Tensor | None, ...] | None:
    call = _forward_call(*(sizes := _sizes(x, gate, up, down, *biases)))
    if call is None:
        return None
    down = down.t() if sizes[-1] else down
    return call(*map(_contiguous, (x, up, down, gate, *biases)))


def _sparse_backward(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, kept, down_t, ups, spans, words, lost):
    sizes = _sizes(x, gate, up, down, gate_bias, up_bias, down_bias)
    if down_t is None or not down_t.numel():  # down has the strides of a transpose, or had them in the forward pass
        down_t = down.t()
    given = map(_contiguous, (dy, x, dl1, up, down_t, gate, gate_bias, up_bias))
    call = _backward_call(*sizes, dl1 is not None)
    made = call(spans, words, lost, kept, None if gate is None else ups, *given)
    dx, dgate, dup, ddown, *biases = made
    return dx, dgate, dup, ddown.t() if sizes[-1] else ddown, *biases, None if down_bias is None else dy.sum(0)


# ---- the dense path: torch's GEMMs, and one fused kernel between them (h is not kept, but computed again)


def _by_torch(x, gate, up, down, gate_bias, up_bias, down_bias):
    """(y, l1, kept), differentiable any number of times."""
    first = torch.relu(linear(x, up, up_bias) if gate is None else linear(x, gate, gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    kept = fires(first.detach()).sum(1, dtype=torch.int32)
    return linear(h, down, down_bias), h.abs().sum(1, dtype=_wide(h)), kept


_NOTHING: AbstractContextManager = nullcontext()


def _uncast(kind: str) -> AbstractContextManager:
    """A context without autocast on this kind of device. It is mostly off already, which costs less to see."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def _gate_and_up(x, gate, up, gate_bias, up_bias) -> tuple[Tensor, Tensor | None]:
    """g and u: the gate before its ReLU, and up. For a plain layer: up before its ReLU, and None."""
    if gate is None:
        return linear(x, up, up_bias), None
    return linear(x, gate, gate_bias), linear(x, up, up_bias)


def _dense_forward(x, gate, up, down, gate_bias, up_bias, down_bias) -> tuple[Tensor | None, ...]:
    """(y, l1, kept, g, u)."""
    with _uncast(x.device.type):
        g, u = _gate_and_up(x, gate, up, gate_bias, up_bias)
        if g.is_cuda:
            h, l1, kept = _hidden_call(g.device, g.dtype, *g.shape, gate is not None)(g, u)
        else:
            keep = fires(g)
            h = torch.where(keep, g if u is None else g * u, g.new_zeros(()))
            l1, kept = h.abs().sum(1, dtype=_wide(g)), keep.sum(1, dtype=torch.int32)
            if u is not None:  # a silent neuron's zero is not multiplied by an infinite u; torch and the GPU do it
                spoilt = ~x.isfinite().all(1) & ~keep.all(1)
                h[spoilt], l1[spoilt] = torch.nan, torch.nan
        return linear(h, down, down_bias), l1, kept, g, u


def _dense_backward(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, g, u) -> tuple[Tensor | None, ...]:
    """The gradients of the seven inputs; g None: to be computed again."""
    with _uncast(x.device.type):
        if g is None or not g.numel():
            g, u = _gate_and_up(x, gate, up, gate_bias, up_bias)
        h, dg, du = _middle_gradients(g, None if gate is None else u, dy @ down, dl1)
        ddown = dy.t() @ h
        del h
        if gate is None:
            dgate, dup, dx = None, dg.t() @ x, dg @ up
        else:
            dgate, dup = dg.t() @ x, du.t() @ x
            dx = torch.addmm(dg @ gate, du, up) if x.is_cuda else dg @ gate + du @ up
        of_up = dg if gate is None else du
        summed = ((gate_bias, dg), (up_bias, of_up), (down_bias, dy))
        return dx, dgate, dup, ddown, *(None if bias is None else values.sum(0) for bias, values in summed)


def _middle_gradients(g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None):
    """(h, dg, du) from dh, the gradient of the loss in h, and dl1, that in l1. dh may be overwritten."""
    if g.is_cuda:
        call = _gradients_call(g.device, g.dtype, *g.shape, u is not None, dl1 is not None)
        return call(g, u, dh, _contiguous(dl1))
    keep, zero = fires(g), g.new_zeros(())
    h = torch.where(keep, g if u is None else g * u, zero)
    if dl1 is not None:
        dh = (dh + dl1[:, None] * h.sign()).to(dh.dtype)
    if u is None:
        return h, torch.where(keep, dh, zero), None
    return h, torch.where(keep, dh * u, zero), torch.where(keep, dh * g, zero)


@lru_cache(maxsize=256)
def _hidden_call(device, dtype, tokens, d_ff, gated: bool) -> Call:
    call = Call(device)
    g, u = _input(call, dtype, tokens, d_ff), _input(call, dtype, tokens, d_ff) if gated else call.input(None)
    call.returns(dense_hidden(call, g, u))
    return call


@lru_cache(maxsize=256)
def _gradients_call(device, dtype, tokens, d_ff, gated: bool, slope: bool) -> Call:
    call = Call(device)
    g, u = _input(call, dtype, tokens, d_ff), _input(call, dtype, tokens, d_ff) if gated else call.input(None)
    dh = _input(call, dtype, tokens, d_ff)
    call.returns(dense_gradients(call, g, u, dh, _input(call, torch.float32, tokens) if slope else call.input(None)))
    return call


def _wide(t: Tensor) -> torch.dtype:
    """The type of sums over neurons: float64 for float64, otherwise float32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


# ---- both paths, as an operator of torch's and as a function


@torch.no_grad()
def _forward(x, *weights, path: str) -> tuple[Tensor | None, ...]:
    """y, l1, kept, then first, second, spans, words and lost of the operator, None for what there is not."""
    made = _sparse_forward(x, *weights) if path == "twell" and x.is_cuda else None
    if made is None:
        y, l1, kept, g, u = _dense_forward(x, *weights)
        made = (y, l1, kept, *((g, u) if path == "dense" else (None, None)), None, None, None)
    return made


@torch.no_grad()
def _backward(dy, dl1, *tensors, path: str) -> tuple[Tensor | None, ...]:
    """The gradients of x and the weights. tensors: x, the weights, and what `_forward` returned from `kept` on."""
    layer, saved = tensors[:7], tensors[7:]
    if saved[3] is not None and saved[3].numel():
        return _sparse_backward(dy, dl1, *tensors)
    return _dense_backward(dy, dl1, *layer, *saved[1:3])


def _types(x: Tensor, path: str) -> tuple[torch.dtype, ...]:
    """The types of what is saved behind `kept`."""
    return x.dtype, torch.float32 if path == "twell" else x.dtype, *(torch.int32,) * 3


@torch.library.impl(_library, "train", "CPU")
@torch.library.impl(_library, "train", "CUDA")
def _operator(x, gate, up, down, gate_bias, up_bias, down_bias, path):
    y, l1, kept, *saved = _forward(x, gate, up, down, gate_bias, up_bias, down_bias, path=path)
    # An operator returns no None.
    return y, l1, kept, *(x.new_empty(0, dtype=d) if t is None else t for t, d in zip(saved, _types(x, path)))


@torch.library.impl(_library, "train_backward", "CPU")
@torch.library.impl(_library, "train_backward", "CUDA")
def _backward_operator(*arguments):
    *tensors, path = arguments
    return [tensors[0].new_empty(0) if t is None else t for t in _backward(*tensors, path=path)]


@torch.library.register_fake("twell_lab::train", lib=_library)
def _(x, gate, up, down, gate_bias, up_bias, down_bias, path):
    tokens, (d_ff, d_model), nothing = x.shape[0], up.shape, [(0,)] * 5
    if path == "dense":
        shapes = [(tokens, d_ff), (tokens, d_ff) if gate is not None else (0,), *nothing[2:]]
    elif not takes(x.device, x.dtype, tokens, d_model, d_ff):
        shapes = nothing
    else:
        room, turned = capacity_for(tokens, d_ff), down.stride() == (1, d_model)
        rows = [(tokens, 2), (room,), (tokens + 2,)]
        shapes = [(0,) if turned else (d_ff, d_model), (0,) if gate is None else (room,), *rows]
    facts = x.new_empty(tokens, dtype=_wide(x)), x.new_empty(tokens, dtype=torch.int32)
    saved = (x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, _types(x, path)))
    return x.new_empty(x.shape), *facts, *saved


@torch.library.register_fake("twell_lab::train_backward", lib=_library)
def _(dy, dl1, x, gate, up, down, gate_bias, up_bias, down_bias, kept, first, second, spans, words, lost, path):
    made = [x.new_empty(0 if t is None else t.shape) for t in (x, gate, up, down, gate_bias, up_bias, down_bias)]
    if spans.numel() and down.stride() == (1, down.shape[0]):
        made[3] = x.new_empty(up.shape).t()
    return made


def _keep(ctx, path: str, inputs, saved, told) -> None:
    """Keep inputs and `saved` for the backward pass; `told` are the outputs that have no gradient."""
    ctx.path = path
    ctx.mark_non_differentiable(*(t for t in told if t is not None))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *saved)


def _gradients(ctx, dy: Tensor | None, dl1: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs."""
    everything = ctx.saved_tensors  # read only once: under torch.utils.checkpoint a second time would be an error
    inputs = everything[:7]
    dy = torch.zeros_like(inputs[0]) if dy is None else dy  # only l1 was used
    # With create_graph the gradients are themselves differentiated; with batched tensors there are many dy at once.
    if torch.is_grad_enabled() or any(
        t is not None and (is_batchedtensor(t) or is_legacy_batchedtensor(t)) for t in (dy, dl1)
    ):
        return _differentiable_gradients(dy, dl1, inputs)
    if not watched(dy, dl1, *inputs):
        return _backward(dy, dl1, *everything, path=ctx.path)
    dtypes = (torch.int32, *_types(inputs[0], ctx.path))
    saved = [inputs[0].new_empty(0, dtype=d) if t is None else t for t, d in zip(everything[7:], dtypes)]
    made = torch.ops.twell_lab.train_backward(dy.contiguous(), dl1, *inputs, *saved, ctx.path)
    return tuple(None if t is None else d for t, d in zip(inputs, made))


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
    """The operator without torch's dispatcher, which takes the host three times as long: (y, l1, kept, lost)."""

    @staticmethod
    def forward(ctx, path, *inputs):
        y, l1, *saved = _forward(*inputs, path=path)
        _keep(ctx, path, inputs, saved, (saved[0], saved[-1]))
        return y, l1, saved[0], saved[-1]

    @staticmethod
    def backward(ctx, dy, dl1, *_):
        return None, *_gradients(ctx, dy, dl1)
