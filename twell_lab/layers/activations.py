"""Which activation of a feed-forward layer the kernels compute, told by what it gives."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ops.activation import CURVES, RELU, Activation
from ..ops.kept_inputs import Kept
from .anatomy import is_relu, is_squared, is_threshold
from .lossy import Cut, ThresholdedActivation


def kept(acts: Callable[[Tensor], Tensor], both: bool, cut: Cut | None) -> Kept | None:
    """What a kernel that reads the weights of kept inputs alone computes of a layer with thresholds on its inputs; None
    where it has none, or there is no such kernel for its activation."""
    if cut is None or both or is_squared(acts):
        return None
    kind = "relu" if is_relu(acts) else None if is_threshold(acts) else _curve(acts)
    return None if kind is None else Kept(kind, *cut)


def known(
    acts: Callable[[Tensor], Tensor],
    gated: bool,
    both: bool = False,
    like: Tensor | None = None,
    cut: Cut | None = None,
) -> Activation | None:
    """The activation of a layer as kernels compute it that skip silent neurons; None where none does. both: whether up
    goes through it too. cut: thresholds on the layer's inputs, which these kernels do not have.

    A squared ReLU counts as a ReLU: its layer is relu(u) * u. like: a tensor with the type and device of the values;
    whether a threshold that lies between two of them is rounded is up to torch's operation there, so it is asked which
    of them are kept. Without one: float32 on a CPU."""
    if cut is not None:
        return None
    if is_relu(acts) or is_squared(acts):
        return Activation(both=both)
    if both or not is_threshold(acts):
        return None
    bound = float(acts.threshold)
    if not isinstance(acts, ThresholdedActivation):
        return _above(acts, bound, gated, like)
    if type(acts) is not ThresholdedActivation:
        return None
    if is_relu(acts.activation):
        return _above(acts, bound, gated, like)
    kind = _curve(acts.activation) if bound else None
    return None if kind is None else Activation(kind, bound)


def _above(activation: Callable[[Tensor], Tensor], bound: float, gated: bool, like: Tensor | None) -> Activation | None:
    """The one that keeps what lies above the greatest value that this one does not keep."""
    kind = {"dtype": torch.float32, "device": "cpu"}
    if like is not None and not like.is_meta and not hasattr(like, "fake_mode"):
        kind = {"dtype": like.dtype, "device": like.device}
    with _disable_current_modes(), torch.no_grad():
        at = torch.tensor(bound, **kind)
        down, up = torch.full_like(at, -torch.inf), torch.full_like(at, torch.inf)
        below, above = torch.nextafter(at, down), torch.nextafter(at, up)
        near = torch.stack([torch.nextafter(below, down), below, at, above, torch.nextafter(above, up)])
        silent = max(
            (v for v, found in zip(near.tolist(), activation(near.clone()).tolist()) if found == 0), default=inf
        )
        nan = activation(torch.full_like(near, torch.nan))
    if silent == inf:  # a threshold beyond the type's end, or one that is none
        return None
    if not gated and not nan.isnan().all():  # such a layer gives numbers for a row without any
        return None
    return RELU if silent <= 0 else Activation("above", silent)


def _curve(activation: Callable[[Tensor], Tensor]) -> str | None:
    """Which of CURVES gives the same bits, for every bfloat16 value and for float32 values of many sizes."""
    with _disable_current_modes(), torch.no_grad():
        short = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device="cpu").view(torch.bfloat16)
        for kind, curve in CURVES.items():
            for x in (short, short.float() * 1.01):
                try:
                    found = activation(x.clone())  # it may work in place
                except Exception:
                    return None
                if not isinstance(found, Tensor) or not _same(found, curve(x)):
                    break
            else:
                return kind
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
