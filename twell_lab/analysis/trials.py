"""Trials: candidates of a plan timed on a layer, by the clock that the caller will see, and who shares which trial.

The clocks give a call's `Times`. A `Subject` is a layer that can be timed: as the model has it, and on each path.
`Trials` keeps what was timed, and finds a trial for a layer that is like one that was timed already.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..core import InputError
from ..layers import hooks
from ..layers.activations import kernel_activation
from ..layers.choice import DENSE, Choice, LayerPlan
from ..layers.experts import Expert
from ..layers.find import FeedForward, StandIn
from ..layers.lossy import ThresholdedInput
from ..layers.parts import parts_of
from ..layers.paths import PATHS
from ..layers.shards import split_of
from ..layers.sparse_ffn import SparseFFN
from ..ops import measure
from .profile import LayerProfile

ALIKE = 1.2  # layers share a trial where their predicted times are at most this factor apart
_NEARLY = (
    1.05  # and a hot size that was timed stands for the one asked for, if predicted to take at most this much more
)
_ROUNDS = 10  # of each timing on a GPU; medians of ten are steady there
_LONG_MS = 2.0  # of a call that takes at least this long
_FEW_ROUNDS = 2  # are enough: it waits for nothing, its caches are its own, and its time hardly varies
_WARM = 3  # calls before each burst: one with each input
# Gigabytes read before a call of the first timing, whose one warm call makes copies of weights and records launches,
# for up to a hundred times as long as its host needs later: enough to hide that of a call that takes _LONG_MS.
_FIRST_READS = 4
_BURST_MS = 3.0  # about how long the calls of a burst take; at least 3 calls (on a CPU 1), at most 10
_CPU_MS = 150.0  # about how long a trial takes on a CPU; at least 3 bursts of each call, at most 10
_MOST_BESIDE = 64 << 20  # bytes that come between two calls on a CPU, whose caches mostly hold fewer


# ---- clocks ----


class Times(NamedTuple):
    """Microseconds of one call.

    call: by the clock that decides. host: until the call returns; device: the GPU's work. None: not told apart."""

    call: float
    host: float | None = None
    device: float | None = None

    def scaled(self, ratio: float) -> Times:
        """The times of a layer whose work takes `ratio` times as long; the host's part stays what it is."""
        device = None if self.device is None else self.device * ratio
        return Times(max(self.call * ratio, self.host or 0.0), self.host, device)


Calls = dict[Choice | None, Callable[[int], object]]


def wall(calls: Calls, device: torch.device, beside: int = 0) -> dict[Choice | None, Times]:
    """Times of plain eager calls. `call` is the wall time of a burst that is waited for at its end, divided by its
    calls. On a GPU `host` is what of it passes until the last call returns, the least of all bursts, and `device` is
    taken by events, cold L2.

    On a CPU there is one clock. beside: the bytes of the model's other weights, which come through a CPU's caches
    between two calls of a layer there. So they do here: else a layer that fits into the caches would be timed in them,
    and seem to gain less by weights that it need not read."""
    if device.type != "cuda":
        once = measure.time_bursts(calls, _nothing, rounds=1, count=1)  # which warms up, too
        ms = [ended for _, (ended,) in once.values()]
        if beside:
            others = torch.zeros(min(beside, _MOST_BESIDE), dtype=torch.uint8, device="cpu")
            rounds = min(10, max(3, int(_CPU_MS / sum(ms))))
            bursts = measure.time_bursts(calls, lambda: others.add_(1), rounds=rounds, count=1, warm=0)
            # A call has finished when it returns; what is waited for afterwards is for the next one.
            return {
                name: Times(1e3 * ms) for name, ms in _medians({n: host for n, (host, _) in bursts.items()}).items()
            }
        count = min(10, max(1, int(_BURST_MS / max(ms))))
        rounds = min(10, max(3, int(_CPU_MS / (2 * count * sum(ms)))))
        bursts = measure.time_bursts(calls, _nothing, rounds=rounds, count=count)
        return {
            name: Times(1e3 * ms) for name, ms in _medians({name: wall for name, (_, wall) in bursts.items()}).items()
        }
    with torch.cuda.device(device):
        busy = _medians(measure.time_cuda(calls, _FEW_ROUNDS, warm=1, most_reads=_FIRST_READS))
        wait, longest = torch.cuda.synchronize, max(busy.values())
        if longest >= _LONG_MS:
            bursts = measure.time_bursts(calls, wait, rounds=_FEW_ROUNDS, count=1, warm=0)
        else:
            busy = _medians(measure.time_cuda(calls, _ROUNDS))
            count = min(10, max(3, int(_BURST_MS / longest)))
            bursts = measure.time_bursts(calls, wait, count=count, warm=_WARM)
    ended = _medians({name: walls for name, (_, walls) in bursts.items()})
    # The least of the host's samples: what else it does only adds, and would let a path through whose host is slower.
    return {name: Times(1e3 * ended[name], 1e3 * min(bursts[name][0]), 1e3 * busy[name]) for name in calls}


