"""Weights that are turned: the same Parameter, shape and values, in the storage of the transpose. The transpose is
contiguous then, as kernels read it, and nobody has to hold a copy (twell_lab.ops.copies)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from . import checks, copies
from .copies import TRANSPOSED

DEVICES = ["cuda"]  # where weights are turned


def is_turned(weight: Tensor | None) -> bool:
    """Whether a weight is turned, by us or by somebody else."""
    return copies.is_view(TRANSPOSED, weight)


def turn(weight: Tensor, own: Tensor | None = None) -> bool:
    """Turn a weight, if that can be done unseen; whether it is turned now. own: a tensor of the caller's that may share
    the weight's storage, and which knows that it will be left behind."""
    if not is_turned(weight) and weight.is_contiguous() and weight.device.type in DEVICES and _moves(weight, own):
        with torch.inference_mode(False):
            _move(weight, weight.detach().t().contiguous().t())
    return is_turned(weight)


def turn_back(weight: Tensor) -> bool:
    """Give a turned weight the plain layout, if that can be done unseen; whether it has the plain layout now."""
    if is_turned(weight) and _moves(weight):
        with torch.inference_mode(False):
            _move(weight, weight.detach().contiguous())
    return weight.is_contiguous()


def _moves(weight: Tensor, own: Tensor | None = None) -> bool:
    """Whether the weight may lie elsewhere: it is a plain Parameter, every change of it is seen, it fills its storage,
    no other tensor shares that, and no CUDA graph is being captured."""
    if type(weight) is not Parameter or weight.dim() != 2 or checks.watched(weight) or copies.changes_unseen(weight):
        return False
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    storage, alone = weight.untyped_storage(), torch.empty(1, device="cpu")
    shared = own is not None and own.untyped_storage()._cdata == storage._cdata
    return storage.nbytes() == weight.nbytes and _users(weight) == _users(alone) + shared


def _users(t: Tensor) -> int:
    """How many tensors share this one's storage, and one for Python's handle."""
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


def _move(weight: Tensor, fresh: Tensor) -> None:
    """Have the weight lie where `fresh` lies, which has the same values. Waits for the device: on any stream the old
    memory may still be read, and the new one may be read next."""
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)
    weight.data = fresh
