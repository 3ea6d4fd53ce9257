"""Copies of weights in another layout, kept equal to the weights: `down` transposed, or all with the hot neurons first.

A copy keeps a note of what it was made from: each weight's storage (a weak reference, so that another one at the same
address is told apart), address, strides and version, and how many steps were taken by optimizers that raise no version,
as torch's fused ones. A copy without a note, such as one that somebody else put in its place, is made anew. So is, on
every call, the copy of a weight that can change unseen: an inference tensor, CPU memory shared with another process, a
weight that FSDP gathers, and a copy that a captured CUDA graph writes to.

Of a weight that is turned (twell_lab.ops.turned) the transpose is no copy but a view, to which nothing is written: it
only has a note, as of when the weight's values were looked at last.

Two kinds of change are not seen. First, writes that go past torch's version counter: into `weight.data` or its storage,
through NumPy or DLPack, or from another process on a GPU. Second, changes after the capture of a CUDA graph that began
with a copy that was up to date: the graph reads the copy as it is, until a call outside of the graph has refreshed it.

On several streams, each waits for the copies that it reads, and a copy that is dropped stays in memory until they have
all passed (ops.streams). Whoever changes a weight waits for the forwards that still read it, as for any tensor that is
written to.

Weights that are not finite are an error: a NaN beside a silent neuron would make the dense layer's result NaN, and is
skipped here. They are looked for when a copy is made outside of training. On a GPU nobody waits for the answer: the
first call after it has arrived raises."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..core import InputError
from . import checks, streams

# How a copy is laid out; all but the first take the neurons in `order`.
TRANSPOSED, ROWS, ROWS_OF_TRANSPOSE = range(3)

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
    """Make each copy equal its weight in its layout again, if the weight has changed since the last call; and make the
    copies safe to read on the current stream.

    weights: by name, one for each copy. how: the layout of each. order: int64 [d_ff], the neuron that comes first,
    second, ... in copies that are not just TRANSPOSED. beside: other weights, by name, that the caller reads in place:
    looked at for non-finite values with the others. training: whether weights with gradients are being trained now.
    While a CUDA graph is captured, a weight that is being trained is copied in any case: it may change between replays,
    and this check will not run then. Raises InputError, naming it, for a weight with non-finite values, outside of
    training only."""
    beside = beside or {}
    sources, others = [*weights.values()], [*beside.values()]
    changing = _changing(training, sources, others)
    anew = not all(isinstance(w, Parameter) for w in sources)  # FSDP's first version gathers into plain tensors
    # Most calls change nothing, and torch's dispatcher would cost more than finding that out. It has to be called where
    # something watches: a fake tensor, for one, has no address.
    watched = checks.watched(*sources, *others)
    if watched or not _done(sources, copies, order, others, changing, anew):
        call = torch.ops.twell_lab.refresh_copies if watched else _refresh
        sources, others = [w.detach() for w in sources], [w.detach() for w in others]
        call(sources, copies, how, order, others, " ".join((*weights, *beside)), changing, anew)


def settled(copies: list[Tensor], weights: list[Tensor], order: Tensor | None, beside: list[Tensor]) -> Note | None:
    """The note of copies for which `refresh`, outside of training, has nothing to do and nothing to wait for; None
    where it may have."""
    if checks.watched(*weights, *beside) or not all(isinstance(w, Parameter) for w in weights):
        return None
    note = _note_of(copies)
    if note is None or not _done(weights, copies, order, beside, False, False) or note.answer is not None:
        return None
    return note


def note(weights: list[Tensor]) -> Note:
    """The note of what was just made of these weights, on the current stream, by other means than `refresh`."""
    _follow_optimizers()
    cuda = weights[0].is_cuda
    return Note(_seen(weights), None, moment=streams.Moment(weights[0].device) if cuda else None)


def made_of(note: Note, weights: list[Tensor]) -> bool:
    """Whether these are the weights of the note, and have not changed since."""
    return not note.dropped and note.sources == _seen(weights)


def still(note: Note, copies: Sequence[Tensor]) -> bool:
    """Whether copies that were `settled`, and whose weights have not changed since, can be read on the current
    stream. It is asked on every call, so it looks at as little as can be."""
    if note.dropped or note.steps != _steps or _sharding():
        return False
    if note.moment is not None:
        note.moment.enter(copies)
    return True


def _changing(training: bool, weights: list[Tensor], beside: list[Tensor]) -> bool:
    """Whether weights with gradients are being trained now."""
    return training and torch.is_grad_enabled() and any(w.requires_grad for w in (*weights, *beside))


def forget(copy: Tensor | None) -> None:
    """Have the next `refresh` make this copy anew."""
    if copy is not None and (note := vars(copy).pop("made", None)) is not None:
        note.dropped = True


def is_view(how: int, weight: Tensor | None) -> bool:
    """Whether a view of the weight serves as a copy in that layout: it is turned, by us or by somebody else. In
    eager code not of an inference tensor, whose views are not known for views."""
    return (
        how == TRANSPOSED
        and type(weight) is Parameter
        and not weight.is_meta
        and not weight.is_contiguous()
        and weight.t().is_contiguous()
        and (torch.compiler.is_compiling() or not weight.is_inference())
    )


def fits(copy: Tensor | None, how: int, weight: Tensor | None) -> bool:
    """Whether `copy` is a place for `weight` in that layout: same shape, dtype and device; None for None. A view is the
    place of the weight that it is a view of, and of no other: filling it would change somebody's weight."""
    if copy is None or weight is None:
        return copy is weight
    if is_view(how, weight):
        return copy.is_set_to(weight.detach().t())
    if not torch.compiler.is_compiling() and copy._is_view():
        return False
    return copy.shape == _shape(how, weight) and copy.dtype == weight.dtype and copy.device == weight.device


