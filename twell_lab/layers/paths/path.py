"""What a path is: whether it takes a layer, how it wants the weights to lie, the forward pass, and what that costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...core import TwellError
from ...ops import functional
from ...ops.checks import is_turned
from ..parts import Weights
from ..storage import COLUMNS

if TYPE_CHECKING:
    from .cost import Rates, Work


class Path:
    """One way through a layer. It has no state.

    name: what plans, records and the operator call it. packs: whether neurons that fire are packed. splits: whether a
    choice of it says how many neurons, the first ones, are hot. exact: whether it computes the layer's function, but
    for rounding; one that does not is called lossy wherever it is named. patterned: whether it takes a layer for where
    the zeros of its weights lie; then it is timed on those weights, and never on drawn ones. learns: the path of
    ops.train to take where gradients are needed. cuts: whether it is for layers with thresholds on their inputs; they
    take these paths and dense, and no others do. reads: of "gate", "up" and "down" those that it reads by rows or by
    columns (layers.storage)."""

    name: str
    packs = True
    splits = False
    exact = True
    patterned = False
    cuts = False
    learns = "twell"
    reads: Mapping[str, str] = {}

    def sizes(self, d_ff: int) -> Sequence[int]:
        """Return how many neurons may be hot in a layer of d_ff: empty where the path cannot take it."""
        return (0,)

    def accepts(self, d_ff: int, hot: int = 0) -> bool:
        """Return whether a layer of d_ff neurons can go this way with so many hot ones."""
        return hot in self.sizes(d_ff)

    def helps(self, tokens: int, rates: Rates) -> bool:
        """Return whether so many tokens go another way here than on the dense path, on a device of these rates."""
        return True

    def fitted(self, weights: Weights) -> Path:
        """Return the path for a layer with these weights, on which its `cost` may depend. Raises a TwellError for a
        layer that it does not take because of them."""
        return self

    def refuses(self, layer: nn.Module, weights: Weights) -> str:
        """Return why the layer, as it is now, computes densely in the place of this path; "" where it does not."""
        for name, how in self.reads.items():
            weight = getattr(weights, name)
            if weight is not None and not (is_turned(weight) if how == COLUMNS else weight.is_contiguous()):
                return f"{name} does not lie as this path reads it: {layer.why or 'it was moved or replaced'}"
        return ""

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        """Return the layer's output for x [..., d_model], without gradients."""
        return functional.infer(x, *weights, self.name, hot, layer.tile, layer.words, layer.acts)

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor] | None:
        """Return a function that does `forward` on a GPU for any x like this one, as long as these weights lie where
        they do; None where it is not worth it."""
        if not self.packs:
            return None
        from ...ops import dispatch

        return dispatch.prepare(x, weights, self.name, hot, layer.tile, layer.words, layer.acts)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float] | None:
        """Return the seconds that one call should take, by what they go to: gemm, rows, memory, launches, lost; None
        where that is not predicted, so that only a clock can say it."""
        return None


class Converted(Path):
    """A path that computes with another representation of the weights, which the layer owns: made once (`make`), and
    made again by one hook when a state is loaded. Gradients are dense. Changes of weights that are no loading are not
    followed, as in quantised layers everywhere."""

    learns = "dense"
    packs = False

    @abstractmethod
    def make(self, weights: Weights) -> Any:
        """Return what `compute` needs. Raises a TwellError for weights that the path does not take."""

    @abstractmethod
    def compute(self, layer: nn.Module, x: Tensor, weights: Weights, form: Any) -> Tensor:
        """Return the layer's output for x [..., d_model], from what `make` returned."""

    def fitted(self, weights: Weights) -> Path:
        functional.check_finite({name: t for name, t in weights.named().items() if not name.endswith("bias")})
        return self

    def refuses(self, layer: nn.Module, weights: Weights) -> str:
        form = self.form(layer, weights)
        return str(form) if isinstance(form, TwellError) else ""

    def form(self, layer: nn.Module, weights: Weights) -> Any:
        """Return what the layer keeps for this path, made now if it is not there: a TwellError where none can be."""
        if self.name not in layer.forms:
            try:
                Converted.fitted(self, weights)
                plain = {id(t): None if t is None else t.detach() for t in weights}  # what is there twice stays one
                layer.forms[self.name] = self.make(Weights(*[plain[id(t)] for t in weights]))
            except TwellError as error:
                layer.forms[self.name] = error
        return layer.forms[self.name]

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        return self.compute(layer, x, weights, layer.forms[self.name])

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor]:
        form = layer.forms[self.name]
        return lambda x: self.compute(layer, x, weights, form)
