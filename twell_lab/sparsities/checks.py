"""Checks of arguments that several methods share, and torch's refusals as errors of this library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core import DeviceError, InputError, TwellError
from ..formats.matrix import as_matrix
from ..layers.parts import HOOKS


def shown(value: object) -> str:
    """Return what a message calls a value: of a tensor its dtype, shape and device."""
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else f"{value!r:.80}"


def check_count(name: str, value: int, most: int | None = None) -> None:
    """Raise InputError unless `value` is a whole number from 1 up, to `most` where that is given."""
    if type(value) is not int or not 1 <= value <= (most or value):
        raise InputError(f"{name} is {value!r:.80}; a whole number from 1 {f'to {most}' if most else 'up'} is accepted")


def check_number(name: str, value: float, fits: Callable[[float], bool], accepted: str) -> float:
    """Return the value. InputError unless it is a number that fits, which `accepted` says in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
        raise InputError(f"{name} is {value!r:.80}; {accepted} is accepted")
    return float(value)


def checked_weight(weight: Tensor) -> Tensor:
    """Return the weight [out, in] without its history. InputError unless it is a dense matrix of finite floating-point
    values of 16 bits or more, that are there (not on meta)."""
    weight = as_matrix(weight).detach()
    if not weight.isfinite().all():
        raise InputError("the weight holds a value that is not finite; finite weights are accepted")
    return weight


def checked_linear(module: nn.Module) -> nn.Linear:
    """Return the module. InputError unless it is exactly an nn.Linear, without hooks, with a plain weight."""
    plain = type(module) is nn.Linear and not any(vars(module)[kind] for kind in HOOKS)
    if not plain or type(module._parameters.get("weight")) is not nn.Parameter:
        raise InputError(
            f"a {type(module).__name__} is no plain torch.nn.Linear, or has hooks or a weight that is computed, shared "
            "out or wrapped; a plain one without is accepted"
        )
    return module


def check_gpu(device: torch.device, oldest: tuple[int, int], what: str) -> None:
    """Raise DeviceError unless a weight's device is a GPU of this compute capability or newer, which have `what`."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < oldest:
        where = "a CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
        raise DeviceError(f"the weight is on {where}; GPUs of {oldest[0]}.{oldest[1]} and newer have {what}")


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Make a DeviceError of what torch raises where its kernels refuse a GPU; what: the kernels, for the message."""
    try:
        yield
    except (torch.OutOfMemoryError, TwellError):
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"{what} does not run here: {reason:.200}; a GPU that it runs on is accepted") from error