def place(how: int, weight: Tensor | None) -> Tensor | None:
    """Memory for a copy of `weight` in that layout, not yet filled; of a turned weight a view."""
    if weight is None:
        return None
    with torch.inference_mode(False):  # what is made inside inference mode could not be written to outside of it
        view = is_view(how, weight)
        copy = weight.detach().t() if view else weight.new_empty(_shape(how, weight), requires_grad=False)
    streams.allocated(copy)
    return copy


def _shape(how: int, weight: Tensor) -> torch.Size:
    return weight.shape[::-1] if how in (TRANSPOSED, ROWS_OF_TRANSPOSE) else weight.shape


def check_finite(weights: dict[str, Tensor | None]) -> None:
    """Raise InputError naming the first weight that has a NaN or an infinity. Waits for the device."""
    known = {
        name: w.detach()
        for name, w in weights.items()
        if w is not None and w.device.type in ("cpu", "cuda") and not checks.watched(w)
    }
    if known and not all_finite([*known.values()]).item():
        _refuse(known)


def _seen(weights: list[Tensor]) -> list[tuple]:
    """For each weight what is equal as long as the weight is the same and has not changed. For one that can change
    unseen, something that is never equal to anything."""
    sharding = _sharding()
    return [(object(),) if sharding or _changes_unseen(w) else (*trace(w), _steps) for w in weights]


def trace(weight: Tensor) -> tuple:
    """What is equal as long as a weight lies where it lies and torch counts no change of it."""
    storage = ref(weight.untyped_storage())
    return storage, weight.data_ptr(), weight._version, weight.shape, weight.stride(), weight.dtype


@dataclass(eq=False, slots=True)
class Note:
    """The note that all copies of one call share. A pickled or copied tensor has None in its place.

    sources, order: what the copies were made from; sources is what was `_seen`. beside: what was seen of the weights
    beside them when all were found finite or are being looked at; None where nobody looked. On a GPU also moment: when
    the copies were made; answer: the bool that will say whether all are finite, once the moment has passed. steps: of
    optimizers, as counted then. dropped: whether a copy has lost it."""

    sources: list[tuple]
    order: Tensor | None
    beside: list[tuple] | None = None
    moment: streams.Moment | None = None
    answer: Tensor | None = None
    steps: int = field(default_factory=lambda: _steps)
    dropped: bool = False

    def __reduce__(self):
        return type(None), ()


def changes_unseen(weight: Tensor) -> bool:
    """Whether somebody may write to the weight without a trace, such as another version or storage."""
    return _sharding() or _changes_unseen(weight)


def _changes_unseen(weight: Tensor) -> bool:
    return weight.is_inference() or (not weight.is_cuda and weight.untyped_storage().is_shared())


def _sharding() -> bool:
    """Whether FSDP2 manages a module: it writes gathered weights where the last ones were, and keeps their version as
    it was."""
    states = sys.modules.get("torch.distributed._composable_state")  # loaded once there was such a module
    return states is not None and bool(getattr(states, "_module_state_mapping", True))


_steps = 0  # of optimizers that may change weights without raising their version


def _count_step(optimizer: Optimizer | None = None, *_) -> None:
    global _steps
    tells = optimizer is not None and type(optimizer).__module__.startswith("torch.optim.")
    if not tells or any(group.get("fused") for group in optimizer.param_groups):
        _steps += 1


@functools.cache
def _follow_optimizers() -> None:
    """Have every optimizer's step counted from now on. Called for the first copy, so that an import changes nothing of
    torch's."""
    register_optimizer_step_post_hook(_count_step)


def _note_of(copies: Sequence[Tensor]) -> Note | None:
    """The note that the copies share; None where one of them has another one, or none."""
    made = getattr(copies[0], "made", None)
    return made if all(getattr(copy, "made", None) is made for copy in copies) else None