def _nothing() -> None:
    """A CPU has finished when a call returns."""


def graph(calls: Calls, device: torch.device, beside: int = 0) -> dict[Choice | None, Times]:
    """Times of the calls replayed from CUDA graphs, by device events, cold L2: there the host does next to nothing.
    beside: as in `wall`, on a GPU of no use."""
    with torch.cuda.device(device):
        busy = _medians(measure.time_cuda({name: measure.graphed(call) for name, call in calls.items()}, _ROUNDS))
    return {name: Times(1e3 * ms, None, 1e3 * ms) for name, ms in busy.items()}


def _medians(samples: dict) -> dict:
    return {name: measure.quartiles(values)[0] for name, values in samples.items()}


CLOCKS = {"wall": wall, "graph": graph}


# ---- what is timed ----


class Subject:
    """A layer that can be timed.

    layer: its profile; found: the layer itself; rows: gives inputs of it, [rows, d_model], when they are first needed.
    Without rows a stand-in is timed: a layer of the same shape, drawn so that each neuron fires as often as in the
    profile, though independently, with inputs of at least `most` rows. A path that takes a layer for where its zeros
    lie (Path.patterned) is timed on the layer's own weights nevertheless: what fires makes no difference to it."""

    def __init__(
        self, layer: LayerProfile, found: FeedForward, rows: Callable[[], Tensor] | None = None, most: int = 1
    ) -> None:
        self.layer, self.found, self.rows, self.most = layer, found, rows, most
        self.made: dict[Choice, SparseFFN] = {}
        self._as_it_is: nn.Module | None = None  # the dense layer, where it can be called by itself

    @property
    def weight(self) -> Tensor:
        """The layer's up projection, which says dtype and device."""
        return self.found.up.weight

    def calls(self, choices: Iterable[Choice], tokens: int) -> Calls:
        """A call of the layer as it is (None) and one for each choice; each takes the number of its turn."""
        module, x = self._timed
        inputs = inputs_of(x, tokens)
        # Copies of weights are kept for the next number of tokens, but none that it has no use for.
        of = {choice: _Parts(self.found) if PATHS[choice.path].patterned else module for choice in choices}
        self.made = {choice: self.made.get(choice) or self._sparse(each, choice) for choice, each in of.items()}
        ways = {None: self._as_it_is or module, **self.made}
        return {name: (lambda turn, way=way: way(inputs[turn % len(inputs)])) for name, way in ways.items()}

    @cached_property
    def _timed(self) -> tuple[_Parts, Tensor]:
        if self.rows is not None:
            module = self.found.module
            family = None if isinstance(module, (StandIn, Expert)) else family_of(module)
            alone = family is not None and not family.inside and hooks.obstacle(module) is None
            # Calling it does what the model does, and nothing else; and no other process has to call it, too.
            if alone and not any(map(split_of, family.owners(module).values())):
                self._as_it_is = module
            return _Parts(self.found), self.rows().to(self.weight.device, self.weight.dtype)
        drawn, inputs = stand_in(self.layer, self.most, self.weight.dtype, self.weight.device)
        self._as_it_is = drawn
        gate = getattr(drawn, "gate_proj", None)
        return _Parts(FeedForward("", drawn, gate, drawn.up_proj, drawn.down_proj)), torch.cat(inputs)

    def _sparse(self, module: _Parts, choice: Choice) -> SparseFFN:
        plan = LayerPlan.forced(self.layer, choice)
        modes = [(each, each.training) for each in module.modules()]
        how = {"tile": self.layer.tile, "words": self.layer.words, "_check": False, "_both": module.both}
        made = SparseFFN(module, plan=plan, **how)
        for each, mode in modes:  # a SparseFFN sets its projections' mode, and these are the model's
            each.training = mode
        return made


