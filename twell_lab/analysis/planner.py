"""The planner: for each layer and number of tokens the path that was measured to be the fastest, dense in doubt.

1. Every path is predicted from counted bytes and operations over the device's measured rates (analysis.costs).
2. Layers of one shape and kind whose predictions are alike share trials: the one that fires most is timed for all.
3. Timed are the paths predicted to take at most _REACH times as long as the best, and all further ones that were named,
   on copies of that layer, in turns, beside the layer as torch computes it, for the caller's way of calling.
4. A path is taken where it is MARGIN times as fast as both dense ones, at the largest count of its class, and at the
   smallest is not slower.
5. Hot/cold puts a layer's neurons in another order, in which TwELL may overflow its first tiles. So it is timed
   together with TwELL in that order, and taken where it is MARGIN_HOT times as fast as the best without, in some class,
   and no other class loses by it."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import __version__, records
from ..core import WHOLE, InputError, TwellError
from ..formats.twell import VALUE_DTYPES
from ..layers.activations import kernel_activation
from ..layers.choice import DENSE, LOSSY, MARGIN, Candidate, Choice, LayerPlan
from ..layers.experts import Expert
from ..layers.find import FeedForward, Only, StandIn, cut_places, feed_forwards, only_dense
from ..layers.lossy import ThresholdedInput
from ..layers.parts import Projection, Weights, named_family, parts_of
from ..layers.paths import PATHS, Path
from ..layers.sparse_ffn import FOR_CUT, ONLY_CUT, SparseFFN
from ..ops import clock
from ..ops.activation import SquaredReLU
from .costs import Firing, Rates, by_choice, measure_rates
from .profile import FiringProfile, LayerProfile, captured, check_same
from .saved import Saved

CALLS = ("eager", "compiled", "captured")
MARGIN_HOT = 1.05  # how many times as fast as the best path without it hot/cold has to be
MARGIN_PREDICTED = 1.1  # how many times as fast as dense where nothing is timed
ALIKE = 1.3  # up to this ratio of their predictions layers share trials
CAPTURED, DRAWN = "captured from the batches", "drawn at the profile's rates"
IN_FOLDER = "plan.json"  # what the plan is called in a folder that has its model
# Of the table that a plan is printed as: the fields of its rows, with their headings.
COLUMNS = {"layer": "layer", "nnz": "mean nnz"}
COLUMNS |= {name: name.replace("_", " ") for name in ("tokens", "choice", "us", "dense_us", "x_dense", "how", "why")}
_REACH = 1.5  # how far from the best prediction paths are timed
_ROWS = 4096  # inputs of a layer that are timed on at most; more tokens repeat them
_CPU_PRODUCTS = 2**29  # of a call on a CPU: more tokens than take so many are timed as so many, and scaled
_LAST = 2**62  # a class of token counts above all that are asked for

Option = tuple[Choice, bool]  # what a layer does, and whether its neurons lie in the order of hot/cold
Times = dict[Option | None, float]  # microseconds of a call; None: of the layer as torch computes it


@dataclass(frozen=True)
class Plan(Saved):
    """The plans of a model's layers, in the model's order.

    device, dtype: what it was made for; rates: costs.Rates as a dict, what the predictions rest on. calls: whose time
    decides: "eager", "compiled" or "captured" calls; inputs: where what was timed came from ("captured from the
    batches", "drawn at the profile's rates"), None where nothing was."""

    FORMAT: ClassVar = "twell-lab plan"
    VERSION: ClassVar = 4

    layers: list[LayerPlan]
    device: str
    dtype: str
    rates: dict = field(default_factory=dict)
    calls: str = "eager"
    inputs: str | None = None
    release: str = __version__

    def layer(self, name: str) -> LayerPlan:
        """Return the plan of the layer called so; InputError names the ones there are."""
        layers = {layer.name: layer for layer in self.layers}
        if name not in layers:
            raise InputError(f"the plan has no layer {name!r}; it has {[*layers]}")
        return layers[name]

    def table(self) -> list[dict]:
        """List every candidate of every layer: `layer`, and the fields of Candidate."""
        return [{"layer": layer.name, **vars(row)} for layer in self.layers for row in layer.candidates]

    def summary(self) -> str:
        """Return lines that say which paths the layers take, what that should gain, and what stayed dense and why."""
        taken, lines = {layer.name: chosen(layer) for layer in self.layers}, []
        for tokens in sorted({tokens for layer in self.layers for tokens in layer.choices}):
            rows = [next((row for row in rows if tokens <= row["tokens"]), rows[-1]) for rows in taken.values()]
            paths = Counter(layer.choice(tokens).path for layer in self.layers)
            us, dense_us = (sum(row[name] or 0.0 for row in rows) for name in ("us", "dense_us"))
            gain = f"; {dense_us / us:.2f}x dense together" if us and all(row["us"] for row in rows) else ""
            ways = ", ".join(f"{count} {path}" for path, count in paths.most_common())
            lines.append(f"up to {tokens:,} token{'s' * (tokens > 1)}: {ways}{gain}")
        why: dict[str, list[str]] = {}
        for layer in self.layers:
            if {*layer.choices.values()} == {DENSE}:
                why.setdefault(taken[layer.name][-1]["why"], []).append(layer.name or "layer")
        for reason, names in why.items():
            more = f" and {len(names) - 3} more" if names[3:] else ""
            lines.append(f"dense throughout: {', '.join(names[:3])}{more}: {reason}")
        how = f"timed, {self.calls} calls" if self.inputs else "predicted"
        return "\n".join([*lines, f"for {self.device}, {self.dtype}; {how}"])

    def __str__(self) -> str:
        rows = [{**row, "layer": layer.name or "layer"} for layer in self.layers for row in chosen(layer)]
        return f"{records.table(rows, COLUMNS)}\n{self.summary()}"

    def check_model(self, layers: Iterable[FeedForward]) -> None:
        """Raise InputError unless the plan is for a model with these layers, where they are now."""
        have = {layer.name: layer for layer in layers}
        check_same({layer.name: layer for layer in self.layers}, have, "the plan", "the model")
        weight = have[self.layers[0].name].up.weight
        here = f"{clock.device_name(weight.device)}, {str(weight.dtype).removeprefix('torch.')}"
        if f"{self.device}, {self.dtype}" != here:
            said = f"the plan is for {self.device}, {self.dtype}; the model is on {here}"
            raise InputError(f"{said}: a plan made there is accepted (tl.plan, twell-lab sparsify)")

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read the plan that `save` wrote, or the one in a folder of `twell-lab sparsify`'s; RecordError as there."""
        return super().load(os.path.join(path, IN_FOLDER) if os.path.isdir(path) else path)


def chosen(layer: LayerPlan) -> list[dict]:
    """List one row a class of token counts of a layer's plan: `layer`, `nnz`, `tokens`, `choice`, `us` and `dense_us`
    (None where nothing is known), `x_dense`, `how` and on which layer they were measured, and `why`."""
    rows = []
    for taken in sorted((row for row in layer.candidates if row.chosen), key=lambda row: row.tokens):
        dense = next((row for row in layer.candidates if (row.tokens, row.choice) == (taken.tokens, DENSE)), taken)
        us, dense_us, how = taken.predicted_us or None, dense.predicted_us or None, "predicted"
        if taken.measured_us is not None:
            dense_us = taken.dense_us
            us = dense_us if layer.unchanged else taken.measured_us  # nothing is swapped
            how = "measured" if taken.timed_on in (None, layer.name) else f"measured on {taken.timed_on}"
        row = {"layer": layer.name, "nnz": layer.nnz if layer.profiled else None, "tokens": taken.tokens}
        row |= {"choice": str(taken.choice), "us": us, "dense_us": dense_us}
        rows.append({**row, "x_dense": dense_us / us if us and dense_us else None, "how": how, "why": taken.why})
    return rows


def plan(
    profile: FiringProfile,
    model: nn.Module,
    *,
    tokens: Iterable[int] = (1, 64, 2048, 16384),
    calls: str = "eager",
    paths: Iterable[str] | None = None,
    batches: Iterable | None = None,
    measure: bool = True,
    rates: Rates | None = None,
    only: Only | None = None,
    progress: bool = True,
) -> Plan:
    """Choose a path for every layer of a model and every class of token counts; leaves the model as it was.

    Args:
        profile: what `twell_lab.profile` counted in this model.
        tokens: the largest count of each class (see LayerPlan).
        calls: how the model will be called: "eager", "compiled" (torch.compile) or, on a GPU, "captured" (CUDA graphs).
        paths: the names of those that are weighed beside dense; None: "twell" and "hot_cold". There are also
            (twell_lab.sparsities) "two_four" and "blocks", for weights that are 2:4, or have empty blocks; and lossy
            ones: "int8", "fp8" and "twell_int8". A layer with thresholds on its inputs (TEAL) weighs "kept_inputs" and
            no other.
        batches: inputs of the model, OTHER than the profiled ones, to time on. Without them the layers timed are drawn,
            of the same shape, so that each neuron fires as often as in the profile.
        measure: whether to time anything; otherwise predictions decide. rates: measure_rates of the device, if at hand.
            only: as it was for the profile. progress: show a bar on stderr, if that is a terminal.

    Raises InputError for a profile that does not fit the model, and other arguments that do not; for a path that no
    layer takes, the first layer's reason, of its own type."""
    if not isinstance(profile, FiringProfile):
        raise InputError(f"profile is a {type(profile).__name__}; a FiringProfile of tl.profile is accepted")
    tokens = [tokens] if isinstance(tokens, int) else list(tokens)
    if not tokens or not all(type(n) is int and 0 < n < WHOLE for n in tokens) or len({*tokens}) < len(tokens):
        raise InputError(f"tokens is {tokens!r:.200}; different whole numbers from 1 to 2**63 - 1 are accepted")
    layers = {layer.name: layer for layer in feed_forwards(model, only=only)}
    check_same({layer.name: layer for layer in profile.layers}, layers, "the profile", "the model")
    found = [layers[layer.name] for layer in profile.layers]
    device, dtype = found[0].up.weight.device, found[0].up.weight.dtype
    if calls not in CALLS or calls == "captured" and device.type != "cuda":
        raise InputError(f"calls is {calls!r:.80} on {device}; accepted: {', '.join(CALLS)} (the last on a GPU)")
    if dtype not in VALUE_DTYPES:
        raise InputError(f"the model's weights are {dtype}; bfloat16, float16 and float32 are accepted")
    fitted, rates = _fitted(paths, found), rates or measure_rates(device, dtype)
    candidates: dict[str, list[Candidate]] = {}
    trials = []
    for layer, dense, options in zip(profile.layers, found, fitted):
        why = only_dense(dense)
        if not layer.tokens:
            why = "no token reached it in the profile"
        elif isinstance(dense.module, Expert):
            why = "an expert: the model computes all of them together"
        elif dense.cut is not None and measure and batches is None:
            why = "its inputs have thresholds, so it is timed on batches, and there are none"
        candidates[layer.name] = [Candidate(n, DENSE.path, 0, 0.0, None, True, why) for n in sorted(tokens)]
        trials += [] if why else [Trial(layer, dense, options, rates, sorted(tokens))]
    groups: dict[Trial, list[Trial]] = {}  # of layers that share trials, by the one that should take longest
    for trial in sorted(trials, key=lambda trial: -sum(sum(took.values()) for took in trial.predicted.values())):
        groups.setdefault(next((first for first in groups if first.alike(trial)), trial), []).append(trial)
    measure, inputs = measure and bool(groups), {}
    if measure and batches is not None:
        inputs = captured(model, batches, [first.layer.name for first in groups], min(_ROWS, max(tokens)))
    beside = sum(p.nbytes for p in model.parameters())
    for first, group in tqdm(groups.items(), "plan", unit="group", leave=False, disable=None if progress else True):
        if measure:
            first.prepare(calls, inputs.pop(first.layer.name, None), beside)
        candidates |= dict.fromkeys((trial.layer.name for trial in group), first.decide())
        first.timed, first.x, first.ways = first.found, torch.empty(0), {}  # copies go before the next one's come
    plans = [LayerPlan.forced(layer, DENSE) for layer in profile.layers]
    plans = [replace(plan, candidates=tuple(candidates[plan.name])) for plan in plans]
    source = None if not measure else DRAWN if batches is None else CAPTURED
    return Plan(plans, rates.device, rates.dtype, dict(vars(rates)), calls, source)


def _fitted(paths: Iterable[str] | None, layers: list[FeedForward]) -> list[dict[str, Path]]:
    """Return for each layer the paths of these names that take it, dense among them, fitted to its weights; the first
    refusal is raised where no layer takes a path."""
    names = [*PATHS] if paths is None else [paths] if isinstance(paths, str) else list(paths)
    cuts = any(layer.cut is not None for layer in layers)
    for name in names:
        if name not in PATHS.names():
            raise InputError(f"paths has {name!r:.80}; accepted: {', '.join(map(repr, PATHS.names()))}")
        if name in FOR_CUT and not cuts:
            raise InputError(f"path {name!r} {ONLY_CUT}; the model has none")
    fitted: list[dict[str, Path]] = [{} for _ in layers]
    for name in dict.fromkeys([DENSE.path, *names, *(FOR_CUT if cuts else ())]):
        refused = []
        for options, layer in zip(fitted, layers):
            if name != DENSE.path and PATHS[name].cuts != (layer.cut is not None):
                continue
            try:
                options[name] = PATHS[name].fitted(Weights.of(layer.gate, layer.up, layer.down))
            except TwellError as error:
                refused.append(type(error)(f"path {name!r}, layer {layer.name!r}: {error}"))
        if refused and not any(name in options for options in fitted):
            raise refused[0]
    return fitted


class Trial:
    """A layer, what each path should take, and, once it is prepared, what it takes.

    predicted: microseconds of each choice, by class. hot: how many neurons hot/cold has first, of all classes, since
    they can lie in one order only; 0 where that is not weighed. kind: what layers that share trials have in common.
    ways: what is timed. errors: of each lossy choice the norm of its output's error over that of the output. refused:
    of each choice that the layer cannot take, why."""

    def __init__(
        self, layer: LayerProfile, found: FeedForward, paths: dict[str, Path], rates: Rates, tokens: list[int]
    ) -> None:
        self.layer, self.found, self.paths, self.rates, self.firing = layer, found, paths, rates, Firing.of(layer)
        self.hot = max(choice.hot for choice in by_choice(self.firing, rates, tokens[-1], paths))
        self.predicted = {count: self.predict(count) for count in tokens}
        acts, biases = kernel_activation(found) or found.acts, (part.bias is None for part in (found.up, found.down))
        own = found.name if any(path.patterned for path in paths.values()) else ""  # its zeros are its own
        self.kind = (layer.d_model, layer.d_ff, layer.gated, layer.tile, layer.words, found.up.weight.dtype, *paths)
        self.kind += (found.up.weight.device, str(acts), found.cut is None, own, *biases)
        self.timed, self.x, self.ways = found, torch.empty(0), dict[Option | None, nn.Module]()
        self.errors: dict[Choice, float] = {}
        self.refused: dict[Choice, str] = {}

    def predict(self, tokens: int) -> dict[Choice, float]:
        return by_choice(self.firing, self.rates, tokens, self.paths, self.hot)

    def alike(self, other: Trial) -> bool:
        """Return whether the layers can share trials."""
        both = zip(self.predicted.values(), other.predicted.values())
        pairs = [pair for mine, its in both for pair in zip(mine.values(), its.values())]
        return self.kind == other.kind and all(1 / ALIKE <= mine / its <= ALIKE for mine, its in pairs)

    def decide(self) -> list[Candidate]:
        """Return the candidates of each class, from few tokens to many, one of each chosen."""
        times = {count: self._times(count) for count in self.predicted}
        margin = MARGIN if self.ways else MARGIN_PREDICTED
        best, gains, loses = {}, False, False
        for count, took in times.items():
            own, other = _fastest(took, False, margin), _fastest(took, True, margin)
            best[count] = {False: own, True: other}
            without, instead = took[own, False], took[other, other != DENSE]
            gains |= other.hot > 0 and instead * max(MARGIN_HOT, margin) <= without
            loses |= instead > MARGIN * without
        hot, least, candidates = gains and not loses, 1, []
        for count, took in times.items():
            choice, slow = best[count][hot], ""
            if choice != DENSE and 1 < least < count:
                first = self._times(least, choice)
                if first[choice, hot] > MARGIN * _dense(first):
                    choice, slow = DENSE, f"{choice} is slower than dense at {least:,} tokens, the fewest of its class"
            candidates += self._rows(count, took, choice, hot, slow)
            least = count + 1
        return candidates

    def _times(self, tokens: int, choice: Choice | None = None) -> Times:
        """Return the times of a choice, or of what is near the best prediction; unless prepared, the predictions."""
        predicted = self.predict(tokens)
        if not self.ways:
            plain = {(option, False): us for option, us in predicted.items() if not option.hot}
            ordered = {(option, True): us for option, us in predicted.items() if PATHS[option.path].packs}
            return {None: predicted[DENSE], **plain, **ordered}
        best = min(predicted.values())
        near = [option for option, us in predicted.items() if us <= _REACH * best or option.path in PATHS.further]
        return self.run(tokens, [choice] if choice else [option for option in near if option != DENSE])

    def _rows(self, tokens: int, took: Times, choice: Choice, hot: bool, slow: str) -> list[Candidate]:
        predicted, how = self.predicted[tokens], "timed" if self.ways else "predicted"
        in_order = {option: (option, option.hot > 0 or hot and option != DENSE) for option in predicted}
        times = {option: took[way] for option, way in in_order.items() if way in took}
        fastest, dense, rows = min(times, key=times.__getitem__), _dense(took), []
        for option, expected in predicted.items():
            us = times.get(option)
            if us is None:
                why = self.refused.get(option, f"not timed: predicted {expected / predicted[DENSE]:.2f}x dense's time")
            elif not self.ways and option != DENSE and expected == predicted[DENSE]:
                why = "nothing predicts it: it has to be timed"
            elif option != choice:
                why = f"{us / times[choice]:.2f}x the time of the choice, {how}"
                why += ", its neurons in another order" if option.hot and not hot else ""
            elif choice != DENSE:
                why = f"{dense / us:.2f}x dense, {how}"
            elif times[fastest] < dense:
                why = slow or f"{fastest} is {dense / times[fastest]:.2f}x dense, too little, {how}"
            else:
                why = slow or f"fastest, {how}"
            off = f": its output is {self.errors[option]:.2%} off" if option in self.errors else ""
            why += "" if PATHS[option.path].exact else f"; {LOSSY}{off}"
            timed = (us, took[None], self.layer.name) if self.ways and us is not None else (None, None, None)
            row = Candidate(tokens, option.path, option.hot, expected, timed[0], option == choice, why, *timed[1:])
            rows.append(row)
        return rows

    def prepare(self, calls: str, x: Tensor | None, beside: int) -> None:
        """Have the layer at hand as torch computes it, for this way of calling, beside so many bytes of weights.

        x: inputs of it, [rows, d_model]; without them a drawn one is timed, of its shape, in which each neuron fires as
        often. A path that takes a layer for where its zeros lie has its own weights even then."""
        self.calls, self.beside, layer, weight = calls, beside, self.layer, self.found.up.weight
        if x is None:
            often, how = layer.neuron_counts.double() / layer.tokens, {"shrink": layer.d_ff**0.5, "gated": layer.gated}
            drawn, inputs = clock.drawn(often, _ROWS, layer.d_model, weight.dtype, weight.device, **how)
            x, (self.timed,) = torch.cat(inputs), feed_forwards(drawn)
        self.x, module = x.to(weight), self.timed.module
        # Its own module where one projection holds gate and up, if no other process has to call it too.
        family = None if isinstance(module, StandIn) else named_family(module)
        fused = family is not None and family.gate == family.up and not torch.distributed.is_initialized()
        self.ways[None] = self._ready(module if fused else Plain(self.timed))

    def run(self, tokens: int, choices: list[Choice]) -> Times:
        """Return the times of the layer as torch computes it, of our dense path, and of these choices."""
        most = _CPU_PRODUCTS // (3 * self.found.up.weight.numel()) if self.x.device.type == "cpu" else tokens
        count = max(1, min(tokens, most))
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
            calls = {option: lambda turn, way=way: way(inputs[turn % len(inputs)]) for option, way in ways.items()}
            if self.calls == "captured":
                with torch.cuda.device(self.x.device):
                    took = clock.time_cuda({option: clock.graphed(call) for option, call in calls.items()}, 10)
            else:
                with torch._dynamo.config.patch(recompile_limit=256) if self.calls == "compiled" else nullcontext():
                    took = clock.time_calls(calls, self.x.device, beside=self.beside)
        us = {option: 1e3 * clock.quartiles(values)[0] * tokens / count for option, values in took.items()}
        return {(DENSE, False): us[None], **us}

    def _make(self, choice: Choice, ordered: bool) -> bool:
        """Have a copy of the layer at hand on this path; return whether it takes it."""
        if choice not in self.refused and (choice, ordered) not in self.ways:
            plan = LayerPlan.forced(self.layer, choice)
            if ordered:  # as a layer lies that takes hot/cold for more tokens than there are
                row = replace(plan.candidates[0], tokens=_LAST)
                plan = replace(plan, candidates=(row, replace(row, tokens=_LAST + 1, path="hot_cold", hot=self.hot)))
            source = Plain(self.found if PATHS[choice.path].patterned else self.timed)
            try:
                self.ways[choice, ordered] = self._ready(SparseFFN.from_module(copy.deepcopy(source), plan=plan))
            except TwellError as error:
                self.refused[choice] = str(error)
        return choice not in self.refused

    def _ready(self, module: nn.Module) -> nn.Module:
        return torch.compile(module, dynamic=False) if self.calls == "compiled" else module


def _dense(took: Times) -> float:
    """Return the time of the faster dense layer, torch's or ours."""
    return min(took[None], took[DENSE, False])


def _fastest(took: Times, ordered: bool, margin: float) -> Choice:
    """Return the fastest choice in this order of the neurons if it is `margin` times as fast as dense, else dense."""
    options = [option for option in took if option and option[1] == ordered and option[0] != DENSE]
    best = min(options, key=took.__getitem__, default=None)
    return best[0] if best and took[best] * margin <= _dense(took) else DENSE


class Plain(nn.Module):
    """A feed-forward layer under usual names, computed as the model does, with its weights and none of its hooks."""

    def __init__(self, found: FeedForward) -> None:
        super().__init__()
        self.both, squared = found.both, found.gate is found.up
        self.gate_proj = None if squared or found.gate is None else _projection(found.gate)
        self.up_proj, self.down_proj = _projection(found.up), _projection(found.down)
        self.act_fn = copy.copy(found.acts) if found.acts else SquaredReLU() if squared else nn.ReLU()
        for place, projections in cut_places(parts_of(self)).items() if found.cut else ():
            copy.copy(ThresholdedInput.of(found.module)[f"lossy_{place}"]).put_on(self, place, projections)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        hidden, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(hidden * (self.act_fn(up) if self.both else up))


def _projection(part: Projection) -> nn.Linear:
    (rows, columns), given = part.weight.shape, {"weight": part.weight.detach()}
    given |= {} if part.bias is None else {"bias": part.bias.detach()}
    plain = nn.Linear(columns, rows, "bias" in given, device="meta").requires_grad_(False)
    plain.load_state_dict(given, assign=True)
    return plain
