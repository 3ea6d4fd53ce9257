"""A layer in compiled code: one operator, behind which it runs as in eager code.

torch.compile can fuse nothing into the kernels, so all it has to know is what a layer reads and writes. And whatever of
a layer it sees while it traces, it asks after before each call (guards): a layer seen as a whole takes the host a third
of the time. The operator finds the layer by its handle, a buffer without elements: so compiled code names no layer, and
serves all that are alike. What a layer keeps for itself, its copies and counters, compiled code does not see."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops import checks, inference
from . import hooks
from .choice import Choice, LayerPlan
from .paths import PATHS
from .paths.dense import by_torch
from .paths.path import hold
from .weights import Weights

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "layer(Tensor x, Tensor handle, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias, int tile, int words) -> Tensor"
)


HANDLE = "handle"  # the buffer's name
# What a layer is in compiled code: one operator; torch's operations, where its kernels take the host more time than
# they save; or all that it does, seen while torch traces it.
ONE, TORCH, SEEN = "one operator", "torch's operations", "seen"


def way(plan: LayerPlan | Choice | None, tokens: int, choice: Choice) -> str:
    """What a layer with this plan is in compiled code, for the class `tokens` of token counts and its choice."""
    if not PATHS[choice.path].packs:
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


def renew_handle(layer) -> None:
    """Have the layer hold a handle that is its own in the place of one that was moved, or copied with it."""
    if (handle := layer._buffers.get(HANDLE)) is not None:
        hold_handle(layer, handle.device)


def call(layer, x: Tensor) -> Tensor | None:
    """While compiled code is traced: the layer's result, where torch does not have to see how it is computed; otherwise
    None, as where a gradient is needed."""
    if layer.drops or not isinstance(x, Tensor) or x.dim() == 0 or checks.transformed():
        return None
    found = layer.compiled_as[layer._class_of(x, layer.compiled_as)][1]
    if found == SEEN or torch.is_autocast_enabled(x.device.type):
        return None
    weights, handle = layer._weights(), layer._buffers.get(HANDLE)
    up = weights.up
    if (x.dtype, x.device, x.shape[-1]) != (up.dtype, up.device, up.shape[1]):
        return None  # an error, of which eager code says more
    if not all(t is None or isinstance(t, Parameter) for t in weights) or checks.needs_gradient(x, *weights):
        return None
    if found == TORCH:
        hooks.check_parts(layer)
        return by_torch(x, weights)
    if handle is None or handle.device != up.device:
        return None
    return torch.ops.twell_lab.layer(x, handle, *weights[:6], layer.tile, layer.words)


@torch.library.impl(_library, "layer", "CUDA")
@torch.library.impl(_library, "layer", "CPU")
def _run(x, handle, gate, up, down, gate_bias, up_bias, down_bias, tile, words):
    given = Weights(gate, up, down, gate_bias, up_bias, down_bias)
    owner = getattr(handle, "owner", None)
    layer = None if owner is None else owner.layer()
    if layer is not None and layer._buffers.get(HANDLE) is handle:
        y = layer.computed(x, given)
        if y is not None:
            return y
    # Other weights than the layer's, as in torch.func.functional_call, or a handle that is a copy, as in torch.export.
    with torch.no_grad():
        return inference.infer(x, *given[:6], tile=tile, words=words)


@torch.library.register_fake("twell_lab::layer", lib=_library)
def _(x, handle, gate, up, down, gate_bias, up_bias, down_bias, tile, words):
    return x.new_empty(x.shape)
