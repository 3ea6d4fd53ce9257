"""What a path is: which layers it takes, how it wants the weights to lie, the forward pass, and what that costs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import TwellError
from ...ops import functional
from ...ops.activation import RELU
from ...ops.checks import is_turned
from ..parts import Weights
from ..storage import COLUMNS

if TYPE_CHECKING:
    from .cost import Rates, Work


class Path:
    """One way through a layer. It has no state.

    name: what plans, records and the operator call it. packs: whether neurons that fire are packed. splits: whether a
    choice of it says how many neurons, the first ones, are hot. exact: whether it computes the layer's function, but
    for rounding. patterned: whether it takes a layer for where the zeros of its weights lie; then it is timed on those.
    learns: the path of ops.train where gradients are needed. cuts: whether it is for layers with thresholds on their
    inputs, which take these paths and dense alone. reads: of "gate", "up" and "down" those that it reads by rows or by
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
        """Return the path for a layer with these weights, on which its `cost` may depend; or raise a TwellError."""
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
        """Return a function that does `forward` on a GPU for any x like this one; None where it is not worth it."""
        if not self.packs:
            return None
        from ...ops import dispatch

        return dispatch.prepare(x, weights, self.name, hot, layer.tile, layer.words, layer.acts)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float] | None:
        """Return the seconds that one call should take, by what they go to: gemm, rows, memory, launches, lost; None
        where only a clock can say it."""
        return None


class Dense(Path):
    """The dense module itself; on a Hopper GPU, from dispatch.LEAST_HIDDEN tokens, relu(gate) * up in one GEMM."""

    name = learns = "dense"
    packs = False

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        return super().forward(layer, x, weights, 0) if self._fuses(layer, x, weights) else layer.dense(x)

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor] | None:
        if self._fuses(layer, x, weights):
            from ...ops import dispatch

            return dispatch.prepare(x, weights, self.name, 0, layer.tile, layer.words, layer.acts)
        return layer.source.forward if layer.registered else None

    @staticmethod
    def _fuses(layer: nn.Module, x: Tensor, weights: Weights) -> bool:
        if not x.is_cuda or torch.compiler.is_compiling() or layer.acts != RELU or weights.gate is weights.up:
            return False
        from ...ops import dispatch

        return hides_host(x) and dispatch.fuses(weights.up)

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        gemm, values = dense_parts(work)
        launches = 2 if work.fuses_dense else 5 if work.firing.gated else 3
        return {"gemm": gemm, "rows": 0.0, "memory": values, "launches": launches * work.rates.launch, "lost": 0.0}


def hides_host(x: Tensor) -> bool:
    """Return whether x has so many tokens that the GPU works longer than the host: where not, torch's own operations,
    which cost the host least, are the fastest dense layer."""
    from ...ops import dispatch

    return x.shape[:-1].numel() >= dispatch.LEAST_HIDDEN


def dense_parts(work: Work) -> tuple[float, float]:
    """Return the seconds of the GEMMs, and of relu and multiply over the values between them."""
    values = 0 if work.fuses_dense else (5 if work.firing.gated else 2) * work.tokens * work.firing.d_ff * work.itemsize
    return work.gemm(work.firing.d_ff, work.firing.d_model, work.gemms), values / work.rates.bandwidth


class Converted(Path):
    """A path that computes with another representation of the weights, which the layer owns: made once, and made again
    by one hook when a state is loaded, as in quantised layers everywhere. Gradients are dense."""

    learns = "dense"
    packs = False

    @abstractmethod
    def make(self, weights: Weights) -> Any:
        """Return what `compute` needs, or raise a TwellError for weights that the path does not take."""

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
