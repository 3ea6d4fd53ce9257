"""What a path is: whether it takes a layer, what it holds for it, the forward pass, and what that should cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core import InputError
from ...ops import copies, inference
from ..again import Known
from ..weights import NAMES, Weights
from .cost import Rates, Work


class Copy(NamedTuple):
    """A weight in another layout.

    buffer: the name of the layer's buffer that holds it. name: the field of Weights in whose place it is read. source:
    the field that it is made of. how: a layout of twell_lab.ops.copies."""

    buffer: str
    name: str
    source: str
    how: int


def hold(layer: nn.Module, tensors: dict[str, Tensor | None], views: Iterable[str] = ()) -> None:
    """Have the layer keep these; all at once, since other threads may be reading. Copies are buffers outside its
    state_dict. Views of weights, of these names, are not: who writes to buffers, as averages of models do, would write
    to the weights; and compiled code makes its own. None: keep nothing of that name (torch.export miscounts buffers
    that are None)."""
    kept = {name: t for name, t in tensors.items() if t is not None and name not in views}
    if not torch.compiler.is_compiling():
        others = {name: t for name, t in layer._views.items() if name not in tensors}
        layer._views = {**others, **{name: t for name in views if (t := tensors[name]) is not None}}
    layer._non_persistent_buffers_set.update(kept)
    layer._buffers.update(kept)
    for name in tensors.keys() - kept.keys():
        layer._buffers.pop(name, None)


def held(layer: nn.Module) -> dict[str, Tensor]:
    """What the layer keeps; all at once, as other threads may be replacing the order and the copies. For compiled code
    without views: code that writes a copy cannot tell them apart."""
    return dict(layer._buffers) if torch.compiler.is_compiling() else {**layer._buffers, **layer._views}


ORDER = "order"  # the buffer of a layer that says which neuron comes first, second, ...: int64 [d_ff]


def _order(layer: nn.Module, up: Tensor) -> Tensor:
    """`layer.neurons` on the device. The list is what counts: a buffer that is moved by to_empty loses its values."""
    if up.shape[0] != len(layer.neurons):
        raise InputError(
            f"up has {up.shape[0]} neurons, but the layer's plan is for {len(layer.neurons)}; as many are accepted"
        )
    with torch.inference_mode(False):
        return torch.tensor(layer.neurons, device=up.device)


class Path:
    """One way through a layer. It has no state: what it holds for a layer are buffers of that SparseFFN.

    name: what plans, records and the operator call it. packs: whether neurons that fire are packed, and counted.
    splits: whether a choice of it says how many neurons are hot; then `layer.neurons` is their order, and the buffer
    ORDER holds it, unless the layer's own weights lie in that order. exact: whether it computes the layer's function,
    but for rounding; one that does not is called lossy wherever it is named. opaque: whether torch.compile sees one
    operator and not what it does. patterned: whether it takes a layer for where the zeros of its weights lie; then it
    is timed on those weights, and never on drawn ones. learns: the path of twell_lab.ops.train to take where
    gradients are needed. cuts: whether it is for layers with thresholds on their inputs (layers.lossy.Cut); they take
    these paths and dense, and no others do. copies: the weights it wants in another layout. in_order: those of them, by
    the same buffers, that it still wants where the layer's weights lie in `layer.neurons`."""

    name: str
    packs = True
    splits = False
    exact = True
    patterned = False
    cuts = False
    learns = "twell"
    copies: tuple[Copy, ...] = ()
    in_order: tuple[Copy, ...] | None = None

    def sizes(self, d_ff: int) -> Sequence[int]:
        """How many neurons may be hot in a layer of d_ff: empty where the path cannot take it."""
        return (0,)

    def accepts(self, d_ff: int, hot: int = 0) -> bool:
        """Whether a layer of d_ff neurons can go this way with so many hot ones, whatever the number of tokens."""
        return hot in self.sizes(d_ff)

    def helps(self, tokens: int, rates: Rates) -> bool:
        """Whether so many tokens go another way here than on the dense path, on a device of these rates; where not, it
        is not weighed."""
        return True

    def fitted(self, weights: Weights) -> Path:
        """The path for a layer with these weights, whose `cost` may depend on them. Raises a TwellError for a layer
        that it does not take because of them."""
        return self

    @property
    def opaque(self) -> bool:
        return self.packs

    def refuses(self, layer: nn.Module, weights: Weights) -> str:
        """Why the layer, as it is now, computes densely in the place of this path; "" where it does not."""
        return ""

    # ---- what is held ----

    def wanted(self, reordered: bool) -> tuple[Copy, ...]:
        """The weights it wants in another layout in a layer whose weights lie in `layer.neurons`, or do not."""
        return self.copies if self.in_order is None or not reordered else self.in_order

    def transposes(self, reordered: bool) -> set[str]:
        """The weights that it wants transposed and otherwise as they are: turned ones (ops.turned) need no copy."""
        return {copy.source for copy in self.wanted(reordered) if copy.how == copies.TRANSPOSED}

    def copy_bytes(self, weights: Weights, turned: Collection[str], reordered: bool) -> int:
        """The bytes of all that a layer holds for this path. turned: which of its weights are."""
        sources = [
            getattr(weights, copy.source)
            for copy in self.wanted(reordered)
            if not (copy.source in turned and copy.how == copies.TRANSPOSED)
        ]
        order = 8 * weights.up.shape[0] if self.splits and not reordered else 0
        return order + sum(source.nbytes for source in sources if source is not None)

    @property
    def noted(self) -> str:
        """The buffer without elements beside views: compiled code, which may not write to a weight, has the note of its
        values kept there."""
        return f"{self.name}_noted"

    @property
    def buffers(self) -> list[str]:
        """The names of all buffers that a layer may hold for this path."""
        return [*(copy.buffer for copy in self.copies), self.noted, *([ORDER] if self.splits else [])]

    def prepare(self, layer: nn.Module, weights: Weights) -> tuple[Tensor | None, list[Tensor | None]]:
        """Have the layer hold memory for the copies, which its next forward will fill, and nothing else for this path;
        returns the order and the copies."""
        order = _order(layer, weights.up) if self._orders(layer) else None
        wanted = self.wanted(layer.reordered)
        places = [copies.place(copy.how, getattr(weights, copy.source)) for copy in wanted]
        made = dict(zip((copy.buffer for copy in wanted), places))
        if self.splits:
            made[ORDER] = order
        views = [copy.buffer for copy in wanted if copies.is_view(copy.how, getattr(weights, copy.source))]
        if views:
            made[self.noted] = weights.down.new_empty(0, requires_grad=False)
        hold(layer, {**dict.fromkeys(self.buffers), **made}, views)
        return order, places

    def release(self, layer: nn.Module) -> None:
        """Have the layer hold nothing for this path any more."""
        hold(layer, dict.fromkeys(self.buffers))

    def moved(self, layer: nn.Module, weights: Weights) -> None:
        """Make anew, after the layer's tensors were moved as by `to`, what cannot be used any more: copies that were
        moved inside inference mode could not be written to outside of it, and `to_empty` loses the order's values."""
        if self.splits or any(place is not None and place.is_inference() for place in self._held(layer)[1]):
            self.prepare(layer, weights)

    def fit(self, layer: nn.Module, weights: Weights) -> None:
        """Make anew what is no place for its weight."""
        if not self._fits(layer, *self._held(layer), weights):
            self.prepare(layer, weights)

    def ready(self, layer: nn.Module, weights: Weights) -> Weights:
        """The weights as this path reads them: its copies, brought up to date, in the place of what they stand for."""
        order, places = self._held(layer)
        # Compiled code makes the view itself, and has the note kept elsewhere: it may not write to a weight.
        views = self._views(layer, weights) if torch.compiler.is_compiling() else {}
        wanted = self.wanted(layer.reordered)
        if not self._fits(layer, order, places, weights, views):
            order, places = self.prepare(layer, weights)
            if not layer.takes(self.name):  # another thread changed the plan meanwhile: they are for this call alone
                self.release(layer)
        places = [layer._buffers.get(self.noted) if copy.name in views else t for copy, t in zip(wanted, places)]
        filled = [(copy, place) for copy, place in zip(wanted, places) if place is not None]
        sources: dict[str, Tensor] = {}
        for copy, _ in filled:  # a weight may have two copies
            sources[copy.name if copy.source in sources else copy.source] = getattr(weights, copy.source)
        beside = {name: t for name, t in zip(NAMES, weights) if t is not None and name not in sources}
        targets, how = [place for _, place in filled], [copy.how for copy, _ in filled]
        if targets:
            copies.refresh(sources, targets, how, order, beside, training=layer.training)
        made = {copy.name: place for copy, place in filled} | views
        return Weights(*[made.get(name, t) for name, t in zip(NAMES, weights)])

    def _views(self, layer: nn.Module, weights: Weights) -> dict[str, Tensor]:
        """What needs no copy, since the weight is turned, by the fields of Weights in whose place it is read."""
        sources = [(copy, getattr(weights, copy.source)) for copy in self.wanted(layer.reordered)]
        return {copy.name: weight.detach().t() for copy, weight in sources if copies.is_view(copy.how, weight)}

    def _held(self, layer: nn.Module) -> tuple[Tensor | None, list[Tensor | None]]:
        """The order of the neurons, None for the layer's own, and the copies, as far as they are there."""
        there = held(layer)
        places = [there.get(copy.buffer) for copy in self.wanted(layer.reordered)]
        return there.get(ORDER) if self._orders(layer) else None, places

    def _orders(self, layer: nn.Module) -> bool:
        """Whether the copies have the neurons in another order than the layer's weights."""
        return self.splits and not layer.reordered

    def _fits(self, layer: nn.Module, order: Tensor | None, places: list, weights: Weights, views=()) -> bool:
        """Whether every copy but these views is a place for its weight, and the order at hand."""
        return (not self._orders(layer) or order is not None and order.device == weights.up.device) and all(
            copy.name in views or copies.fits(place, copy.how, getattr(weights, copy.source))
            for copy, place in zip(self.wanted(layer.reordered), places)
        )

    # ---- what is done, and what it costs ----

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Tensor:
        """The layer's output for x [..., d_model], without gradients. stats: int64 [4] to count in, as inference.infer
        does; None: count nothing."""
        weights = self.ready(layer, weights)
        how = {"path": self.name, "hot": hot, "tile": layer.tile, "words": layer.words, "acts": layer.acts}
        return inference.infer(x, *weights[:6], down_t=weights.down_t, stats=stats, **how)

    def again(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Known | None:
        """How to do a `forward` that was just done again, for any x like this one and as long as the weights do not
        change; None where that cannot be said."""
        if not x.is_cuda:  # a CPU takes longer for a layer than Python does
            return None
        order, places = self._held(layer)
        there = [(copy, place) for copy, place in zip(self.wanted(layer.reordered), places) if place is not None]
        sources = [getattr(weights, copy.source) for copy, _ in there]
        note = None
        if there:
            copied = {copy.source for copy, _ in there}
            beside = [t for name, t in zip(NAMES, weights) if t is not None and name not in copied]
            note = copies.settled([place for _, place in there], sources, order, beside)
            if note is None:
                return None
        read = {NAMES.index(copy.name): place for copy, place in there}
        run = inference.prepared(x, weights, read, stats, self.name, hot, layer.tile, layer.words, layer.acts)
        return None if run is None else Known(run, [place for _, place in there], note)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        """Seconds that one call should take, by what they go to: gemm, rows, memory, launches, lost."""
        raise NotImplementedError
