"""What every operator does with its arguments before anything runs: refuse wrong dtypes, shapes, devices and layouts
(InputError, with the value and what is accepted), cast as autocast does, and transpose `down` where the caller keeps no
transpose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ..core import InputError
from ..formats.twell import VALUE_DTYPES, TwELL


def watched(*tensors: Tensor | None) -> bool:
    """Whether something observes operations on these tensors: torch.compile, a tensor subclass, or a mode that traces
    or counts operations. Then the operator is called through torch's dispatcher, which takes longer than a launch."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(t is not None and type(t) not in (Tensor, Parameter) for t in tensors)
    )


# What every call of a layer asks: to find a function by three names takes longer than to call it.
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._is_tracing
_modes, _autocast = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled


def plain_eager() -> bool:
    """Whether torch's eager code runs with nothing that changes or observes it: no transform, mode, trace or
    autocast."""
    return not (_transforms() or forward_ad._current_level >= 0 or _tracing() or _modes() or _autocast())


def transformed() -> bool:
    """Whether the call is inside a transform that sees operations one by one: torch.func (vmap, grad, jvp),
    forward-mode gradients, torch.export, torch.jit.trace. There a layer is computed by torch's own operations, which
    they all know."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or not torch.compiler.is_dynamo_compiling()
        and _is_exporting()  # while it compiles, torch 2.11 says that it exports
    )


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse_transforms(name: str) -> None:
    if transformed():
        raise InputError(
            f"{name} is called inside a transform (torch.func, forward-mode gradients, torch.export or a trace), which "
            "cannot follow it; SparseFFN, gated_ffn and plain_ffn are accepted there"
        )


_is_exporting = getattr(torch.compiler, "is_exporting", bool)  # from torch 2.7 on


def autocast(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """Under torch.autocast the tensors cast as nn.Linear casts them there; otherwise the tensors themselves."""
    tensors = [x, *others]
    if not torch.is_autocast_enabled(x.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


def check_tensor(name: str, t: Tensor, dims: int | None = None) -> None:
    if not isinstance(t, Tensor):
        raise InputError(f"{name} is a {type(t).__name__}; a torch.Tensor is accepted")
    if t.is_nested:
        raise InputError(f"{name} is a nested tensor; a dense one is accepted")
    if t.dtype not in VALUE_DTYPES:
        raise InputError(f"{name} is {t.dtype}; bfloat16, float16 and float32 are accepted")
    if t.device.type not in ("cpu", "cuda"):
        raise InputError(f"{name} is on {t.device}; cpu and cuda are accepted")
    if t.layout != torch.strided:
        raise InputError(f"{name} has layout {t.layout}; torch.strided is accepted")
    if dims is not None and t.dim() != dims or t.dim() == 0:
        raise InputError(f"{name} has shape {list(t.shape)}; {dims or 'at least 1'} dimensions are accepted")


def check_together(like: Tensor, dtype: torch.dtype, /, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is None and (name == "down_t" or name.endswith("bias")):
            continue
        check_tensor(name, t)
        if t.dtype != dtype:
            raise InputError(f"{name} is {t.dtype} but the input is {dtype}; one dtype for all is accepted")
        if t.device != like.device:
            raise InputError(f"{name} is on {t.device} but the input is on {like.device}; one device is accepted")


def check_packed(packed: TwELL) -> None:
    if not isinstance(packed, TwELL):
        raise InputError(f"packed is a {type(packed).__name__}; a TwELL, as pack() returns it, is accepted")


def check_shape(name: str, t: Tensor, shape: tuple) -> None:
    if t.dim() != len(shape) or any(want is not None and have != want for have, want in zip(t.shape, shape)):
        accepted = ["any" if want is None else want for want in shape]
        raise InputError(f"{name} has shape {list(t.shape)}; {accepted} is accepted")


def check_bias(name: str, bias: Tensor | None, length: int) -> None:
    if bias is not None:
        check_shape(name, bias, (length,))


def check_weights(d_model, d_ff, gate, up, down, gate_bias, up_bias, down_bias) -> None:
    if min(d_model, d_ff) < 1:
        raise InputError(f"d_model is {d_model} and d_ff {d_ff}; at least 1 of each is accepted")
    if up.dim() == 2 and up.shape[1] != d_model:
        raise InputError(f"x has rows of {d_model} values, up has shape {list(up.shape)}: {up.shape[1]} are accepted")
    check_shape("up", up, (d_ff, d_model))
    if gate is not None:
        check_shape("gate", gate, (d_ff, d_model))
    check_shape("down", down, (d_model, d_ff))
    check_bias("gate_bias", gate_bias, d_ff)
    check_bias("up_bias", up_bias, d_ff)
    check_bias("down_bias", down_bias, d_model)


def layer(x, gate, up, down, gate_bias, up_bias, down_bias, down_t=None) -> list[Tensor | None]:
    """The tensors of a layer's call, in this order, cast as autocast does. x: [..., d_model]; gate: None for a plain
    layer; down_t: None where the caller keeps no transpose of down; it is checked by `transposed`.

    Raises InputError, naming the tensor, for tensors that kernels cannot read or that do not fit together."""
    check_tensor("x", x)
    tensors = autocast(x, gate, up, down, gate_bias, up_bias, down_bias, down_t)
    x, gate, up, down, gate_bias, up_bias, down_bias, down_t = tensors
    named = {} if gate is None else {"gate": gate}
    biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    check_together(x, x.dtype, **named, up=up, down=down, down_t=down_t, **biases)
    check_weights(x.shape[-1], up.shape[0], gate, up, down, **biases)
    return tensors


def transposed(down: Tensor, down_t: Tensor | None) -> Tensor:
    """down_t, once it is checked; where it is None, a new transpose of down."""
    if down_t is None:
        return down.t().contiguous()
    check_shape("down_t", down_t, tuple(reversed(down.shape)))
    if not down_t.is_contiguous():
        raise InputError(f"down_t has strides {down_t.stride()}; a contiguous {list(down_t.shape)} is accepted")
    return down_t


def plain(t: Tensor | None) -> Tensor | None:
    """t itself if it is contiguous and aligned to 16 bytes, as kernels read it; otherwise a copy that is."""
    if t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0):
        return t
    return t.clone(memory_format=torch.contiguous_format)


def check_backend(backend: str | None, *tensors: Tensor | None) -> bool:
    """Whether the kernels are to run in the simulator. Raises InputError for a backend other than None (the tensors'
    device) and "simulator", and for tensors that the simulator does not take."""
    if backend is None:
        return False
    if backend != "simulator":
        raise InputError(f"backend is {backend!r}; None or 'simulator' is accepted")
    for t in tensors:
        if t is not None and t.device.type != "cpu":
            raise InputError(f"backend 'simulator' got a tensor on {t.device}; tensors on the cpu are accepted")
        if needs_gradient(t):
            raise InputError("backend 'simulator' has no gradient; call it under torch.no_grad()")
    return True