def _capturing(copies: list[Tensor]) -> bool:
    return copies[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _up_to_date(made: Note | None, weights, copies, order, changing, anew) -> bool:
    """Whether every copy equals its weight; a graph that is captured in training holds the copying in any case."""
    if anew or made is None or made.order is not order or made.sources != _seen(weights):
        return False
    return not (hasattr(copies[0], "in_graph") or changing and _capturing(copies))


def _done(weights, copies, order, beside, changing, anew) -> bool:
    """Whether the copies can be read as they are: nothing is to be copied, and nothing to be looked at."""
    made = _note_of(copies)
    answer = None if made is None else made.answer  # once: another thread may be looking
    if answer is not None and not _capturing(copies) and made.moment.event.query():
        made.answer = None
        if not answer:
            made.beside, copies[0].refused = None, True
    if not _up_to_date(made, weights, copies, order, changing, anew) or not (changing or made.beside == _seen(beside)):
        return False
    _enter(made, copies)
    return True


def _enter(made: Note, copies: list[Tensor]) -> None:
    if made.moment is not None:
        made.moment.enter(copies)


def _refresh(weights, copies, how, order, beside, names, changing, anew):
    if _done(weights, copies, order, beside, changing, anew):
        return
    cuda, capturing, made = copies[0].is_cuda, _capturing(copies), _note_of(copies)
    # On a GPU only once the answer was no: then the weights, as they are now, are looked at while the host waits.
    if not changing and not capturing and (not cuda or hasattr(copies[0], "refused")):
        named = dict(zip(names.split(), weights + beside))
        if valueless := next((name for name, weight in named.items() if weight.is_meta), ""):
            raise InputError(f"{valueless} is on meta, without values; cpu and cuda are accepted")
        if not all_finite(weights + beside):
            _refuse(named)
        vars(copies[0]).pop("refused", None)
    if _up_to_date(made, weights, copies, order, changing, anew):
        sources = made.sources
        _enter(made, copies)
    else:
        _follow_optimizers()
        for copy in copies:
            forget(copy)  # if anything goes wrong midway, the copy has no note and is made anew
        filled = _fill(copies, weights, how, order)
        sources = _seen(weights)
        if capturing and filled:  # nothing was copied yet; every replay will copy, from where the weight lies now
            copies[0].in_graph = True
    if capturing:
        return
    made = Note(sources, order)
    if not changing:
        made.beside = _seen(beside)
        if cuda:
            made.answer = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            made.answer.copy_(all_finite(weights + beside), non_blocking=True)
    if cuda:
        made.moment = streams.Moment(copies[0].device)
    for copy in copies:
        forget(copy)
        copy.made = made


@torch.no_grad()
def _fill(copies, weights, how, order) -> bool:
    """Write the copies; whether there was anything to write."""
    for t in copies if order is None else (*copies, order):
        streams.enter(t)
    filled = False
    for copy, weight, kind in zip(copies, weights, how):
        source = weight if kind == ROWS else weight.t()
        if kind != TRANSPOSED:
            torch.index_select(source, 0, order, out=copy)
        elif copy.numel() and not (copy._is_view() and copy.is_set_to(source)):
            copy.copy_(source)
        else:
            continue
        filled = True
    return filled


@torch.library.impl(_library, "refresh_copies", "CUDA")
@torch.library.impl(_library, "refresh_copies", "CPU")
def _refresh_within(weights, copies, how, order, beside, names, changing, anew):
    if not hasattr(copies[0], "made"):
        # A compiler works on clones, and writes them back into copies whose notes would go on to say what they were
        # made from. Counted as an optimizer's step, this makes every note old.
        _count_step()
    _refresh(weights, copies, how, order, beside, names, changing, anew)


@torch.no_grad()
def all_finite(weights: list[Tensor]) -> Tensor:
    """Whether no weight has a NaN or an infinity: a bool scalar on the first one's device. Waits for nothing."""
    largest = [torch.linalg.vector_norm(w, torch.inf).float() for w in weights if w.numel()]  # no number exceeds NaN
    if not largest:
        return torch.ones((), dtype=torch.bool, device="cpu")
    return torch.stack([each.to(largest[0].device, non_blocking=True) for each in largest]).isfinite().all()


def _refuse(weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        wrong = (~weight.isfinite()).nonzero()
        if len(wrong):
            at = wrong[0].tolist()
            raise InputError(
                f"{name} has {len(wrong)} values that are not finite, the first at {at}: {weight[tuple(at)].item()}; "
                "finite weights are accepted (a layer that is still being trained has diverged)"
            )


@torch.library.register_fake("twell_lab::refresh_copies", lib=_library)
def _(weights, copies, how, order, beside, names, changing, anew):
    return None
