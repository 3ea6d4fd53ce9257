"""The torch operators: what torch, its compiler and its autograd see (twell_lab.ops.dispatch picks the kernels).

`torch.ops.twell_lab.*` are registered for CPU (torch operations that skip the zeros) and CUDA (the kernels),
with fake implementations for torch.compile, and autograd. The functions of this module check their arguments
once and call the operators. Weights are as torch.nn.Linear stores them: gate and up [d_ff, d_model], down
[d_model, d_ff]; x is [..., d_model]. dtypes: bfloat16, float16, float32, the same for x and every weight.

`backend="simulator"` runs the CUDA kernels themselves on CPU tensors (twell_lab.simulator), slowly, for tests and
notebooks; it never runs unless it is asked for. No CUDA implementation waits for the GPU, but `pack`, which reads the
length of its tail. Where gradients are not needed, `infer` (inference.py) also has the dense and the hot/cold path."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..core import InputError
from ..formats import as_tensor, twell
from ..formats.twell import TILE, WORDS, TwELL, check_geometry, tail_of, word_dtype
from . import checks, copies, cpu, differentiable, dispatch, portable, reference

_library = torch.library.Library("twell_lab", "DEF")
_library.define("pack(Tensor gate, int tile, int words) -> Tensor")
_library.define(
    "packed_down(Tensor packed, Tensor tail_pointer, Tensor tail_column, Tensor tail_value, Tensor down_t, "
    "Tensor? bias, int tile) -> Tensor"
)
_library.define(
    "packed_gated(Tensor x, Tensor packed, Tensor tail_pointer, Tensor tail_column, Tensor tail_value, Tensor up, "
    "Tensor down_t, Tensor? up_bias, Tensor? down_bias, int tile) -> Tensor"
)
_library.define(
    "gated_ffn(Tensor x, Tensor gate, Tensor up, Tensor down, Tensor down_t, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias, int tile, int words) -> Tensor"
)
_library.define(
    "plain_ffn(Tensor x, Tensor up, Tensor down, Tensor down_t, Tensor? up_bias, Tensor? down_bias, int tile, "
    "int words) -> Tensor"
)


# ---- the public functions: check, then call the operator ----


def pack(gate: Tensor, tile: int = TILE, words: int = WORDS, *, backend: str | None = None) -> TwELL:
    """TwELL of relu(gate), exact on every input. gate: [rows, d_ff]; keeps positives and NaN. gate may also be an array
    of CuPy's, or of another library that can share its memory (`formats.as_tensor`).

    On a GPU a kernel packs the tiles, and then the host waits once, to learn the length of the tail, as torch.nonzero
    does; the operators that run inside a layer (`gated_ffn`, `plain_ffn`) need no tail.
    """
    checks.refuse_transforms("pack")
    gate = as_tensor("gate", gate)
    checks.check_tensor("gate", gate, dims=2)
    check_geometry(tile, words)
    if gate.shape[1] == 0:
        raise InputError(f"gate is {list(gate.shape)}; at least one column is needed")
    gate = gate.detach()
    simulated = checks.check_backend(backend, gate)
    if not gate.is_cuda and not simulated:
        return TwELL.from_gate(gate, tile, words)
    gate = gate.contiguous()
    packed = (_pack_cuda if simulated else torch.ops.twell_lab.pack)(gate, tile, words)
    over = (packed[..., 0] >= words).any(1)
    rows = over.nonzero()[:, 0]
    late = torch.zeros(gate.shape[0], dtype=torch.int64, device=gate.device)
    late[rows], column, value = tail_of(gate[rows], twell.fires(gate[rows]), words - 1, tile)
    pointer = torch.nn.functional.pad(late.cumsum(0), (1, 0))
    return TwELL(packed, pointer, column, value, tuple(gate.shape), gate.dtype, tile)


def packed_down(
    packed: TwELL, down: Tensor, bias: Tensor | None = None, *, down_t: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """packed [rows, d_ff] x down^T + bias -> [rows, d_model], the second half of a plain ReLU layer.

    Packed values count as they are, of either sign (`TwELL.from_dense`).

    down: [d_model, d_ff]; down_t: its transpose, contiguous, if the caller keeps one. Not differentiable.
    """
    checks.refuse_transforms("packed_down")
    checks.check_packed(packed)
    checks.check_together(packed.packed, packed.dtype, down=down, down_t=down_t, bias=bias)
    checks.check_shape("down", down, (None, packed.shape[1]))
    checks.check_bias("bias", bias, down.shape[0])
    down_t = checks.transposed(down, down_t)
    tail = (packed.tail_pointer, packed.tail_column, packed.tail_value)
    simulated = checks.check_backend(backend, packed.packed, down_t, bias)
    operator = _packed_down_cuda if simulated else torch.ops.twell_lab.packed_down
    return operator(packed.packed, *tail, down_t, bias, packed.tile)


def packed_gated(
    x: Tensor,
    packed: TwELL,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    down_t: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """(g * (x up^T + up_bias)) down^T + down_bias over the packed gate values g, of either sign. x: [rows, d_model].

    down_t: down transposed and contiguous, if the caller keeps one. Not differentiable.
    """
    checks.refuse_transforms("packed_gated")
    checks.check_packed(packed)
    named = dict(x=x, up=up, down=down, down_t=down_t, up_bias=up_bias, down_bias=down_bias)
    checks.check_together(packed.packed, packed.dtype, **named)
    checks.check_shape("x", x, (packed.shape[0], None))
    checks.check_weights(x.shape[1], packed.shape[1], None, up, down, None, up_bias, down_bias)
    down_t = checks.transposed(down, down_t)
    tail = (packed.tail_pointer, packed.tail_column, packed.tail_value)
    x, up = x.contiguous(), up.contiguous()
    simulated = checks.check_backend(backend, x, packed.packed, up, down_t, up_bias, down_bias)
    operator = _packed_gated_cuda if simulated else torch.ops.twell_lab.packed_gated
    return operator(x, packed.packed, *tail, up, down_t, up_bias, down_bias, packed.tile)


def gated_ffn(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    down_t: Tensor | None = None,
    tile: int = TILE,
    words: int = WORDS,
    backend: str | None = None,
) -> Tensor:
    """(relu(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias, skipping what the ReLU silences.

    x: [..., d_model] -> [..., d_model]. down_t: down transposed and contiguous, if the caller keeps one (SparseFFN
    does); otherwise it is made anew on each call. Differentiable in x, the weights and the biases. Under torch.autocast
    everything is cast first, as torch.nn.functional.linear does. Inside torch.func's transforms, export and traces
    torch's own operations compute it. Weights must be finite: the rows of a silent neuron are not read, so a NaN there
    does not reach the result as it does in the dense layer. On a CPU, where down_t is not given, InputError names a
    weight that is not finite; otherwise the values are not checked (SparseFFN checks them, once for each change).
    Method: arXiv 2603.23198, section 3."""
    checks.check_tensor("x", x)
    checks.check_tensor("gate", gate)
    biases = (gate_bias, up_bias, down_bias)
    return _layer(_gated_ffn_cpu, _gated_ffn_cuda, x, gate, up, down, biases, down_t, tile, words, backend)


def plain_ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    down_t: Tensor | None = None,
    tile: int = TILE,
    words: int = WORDS,
    backend: str | None = None,
) -> Tensor:
    """relu(x up^T + up_bias) down^T + down_bias, skipping what the ReLU silences. See gated_ffn."""
    biases = (None, up_bias, down_bias)
    return _layer(_plain_ffn_cpu, _plain_ffn_cuda, x, None, up, down, biases, down_t, tile, words, backend)


def _layer(on_cpu, on_cuda, x, gate, up, down, biases, down_t, tile, words, backend) -> Tensor:
    """gated_ffn, or plain_ffn where gate is None. on_cpu, on_cuda: the implementations of its operator."""
    check_geometry(tile, words)
    tensors = checks.layer(x, gate, up, down, *biases, down_t)
    x, gate, up, down, gate_bias, up_bias, down_bias, down_t = tensors
    # For training on a GPU the forward pass keeps what a sparse backward pass needs.
    if x.is_cuda and backend is None and checks.needs_gradient(*tensors) or checks.transformed():
        return differentiable.train_ffn(*tensors[:7])[0]
    if down_t is None:
        _check_unprepared(gate=gate, up=up, down=down, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
    down_t, simulated = checks.transposed(down, down_t), checks.check_backend(backend, *tensors)
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda or simulated:  # else the strides stay: with others torch's dense layer adds in another order
        rows, gate, up = (t if t is None else t.contiguous() for t in (rows, gate, up))
    if gate is None:
        arguments = (rows, up, down, down_t, up_bias, down_bias)
    else:
        arguments = (rows, gate, up, down, down_t, gate_bias, up_bias, down_bias)
    # torch's dispatcher and autograd cost more host time than a launch; they are needed only where the call is watched
    # or has gradients. Otherwise the implementation is called directly.
    run = on_cuda if x.is_cuda or simulated else on_cpu
    if not simulated and (checks.watched(*arguments) or checks.needs_gradient(*arguments)):
        run = torch.ops.twell_lab.plain_ffn if gate is None else torch.ops.twell_lab.gated_ffn
    return run(*arguments, tile, words).view(x.shape)


def _check_unprepared(**weights: Tensor | None) -> None:
    """Raise InputError for weights that are not finite, on a CPU and outside of training: for calls without down_t,
    whose caller has not prepared the weights."""
    on_gpu = any(w is not None and w.is_cuda for w in weights.values())
    if not on_gpu and not torch.compiler.is_compiling() and not checks.needs_gradient(*weights.values()):
        copies.check_finite(weights)


# ---- CPU ----


@torch.library.impl(_library, "pack", "CPU")
def _pack_cpu(gate, tile, words):
    return TwELL.from_gate(gate, tile, words).packed


@torch.library.impl(_library, "packed_down", "CPU")
def _packed_down_cpu(packed, tail_pointer, tail_column, tail_value, down_t, bias, tile):
    gate = _unpacked(packed, tail_pointer, tail_column, tail_value, down_t, tile)
    with torch.autocast("cpu", enabled=False):  # the result has the dtype of the packed values
        return cpu.plain(gate, None, down_t, bias, follow=False, acts=cpu.PACKED)


@torch.library.impl(_library, "packed_gated", "CPU")
def _packed_gated_cpu(x, packed, tail_pointer, tail_column, tail_value, up, down_t, up_bias, down_bias, tile):
    gate = _unpacked(packed, tail_pointer, tail_column, tail_value, down_t, tile)
    with torch.autocast("cpu", enabled=False):
        return cpu.gated(x, gate, up, None, down_t, up_bias, down_bias, follow=False, acts=cpu.PACKED)


def _unpacked(packed, tail_pointer, tail_column, tail_value, down_t, tile):
    shape = (packed.shape[0], down_t.shape[0])
    return TwELL(packed, tail_pointer, tail_column, tail_value, shape, down_t.dtype, tile).to_dense()


@torch.library.impl(_library, "gated_ffn", "CPU")
def _gated_ffn_cpu(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, tile, words):
    return cpu.gated(x, linear(x, gate, gate_bias), up, down, down_t, up_bias, down_bias, (gate, gate_bias))


@torch.library.impl(_library, "plain_ffn", "CPU")
def _plain_ffn_cpu(x, up, down, down_t, up_bias, down_bias, tile, words):
    return cpu.plain(linear(x, up, up_bias), down, down_t, down_bias, x, (up, up_bias))


# ---- CUDA ----


@torch.library.impl(_library, "pack", "CUDA")
def _pack_cuda(gate, tile, words):
    return portable.pack(gate, tile, words)


@torch.library.impl(_library, "packed_down", "CUDA")
def _packed_down_cuda(packed, tail_pointer, tail_column, tail_value, down_t, bias, tile):
    tail = (tail_pointer, tail_column, tail_value)
    return portable.down(packed, None, tail, down_t, bias, down_t.shape[0], tile)


@torch.library.impl(_library, "packed_gated", "CUDA")
def _packed_gated_cuda(x, packed, tail_pointer, tail_column, tail_value, up, down_t, up_bias, down_bias, tile):
    tail = (tail_pointer, tail_column, tail_value)
    return portable.gated(x, packed, None, tail, up, down_t, up_bias, down_bias, tile)


@torch.library.impl(_library, "gated_ffn", "CUDA")
def _gated_ffn_cuda(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, tile, words):
    down_t, gate_bias, up_bias, down_bias = map(checks.plain, (down_t, gate_bias, up_bias, down_bias))
    return dispatch.infer(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, None, "twell", 0, tile, words)


@torch.library.impl(_library, "plain_ffn", "CUDA")
def _plain_ffn_cuda(x, up, down, down_t, up_bias, down_bias, tile, words):
    down_t, up_bias, down_bias = map(checks.plain, (down_t, up_bias, down_bias))
    return dispatch.infer(x, None, up, down, down_t, None, up_bias, down_bias, None, "twell", 0, tile, words)


# ---- fake implementations: shapes and dtypes for torch.compile ----


@torch.library.register_fake("twell_lab::pack", lib=_library)
def _(gate, tile, words):
    shape = (gate.shape[0], (gate.shape[1] + tile - 1) // tile, words)
    return torch.empty(shape, dtype=word_dtype(gate.dtype), device=gate.device)


@torch.library.register_fake("twell_lab::packed_down", lib=_library)
def _(packed, tail_pointer, tail_column, tail_value, down_t, bias, tile):
    return down_t.new_empty(packed.shape[0], down_t.shape[1])


@torch.library.register_fake("twell_lab::packed_gated", lib=_library)
def _(x, packed, tail_pointer, tail_column, tail_value, up, down_t, up_bias, down_bias, tile):
    return x.new_empty(x.shape)


@torch.library.register_fake("twell_lab::gated_ffn", lib=_library)
def _(x, gate, up, down, down_t, gate_bias, up_bias, down_bias, tile, words):
    return x.new_empty(x.shape)


@torch.library.register_fake("twell_lab::plain_ffn", lib=_library)
def _(x, up, down, down_t, up_bias, down_bias, tile, words):
    return x.new_empty(x.shape)


# ---- autograd, by torch's operations. On a GPU the public functions use ops.differentiable, whose backward is sparse


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.tile, ctx.words = inputs
    tensors[len(tensors) // 2] = None  # down_t, the middle one of both signatures, holds the same values as down
    ctx.save_for_backward(*tensors)


def _gated_ffn_backward(ctx, dy):
    x, gate, up, down, _, gate_bias, up_bias, down_bias = ctx.saved_tensors
    g, u = linear(x, gate, gate_bias), linear(x, up, up_bias)
    keep = twell.fires(g)
    zero = torch.zeros((), dtype=g.dtype, device=g.device)
    hidden = torch.where(keep, g * u, zero)
    dh = dy @ down
    dg, du = torch.where(keep, dh * u, zero), torch.where(keep, dh * g, zero)
    biases = (_bias_grad(gate_bias, dg), _bias_grad(up_bias, du), _bias_grad(down_bias, dy))
    return dg @ gate + du @ up, dg.t() @ x, du.t() @ x, dy.t() @ hidden, None, *biases, None, None


def _plain_ffn_backward(ctx, dy):
    x, up, down, _, up_bias, down_bias = ctx.saved_tensors
    g = linear(x, up, up_bias)
    keep = twell.fires(g)
    dg = torch.where(keep, dy @ down, torch.zeros((), dtype=g.dtype, device=g.device))
    hidden = reference.relu(g)
    biases = (_bias_grad(up_bias, dg), _bias_grad(down_bias, dy))
    return dg @ up, dg.t() @ x, dy.t() @ hidden, None, *biases, None, None


def _no_backward(ctx, dy):
    raise InputError("packed_gated and packed_down have no gradient; gated_ffn and plain_ffn are differentiable")


def _bias_grad(bias, upstream):
    return None if bias is None else upstream.sum(0)


torch.library.register_autograd(
    "twell_lab::gated_ffn", _gated_ffn_backward, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd(
    "twell_lab::plain_ffn", _plain_ffn_backward, setup_context=_save_for_backward, lib=_library
)
for _name in ("packed_gated", "packed_down"):
    torch.library.register_autograd(f"twell_lab::{_name}", _no_backward, lib=_library)