class _Parts(nn.Module):
    """A feed-forward layer's projections, whatever they were called, computed as the model does."""

    def __init__(self, found: FeedForward) -> None:
        super().__init__()
        self.gated, self.both = found.gate is not None, found.both
        gate, up, down = found.gate, found.up, found.down
        if found.cut is not None:
            up, down = map(_bare, (up, down))
            gate = up if gate is found.up else gate and _bare(gate)
        if self.gated:
            self.gate_proj = gate
        self.up_proj, self.down_proj, self.act_fn = up, down, found.acts or nn.ReLU()
        self.cut = found.cut
        for place, threshold in found.cut._asdict().items() if found.cut else ():
            self.add_module(f"lossy_{place}", ThresholdedInput(threshold))
        self.training = False  # as the plan's layers will be; the projections themselves stay in the model's mode

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.cut is None else self.cut.of_input(x)
        hidden = self.act_fn(_project(x, self.gate_proj if self.gated else self.up_proj))
        if self.gated:
            beside = hidden if self.gate_proj is self.up_proj else _project(x, self.up_proj)
            hidden = hidden * (self.act_fn(beside) if self.both else beside)
        return _project(hidden if self.cut is None else self.cut.of_hidden(hidden), self.down_proj)


def _bare(projection: nn.Linear) -> nn.Linear:
    """The projection, with its own parameters, without the hooks that zero its inputs."""
    bare = copy.copy(projection)
    bare._forward_pre_hooks = OrderedDict()
    return bare


def _project(x: Tensor, projection: nn.Linear) -> Tensor:
    """Not by calling it: the projections of a swapped OPT layer hand their input on."""
    return linear(x, projection.weight, projection.bias)


