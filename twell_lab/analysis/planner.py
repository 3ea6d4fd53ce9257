"""The planner: for each layer and number of tokens, dense, TwELL or hot/cold, by predicted and measured time.

The design, in ten points:
1. Every candidate is predicted from counted bytes and operations over the device's measured rates (analysis.costs).
2. Within reach are dense and those predicted to take at most 1.5 times as long as the best; no others are timed.
3. They are timed together, beside the layer as the model has it (analysis.trials): one trial, for one number of tokens.
4. A layer of the same shape, dtype and device whose predictions are within 20% shares that trial: its own times are
   those, scaled by its predictions. The plan says for each candidate on which layer it was timed.
5. The caller's clock decides: the wall time of plain eager calls, or that of graph replays (`for_graphs=True`).
6. A sparse path must be 3% faster than the layer as it was, and than our dense path (5% shared, 10% only predicted),
7. also than dense should be once torch.compile has fused it, and neither its host time nor its device time may be above
   dense's: in a model that waits for the host, the time of a layer alone misleads. A host time that is at most half of
   the path's own device time may be: a model of such layers waits for the GPU. Of paths that are as fast within 2%,
   the one that splits no neurons is taken, which mostly needs fewer copies of weights.
8. So it must be at the largest count of its class; where it loses at the smallest, the class is cut in two.
9. Inputs of all layers come from one pass of the model over the batches, up to 4,096 rows of each, or are drawn.
10. On a CPU, where a call of dense is predicted to take more than 30 ms, nothing is timed.

Method of the split: neurons that fire on more than about 1% of the tokens cost less as columns of a dense GEMM than as
rows read from the cache for each entry; where the line lies is for the rates to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..core import WHOLE, InputError, TwellError
from ..formats.twell import VALUE_DTYPES
from ..layers.activations import kernel_activation, kernel_inputs, kind_of
from ..layers.choice import DENSE, Candidate, Choice, LayerPlan
from ..layers.find import FeedForward, Only, feed_forwards
from ..layers.paths import PATHS, Path
from ..layers.paths.hot_cold import STEP
from ..layers.sparse_ffn import FOR_CUT, ONLY_CUT, SparseFFN
from ..layers.weights import Weights
from ..ops import measure as clocks
from . import costs
from .costs import Firing, Rates, measure_rates
from .judge import MARGIN, MARGIN_PREDICTED, MARGIN_SHARED, barred, expected, judge
from .plan import Plan, check_fits
from .profile import FiringProfile, LayerProfile, captured
from .room import Room, check_share
from .trials import Subject, Trial, Trials, beside, check_clock

__all__ = ["Candidate", "Choice", "LayerPlan", "Plan", "Rates", "measure_rates", "plan", "plan_layer"]

TOKENS = (1, 64, 2048, 16384)
_CUTS = 3  # times a class is cut in two at most
_TIMED = 3  # sparse candidates of one class that are timed at most
_ROWS = 4096  # inputs of a layer that are captured at most; a class of more tokens repeats them
_REACH = 1.5  # and only those predicted to take at most this many times the best prediction
# microseconds: on a CPU, where a call of the dense path is predicted to take longer, nothing is timed
_CPU_LONGEST = 3e4
# Hot sizes that are weighed, in steps of 256; and the best predicted one.
_HOT = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
CAPTURED, DRAWN = "captured from the batches", "drawn at the profile's rates"


def plan(
    profile: FiringProfile,
    model: nn.Module | None = None,
    *,
    tokens: Iterable[int] = TOKENS,
    device: str | torch.device | None = None,
    measure: bool = True,
    batches: Iterable | None = None,
    rates: Rates | None = None,
    only: Only | None = None,
    for_graphs: bool = False,
    memory: float | None = None,
    reorder: bool = False,
    paths: Iterable[str] | None = None,
    progress: bool = True,
) -> Plan:
    """Choose a path for every layer of a profile and every class of token counts.

    Needs no gradient and leaves the model as it was. How it is done is said at the top of this module.

    Args:
        profile: what `twell_lab.profile` counted.
        model: the profiled one, dense or sparsified. Without it nothing is timed, and the choice rests on predictions.
        tokens: the largest count of each class (see LayerPlan).
        device: where the layers will run, by default where the model is, or a GPU where there is one.
        measure: whether to time candidates.
        batches: inputs of the model, OTHER than the profiled ones, to time on; a class with more tokens than they hold,
            or than 4,096, repeats them. Without batches the layers timed are stand-ins of the same shape, drawn so that
            each neuron fires as often as in the profile, though independently (the plan's `inputs` says which);
            "two_four" and "blocks" are timed on the layer's own weights even then.
        rates: measure_rates of the device, if at hand.
        only: as it was for the profile.
        for_graphs: decide by the time of CUDA graph replays, which the host does not hold up, instead of the wall time
            of plain calls. For models that are captured; on a GPU alone.
        memory: the share of the model's bytes that copies of weights may take once `sparsify` has swapped the model;
            layers that find no room get the next best (twell_lab.analysis.room). `sparsify` then follows the plan as it
            is. None: copies are not weighed, and `sparsify` does so.
        reorder: whether `sparsify` will be told `reorder=True`, with which hot/cold needs no copies.
        paths: the names of those that are weighed beside dense; None: "twell" and "hot_cold". Further ones, which need
            the model (twell_lab.sparsities): "two_four" and "blocks", for layers whose weights are 2:4, or have empty
            blocks; lossy ones, taken where they are faster, with the error of a layer's output beside its time: "int8",
            "fp8", "twell_int8", "predicted" and "experts". A layer that a path does not take does without. A layer
            with thresholds on its inputs (TEAL) weighs "kept_inputs" beside dense and no other, whatever is named.
        progress: show a bar on stderr while layers are planned, if that is a terminal.

    Raises:
        InputError: for a profile that does not fit the model, and other arguments that do not; for a path that no layer
            takes, the first layer's reason, of its own type.
        DeviceError: for a device that is not there.
    """
    if not isinstance(profile, FiringProfile):
        raise InputError(
            f"profile is a {type(profile).__name__}; a FiringProfile, as profile() returns it, is accepted"
        )
    tokens = _classes(tokens)
    check_share(memory, reorder)
    if memory is not None and model is None:
        raise InputError(f"memory is {memory!r} without a model, of whose bytes it would be a share; both are accepted")
    names = _named(paths, model)
    found = _matching(profile, model, only)
    weight = next(iter(found.values())).up.weight if found else None
    device = clocks.present_device(device if device is not None or weight is None else weight.device)
    others = 0 if model is None or weight is None else beside(model, weight)
    trials = Trials(check_clock(device, for_graphs), others)
    if weight is not None:
        if measure and device.type != weight.device.type:
            raise InputError(
                f"device is {str(device)!r} but the model is on {weight.device}; to time its layers, the same is "
                "accepted"
            )
        if weight.dtype not in VALUE_DTYPES:
            raise InputError(f"the model's weights are {weight.dtype}; bfloat16, float16 and float32 are accepted")
    batches = None if batches is None else [batches] if isinstance(batches, (Tensor, Mapping)) else list(batches)
    if batches is not None and not batches:
        raise InputError("batches is empty; accepted: at least one input of the model, or None")
    rates = rates or measure_rates(device, None if weight is None else weight.dtype)
    fitted = _fitted(names, [found.get(layer.name) for layer in profile.layers])
    weighers = [_Weigher(layer, rates, trials, paths=each) for layer, each in zip(profile.layers, fitted)]
    if measure and model is not None:
        _have_timed(weighers, found, tokens, model, batches)
    layers = []
    with tqdm(weighers, unit="layer", desc="plan", leave=False, disable=None if progress else True) as bar:
        for weigher in bar:
            bar.set_postfix_str(weigher.layer.name, refresh=False)
            layers.append(weigher.plan(tokens))
            weigher.subject = None  # its inputs and copies are not needed any more
    if model is not None and (memory is not None or reorder):
        room = Room(model, math.inf if memory is None else memory, reorder)
        layers = room.fit_all([(found[each.name], each) for each in layers], rates)
    timed = any(each.measured_us is not None for layer in layers for each in layer.candidates)
    inputs = None if not timed else DRAWN if batches is None else CAPTURED
    clock = trials.clock if timed else None
    share = None if memory == math.inf else memory
    return Plan(layers, rates.device, rates.dtype, rates.as_dict(), inputs, clock, memory=share)


def plan_layer(
    layer: LayerProfile,
    rates: Rates,
    tokens: Iterable[int] = TOKENS,
    subject: Subject | None = None,
    trials: Trials | None = None,
    timed: Iterable[int] | None = None,
    paths: Mapping[str, Path] = PATHS,
) -> LayerPlan:
    """The plan of one layer.

    Args:
        layer: its profile.
        rates: of its device.
        tokens: the largest count of each class.
        subject: what candidates are timed on; None: nothing is.
        trials: those of layers before, which this one may share; its own are kept there.
        timed: the classes that are timed, by default all of them.
        paths: those that are weighed.
    """
    return _Weigher(layer, rates, trials or Trials(), subject, paths).plan(_classes(tokens), timed)


class _Weigher:
    """Predicts, times and judges the candidates of one layer, from few tokens to many."""

    def __init__(
        self,
        layer: LayerProfile,
        rates: Rates,
        trials: Trials,
        subject: Subject | None = None,
        paths: Mapping[str, Path] = PATHS,
    ) -> None:
        self.paths = paths
        self.layer, self.rates, self.trials, self.subject = layer, rates, trials, subject
        self.firing, self.itemsize = Firing.of(layer), getattr(torch, rates.dtype).itemsize
        self.known: dict[tuple[Choice, int], float] = {}  # predictions, each asked for often
        self.last: Trial | None = None  # what was timed last for this layer, if anything was

    def plan(self, tokens: list[int], timed: Iterable[int] | None = None) -> LayerPlan:
        """The layer's plan. A class's choice is weighed at its largest count. Where it would lose to the dense path at
        its smallest one, the class is cut in two, up to three times; what then still loses is dense (in the table with
        the times of the class above it)."""
        layer, timed = self.layer, {*(tokens if timed is None else timed)}
        candidates, least = [], None  # nothing is said of counts below the first class
        for most in tokens:
            candidates += self._cut(least, most, most in timed)
            least = most + 1
        counts = tuple(layer.neuron_counts.tolist())
        return LayerPlan(layer.name, layer.d_model, layer.d_ff, layer.gated, layer.tokens, counts, tuple(candidates))

    def _cut(
        self,
        least: int | None,
        most: int,
        timed: bool,
        cuts: int = _CUTS,
        found: list[Candidate] | None = None,
        below: int | None = None,
    ) -> list[Candidate]:
        """The candidates of the class from `least` (None: not looked at) to `most`, in one class or several.

        found: what was weighed at `most`, if it was. below: a count just below `least` that was weighed, to look at
        instead.
        """
        found = found or self._weigh(most, timed)
        (chosen,) = [each for each in found if each.chosen]
        timed = chosen.measured_us is not None  # what rests on predictions at its largest count does so throughout
        at = below or least
        if least is None or least >= most or chosen.choice == DENSE or self._holds(chosen.choice, at, timed):
            return found
        if not cuts:
            return [_passed_over(each, at, most - 1) for each in found] + found
        middle = max(least, min(most - 1, round((least * most) ** 0.5)))
        lower = self._cut(least, middle, timed, cuts - 1, below=below)
        return lower + self._cut(middle + 1, most, timed, cuts - 1, found, middle)

    def _weigh(self, tokens: int, timed: bool) -> list[Candidate]:
        predicted = self.weighed(tokens)
        trial = self._trial(self.worth_timing(tokens), tokens) if timed else None
        saved = costs.compiling_saves(self.firing, self.rates, tokens, self.itemsize)
        saved = min(saved, predicted[DENSE] / 4)
        if trial is None:
            how = "predicted" if self.last is None else "predicted, as far off as it was where timed"
            return judge(tokens, predicted, expected(predicted, self.last), MARGIN_PREDICTED, how, saved)
        self.last = trial
        predicted |= {choice: self.predicted(choice, tokens) for choice in trial.predicted}
        shared = trial.layer != self.layer.name
        margin, how = (MARGIN_SHARED, f"measured on {trial.layer}") if shared else (MARGIN, "measured")
        return judge(tokens, predicted, trial.times, margin, how, saved, trial.layer, trial.errors)

    def _holds(self, choice: Choice, tokens: int, timed: bool) -> bool:
        """Whether a choice of more tokens loses nothing to dense here, as far as clocks tell them apart."""
        trial = self._trial([DENSE, choice], tokens, exact=True) if timed else None
        predicted = {each: self.predicted(each, tokens) for each in (DENSE, choice)}
        times = expected(predicted, self.last) if trial is None else trial.times
        return barred(choice, times, 1 / MARGIN, 1 / MARGIN) is None

    def worth_timing(self, tokens: int) -> list[Choice]:
        """The dense path, and the best predicted other ones that are within reach; empty if there are none, or where a
        CPU would take too long over it."""
        predicted = self.weighed(tokens)
        if self.subject is None or not self._takes_seconds(tokens):
            return []
        ranked = sorted((choice for choice in predicted if choice != DENSE), key=predicted.get)
        best: dict[str, Choice] = {}
        for choice in ranked:
            best.setdefault(choice.path, choice)
        reach = _REACH * min(predicted.values())
        picked = [c for c in dict.fromkeys([*best.values(), *ranked]) if predicted[c] <= reach][:_TIMED]
        return [DENSE, *picked] if picked else []

    def _takes_seconds(self, tokens: int) -> bool:
        """Whether timing this many tokens is a matter of seconds."""
        return self.subject.weight.is_cuda or self.predicted(DENSE, tokens) <= _CPU_LONGEST

    def weighed(self, tokens: int) -> dict[Choice, float]:
        """Predicted microseconds of every path; of one that splits at hot sizes spread over d_ff, and at the best."""
        found = {}
        for path in self.paths.values():
            if not path.helps(tokens, self.rates):
                continue
            each = {hot: self.predicted(Choice(path.name, hot), tokens) for hot in path.sizes(self.firing.d_ff)}
            best = min(each, key=each.get, default=None)
            found |= {Choice(path.name, hot): us for hot, us in each.items() if hot == best or hot // STEP in _HOT}
        return found

    def predicted(self, choice: Choice, tokens: int) -> float:
        """Predicted microseconds of one call."""
        if (choice, tokens) not in self.known:
            path = self.paths.get(choice.path)
            found = costs.predict(choice, self.firing, self.rates, tokens, self.itemsize, path)
            self.known[choice, tokens] = found["total"]
        return self.known[choice, tokens]

    def _trial(self, choices: list[Choice], tokens: int, exact: bool = False) -> Trial | None:
        """The trial of these choices, shared or run now; None where nothing is timed."""
        if not choices or self.subject is None or not self._takes_seconds(tokens):
            return None
        predict = partial(self._at, tokens)
        trial = self.trials.find(self.subject, tokens, choices, predict, exact)
        trial = trial or self.trials.run(self.subject, tokens, choices, predict)
        return trial.of(self.layer.name, predict)

    def _at(self, tokens: int, choice: Choice) -> float:
        return self.predicted(choice, tokens)


def _named(paths: Iterable[str] | None, model: nn.Module | None) -> list[str]:
    """The names of the paths to weigh, dense among them."""
    if paths is None:
        return [*PATHS]
    names, known = [paths] if isinstance(paths, str) else list(paths), PATHS.names()
    for name in names:
        if name not in known:
            raise InputError(f"paths has {name!r:.80}; accepted: {', '.join(map(repr, known))}")
        if model is None and name not in [*PATHS]:
            raise InputError(f"paths has {name!r}, which depends on a layer's weights; accepted with the model")
    return [*dict.fromkeys([DENSE.path, *names])]


def _fitted(names: list[str], found: list[FeedForward | None]) -> list[dict[str, Path]]:
    """For each layer the paths of these names that take it, fitted to its weights; the first one's refusal where none
    does."""
    fitted: list[dict[str, Path]] = [{} for _ in found]
    cuts = [layer for layer in found if layer is not None and layer.cut is not None]
    if found and not cuts and (wrong := [name for name in names if name in FOR_CUT]):
        raise InputError(f"path {wrong[0]!r} {ONLY_CUT}; the model has none")
    for name in dict.fromkeys([*names, *(FOR_CUT if cuts else ())]):
        refused = []
        for at, layer in enumerate(found):
            if name not in paths_for(layer, [*names]):
                continue
            try:
                path = PATHS[name]
                fitted[at][name] = path if layer is None else path.fitted(Weights.of(layer.gate, layer.up, layer.down))
            except TwellError as error:
                refused.append(type(error)(f"path {name!r}, layer {'' if layer is None else layer.name!r}: {error}"))
        if found and len(refused) == len(found):
            raise refused[0]
    return fitted


def paths_for(layer: FeedForward | None, names: Iterable[str]) -> list[str]:
    """Those of the paths of these names that are for such a layer; for one with thresholds on its inputs, where none is
    but dense, all that there are for it."""
    cut = layer is not None and layer.cut is not None
    found = [name for name in names if name == DENSE.path or PATHS[name].cuts == cut]
    return [*found, *FOR_CUT] if cut and found == [DENSE.path] else found


def _have_timed(
    weighers: list[_Weigher], found: dict[str, FeedForward], tokens: list[int], model: nn.Module, batches: list | None
) -> None:
    """Give each layer a subject, with inputs if there is something to time."""
    for weigher in weighers:
        layer = found[weigher.layer.name]
        if layer.cut is not None and batches is None:  # what is drawn has no such inputs
            continue
        subject = weigher.subject = Subject(weigher.layer, layer)
        subject.most = min(_ROWS, max((each for each in tokens if weigher.worth_timing(each)), default=0))
    wanted = {weigher.layer.name: weigher for weigher in weighers if weigher.subject and weigher.subject.most}
    if batches is None or not wanted:
        return
    kept = captured(model, batches, wanted, max(weigher.subject.most for weigher in wanted.values()))
    for name, weigher in wanted.items():
        weigher.subject.rows = partial(kept.pop, name)


def _passed_over(candidate: Candidate, least: int, most: int) -> Candidate:
    """The candidate, timed just above this class, in a class that stays dense because the choice loses at its smallest
    count."""
    if candidate.chosen:
        return replace(candidate, tokens=most, chosen=False, why=f"slower than dense at {least} tokens")
    if candidate.choice == DENSE:
        return replace(
            candidate, tokens=most, chosen=True, why=f"nothing else is sure to be faster from {least} tokens on"
        )
    return replace(candidate, tokens=most)


def _classes(tokens: Iterable[int]) -> list[int]:
    classes = [tokens] if isinstance(tokens, int) else list(tokens)
    if (
        not classes
        or not all(type(each) is int and 0 < each < WHOLE for each in classes)
        or len(set(classes)) < len(classes)
    ):
        raise InputError(f"tokens is {classes!r:.200}; different whole numbers from 1 to 2**63 - 1 are accepted")
    return sorted(classes)


def _matching(profile: FiringProfile, model: nn.Module | None, only: Only | None) -> dict[str, FeedForward]:
    """The model's layers by name, each of the profile's shape."""
    if model is None:
        return {}
    found = {each.name: each for each in feed_forwards(model, only=only)}
    check_fits(found.values(), profile.layers, "profile")
    for name, each in found.items():
        if isinstance(each.module, SparseFFN) and each.module.reordered:
            raise InputError(
                f"the neurons of layer {name!r} are reordered (reorder=True), and the profile has them in their own "
                "order; accepted: twell_lab.densify first"
            )
        acts, squared = each.acts or torch.relu, each.gate is each.up
        if (
            kernel_activation(acts, each.gate is not None, each.both, cut=each.cut)
            is kernel_inputs(acts, each.both or squared, each.cut)
            is None
        ):
            raise InputError(
                f"{name!r} has an activation ({kind_of(each.acts)}) that the dense path alone computes, so there is "
                "nothing to plan; accepted: an `only` that leaves it out"
            )
    return found
