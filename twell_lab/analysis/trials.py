"""Trials: one layer timed on paths, in turns, beside itself as torch computes it, for one way of calling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..core import TwellError
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.find import FeedForward, StandIn
from ..layers.lossy import ThresholdedInput
from ..layers.parts import named_family
from ..layers.paths import PATHS
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock
from ..ops.reference import SquaredReLU
from .profile import LayerProfile

ROWS = 4096  # inputs of a layer that are timed on at most; more tokens repeat them
_CPU_PRODUCTS = 2**29  # of a call on a CPU: more tokens than take so many are timed as so many, and scaled
_LAST = 2**62  # a class of token counts above all that are asked for


@dataclass(frozen=True)
class Times:
    """Microseconds of a call with so many tokens.

    dense: of the faster dense one; plain, ordered: of each choice, in a layer whose neurons lie in their own order, and
    in that of hot/cold; torch: of the layer as torch computes it."""

    dense: float
    plain: dict[Choice, float]
    ordered: dict[Choice, float]
    torch: float | None = None


class Copied(nn.Module):
    """A feed-forward layer under usual names, computed as the model does, on copies of its weights, as they lie.

    copies: False has it read the layer's own weights."""

    def __init__(self, found: FeedForward, copies: bool = True) -> None:
        super().__init__()
        self.both, self.cut, squared = found.both, found.cut, found.gate is found.up
        if found.gate is not None and not squared:
            self.gate_proj = _projection(found.gate, copies)
        self.up_proj, self.down_proj = _projection(found.up, copies), _projection(found.down, copies)
        self.act_fn = copy.copy(found.acts) if found.acts else SquaredReLU() if squared else nn.ReLU()
        for place, threshold in found.cut._asdict().items() if found.cut else ():
            self.add_module(f"lossy_{place}", ThresholdedInput(threshold))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.cut is None else self.cut.of_input(x)
        if hasattr(self, "gate_proj"):
            hidden, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
            hidden = hidden * (self.act_fn(up) if self.both else up)
        else:
            hidden = self.act_fn(self.up_proj(x))
        return self.down_proj(hidden if self.cut is None else self.cut.of_hidden(hidden))


def _projection(projection: nn.Linear, copies: bool) -> nn.Linear:
    """Return a plain nn.Linear with the weights of a projection, or copies of them, and none of its hooks."""
    rows, columns = projection.weight.shape
    made = nn.Linear(columns, rows, projection.bias is not None, device="meta", dtype=projection.weight.dtype)
    for name, tensor in (("weight", projection.weight), ("bias", projection.bias)):
        if tensor is not None:
            value = tensor.detach().clone() if copies else tensor.detach()
            setattr(made, name, nn.Parameter(value, requires_grad=False))
    return made


