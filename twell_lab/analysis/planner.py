"""The planner: for each layer and number of tokens, dense, TwELL or hot/cold, by predicted and measured time.

Candidates are predicted from counted bytes and operations over the device's measured rates (twell_lab.analysis.costs);
the best few are then timed on the layer itself, the dense path beside them. A sparse path is only taken where it is at
least 3% faster than the dense one (10% where nothing was timed), also than the dense one should be once torch.compile
has fused it, so that no layer is slower than it was by choice.

Method of the split: neurons that fire on more than about 1% of the tokens cost less as columns of a dense GEMM than as
rows read from the cache for each entry; where the line lies is for the rates to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.errors import InputError
from ..core.files import WHOLE
from ..formats.twell import VALUE_DTYPES
from ..layers.anatomy import FeedForward, Only, feed_forwards
from ..layers.choice import DENSE, Candidate, Choice, LayerPlan
from ..layers.paths import PATHS
from ..layers.paths.hot_cold import STEP
from ..layers.sparse_ffn import SparseFFN
from ..ops import measure as clocks
from . import costs
from .costs import Firing, Rates, measure_rates
from .plan import Plan, check_fits
from .profile import FiringProfile, LayerProfile, activations

__all__ = ["Candidate", "Choice", "LayerPlan", "Plan", "Rates", "measure_rates", "plan", "plan_layer"]

TOKENS = (1, 64, 2048, 16384)
MARGIN = 0.97  # a sparse path that was timed is taken up to this share of the dense time
MARGIN_PREDICTED = 0.90  # and up to this one where nothing was timed
_CUTS = 3  # times a class is cut in two at most
_TIMED = 3  # sparse candidates of one class that are timed
# microseconds: on a CPU, where a call of the dense path is predicted to take longer, nothing is timed
_CPU_LONGEST = 5e5
_HOPELESS = 1.5  # those predicted to take this many times the dense path are not
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
) -> Plan:
    """Choose a path for every layer of a profile and every class of token counts.

    profile: what `twell_lab.profile` counted. model: the profiled one, dense or sparsified; without it nothing is
    timed, and the choice rests on the predictions. tokens: the largest count of each class (see LayerPlan). device:
    where the layers will run, by default where the model is, or a GPU where there is one. measure: whether to time the
    best candidates. batches: inputs of the model, OTHER than the profiled ones, to time them on; a class with more
    tokens than they hold repeats them. Without batches the layers timed are stand-ins of the same shape, drawn so that
    each neuron fires as often as in the profile, though independently (the plan's `inputs` says which). rates:
    measure_rates of the device, if at hand. only: as it was for the profile.

    Needs no gradient and leaves the model as it was. Raises InputError for a profile that does not fit the model.
    """
    if not isinstance(profile, FiringProfile):
        raise InputError(
            f"profile is a {type(profile).__name__}; a FiringProfile, as profile() returns it, is accepted"
        )
    tokens = _classes(tokens)
    found = _matching(profile, model, only)
    weight = next(iter(found.values())).up.weight if found else None
    device = clocks.present_device(device if device is not None or weight is None else weight.device)
    if found and measure and device.type != weight.device.type:
        raise InputError(
            f"device is {str(device)!r} but the model is on {weight.device}; to time its layers, the same is accepted"
        )
    dtype = weight.dtype if found else None
    if dtype is not None and dtype not in VALUE_DTYPES:
        raise InputError(f"the model's weights are {dtype}; bfloat16, float16 and float32 are accepted")
    rates = rates or measure_rates(device, dtype)
    batches = None if batches is None else [batches] if isinstance(batches, (Tensor, Mapping)) else list(batches)
    if batches is not None and not batches:
        raise InputError("batches is empty; accepted: at least one input of the model, or None")
    layers, timed = [], measure and model is not None
    for layer in profile.layers:
        x = None
        if timed and batches is not None:
            x = _captured(model, batches, layer.name, max(tokens))
        layers.append(plan_layer(layer, rates, tokens, found.get(layer.name) if timed else None, x))
    inputs = None if not timed else DRAWN if batches is None else CAPTURED
    return Plan(layers, rates.device, rates.dtype, rates.as_dict(), inputs)


def plan_layer(
    layer: LayerProfile,
    rates: Rates,
    tokens: Iterable[int] = TOKENS,
    found: FeedForward | None = None,
    x: Tensor | None = None,
    timed: Iterable[int] | None = None,
) -> LayerPlan:
    """The plan of one layer. found: the layer itself, to time candidates on; x: real inputs of it [rows, d_model], or
    None for a drawn stand-in; timed: the classes that are timed, by default all of them if `found` is given.

    A class's choice is weighed at its largest count. Where it would lose to the dense path at its smallest one, the
    class is cut in two, up to three times; what then still loses is dense (in the table with the times of the class
    above it)."""
    tokens = _classes(tokens)
    timed = set(tokens if timed is None else timed) if found is not None else set()
    weigher = _Weigher(layer, rates, found, x)
    candidates, least = [], None  # nothing is said of counts below the first class
    for most in tokens:
        candidates += weigher.cut(least, most, most in timed)
        least = most + 1
    counts = tuple(layer.neuron_counts.tolist())
    return LayerPlan(layer.name, layer.d_model, layer.d_ff, layer.gated, layer.tokens, counts, tuple(candidates))


class _Weigher:
    """Predicts, times and judges the candidates of one layer, from few tokens to many."""

    def __init__(self, layer: LayerProfile, rates: Rates, found: FeedForward | None, x: Tensor | None) -> None:
        self.layer, self.rates, self.found, self.x = layer, rates, found, x
        self.firing, self.itemsize = Firing.of(layer), getattr(torch, rates.dtype).itemsize
        self.off: dict[str, float] = {}  # how far off predictions were where candidates were last timed, by path

    def cut(
        self, least: int | None, most: int, timed: bool, cuts: int = _CUTS, found: list | None = None
    ) -> list[Candidate]:
        """The candidates of the class from `least` (None: not looked at) to `most`, in one class or several.

        found: what was weighed at `most`, if it was.
        """
        found = found or self.weigh(most, timed)
        (chosen,) = [each for each in found if each.chosen]
        if least is None or least >= most or chosen.choice == DENSE:
            return found
        times = self.times([DENSE, chosen.choice], least, timed)
        if times[chosen.choice] * MARGIN <= times[DENSE]:
            return found
        if not cuts:
            return [_passed_over(each, least, most - 1) for each in found] + found
        middle = max(least, min(most - 1, round((least * most) ** 0.5)))
        below = self.cut(least, middle, timed, cuts - 1)
        return below + self.cut(middle + 1, most, timed, cuts - 1, found)

    def weigh(self, tokens: int, timed: bool) -> list[Candidate]:
        weighed = _weighed(self.firing, self.rates, tokens, self.itemsize)
        predicted = {choice: self.predicted(choice, tokens) for choice in weighed}
        measured = self.measured(_worth_timing(predicted), tokens) if timed else {}
        if measured:
            self.off = _off(predicted, measured)
        saved = costs.compiling_saves(self.firing, self.rates, tokens, self.itemsize)
        return _judge(tokens, predicted, measured, self.off, min(saved, predicted[DENSE] / 4))

    def times(self, choices: list[Choice], tokens: int, timed: bool) -> dict[Choice, float]:
        measured = self.measured(choices, tokens) if timed else {}
        return measured or _corrected({choice: self.predicted(choice, tokens) for choice in choices}, self.off)

    def predicted(self, choice: Choice, tokens: int) -> float:
        return costs.predict(choice, self.firing, self.rates, tokens, self.itemsize)["total"]

    def measured(self, choices: list[Choice], tokens: int) -> dict[Choice, float]:
        """Measured microseconds; empty where a CPU would take too long over it."""
        if not self.found.up.weight.is_cuda and self.predicted(DENSE, tokens) > _CPU_LONGEST:
            return {}
        return _measure(self.layer, self.found, self.x, choices, tokens)


def _worth_timing(predicted: dict[Choice, float]) -> list[Choice]:
    """The dense path, the best few others, and twell, whose memory is no more than the transposed down projection."""
    ranked = sorted((c for c in predicted if c != DENSE), key=predicted.get)
    picked = dict.fromkeys([*ranked[:_TIMED], Choice()])
    return [DENSE, *(c for c in picked if predicted[c] <= _HOPELESS * predicted[DENSE])]


def _corrected(predicted: dict[Choice, float], off: dict[str, float]) -> dict[Choice, float]:
    """Predictions, as far off as they were where each path was timed, or as the worst of those."""
    worst = max(off.values(), default=1.0)
    return {choice: us * off.get(choice.path, worst) for choice, us in predicted.items()}


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


def _off(predicted: dict[Choice, float], measured: dict[Choice, float]) -> dict[str, float]:
    """By how much the times of each path differ from their predictions, where they were measured."""
    ratios = {}
    for choice, us in measured.items():
        ratios.setdefault(choice.path, []).append(us / predicted[choice])
    return {path: clocks.quartiles(found)[0] for path, found in ratios.items()}


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
    return found


def _weighed(firing: Firing, rates: Rates, tokens: int, itemsize: int) -> list[Choice]:
    """Every path, one that splits at hot sizes spread over d_ff and at the one predicted to be best."""
    found = []
    for path in PATHS.values():
        choices = [Choice(path.name, hot) for hot in path.sizes(firing.d_ff)]
        cost = lambda choice: costs.predict(choice, firing, rates, tokens, itemsize)["total"]  # noqa: E731
        best = min(choices, key=cost, default=None)
        found += [choice for choice in choices if choice == best or choice.hot // STEP in _HOT]
    return found


def _judge(
    tokens: int,
    predicted: dict[Choice, float],
    measured: dict[Choice, float],
    off: dict[str, float] | None = None,
    saved: float = 0.0,
) -> list[Candidate]:
    """The candidates of one class with their times, one of them chosen, and why each is or is not.

    off: how far predictions were off at another number of tokens, by path; it corrects those of a class not timed.
    saved: what compiling would take off the dense time: who compiles the model should not lose by the choice either.
    """
    times, margin, how = measured, MARGIN, "measured"
    if not measured:
        times, margin = _corrected(predicted, off or {}), MARGIN_PREDICTED
        how = "predicted, as far off as it was where timed" if off else "predicted"
    dense = times[DENSE]
    fastest = min(times, key=times.get)
    chosen = fastest if times[fastest] <= margin * (dense - saved) else DENSE
    compiled = " would be compiled" if times[fastest] <= margin * dense else ""
    short = f"less than {100 * (1 - margin):.0f}% faster than dense{compiled}"

    def why(choice: Choice) -> str:
        if choice == chosen:
            if choice == fastest:
                return f"fastest, {how}" + ("" if choice == DENSE else f": {dense / times[choice]:.2f}x dense")
            return f"{fastest} is {short}, {how}"
        if choice not in times:
            return f"not timed: predicted {predicted[choice] / min(predicted.values()):.2f}x the best prediction"
        if choice == fastest:
            return f"{short}, {how}"
        return f"{times[choice] / times[chosen]:.2f}x the time of the choice, {how}"

    return [Candidate(tokens, c.path, c.hot, predicted[c], measured.get(c), c == chosen, why(c)) for c in predicted]


# ---- timing ----


@torch.no_grad()
def _measure(
    layer: LayerProfile, found: FeedForward, x: Tensor | None, choices: list[Choice], tokens: int
) -> dict[Choice, float]:
    """Measured microseconds of each choice with this many tokens."""
    weight = found.up.weight
    if x is None:
        module, inputs = _stand_in(layer, tokens, weight.dtype, weight.device)
    else:
        module, inputs = _Parts(found), _inputs(x.to(weight.device, weight.dtype), tokens)
    calls = {}
    for choice in choices:
        sparse = SparseFFN(
            module, tile=layer.tile, words=layer.words, plan=LayerPlan.forced(layer, choice), _check=False
        )
        calls[choice] = lambda turn, f=sparse: f(inputs[turn % len(inputs)])
    taken = costs.clock(calls, weight.device)
    return {choice: 1e6 * seconds for choice, seconds in taken.items()}


class _Parts(nn.Module):
    """A feed-forward layer's projections, whatever they were called, as a module that SparseFFN takes."""

    def __init__(self, found: FeedForward) -> None:
        super().__init__()
        if found.gate is not None:
            self.gate_proj = found.gate
        self.up_proj, self.down_proj, self.act_fn = found.up, found.down, nn.ReLU()


def _inputs(x: Tensor, tokens: int, sets: int = 3) -> list[Tensor]:
    """Up to three inputs of so many tokens from the rows of x, other rows in each as far as there are any."""
    if x.shape[0] < tokens:
        x = x.repeat(-(-tokens // x.shape[0]), 1)
    return [x[i * tokens : (i + 1) * tokens].contiguous() for i in range(min(sets, x.shape[0] // tokens))]


def _captured(model: nn.Module, batches: list, name: str, tokens: int) -> Tensor:
    """What enters the layer called `name` when the model runs on the batches, up to three times `tokens` rows."""
    rows = []
    for batch in batches:
        rows.append(activations(model, batch, name)[0].detach())
        if sum(map(len, rows)) >= 3 * tokens:
            break
    return torch.cat(rows)


def _stand_in(
    layer: LayerProfile, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[Tensor]]:
    """A drawn layer of the profile's shape, and inputs at which each neuron fires as often as in the profile."""
    frequency = layer.neuron_counts.double() / layer.tokens
    shape = (tokens, layer.d_model, dtype, device)
    return clocks.drawn(frequency, *shape, gated=layer.gated, shrink=layer.d_ff**0.5)
