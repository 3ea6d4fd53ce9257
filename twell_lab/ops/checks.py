"""What public functions ask of their arguments, and what every call of a layer asks of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..core import InputError
from ..formats import VALUE_DTYPES
from ..formats import check_tensor as check_dense

WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")  # as every call of a layer has them
# Asked before each call: to find a function by three names takes longer than to call it.
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_modes, _autocast = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled
_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # from torch 2.7 on


def plain_eager() -> bool:
    """Return whether torch's eager code runs with nothing that changes or observes it: no transform, mode, trace or
    autocast."""
    return not (_transforms() or forward_ad._current_level >= 0 or _tracing() or _modes() or _autocast())


def transformed() -> bool:
    """Return whether the call is inside a transform that sees operations one by one: torch.func (vmap, grad, jvp),
    forward-mode gradients, torch.export, torch.jit.trace."""
    # While it compiles, torch 2.11 says that it exports.
    exporting = not torch.compiler.is_dynamo_compiling() and _is_exporting()
    return _transforms() or forward_ad._current_level >= 0 or torch.jit.is_tracing() or exporting


def watched(*tensors: Tensor | None) -> bool:
    """Return whether something observes operations on these tensors: torch.compile, a tensor subclass, or a mode. Then
    an operator is called through torch's dispatcher, which takes longer than a launch."""
    return (
        torch.compiler.is_compiling()
        or _modes() > 0
        or any(t is not None and type(t) not in (Tensor, Parameter) for t in tensors)
    )


def is_turned(matrix: Tensor) -> bool:
    """Return whether a matrix is stored transposed, so that its columns lie one after another."""
    rows, columns = matrix.shape
    return (matrix.stride(0) == 1 or rows == 1) and (matrix.stride(1) == rows or columns == 1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def check_tensor(
    name: str, t: Tensor, dims: int | None = None, shape: tuple | None = None, dtype=None, device=None
) -> None:
    """Raise InputError unless t is a strided tensor of bfloat16, float16 or float32 on a CPU or GPU; with so many
    dimensions, of this shape (None: any size), dtype and on this device, where they are given."""
    dense = isinstance(t, Tensor) and not t.is_nested and t.layout == torch.strided
    if not dense or t.dtype not in VALUE_DTYPES or t.device.type not in ("cpu", "cuda"):
        check_dense(name, t, dtypes=VALUE_DTYPES)  # says what it is, unless it is only on another device
        raise InputError(f"{name} is on {t.device}; cpu and cuda are accepted")
    if dims is not None and t.dim() != dims or t.dim() == 0:
        raise InputError(f"{name} has shape {list(t.shape)}; {dims or 'at least 1'} dimensions are accepted")
    if shape is not None and (
        t.dim() != len(shape) or any(want is not None and have != want for have, want in zip(t.shape, shape))
    ):
        accepted = ["any" if want is None else want for want in shape]
        raise InputError(f"{name} has shape {list(t.shape)}; {accepted} is accepted")
    if dtype is not None and t.dtype != dtype:
        raise InputError(f"{name} is {t.dtype} but the input is {dtype}; one dtype for all is accepted")
    if device is not None and t.device != device:
        raise InputError(f"{name} is on {t.device} but the input is on {device}; one device is accepted")


def check_layer(x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None) -> list[Tensor | None]:
    """Return the tensors of a layer's call, in this order, cast as autocast casts those of nn.Linear.

    x: [..., d_model]; gate: None for a plain layer. Raises InputError, naming the tensor, for tensors that kernels
    cannot read or that do not fit together."""
    check_tensor("x", x)
    tensors = [x, gate, up, down, gate_bias, up_bias, down_bias]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        tensors = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
    x, gate, up, down, gate_bias, up_bias, down_bias = tensors
    check_tensor("up", up, dims=2)
    (d_ff, wide), d_model = up.shape, x.shape[-1]
    if min(d_model, d_ff) < 1:
        raise InputError(f"d_model is {d_model} and d_ff {d_ff}; at least 1 of each is accepted")
    if wide != d_model:
        raise InputError(f"x has rows of {d_model} values, up has shape {list(up.shape)}: {wide} are accepted")
    shapes = ((d_ff, d_model), (d_ff, d_model), (d_model, d_ff), (d_ff,), (d_ff,), (d_model,))
    for name, shape, t in zip(WEIGHTS, shapes, tensors[1:]):
        if t is not None or name in ("up", "down"):
            check_tensor(name, t, shape=shape, dtype=x.dtype, device=x.device)
    return tensors


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether every value of these tensors is finite, as a bool scalar on their device."""
    norms = torch._foreach_norm([t.detach() for t in tensors], torch.inf)
    return torch.stack([norm.isfinite() for norm in norms]).all()