class Trial:
    """One layer, timed for one way of calling.

    layer, found: its profile, and the layer. hot: how many neurons hot/cold has first; 0 where that is not weighed.
    x: inputs of it, [rows, d_model]; without them a drawn one is timed, of its shape, in which each neuron fires as
    often, though independently. A path that takes a layer for where its zeros lie has its own weights even then.
    beside: see clock.time_calls. errors: of each lossy choice how far its output is off: the norm of the difference
    over that of the layer's output. refused: of each choice that the layer cannot take, why."""

    def __init__(
        self, layer: LayerProfile, found: FeedForward, hot: int, calls: str, x: Tensor | None, beside: int
    ) -> None:
        self.layer, self.hot, self.calls, self.beside = layer, hot, calls, beside
        self.errors: dict[Choice, float] = {}
        self.refused: dict[Choice, str] = {}
        self.own, self.device = found, found.up.weight.device
        if x is None:
            how = {"shrink": layer.d_ff**0.5, "gated": layer.gated}
            often, dtype = layer.neuron_counts.double() / layer.tokens, found.up.weight.dtype
            drawn, inputs = clock.drawn(often, ROWS, layer.d_model, dtype, self.device, **how)
            x, gate = torch.cat(inputs), getattr(drawn, "gate_proj", None)
            found = FeedForward("", drawn, gate, drawn.up_proj, drawn.down_proj)
        self.found, self.x = found, x.to(self.device, found.up.weight.dtype)
        self.ways: dict[tuple[Choice, bool] | None, nn.Module] = {None: self._ready(_by_torch(found))}

    def run(self, tokens: int, choices: list[Choice]) -> Times:
        """Return the times of the layer as torch computes it, of our dense path, and of these choices."""
        count = tokens
        if self.device.type == "cpu":
            count = max(1, min(tokens, _CPU_PRODUCTS // (3 * self.own.up.weight.numel())))
        wanted = [(choice, False) for choice in (DENSE, *choices) if not choice.hot]
        if self.hot and any(choice.hot or choice == Choice() for choice in choices):
            wanted += [(choice, True) for choice in (*choices, Choice()) if choice.hot or choice == Choice()]
        inputs = _rotated(self.x, count)
        ways = {key: self.ways[key] for key in [None, *(key for key in dict.fromkeys(wanted) if self._make(*key))]}
        with torch.no_grad():
            for key, way in ways.items():
                if key and not PATHS[key[0].path].exact and key[0] not in self.errors:
                    exact = self.ways[None](inputs[0]).double()
                    off = (way(inputs[0]).double() - exact).norm() / exact.norm().clamp(min=1e-30)
                    self.errors[key[0]] = off.item()
            took = self._time({key: _over(way, inputs) for key, way in ways.items()})
        us = {key: 1e3 * clock.quartiles(values)[0] * tokens / count for key, values in took.items()}
        plain = {key[0]: time for key, time in us.items() if key and not key[1]}
        plain.setdefault(DENSE, us[None])
        ordered = {DENSE: plain[DENSE], **{key[0]: time for key, time in us.items() if key and key[1]}}
        return Times(min(us[None], plain[DENSE]), plain, ordered, us[None])

    def _time(self, calls: dict) -> dict:
        if self.calls == "captured":
            with torch.cuda.device(self.device):
                return clock.time_cuda({key: clock.graphed(call) for key, call in calls.items()}, 10)
        limits = torch._dynamo.config.patch(recompile_limit=256) if self.calls == "compiled" else nullcontext()
        with limits:
            return clock.time_calls(calls, self.device, beside=self.beside)

    def _make(self, choice: Choice, ordered: bool) -> bool:
        """Have the layer at hand on this path, its neurons in their own order or in that of hot/cold; return whether it
        takes it."""
        if choice in self.refused or (choice, ordered) in self.ways:
            return choice not in self.refused
        plan = LayerPlan.forced(self.layer, choice)
        if ordered:  # as a layer lies that takes hot/cold for more tokens than there are
            row = replace(plan.candidates[0], tokens=_LAST)
            plan = replace(plan, candidates=(row, replace(row, tokens=_LAST + 1, path="hot_cold", hot=self.hot)))
        source = self.own if PATHS[choice.path].patterned else self.found
        try:
            self.ways[choice, ordered] = self._ready(SparseFFN.from_module(Copied(source), plan=plan))
        except TwellError as error:
            self.refused[choice] = str(error)
        return choice not in self.refused

    def _ready(self, module: nn.Module) -> nn.Module:
        return torch.compile(module, dynamic=False) if self.calls == "compiled" else module


def _by_torch(found: FeedForward) -> nn.Module:
    """Return the layer as the model computes it: its own module where one projection holds gate and up, if no other
    process has to call it too."""
    family = None if isinstance(found.module, StandIn) else named_family(found.module)
    fused = family is not None and family.gate == family.up and not torch.distributed.is_initialized()
    return found.module if fused else Copied(found, copies=False)


def _rotated(x: Tensor, tokens: int) -> list[Tensor]:
    """Return up to three inputs of so many tokens from the rows of x, other rows in each as far as there are any."""
    if x.shape[0] < tokens:
        x = x.repeat(-(-tokens // x.shape[0]), 1)
    sets = min(clock.ROTATED, x.shape[0] // tokens)
    return [x[first * tokens : (first + 1) * tokens].contiguous() for first in range(sets)]


def _over(way: nn.Module, inputs: list[Tensor]) -> Callable[[int], Tensor]:
    return lambda turn: way(inputs[turn % len(inputs)])
