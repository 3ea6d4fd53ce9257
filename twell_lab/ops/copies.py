"""Copies of weights in another layout, kept equal to the weights: `down` transposed, or all with the hot neurons first.

What a copy was made from is kept on the copy itself: the weight's storage (a weak reference, so that another one at the
same address is told apart), address, strides and version, and how many steps optimizers had taken that raise no
version, as torch's fused ones. A copy that somebody else put in its place has none of it and is made anew. So is, on
every call, the copy of a weight that can change unseen: an inference tensor, CPU memory shared with another process, a
weight that FSDP gathers, and a copy that a captured CUDA graph writes to.

What is left unseen are writes that go past torch's version counter (into `weight.data` or its storage, through NumPy or
DLPack, or from another process on a GPU), and what a CUDA graph does not hold: one captured while the copy was up to
date reads it as it is, and follows a changed weight once a call outside of the graph has refreshed it. On several
streams, whoever changes a weight waits for the forwards that still read it, as for any tensor that is written to.

Non-finite weights are an error (a NaN beside a silent neuron would make the dense layer's result NaN and be skipped
here), and are looked for when a copy is made outside of training. On a GPU nobody waits for the answer: the call after
it has arrived raises."""

from __future__ import annotations

import functools
import sys
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..core.errors import InputError
from . import checks

# How a copy is laid out; all but the first take the neurons in `order`.
TRANSPOSED, ROWS, COLUMNS, ROWS_OF_TRANSPOSE = range(4)

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "refresh_copies(Tensor[] weights, Tensor(a!)[] copies, int[] how, Tensor? order, Tensor[] beside, str names, bool "
    "changing, bool anew) -> ()"
)


def refresh(
    weights: dict[str, Tensor],
    copies: list[Tensor],
    how: list[int],
    order: Tensor | None = None,
    beside: dict[str, Tensor] | None = None,
    training: bool = True,
) -> None:
    """Make each copy equal its weight in its layout again, if the weight has changed since the last call.

    weights: by name, one for each copy. order: int64 [d_ff], the neuron that comes first, second, ... in copies that
    are not just TRANSPOSED. beside: other weights, by name, that the caller reads in place: looked at for non-finite
    values with the others. training: whether weights with gradients are being trained now. While a CUDA graph is
    captured, a weight that is being trained is copied in any case: it may change between replays, and this check will
    not run then. Raises InputError, naming it, for a weight with non-finite values, outside of training only."""
    beside = beside or {}
    sources, others = [*weights.values()], [*beside.values()]
    changing = training and torch.is_grad_enabled() and any(w.requires_grad for w in sources + others)
    anew = not all(isinstance(w, Parameter) for w in sources)  # FSDP's first version gathers into plain tensors
    # Mostly this only looks, and the dispatcher would cost more than that; but a fake tensor has no address.
    watched = checks.watched(*sources, *others)
    if watched or not _done(sources, copies, order, others, changing, anew):
        call = torch.ops.twell_lab.refresh_copies if watched else _refresh
        sources, others = [w.detach() for w in sources], [w.detach() for w in others]
        call(sources, copies, how, order, others, " ".join((*weights, *beside)), changing, anew)


def forget(copy: Tensor | None) -> None:
    """Have the next `refresh` make this copy anew."""
    if copy is not None:
        vars(copy).pop("made", None)


def fits(copy: Tensor | None, how: int, weight: Tensor | None) -> bool:
    """Whether `copy` is a place for `weight` in that layout: same shape, dtype and device; None for None."""
    if copy is None or weight is None:
        return copy is weight
    shape = weight.shape[::-1] if how in (TRANSPOSED, ROWS_OF_TRANSPOSE) else weight.shape
    return copy.shape == shape and copy.dtype == weight.dtype and copy.device == weight.device


