"""Weights that lie in memory in another way than they were made, and stay the same Parameters: turned, with the same
values in the storage of the transpose, or with other values, for whoever moves them.

The transpose of a turned weight is contiguous, as kernels read it, and nobody has to hold a copy
(twell_lab.ops.copies)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from . import checks, copies
from .copies import TRANSPOSED

DEVICES = ["cuda"]  # where weights are moved


def is_turned(weight: Tensor | None) -> bool:
    """Whether a weight is turned, by us or by somebody else."""
    return copies.is_view(TRANSPOSED, weight)


def turn(weight: Tensor, own: Sequence[Tensor] = ()) -> bool:
    """Turn a weight, if that can be done unseen; whether it is turned now. own: see `movable`."""
    if turns(weight, own) and not is_turned(weight):
        with torch.inference_mode(False):
            move([(weight, weight.detach().t().contiguous().t())])
    return is_turned(weight)


def turns(weight: Tensor | None, own: Sequence[Tensor] = ()) -> bool:
    """Whether `turn` would leave the weight turned. own: see `movable`."""
    return is_turned(weight) or (
        weight is not None and weight.dim() == 2 and weight.is_contiguous() and movable(weight, own)
    )


def turn_back(weight: Tensor) -> bool:
    """Give a turned weight the plain layout, if that can be done unseen; whether it has the plain layout now."""
    if is_turned(weight) and _alone(weight):
        with torch.inference_mode(False):
            move([(weight, weight.detach().contiguous())])
    return weight.is_contiguous()


def movable(weight: Tensor, own: Sequence[Tensor] = ()) -> bool:
    """Whether the weight may lie elsewhere: it is on one of DEVICES, a plain Parameter, every change of it is seen, it
    fills its storage, no other tensor shares that, and no CUDA graph is being captured. own: tensors of the caller's
    that may share the storage, and which it will not use any more."""
    return weight.device.type in DEVICES and _alone(weight, own)


def _alone(weight: Tensor, own: Sequence[Tensor] = ()) -> bool:
    if type(weight) is not Parameter or checks.watched(weight) or copies.changes_unseen(weight) or capturing(weight):
        return False
    storage, alone = weight.untyped_storage(), torch.empty(1, device="cpu")
    own = {id(t): t for each in own for t in (each, each._base) if t is not None and t is not weight}.values()
    shared = sum(each.untyped_storage()._cdata == storage._cdata for each in own)
    return storage.nbytes() == weight.nbytes and _users(weight) == _users(alone) + shared


def capturing(weight: Tensor) -> bool:
    """Whether a CUDA graph is being captured, on a weight's device."""
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()


def _users(t: Tensor) -> int:
    """How many tensors share this one's storage, and one for Python's handle."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


def move(moves: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Have each weight lie where its other tensor lies. Waits for the device: on any stream the old memory may still be
    read, and the new one may be read next."""
    moves = [*moves]
    for device in {weight.device for weight, _ in moves if weight.is_cuda}:
        torch.cuda.synchronize(device)
    for weight, fresh in moves:
        weight.data = fresh
