"""The ways through a feed-forward layer: which layers each takes, how it wants the weights to lie, its forward pass,
and what that costs. A new one is a class here and a line in PATHS; or a file of a room above, which hands it down
(`Registry.further`)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core import TwellError
from ...formats.twell import TILE, WORDS
from ...ops import functional
from ...ops.activation import RELU
from ...ops.checks import is_turned
from ..parts import Weights
from ..storage import COLUMNS, ROWS

if TYPE_CHECKING:
    from .cost import Rates, Work

STEP = 256  # hot sizes are multiples of this, so that the cold part starts with a whole tile
_HANDS_DOWN = "twell_lab.sparsities"  # fills `Registry.further`; imported when a name is asked for that is not here


class Path:
    """One way through a layer, without state. name: what plans, records and the operator call it."""

    name: str
    packs = True  # the neurons that fire
    splits = False  # whether a choice of it says how many neurons, the first ones, are hot
    exact = True  # whether it computes the layer's function, but for rounding
    patterned = False  # whether it takes a layer for where the zeros of its weights lie; then it is timed on those
    cuts = False  # whether it is for layers with thresholds on their inputs, which take such paths and dense alone
    learns = "twell"  # the path of ops.train where gradients are needed
    reads: Mapping[str, str] = {}  # of "gate", "up" and "down" those that it reads by ROWS or by COLUMNS

    def sizes(self, d_ff: int) -> Sequence[int]:
        """Return how many neurons may be hot in a layer of d_ff: empty where the path cannot take it."""
        return range(STEP, d_ff, STEP) if self.splits else (0,)

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
        return super().forward(layer, x, weights, 0) if _fuses(layer, x, weights) else layer.dense(x)

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor] | None:
        if _fuses(layer, x, weights):
            return super().prepare(layer, x, weights, 0)
        return layer.source.forward if layer.registered else None

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        firing, tokens, fused = work.firing, work.tokens, work.fuses_dense
        values = 0 if fused else (5 if firing.gated else 2) * tokens * firing.d_ff * work.itemsize
        gemm, memory = work.gemm(firing.d_ff, firing.d_model, work.gemms), values / work.rates.bandwidth
        launches = 2 if fused else 5 if firing.gated else 3
        return {"gemm": gemm, "rows": 0.0, "memory": memory, "launches": launches * work.rates.launch, "lost": 0.0}


def _fuses(layer: nn.Module, x: Tensor, weights: Weights) -> bool:
    if not x.is_cuda or torch.compiler.is_compiling() or layer.acts != RELU or weights.gate is weights.up:
        return False
    from ...ops import dispatch

    return hides_host(x) and dispatch.fuses(weights.up)


def hides_host(x: Tensor) -> bool:
    """Return whether x has so many tokens that the GPU works longer than the host: where not, torch's own operations,
    which cost the host least, are the fastest dense layer."""
    from ...ops import dispatch

    return x.shape[:-1].numel() >= dispatch.LEAST_HIDDEN


class Twell(Path):
    """The neurons that fire are packed while the gate's GEMM still holds them, and the rest of the layer is computed
    for these entries alone: each costs one row of `down` transposed, and in a gated layer one of `up`."""

    name = "twell"
    reads = {"gate": ROWS, "up": ROWS, "down": COLUMNS}

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        firing, tokens, itemsize, rates = work.firing, work.tokens, work.itemsize, work.rates
        few, fused, cold, d_model = work.few, work.fuses_gate, firing.d_ff - hot, firing.d_model
        a_row = math.ceil(cold / TILE) * (WORDS * 4 + 32)  # written whole, read as far as it is used
        packed = 0 if work.lists else tokens * a_row
        values = 0 if fused or few else 2 * tokens * cold * itemsize
        heavy, entries = firing.heavy(hot) if fused else (0.0, 0.0)
        lost = 0.0 if few else firing.lost(hot)  # the kernels for few tokens take any number of entries
        dense = PATHS["dense"].cost(work)
        gemm, memory = work.gemm(cold, d_model), 2 * tokens * d_model * itemsize + packed + values
        launches = (2 if fused or few else 3) + (2 * work.pieces if fused else 0)
        if hot:
            gemm += work.gemm(hot, d_model, work.gemms)
            memory += 2 * tokens * hot * itemsize + 2 * tokens * d_model * 4
            launches += 2 if fused else 5
        return {
            "gemm": gemm,
            "rows": work.rows(firing.frequency[hot:]) * (1 - entries),
            "memory": memory / rates.bandwidth,
            "launches": launches * rates.launch,
            "lost": max(lost, heavy) * (dense["gemm"] + dense["memory"]),
        }


class HotCold(Twell):
    """TwELL, but for the first `hot` neurons, those that fire most, which are computed densely; the sum of both is
    rounded once. A layer that is given a LayerPlan with this path has its neurons put in order (layers.storage); one
    that is given a Choice keeps the order that it has."""

    name = "hot_cold"
    splits = True


def hot_first(counts: Tensor, hot: int) -> Tensor:
    """Return an order of the neurons, int64: first the `hot` with the highest counts, by count; then the others, dealt
    to tiles of 256 like cards, back and forth, so that every tile gets its share of those that still fire often. Equal
    counts keep their order."""
    order = counts.argsort(descending=True, stable=True)
    rest = order[hot:]
    deals = torch.arange(-(-len(rest) // STEP) * STEP, device=rest.device).view(STEP, -1)  # of each slot, by tile
    deals[1::2] = deals[1::2].flip(1)
    turns = deals.t().flatten()[: len(rest)].argsort().argsort()  # the last tile may have fewer slots
    return torch.cat([order[:hot], rest[turns]])


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
        if self.name not in layer.forms:
            try:
                Converted.fitted(self, weights)
                plain = {id(t): None if t is None else t.detach() for t in weights}  # what is there twice stays one
                layer.forms[self.name] = self.make(Weights(*[plain[id(t)] for t in weights]))
            except TwellError as error:
                layer.forms[self.name] = error
        form = layer.forms[self.name]
        return str(form) if isinstance(form, TwellError) else ""

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Tensor:
        return self.compute(layer, x, weights, layer.forms[self.name])

    def prepare(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int) -> Callable[[Tensor], Tensor]:
        form = layer.forms[self.name]
        return lambda x: self.compute(layer, x, weights, form)


class Registry(dict[str, Path]):
    """Holds paths by the names that plans, records and the operator know them by. Those in it are exact, and weighed
    for every plan. `further` ones, by name their module and class, which is imported when it is used, are found by
    their names as well, and are weighed where somebody named them."""

    def __init__(self, *paths: Path) -> None:
        super().__init__({path.name: path for path in paths})
        self.further: dict[str, str] = {}

    def names(self) -> list[str]:
        """Return the names of all paths, those of this room first."""
        import_module(_HANDS_DOWN)
        return [*self, *self.further]

    def __missing__(self, name: str) -> Path:
        if name not in self.names():
            raise KeyError(name)
        module, _, kind = self.further[name].rpartition(".")
        return getattr(import_module(module), kind)()


PATHS = Registry(Dense(), Twell(), HotCold())
