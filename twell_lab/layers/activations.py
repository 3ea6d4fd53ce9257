"""What the activation of a feed-forward layer is, and which one kernels compute in its place, by what it gives."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..ops.activation import CURVES, RELU, Activation, SquaredReLU
from .lossy import ThresholdedActivation

if TYPE_CHECKING:
    from ..ops.kept_inputs import Kept
    from .parts import FeedForward


def kind_of(activation) -> str:
    """Return what to call an activation, a module or a function."""
    return getattr(activation, "__name__", type(activation).__name__)


def is_relu(activation) -> bool:
    """Return whether the activation is torch's ReLU; a subclass that computes something else is none."""
    if isinstance(activation, nn.ReLU):
        return type(activation).forward is nn.ReLU.forward and "forward" not in vars(activation)
    return activation is torch.relu or activation is nn.functional.relu


def is_squared(activation) -> bool:
    """Return whether the activation is a squared ReLU: this project's, or that of transformers ("relu2")."""
    kind = type(activation)
    own = isinstance(activation, SquaredReLU) and kind.forward is SquaredReLU.forward
    named = f"{kind.__module__}.{kind.__qualname__}" == "transformers.activations.ReLUSquaredActivation"
    return (own or named) and "forward" not in vars(activation)


def is_threshold(activation) -> bool:
    """Return whether the activation has a threshold: FATReLU (ProSparse, arXiv 2402.13516; MiniCPM-S), by the name of
    its class and by what it gives; torch.nn.Threshold that gives the same; or one of layers.lossy, which keeps negative
    values too."""
    if isinstance(activation, ThresholdedActivation):
        return True
    named = isinstance(activation, nn.Module) and "FATReLU" in type(activation).__name__
    bound = getattr(activation, "threshold", None) if named or isinstance(activation, nn.Threshold) else None
    if type(bound) not in (int, float) or not 0 <= bound < inf:
        return False
    around = torch.tensor([-2.0, -1.0, -0.5, 0.5, 0.99, 1.01, 2.0, 100.0], device="cpu") * (bound or 1.0)
    return _gives(activation, around, torch.where(around > bound, around, 0.0))


def computes(activation, gated: bool) -> bool:
    """Return whether a sparse layer computes this activation: ReLU, in plain layers its square, and a threshold."""
    return is_relu(activation) or not gated and is_squared(activation) or is_threshold(activation)


def kernel_inputs(layer: FeedForward) -> Kept | None:
    """Return what the kernel that reads the weights of kept inputs alone computes of a layer; None where it does not
    take it. Where thresholds differ by column, the kernel has none: zeros are there before."""
    acts, cut = layer.acts or torch.relu, layer.cut
    if cut is None or layer.both or layer.gate is layer.up:
        return None
    from ..ops.kept_inputs import Kept

    kind = "relu" if is_relu(acts) else None if is_threshold(acts) else _curve(acts)
    return None if kind is None else Kept(kind, *((0.0, 0.0) if cut.by_column else cut))


@torch.no_grad()
def kernel_activation(layer: FeedForward) -> Activation | None:
    """Return the activation of a layer as kernels compute it that skip silent neurons; None where none does, as with
    thresholds on the layer's inputs. A squared ReLU counts as a ReLU: its layer is relu(u) * u.

    A threshold keeps what lies above the greatest value that the activation does not keep: whether one between two
    values is rounded is up to torch's operation, in the weights' type and on their device."""
    acts, like = layer.acts, layer.up.weight
    if layer.cut is None and acts is None:
        return Activation(both=layer.both)
    if layer.cut is not None or layer.both or not is_threshold(acts):
        return None
    bound = float(acts.threshold)
    if isinstance(acts, ThresholdedActivation) and not is_relu(acts.activation):
        kind = _curve(acts.activation) if bound else None
        return None if kind is None else Activation(kind, bound)
    with _disable_current_modes():
        unreal = like.is_meta or hasattr(like, "fake_mode")
        near = [torch.tensor(bound, dtype=like.dtype, device="cpu" if unreal else like.device)]
        least, most = (torch.full_like(near[0], end) for end in (-inf, inf))
        for _ in range(2):
            near = [torch.nextafter(near[0], least), *near, torch.nextafter(near[-1], most)]
        values = torch.stack(near)
        silent = max((v for v, y in zip(values.tolist(), acts(values.clone()).tolist()) if y == 0), default=inf)
        nan = acts(torch.full_like(values, torch.nan)).isnan().all()
    if (
        silent == inf or layer.gate is None and not nan
    ):  # beyond the type's end, or none; or numbers for a row without any
        return None
    return RELU if silent <= 0 else Activation("above", silent)


def _curve(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Return which of CURVES gives the same bits, for every bfloat16 value and for float32 values of many sizes."""
    with _disable_current_modes():
        short = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device="cpu").view(torch.bfloat16)
        inputs = (short, short.float() * 1.01)
        same = (kind for kind, curve in CURVES.items() if all(_gives(activation, x, curve(x)) for x in inputs))
        return next(same, None)


def _gives(activation: Callable[[Tensor], Tensor], x: Tensor, wanted: Tensor) -> bool:
    try:
        with torch.no_grad():
            y = activation(x.clone())  # it may work in place
    except Exception:
        return False
    same = isinstance(y, Tensor) and y.dtype == x.dtype
    return same and torch.allclose(y, wanted, rtol=0.0, atol=0.0, equal_nan=True)
