"""A layer in compiled code: one operator, behind which it runs as in eager code.

torch.compile can fuse nothing into the kernels, so all it has to know is what a layer reads and writes. And whatever of
a layer it sees while it traces, it asks after before each call (guards), which took the host longer than the calls of
our operators did (docs/calls.md). The operator finds the layer by its handle, a buffer without elements: so compiled
code names no layer, and serves all that are alike. What a layer keeps for itself, its copies and counters, compiled
code does not see."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..ops import inference
from . import hooks
from .choice import Choice, LayerPlan
from .paths import PATHS
from .paths.dense import by_torch
from .paths.path import hold
from .weights import Weights

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "layer(Tensor x, Tensor handle, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias) -> Tensor"
)


HANDLE = "handle"  # the buffer's name
# What a layer is in compiled code: one operator; torch's operations, where its kernels take the host more time than
# they save; or all that it does, seen while torch traces it.
ONE, TORCH, SEEN = "one operator", "torch's operations", "seen"


def way(plan: LayerPlan | Choice | None, tokens: int, choice: Choice) -> str:
    """What a layer with this plan is in compiled code, for the class `tokens` of token counts and its choice."""
    if not PATHS[choice.path].opaque:
        return SEEN
    return TORCH if isinstance(plan, LayerPlan) and not plan.pays_compiled(tokens) else ONE


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
    one, alike = any(way == ONE for _, way in ways), all(way == ways[0][1] for _, way in ways)
    if one:  # in this order: another thread may be tracing
        hold_handle(layer, layer.up.weight.device)
    layer.compiled_as = [(1, ways[0][1])] if alike else ways
    if not one:
        hold_handle(layer, None)


def renew_handle(layer) -> None:
    """Have the layer hold a handle that is its own in the place of one that was moved, or copied with it."""
    if (handle := layer._buffers.get(HANDLE)) is not None:
        hold_handle(layer, handle.device)


def call(layer, x: Tensor) -> Tensor | None:
    """While compiled code is traced: the layer's result, where torch does not have to see how it is computed; otherwise
    None, as where a gradient is needed. Whatever is read here is asked after before each call: so as little as can be.
    """
    ways = layer.compiled_as
    found = ways[layer._class_of(x, ways) if len(ways) > 1 else 0][1]
    if found == SEEN or layer.drops or not isinstance(x, Tensor) or x.dim() == 0:
        return None
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    parts, modules, tensors = layer._parts, layer._modules, []
    for part in parts:
        own = {} if part is None else (modules[part] if type(part) is str else part).__dict__["_parameters"]
        tensors += [own.get("weight"), own.get("bias")]
    gate, gate_bias, up, up_bias, down, down_bias = tensors
    if up is None or down is None or gate is None and parts[0] is not None:  # they are parametrized, or parts of others
        return None
    if x.dtype != up.dtype or x.device != up.device or x.shape[-1] != up.shape[1]:
        return None  # an error, of which eager code says more; or autocast, in which torch sees the layer, too
    if torch.is_autocast_enabled(x.device.type):
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        return None
    if found == TORCH:
        hooks.check_parts(layer)
        return by_torch(x, Weights(gate, up, down, gate_bias, up_bias, down_bias))
    handle = layer._buffers.get(HANDLE)
    if handle is None or handle.device != up.device:
        return None
    return torch.ops.twell_lab.layer(x, handle, gate, up, down, gate_bias, up_bias, down_bias)


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