def place(how: int, weight: Tensor | None) -> Tensor | None:
    """Memory for a copy of `weight` in that layout, not yet filled."""
    if weight is None:
        return None
    with torch.inference_mode(False):  # what is made inside inference mode could not be written to outside of it
        return weight.new_empty(
            weight.shape[::-1] if how in (TRANSPOSED, ROWS_OF_TRANSPOSE) else weight.shape, requires_grad=False
        )


def check_finite(weights: dict[str, Tensor | None]) -> None:
    """Raise InputError naming the first weight that has a NaN or an infinity. Waits for the device."""
    known = {
        name: w.detach()
        for name, w in weights.items()
        if w is not None and w.device.type in ("cpu", "cuda") and not checks.watched(w)
    }
    if known and not all_finite([*known.values()]).item():
        _refuse(known)


class _Made:
    """What a copy was made from. Pickled or copied along with a copy it is forgotten.

    Of the first copy of a call also: what the weights beside it were when all were found finite or are being looked at
    (None: they were not), and on a GPU the stream that made the copies, an event after that, and where the answer will
    be."""

    def __init__(self, weight: Tensor | None = None, order: Tensor | None = None) -> None:
        self.order = order
        self.storage = None if weight is None or _changes_unseen(weight) else ref(weight.untyped_storage())
        self.seen = None if self.storage is None else (weight.data_ptr(), weight._version, weight.stride(), _steps)
        self.beside: list[_Made] | None = None
        self.stream = self.event = self.answer = None

    def __reduce__(self):
        return _Made, ()

    def is_of(self, weight: Tensor, order: Tensor | None) -> bool:
        return (
            self.storage is not None
            and self.storage() is weight.untyped_storage()
            and self.order is order
            and self.seen == (weight.data_ptr(), weight._version, weight.stride(), _steps)
            and not _changes_unseen(weight)
        )


def _changes_unseen(weight: Tensor) -> bool:
    return weight.is_inference() or (not weight.is_cuda and weight.untyped_storage().is_shared()) or _sharding()


def _sharding() -> bool:
    """Whether FSDP2 manages a module: it writes gathered weights where the last ones were, and keeps their version as
    it was."""
    states = sys.modules.get(
        "torch.distributed._composable_state"
    )  # where torch keeps whom it manages, once there was one
    return states is not None and bool(getattr(states, "_module_state_mapping", True))


_steps = 0  # of optimizers that may change weights without raising their version


def _count_step(optimizer: Optimizer | None = None, *_) -> None:
    global _steps
    tells = optimizer is not None and type(optimizer).__module__.startswith("torch.optim.")
    if not tells or any(group.get("fused") for group in optimizer.param_groups):
        _steps += 1


@functools.cache
def _follow_optimizers() -> None:
    """Have every optimizer's step counted from now on: asked for by the first copy, so that an import changes nothing
    of torch's."""
    register_optimizer_step_post_hook(_count_step)


def _made_of(copies: list[Tensor]) -> list[_Made | None]:
    return [getattr(copy, "made", None) for copy in copies]


def _up_to_date(made: list[_Made | None], weights, copies, order, changing, anew) -> bool:
    """Whether every copy equals its weight; a graph that is captured in training holds the copying in any case."""
    if anew or not all(each is not None and each.is_of(weight, order) for each, weight in zip(made, weights)):
        return False
    return not (
        copies[0].is_cuda and (hasattr(copies[0], "in_graph") or changing and torch.cuda.is_current_stream_capturing())
    )


def _looked_at(first: _Made, beside) -> bool:
    """Whether the weights, which the first copy is of, were found finite, or are being looked at."""
    return (
        first.beside is not None
        and len(first.beside) == len(beside)
        and all(each.is_of(weight, None) for each, weight in zip(first.beside, beside))
    )


