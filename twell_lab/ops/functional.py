"""The functional face: pack a gate, compute with it, or compute a whole layer; and the operator in compiled code.

`torch.ops.twell_lab.infer` is a layer that is not being trained, on one of the paths of twell_lab.ops.dispatch. It is
registered for CPU and CUDA, with a fake implementation for torch.compile, and has no gradient.

The files of the operations are imported when they are first used."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..formats import TILE, WORDS, TwELL, as_matrix, check_geometry, fires, row_pointers, tail_of
from . import checks
from .activation import RELU, Activation

PATHS = ("dense", "twell", "hot_cold")

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "infer(Tensor x, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
    "str path, int hot, int tile, int words, str acts='relu', float threshold=0.0, bool both=False) -> Tensor",
    # `down` is stored transposed, and stays so in compiled code.
    tags=(getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),),
)


@torch.no_grad()
def _infer(x, gate, up, down, gate_bias, up_bias, down_bias, path, hot, tile, words, *acts):
    from . import dispatch

    weights = (gate, up, down, gate_bias, up_bias, down_bias)
    if x.is_cuda:
        return dispatch.infer(x, *weights, path, hot, tile, words, Activation(*acts))
    from . import cpu

    compute = dispatch.by_torch if path == "dense" else cpu.layer
    with torch.autocast("cpu", enabled=False):  # the arguments were cast already
        return compute(x.reshape(-1, x.shape[-1]), *weights, Activation(*acts)).view(x.shape)


for _device in ("CPU", "CUDA"):
    _library.impl("infer", _infer, _device)


@torch.library.register_fake("twell_lab::infer", lib=_library)
def _(x, gate, up, down, gate_bias, up_bias, down_bias, path, hot, tile, words, *acts):
    return x.new_empty(x.shape)


def infer(x, gate, up, down, gate_bias, up_bias, down_bias, path, hot=0, tile=TILE, words=WORDS, acts=RELU) -> Tensor:
    """Compute a layer without gradients on the named path: x [..., d_model] -> [..., d_model]. Nothing is checked.

    gate: None for a plain layer. In compiled code, and for tensors that something watches, it is one operator."""
    weights = (gate, up, down, gate_bias, up_bias, down_bias)
    if checks.watched(x, *weights):
        return torch.ops.twell_lab.infer(x, *weights, path, hot, tile, words, *acts)
    return _infer(x, *weights, path, hot, tile, words, *acts)


# ---- the public functions


def ffn(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    path: str = "twell",
    hot: int = 0,
    tile: int = TILE,
    words: int = WORDS,
    acts: Activation = RELU,
) -> Tensor:
    """Compute (act(x gate^T + gate_bias) * (x up^T + up_bias)) down^T + down_bias, skipping what the ReLU silences;
    without a gate act(x up^T + up_bias) down^T + down_bias.

    x: [..., d_model] -> [..., d_model]; gate and up [d_ff, d_model], down [d_model, d_ff]. path: "twell", "dense", or
    "hot_cold" with its `hot` first neurons dense. Differentiable in x, the weights and the biases with a ReLU
    (`train.train`). Under torch.autocast everything is cast first, as nn.Linear casts. Where down is not stored
    transposed (as `SparseFFN` stores it), a transpose is made on each call. Weights must be finite: the rows of a
    silent neuron are not read, so a NaN there does not reach the result as it does in the dense layer; on a CPU that is
    checked. Raises InputError for arguments that do not fit together. Method: arXiv 2603.23198, section 3."""
    check_geometry(tile, words)
    x, *weights = tensors = checks.check_layer(x, gate, up, down, gate_bias, up_bias, down_bias)
    d_ff = len(up)
    if path not in PATHS:
        raise InputError(f"path is {path!r}; {', '.join(map(repr, PATHS))} are accepted")
    if isinstance(hot, bool) or not isinstance(hot, int):
        raise InputError(f"hot is {hot!r}; a whole number is accepted")
    if path != "hot_cold" and hot != 0:
        raise InputError(f"hot is {hot} on path {path!r}; 0 is accepted, and other values on 'hot_cold' only")
    if path == "hot_cold" and (hot % TILE or not 0 < hot < d_ff):
        raise InputError(f"hot is {hot} of {d_ff} neurons; multiples of {TILE} above 0 and below {d_ff} are accepted")
    if not isinstance(acts, Activation):
        raise InputError(f"acts is a {type(acts).__name__}; an Activation is accepted")
    acts.check(gate is not None)
    if checks.transformed() or checks.needs_gradient(*tensors):
        from . import dispatch, train

        if acts != RELU:
            return dispatch.by_torch(*tensors, acts=acts)
        return train.train(*tensors, path="dense" if path == "dense" else "twell")[0]
    if not x.is_cuda and not torch.compiler.is_compiling():
        check_finite(dict(zip(checks.WEIGHTS, weights)))
    return infer(*tensors, path, hot, tile, words, acts)


def check_finite(weights: dict[str, Tensor | None]) -> None:
    """Raise InputError, naming the weight, where one holds a value that is not finite. Waits for the device."""
    there = {name: t for name, t in weights.items() if t is not None and not t.is_meta}
    if there and not bool(checks.all_finite([*there.values()])):
        bad = next(name for name, t in there.items() if not bool(t.isfinite().all()))
        raise InputError(f"{bad} holds a value that is not finite; finite weights are accepted")


def pack(gate: Tensor, tile: int = TILE, words: int = WORDS) -> TwELL:
    """Pack relu(gate) into TwELL, exact on every input. gate: [rows, d_ff]; positives and NaN are kept. gate may also
    be an array of CuPy's, or of another library that can share its memory (`formats.as_tensor`).

    On a GPU a kernel packs the tiles, and then the host waits once, to learn the length of the tail, as torch.nonzero
    does; what runs inside a layer needs no tail. Raises InputError for another shape, dtype or geometry."""
    gate = as_matrix(gate)
    if not gate.is_cuda:
        return TwELL.from_gate(gate, tile, words)
    checks.check_tensor("gate", gate)
    check_geometry(tile, words)
    from ..cuda.launch import run
    from . import pack as kernel

    gate = gate.detach().contiguous()
    packed = run(kernel.pack, gate, tile, words)
    rows = (packed[..., 0] >= words).any(1).nonzero()[:, 0]
    late = torch.zeros(gate.shape[0], dtype=torch.int64, device=gate.device)
    late[rows], column, value = tail_of(gate[rows], fires(gate[rows]), words - 1, tile)
    return TwELL(packed, row_pointers(late), column, value, tuple(gate.shape), gate.dtype, tile)


def packed_down(packed: TwELL, down: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute packed [rows, d_ff] x down^T + bias -> [rows, d_model], the second half of a plain ReLU layer.

    Packed values count as they are, of either sign (`TwELL.from_dense`). down: [d_model, d_ff]. Not differentiable."""
    return _of_packed(None, packed, None, down, None, bias)