def inputs_of(x: Tensor, tokens: int, sets: int = measure.ROTATED) -> list[Tensor]:
    """Up to three inputs of so many tokens from the rows of x, other rows in each as far as there are any."""
    if x.shape[0] < tokens:
        x = x.repeat(-(-tokens // x.shape[0]), 1)
    return [x[i * tokens : (i + 1) * tokens].contiguous() for i in range(min(sets, x.shape[0] // tokens))]


def stand_in(
    layer: LayerProfile, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[Tensor]]:
    """A drawn layer of the profile's shape, and inputs at which each neuron fires as often as in the profile."""
    frequency = layer.neuron_counts.double() / layer.tokens
    shape = (tokens, layer.d_model, dtype, device)
    return measure.drawn(frequency, *shape, gated=layer.gated, shrink=layer.d_ff**0.5)


# ---- what was timed ----


@dataclass(frozen=True)
class Trial:
    """Choices that were timed together on one layer with one number of tokens.

    layer: its name. predicted: microseconds, for that layer. times: of each choice, and, as None, of the layer as the
    model had it before it was swapped. errors: of each lossy choice, how far its output is off: the norm of the
    difference, over that of the layer's output."""

    layer: str
    predicted: dict[Choice, float]
    times: dict[Choice | None, Times]
    errors: dict[Choice, float] = field(default_factory=dict)

    def apart(self, predict: Callable[[Choice], float], choices: Iterable[Choice], exact: bool) -> float:
        """The largest factor between what is predicted for this trial's layer and for another, over the choices that
        the other asks for; infinite where one of them was not timed. exact: no other hot size stands for it."""
        return max(self._ratio(predict, choice, exact) for choice in choices)

    def _ratio(self, predict: Callable[[Choice], float], choice: Choice, exact: bool) -> float:
        timed = [choice] if choice in self.predicted else []
        if not timed and not exact:
            nearly = _NEARLY * predict(choice)
            timed = [each for each in self.predicted if each.path == choice.path and predict(each) <= nearly]
        ratios = [predict(each) / self.predicted[each] for each in timed]
        return min((max(ratio, 1 / ratio) for ratio in ratios), default=math.inf)

    def of(self, layer: str, predict: Callable[[Choice], float]) -> Trial:
        """The trial as it counts for the layer of this name. Another than was timed gets what is predicted for itself,
        and the times scaled by the ratio of the predictions, of the choices for which that is alike."""
        if layer == self.layer:
            return self
        ratios = {choice: predict(choice) / us for choice, us in self.predicted.items()}
        ratios = {choice: ratio for choice, ratio in ratios.items() if 1 / ALIKE <= ratio <= ALIKE}
        times = {choice: self.times[choice].scaled(ratio) for choice, ratio in ratios.items()}
        predicted = {choice: predict(choice) for choice in times}
        return Trial(self.layer, predicted, {None: self.times[None], **times}, self.errors)


class Trials:
    """The trials of one plan, or of one model whose layers plan themselves.

    clock: "wall" or "graph", see CLOCKS. beside: the bytes of the model's weights but those of a layer, see wall."""

    def __init__(self, clock: str = "wall", beside: int = 0) -> None:
        self.clock, self.beside = clock, beside
        self.kept: dict[tuple, list[Trial]] = {}

    def find(
        self,
        subject: Subject,
        tokens: int,
        choices: Iterable[Choice],
        predict: Callable[[Choice], float],
        exact: bool = False,
    ) -> Trial | None:
        """The trial of the layer most like this one, if one is: same shape, tile, dtype and device, as many tokens, and
        each choice predicted to take at most ALIKE times as long on the one as on the other."""
        kept = self.kept.get(_key(subject, tokens), [])
        found = min(kept, key=lambda trial: trial.apart(predict, choices, exact), default=None)
        return found if found is not None and found.apart(predict, choices, exact) <= ALIKE else None

    def keep(self, subject: Subject, tokens: int, trial: Trial) -> Trial:
        """Have the trial found from now on."""
        self.kept.setdefault(_key(subject, tokens), []).append(trial)
        return trial

    @torch.no_grad()
    def run(
        self, subject: Subject, tokens: int, choices: Iterable[Choice], predict: Callable[[Choice], float]
    ) -> Trial:
        """Time the choices, and the layer as it is, on the subject."""
        choices = dict.fromkeys([DENSE, *choices])
        calls = subject.calls(choices, tokens)
        errors = {each: _off(calls[each](0), calls[None](0)) for each in choices if not PATHS[each.path].exact}
        times = CLOCKS[self.clock](calls, subject.weight.device, self.beside)
        predicted = {each: predict(each) for each in choices}
        return self.keep(subject, tokens, Trial(subject.layer.name, predicted, times, errors))


def _off(y: Tensor, exact: Tensor) -> float:
    norm = exact.double().norm().item()
    return (y.double() - exact.double()).norm().item() / norm if norm else 0.0


def _key(subject: Subject, tokens: int) -> tuple:
    layer, weight = subject.layer, subject.weight
    kind = kernel_activation(subject.found.acts or torch.relu, layer.gated, subject.found.both)
    form = layer.d_model, layer.d_ff, layer.gated, kind and kind._replace(threshold=0.0)
    return *form, layer.tile, layer.words, weight.dtype, weight.device, tokens


def beside(model: nn.Module, weight: Tensor) -> int:
    """The bytes of a model's weights but those of one of its feed-forward layers; weight: the layer's up."""
    return max(0, sum(each.nbytes for each in model.parameters()) - 3 * weight.nbytes)


def check_clock(device: torch.device, for_graphs: bool) -> str:
    """The name of the clock to go by; InputError for graphs where there are none."""
    if not isinstance(for_graphs, bool):
        raise InputError(f"for_graphs is {for_graphs!r:.80}; True or False is accepted")
    if for_graphs and device.type != "cuda":
        raise InputError(f"for_graphs is True, but the plan is for {device}; accepted: on a GPU, which has CUDA graphs")
    return "graph" if for_graphs else "wall"