def _done(weights, copies, order, beside, changing, anew) -> bool:
    """Whether nothing is to be done but, on another stream than the one that made the copies, wait for them there."""
    made = _made_of(copies)
    first = made[0]
    if (
        first is not None
        and (answer := first.answer) is not None
        and not torch.cuda.is_current_stream_capturing()
        and first.event.query()
    ):
        first.answer = None
        if not answer:
            first.beside = None
            copies[0].refused = True
            return False
    if not _up_to_date(made, weights, copies, order, changing, anew) or not (changing or _looked_at(first, beside)):
        return False
    device = copies[0].device
    if first.event is not None and first.stream != torch._C._cuda_getCurrentRawStream(device.index):
        if not torch.cuda.is_current_stream_capturing():  # capturing begins with a device that has done all before it
            first.event.wait(torch.cuda.current_stream(device))
    return True


def _refresh(weights, copies, how, order, beside, names, changing, anew):
    if _done(weights, copies, order, beside, changing, anew):
        return
    cuda = copies[0].is_cuda
    capturing = cuda and torch.cuda.is_current_stream_capturing()
    # On a GPU only once its answer was no: then they, or what they were changed to since, are looked at here and now.
    if not changing and not capturing and (not cuda or hasattr(copies[0], "refused")):
        if not all_finite(weights + beside):
            _refuse(dict(zip(names.split(), weights + beside)))
        vars(copies[0]).pop("refused", None)
    made = _made_of(copies)
    if not _up_to_date(made, weights, copies, order, changing, anew):
        _follow_optimizers()
        for copy in copies:
            forget(copy)  # should anything go wrong midway, it is known for half made
        with torch.no_grad():
            for weight, copy, kind in zip(weights, copies, how):
                if kind == TRANSPOSED:
                    copy.copy_(weight.t())
                else:
                    source = weight.t() if kind == ROWS_OF_TRANSPOSE else weight
                    torch.index_select(source, int(kind == COLUMNS), order, out=copy)
        if capturing:  # nothing was copied yet, and every replay will, from where the weight lay then
            for copy in copies:
                copy.in_graph = True
            return
        made = [_Made(weight, order) for weight in weights]
    elif capturing:
        return
    first = made[0]
    if not changing:
        first.beside = [_Made(weight) for weight in beside]
    if cuda:
        if not changing:
            answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            answer.copy_(all_finite(weights + beside), non_blocking=True)
        stream = torch.cuda.current_stream(copies[0].device)
        first.stream, first.event = stream.cuda_stream, stream.record_event()
        first.answer = None if changing else answer
    for copy, each in reversed([*zip(copies, made)]):  # last of all the first one: another thread may be looking
        copy.made = each


@torch.library.impl(_library, "refresh_copies", "CUDA")
@torch.library.impl(_library, "refresh_copies", "CPU")
def _refresh_within(weights, copies, how, order, beside, names, changing, anew):
    if not hasattr(copies[0], "made"):
        # A compiler that works on clones writes them back into copies that would still be taken for what they were made
        # from.
        _count_step()
    _refresh(weights, copies, how, order, beside, names, changing, anew)


@torch.no_grad()
def all_finite(weights: list[Tensor]) -> Tensor:
    """Whether no weight has a NaN or an infinity: a bool scalar on the first one's device. Waits for nothing."""
    largest = [
        torch.linalg.vector_norm(w, torch.inf).float() for w in weights if w.numel()
    ]  # NaN is larger than any number here
    if not largest:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return torch.stack([each.to(largest[0].device, non_blocking=True) for each in largest]).isfinite().all()


def _refuse(weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        wrong = (~weight.isfinite()).nonzero()
        if len(wrong):
            place = wrong[0].tolist()
            value = weight[tuple(place)].item()
            raise InputError(
                f"{name} has {len(wrong)} values that are not finite, the first at {place}: {value}; finite weights "
                f"are accepted "
                "(a layer that is still being trained has diverged)"
            )


@torch.library.register_fake("twell_lab::refresh_copies", lib=_library)
def _(weights, copies, how, order, beside, names, changing, anew):
    return None