def packed_gated(x: Tensor, packed: TwELL, up: Tensor, down: Tensor, up_bias=None, down_bias=None) -> Tensor:
    """Compute (g * (x up^T + up_bias)) down^T + down_bias over the packed gate values g, of either sign.

    x: [rows, d_model]. Not differentiable."""
    x, _, up, down, _, up_bias, down_bias = checks.check_layer(x, None, up, down, None, up_bias, down_bias)
    return _of_packed(x, packed, up, down, up_bias, down_bias)


@torch.no_grad()
def _of_packed(x, packed: TwELL, up, down, up_bias, down_bias) -> Tensor:
    """Compute `packed_gated`, or `packed_down` without x and up."""
    if not isinstance(packed, TwELL):
        raise InputError(f"packed is a {type(packed).__name__}; a TwELL, as pack() returns it, is accepted")
    how = {"dtype": packed.dtype, "device": packed.packed.device}
    checks.check_tensor("down", down, shape=(None, packed.shape[1]), **how)
    if down_bias is not None:
        checks.check_tensor("bias", down_bias, shape=(down.shape[0],), **how)
    if x is not None:
        checks.check_tensor("x", x, shape=(packed.shape[0], None), **how)
    if not packed.packed.is_cuda:
        from . import cpu

        with torch.autocast("cpu", enabled=False):  # the result has the dtype of the packed values
            return cpu.after_gate(x, packed.to_dense(), up, up_bias, down, down_bias)
    from ..cuda.launch import run
    from . import down as plain
    from . import gated

    down_t, tail = down.t().contiguous(), (packed.tail_pointer, packed.tail_column, packed.tail_value)
    gate = (packed.packed, None, tail)
    if x is None:
        return run(plain.down, *gate, down_t, down_bias, packed.shape[1], packed.tile)
    return run(gated.gated, x.contiguous(), *gate, up.contiguous(), down_t, up_bias, down_bias, packed.tile)
