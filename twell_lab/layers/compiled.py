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
from .paths.path import hold
from .weights import Weights

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "layer(Tensor x, Tensor handle, Tensor? gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, "
    "Tensor? down_bias, int tile, int words) -> Tensor"
)


HANDLE = "handle"  # the buffer's name


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
    """While compiled code is traced: the layer's result as of one operator; None where torch has to see what the layer
    computes, as where a gradient is needed, or where torch's operations are the path."""
    one = layer.as_one
    if not one or layer.drops or not isinstance(x, Tensor) or x.dim() == 0 or checks.transformed():
        return None
    handle, weights = layer._buffers.get(HANDLE), layer._weights()
    if not one[layer._class_of(x, one)][1] or torch.is_autocast_enabled(x.device.type) or handle is None:
        return None
    up = weights.up
    if (x.dtype, x.device, x.shape[-1], handle.device) != (up.dtype, up.device, up.shape[1], up.device):
        return None  # which is an error, or for eager code to mend
    if not all(t is None or isinstance(t, Parameter) for t in weights) or checks.needs_gradient(x, *weights):
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
