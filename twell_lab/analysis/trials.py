"""Trials: one layer timed on paths, in turns, beside itself as torch computes it, for one way of calling."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core import TwellError
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.find import FeedForward, StandIn, cut_places
from ..layers.lossy import ThresholdedInput
from ..layers.parts import named_family, parts_of
from ..layers.paths import PATHS
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock
from ..ops.activation import SquaredReLU
from .profile import LayerProfile

ROWS = 4096  # inputs of a layer that are timed on at most; more tokens repeat them
_CPU_PRODUCTS = 2**29  # of a call on a CPU: more tokens than take so many are timed as so many, and scaled
_LAST = 2**62  # a class of token counts above all that are asked for

Option = tuple[Choice, bool]  # what a layer does, and whether its neurons lie in the order of hot/cold
Times = dict[Option | None, float]  # microseconds of a call; None: of the layer as torch computes it


class Plain(nn.Module):
    """A feed-forward layer under usual names, computed as the model does, with its weights and none of its hooks."""

    def __init__(self, found: FeedForward) -> None:
        super().__init__()
        self.both, squared = found.both, found.gate is found.up
        if found.gate is not None and not squared:
            self.gate_proj = _projection(found.gate)
        self.up_proj, self.down_proj = _projection(found.up), _projection(found.down)
        self.act_fn = copy.copy(found.acts) if found.acts else SquaredReLU() if squared else nn.ReLU()
        for place, projections in cut_places(parts_of(self)).items() if found.cut else ():
            copy.copy(ThresholdedInput.of(found.module)[f"lossy_{place}"]).put_on(self, place, projections)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "gate_proj"):
            return self.down_proj(self.act_fn(self.up_proj(x)))
        hidden, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(hidden * (self.act_fn(up) if self.both else up))


def _projection(projection: nn.Linear) -> nn.Linear:
    rows, columns = projection.weight.shape
    plain = nn.Linear(columns, rows, projection.bias is not None, device="meta", dtype=projection.weight.dtype)
    for name, tensor in (("weight", projection.weight), ("bias", projection.bias)):
        if tensor is not None:
            setattr(plain, name, nn.Parameter(tensor.detach(), requires_grad=False))
    return plain


class Trial:
    """One layer, timed for one way of calling.

    hot: how many neurons hot/cold has first; 0 where that is not weighed. x: inputs of it, [rows, d_model]; without
    them a drawn one is timed, of its shape, in which each neuron fires as often. A path that takes a layer for where
    its zeros lie has its own weights even then. errors: of each lossy choice the norm of its output's error over that
    of the output. refused: of each choice that the layer cannot take, why."""

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
        self.ways: dict[Option | None, nn.Module] = {None: self._ready(_by_torch(found))}

    def run(self, tokens: int, choices: list[Choice]) -> Times:
        """Return the times of the layer as torch computes it, of our dense path, and of these choices."""
        count = tokens
        if self.device.type == "cpu":
            count = max(1, min(tokens, _CPU_PRODUCTS // (3 * self.own.up.weight.numel())))
        wanted = [(choice, False) for choice in (DENSE, *choices) if not choice.hot]
        ordered = [(choice, True) for choice in choices if choice.hot or choice == Choice()]
        if self.hot and ordered:
            wanted += dict.fromkeys([*ordered, (Choice(), True)])
        x = self.x.repeat(-(-count // len(self.x)), 1)
        inputs = [part.contiguous() for part in x.split(count)[: min(clock.ROTATED, len(x) // count)]]
        ways = {option: self.ways[option] for option in (None, *(option for option in wanted if self._make(*option)))}
        with torch.no_grad():
            for option, way in ways.items():
                if option and not PATHS[option[0].path].exact and option[0] not in self.errors:
                    exact = self.ways[None](inputs[0]).double()
                    off = (way(inputs[0]).double() - exact).norm() / exact.norm().clamp(min=1e-30)
                    self.errors[option[0]] = off.item()
            took = self._time(
                {option: lambda turn, way=way: way(inputs[turn % len(inputs)]) for option, way in ways.items()}
            )
        us = {option: 1e3 * clock.quartiles(values)[0] * tokens / count for option, values in took.items()}
        return {(DENSE, False): us[None], **us}

    def _time(self, calls: dict) -> dict:
        if self.calls == "captured":
            with torch.cuda.device(self.device):
                return clock.time_cuda({option: clock.graphed(call) for option, call in calls.items()}, 10)
        with torch._dynamo.config.patch(recompile_limit=256) if self.calls == "compiled" else nullcontext():
            return clock.time_calls(calls, self.device, beside=self.beside)

    def _make(self, choice: Choice, ordered: bool) -> bool:
        """Have a copy of the layer at hand on this path; return whether it takes it."""
        if choice not in self.refused and (choice, ordered) not in self.ways:
            plan = LayerPlan.forced(self.layer, choice)
            if ordered:  # as a layer lies that takes hot/cold for more tokens than there are
                row = replace(plan.candidates[0], tokens=_LAST)
                plan = replace(plan, candidates=(row, replace(row, tokens=_LAST + 1, path="hot_cold", hot=self.hot)))
            source = self.own if PATHS[choice.path].patterned else self.found
            try:
                way = SparseFFN.from_module(copy.deepcopy(Plain(source)), plan=plan)
                self.ways[choice, ordered] = self._ready(way)
            except TwellError as error:
                self.refused[choice] = str(error)
        return choice not in self.refused

    def _ready(self, module: nn.Module) -> nn.Module:
        return torch.compile(module, dynamic=False) if self.calls == "compiled" else module


def _by_torch(found: FeedForward) -> nn.Module:
    # Its own module where one projection holds gate and up, if no other process has to call it too.
    family = None if isinstance(found.module, StandIn) else named_family(found.module)
    fused = family is not None and family.gate == family.up and not torch.distributed.is_initialized()
    return found.module if fused else Plain(found)
