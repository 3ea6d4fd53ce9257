"""What a layer's calls found out, so that the next ones ask only whether it still holds.

In a model whose host is behind its GPU a layer costs what its Python costs, and every function that is called there is
felt. A call like an earlier one therefore looks, in one place, whether anything about the layer is otherwise than it
was, and computes. Where something may be, the layer looks at everything anew, as on its first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from ..ops import checks, copies, streams
from .parts import Cut
from .weights import Weights

_MOST = 256  # kinds of inputs that are remembered; then all are forgotten


class Known(NamedTuple):
    """How to compute a layer for inputs of one kind.

    run: from x and a list of the weights, in the order of Weights, with nothing checked. places, note: the copies of
    weights that it reads, and their note (copies.settled); without copies, () and None. counters: where it counts, if
    it does."""

    run: Callable[[Tensor, list[Tensor | None]], Tensor]
    places: Sequence[Tensor] = ()
    note: copies.Note | None = None
    counters: Tensor | None = None


class Again:
    """The calls of one layer without gradients in plain eager code, as long as nothing of the layer changes.

    A change of the layer's own attributes has it drop this; what lies in its parts is looked at here. Between calls it
    keeps no weight alive."""

    def __init__(self, layer, weights: Weights) -> None:
        self._modules, self._seat = layer._modules, layer._seat if layer.registered else ""
        # Where each projection has to be, and the forward that it has of its own.
        self._seats = []
        for _, block, leaf, _ in layer._seats:
            held = (layer if block is None else block)._modules
            self._seats.append((held, leaf, held[leaf], vars(held[leaf]).get("forward")))
        self._weights = [None if t is None else ref(t) for t in weights]
        stored = _stored(layer)
        self._traces = [(own, name, ref(t), *copies.trace(t)) for own, name, t in stored if t is not None]
        self._absent = [(own, name) for own, name, t in stored if t is None]
        self._known: dict[tuple, Known] = {}

    @classmethod
    def remembered(cls, last: Again | None, layer, x: Tensor, weights: Weights, known: Known) -> Again | None:
        """With this call remembered, too; None where weights could change unseen. last: what there was before, which
        did not know the call, or of which something has changed."""
        if not all(type(t) is Parameter and not copies.changes_unseen(t) for *_, t in _stored(layer) if t is not None):
            return None
        if not all(t is None or type(t) is Parameter for t in weights):  # some are not stored where they are looked for
            return None
        key = _kind(x)
        if last is None or key in last._known:
            last = cls(layer, weights)
        elif len(last._known) >= _MOST:
            last._known.clear()
        last._known[key] = known
        return last

    def run(self, x: Tensor, given: Sequence[Tensor | None] | None = None) -> Tensor | None:
        """The layer's result; None where the call is new, or something may be otherwise than it was. given: what the
        weights have to be, as in Weights."""
        if type(x) is not Tensor or not checks.plain_eager():
            return None
        weights: list[Tensor | None] = []  # from now on alive
        for seen in self._weights:
            weight = None if seen is None else seen()
            if weight is None and seen is not None:
                return None
            if given is not None and weight is not given[len(weights)]:
                return None
            weights.append(weight)
        try:
            known = self._known.get(_kind(x))
            if known is None or not self._as_it_was():
                return None
        except (RuntimeError, KeyError):  # a tensor without an address; a projection that is gone
            return None
        if known.note is not None and not copies.still(known.note, known.places):
            return None
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights)):
            return None
        if known.counters is not None:
            streams.enter(known.counters)
        return known.run(x, weights)

    def _as_it_was(self) -> bool:
        """Whether the projections and their weights are: what hooks.check_parts and copies.trace look at, without a
        call of a function for each."""
        for held, leaf, part, forward in self._seats:
            if held[leaf] is not part:
                return False
            own = part.__dict__
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or own.get("forward") is not forward
            ):
                return False
        for own, name, seen, storage, at, version, shape, stride, dtype in self._traces:
            weight = own[name]
            if (
                weight is None
                or weight is not seen()
                or weight._version != version
                or weight.data_ptr() != at
                or weight.untyped_storage() is not storage()
                or weight.shape != shape
                or weight.stride() != stride
                or weight.dtype != dtype
            ):
                return False
        for own, name in self._absent:
            if own.get(name) is not None:
                return False
        return self._seat not in self._modules


def _kind(x: Tensor) -> tuple:
    """What the choice of kernels depends on."""
    return x.shape, x.dtype, x.device, x.is_contiguous(), x.data_ptr() & 15


def _stored(layer) -> list[tuple[dict, str, Tensor | None]]:
    """Where the model keeps the layer's weights and biases: the parameters of a module, a name, and what is there."""
    found = []
    for part in (layer.gate, layer.up, layer.down):
        if part is not None:
            module, names = (part.of, part.names) if isinstance(part, Cut) else (part, ("weight", "bias"))
            own = module._parameters
            found += [(own, name, own.get(name)) for name in names if name]
    return found
