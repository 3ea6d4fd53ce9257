"""What a layer's calls found out, so that the next ones ask only whether it still holds.

In a model whose host is behind its GPU a layer costs what its Python costs, and every function that is called there is
felt. A call like an earlier one therefore looks, in one place, whether anything about the layer is otherwise than it
was, and computes. Where something may be, the layer looks at everything anew, as on its first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple
from weakref import ref

from torch import Tensor, is_grad_enabled
from torch.nn import Parameter

from ..ops import copies, streams
from ..ops.checks import plain_eager
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
        # Where each projection has to be, its class, and the forward that it has of its own.
        self._seats = []
        for _, block, leaf, _ in layer._seats:
            held = (layer if block is None else block)._modules
            self._seats.append((held, leaf, held[leaf], type(held[leaf]), vars(held[leaf]).get("forward")))
        # Where the model keeps each weight, and what it was; Nones where there was none.
        self._stored = [
            (own, name, *((None,) * 7 if t is None else (ref(t), *copies.trace(t)))) for own, name, t in _stored(layer)
        ]
        # The weights, where some are cut out of what is stored; down_t, the last of them, a layer's own do not have.
        cut = any(isinstance(part, Cut) for part in layer.parts)
        self._cut = [None if t is None else ref(t) for t in weights] if cut else None
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
        if type(x) is not Tensor or not plain_eager():
            return None
        try:
            known = self._known.get(_kind(x))
            stored = None if known is None else self._as_stored()
        except (RuntimeError, KeyError):  # a tensor without an address; a projection that is gone
            return None
        if known is None or stored is None:
            return None
        if is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *stored)):
            return None
        weights = [*stored, None] if self._cut is None else self._cut_out()
        if weights is None or given is not None and not all(map(is_, weights, given)):
            return None
        if known.note is not None and not copies.still(known.note, known.places):
            return None
        if known.counters is not None:
            streams.enter(known.counters)
        return known.run(x, weights)

    def _as_stored(self) -> list[Tensor | None] | None:
        """What the model keeps for the weights, in the order of Weights, from now on alive; None where that, or the
        projections, may be otherwise than it was: what hooks.check_parts and copies.trace look at, without a call of a
        function for each."""
        for held, leaf, part, kind, forward in self._seats:
            if held[leaf] is not part or type(part) is not kind:
                return None
            own = part.__dict__
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or own.get("forward") is not forward
            ):
                return None
        if self._seat in self._modules:
            return None
        stored: list[Tensor | None] = []
        for own, name, seen, storage, at, version, shape, stride, dtype in self._stored:
            weight = own.get(name)
            if seen is None:
                if weight is not None:
                    return None
            elif (
                weight is None
                or weight is not seen()
                or weight._version != version
                or weight.data_ptr() != at
                or weight.untyped_storage() is not storage()
                or weight.shape != shape
                or weight.stride() != stride
                or weight.dtype != dtype
            ):
                return None
            stored.append(weight)
        return stored

    def _cut_out(self) -> list[Tensor | None] | None:
        """The weights, where some are cut out of what is stored; None where one is gone."""
        weights = [None if seen is None else seen() for seen in self._cut]
        return None if any(t is None is not seen for t, seen in zip(weights, self._cut)) else weights


def _kind(x: Tensor) -> tuple:
    """What the choice of kernels depends on."""
    return x.shape, x.dtype, x.device, x.is_contiguous(), x.data_ptr() & 15


def _stored(layer) -> list[tuple[dict, str | None, Tensor | None]]:
    """Where the model keeps the layer's weights and biases: the parameters of a module, a name, and what is there; in
    the order of Weights."""
    found = []
    for index, plain in enumerate(("weight", "bias")):
        for part in layer.parts:
            module, name = (part.of, part.names[index]) if isinstance(part, Cut) else (part, plain)
            own = {} if module is None else module._parameters
            found.append((own, name, own.get(name)))
    return found
