"""A layer in compiled code: one operator, behind which it runs as in eager code.

torch.compile can fuse nothing into the kernels, so all it has to know is what a layer reads and writes. And whatever of
a layer it sees while it traces, it asks after before each call (guards), which took the host longer than the calls of
our operators did (docs/calls.md). So one string says all that a layer decides before, and each module and function that
is traced is named once. The operator finds the layer by its handle, a buffer without elements: so compiled code names
no layer, and serves all that are alike. What a layer keeps for itself, its copies and counters, compiled code does not
see."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, relu
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.nn.functional import linear

from ..ops import dispatch, inference
from .choice import DENSE, Choice, LayerPlan
from .paths import PATHS
from .paths.path import hold

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "layer(Tensor x, Tensor handle, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias) -> Tensor"
)


HANDLE = "handle"  # the buffer's name
# What a layer is in compiled code: one operator; torch's operations, where it is dense, or its kernels take the host
# more time than they save; or all that it does, seen while torch traces it.
ONE, TORCH, SEEN = "one operator", "torch's operations", "seen"
_operator = torch.ops.twell_lab.layer


def ways(plan: LayerPlan | Choice | None, choices: list[tuple[int, Choice]]) -> list[tuple[int, str]]:
    """What a layer with this plan and these choices, for classes of token counts, is in each of them. The last class
    holds all larger counts, too."""
    found: list[tuple[int, str]] = []
    for at, (tokens, choice) in enumerate(choices):
        if PATHS[choice.path].opaque:
            found.append((tokens, ONE))
            continue
        if choice == DENSE:  # for so many tokens that the host does not matter, there is a kernel
            last = at == len(choices) - 1
            found.append((dispatch.LEAST_HIDDEN - 1 if last else min(tokens, dispatch.LEAST_HIDDEN - 1), TORCH))
        if choice != DENSE or found[-1][0] != tokens:
            found.append((tokens, SEEN))
    return found


class _Owner:
    """Whose handle a tensor is. A pickled or copied tensor has None in its place."""

    def __init__(self, layer) -> None:
        self.layer = ref(layer)

    def __reduce__(self):
        return type(None), ()


def hold_handle(layer, device: torch.device | None) -> None:
    """Have the layer hold a handle that is its own, on this device; None: none."""
    handle = None
    if device is not None:
        with torch.inference_mode(False):
            handle = torch.empty(0, device=device)
        handle.owner = _Owner(layer)
    hold(layer, {HANDLE: handle})


def follow(layer, ways: list[tuple[int, str]]) -> None:
    """Have the layer be, in compiled code, what these say for each class of token counts."""
    one = any(way == ONE for _, way in ways)
    if one:  # in this order: another thread may be tracing
        hold_handle(layer, layer.up.weight.device)
    layer.compiled_as = _told(layer, ways)
    if not one:
        hold_handle(layer, None)


def _told(layer, ways: list[tuple[int, str]]) -> str:
    """All that compiled code asks a layer before: "gate_proj,up_proj,down_proj||64 one operator;torch's operations" are
    its projections, the dropout that it may have, and what it is up to 64 tokens, and beyond. No projections: they are
    another module's."""
    merged = [each for each, after in zip(ways, [*ways[1:], None]) if after is None or after[1] != each[1]]
    names = ",".join(part or "" for part in layer._parts) if all(map(_named, layer._parts)) else ""
    counts = [f"{tokens} {way}" for tokens, way in merged[:-1]]
    return "|".join([names, layer._dropout or "", ";".join([*counts, merged[-1][1]])])


def _named(part) -> bool:
    return part is None or type(part) is str


def renew_handle(layer) -> None:
    """Have the layer hold a handle that is its own in the place of one that was moved, or copied with it."""
    if (handle := layer._buffers.get(HANDLE)) is not None:
        hold_handle(layer, handle.device)


def call(layer, x: Tensor) -> Tensor | None:
    """While compiled code is traced: the layer's result, where torch does not have to see how it is computed; otherwise
    None, as where a gradient is needed. Whatever is read here is asked after before each call: so as little as can be.
    """
    names, dropout, ways = layer.compiled_as.split("|")
    if not isinstance(x, Tensor) or x.dim() == 0 or dropout and layer.training:
        return None
    *counts, found = ways.split(";")
    for each in counts:
        most, way = each.split(" ", 1)
        if x.shape[:-1].numel() <= int(most):
            found = way
            break
    if found == SEEN:
        return None
    modules, tensors = layer._modules, []
    parts = [part and modules[part] for part in names.split(",")] if names else _parts(layer)
    for part in parts:
        own = part.__dict__["_parameters"] if part else {}
        tensors += [own.get("weight"), own.get("bias")]
    gate, gate_bias, up, up_bias, down, down_bias = tensors
    if up is None or down is None or gate is None and parts[0]:  # they are parametrized, or parts of others
        return None
    if x.dtype != up.dtype or x.device != up.device or x.shape[-1] != up.shape[1]:
        return None  # an error, of which eager code says more; or autocast, in which torch sees the layer, too
    if is_autocast_enabled(x.device.type):
        return None
    if is_grad_enabled():
        for t in (x, *tensors):
            if t is not None and t.requires_grad:
                return None
    if found == TORCH:
        d_ff, d_model = up.shape
        shapes = (d_ff, d_model), (d_ff,), (d_ff, d_model), (d_ff,), (d_model, d_ff), (d_model,)
        for t, shape in zip(tensors, shapes):
            if t is not None and t.shape != shape:
                return None  # an error again
        if not layer.calls_all():
            return None
        hidden = relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
        return linear(hidden if gate is None else hidden * linear(x, up, up_bias), down, down_bias)
    handle = layer._buffers.get(HANDLE)
    if handle is None or handle.device != up.device:
        return None
    if _are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    return _operator(x, handle, gate, up, down, gate_bias, up_bias, down_bias)


def _parts(layer) -> list:
    """The projections of a layer some of which are not its own modules."""
    return [layer._modules[part] if type(part) is str else part for part in layer._parts]


@torch.library.impl(_library, "layer", "CUDA")
@torch.library.impl(_library, "layer", "CPU")
def _run(x, handle, *weights):
    weights = *weights, None  # down_t, which a layer's own weights do not have
    owner = getattr(handle, "owner", None)
    layer = None if owner is None else owner.layer()
    if layer is not None and layer._buffers.get(HANDLE) is handle:
        y = layer.computed(x, weights)
        if y is not None:
            return y
    # Other weights than the layer's, as in torch.func.functional_call, or a handle that is a copy, as in torch.export.
    with torch.no_grad():
        return inference.infer(x, *weights[:6])


@torch.library.register_fake("twell_lab::layer", lib=_library)
def _(x, handle, gate, up, down, gate_bias, up_bias, down_bias):
    return x.new_empty(x.shape)
