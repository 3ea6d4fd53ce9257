"""Room for copies: which layers of a model may hold weights in another layout as well, and what the others do.

The room is a share of the model's bytes. Of a plan for a whole model, the layers that gain most a byte get it first.
Gain is how much longer the layer's calls would take without copies, as the plan has timed or predicted it, on average
over its classes of token counts. A layer for which there is no room left does without the path whose copies are
largest: each class that took it takes the best of the other candidates that may be taken (analysis.judge), or dense."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..core import InputError
from ..layers.choice import DENSE, Candidate, Choice, LayerPlan
from ..layers.find import FeedForward
from ..layers.layout import Holders, copy_bytes
from ..layers.paths import PATHS
from ..layers.shards import part_of
from ..ops import decode
from . import costs
from .costs import Firing, Rates
from .judge import MARGIN, MARGIN_PREDICTED, MARGIN_SHARED, barred, expected
from .trials import Times, Trial

SHARE = 0.02  # of the model's bytes, where nothing else was asked for


def check_share(memory, reorder) -> None:
    """InputError for a share below 0 or that is no number, and for a `reorder` that is neither True nor False."""
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory >= 0):
        raise InputError(
            f"memory is {memory!r:.80}; a share of the model's bytes from 0 up (0.02 for 2%, math.inf for any) is "
            "accepted, or None"
        )
    if not isinstance(reorder, bool):
        raise InputError(f"reorder is {reorder!r:.80}; True or False is accepted")


class Room:
    """The bytes that layers of a model may still hold for copies of weights.

    memory: the share of the model's bytes. reorders: whether neurons may be reordered, so that hot/cold needs no
    copies. held: what other layers of the model hold already."""

    def __init__(self, model: nn.Module, memory: float, reorders: bool = False, held: int = 0) -> None:
        self.memory, self.reorders = memory, reorders
        whole = sum(part_of(p).nbytes for p in model.parameters())
        self.left = max(0.0, (memory * whole if whole else 0.0) - held)

    def need(self, found: FeedForward, holders: Holders | None = None) -> dict[str, int]:
        """The bytes of copies that the layer holds for each path. holders: of it and other layers, if known."""
        return copy_bytes(found, self.reorders, holders)

    def fit(
        self, found: FeedForward, plan: LayerPlan, rates: Rates | None, need: dict[str, int] | None = None
    ) -> LayerPlan:
        """The plan, or what is left of it for want of room, which it takes. need: if it is known."""
        need = need or self.need(found)
        plan = self._in_order(plan, rates, need)
        out: set[str] = set()
        while (total := sum(need[path] for path in _paths(plan))) > self.left:
            largest = max(_paths(plan), key=need.__getitem__)
            out.add(largest)
            plan = without(
                plan,
                rates,
                lambda _, choice: choice.path not in out,
                f"needs {_bytes(need[largest])} of copies, and memory={self.memory:g} leaves {_bytes(self.left)}",
            )
        self.left -= total
        return plan

    def fit_all(self, layers: Sequence[tuple[FeedForward, LayerPlan]], rates: Rates | None) -> list[LayerPlan]:
        """The plans of these layers, each as `fit` gives it; those that gain most a byte come first."""
        holders = Holders(found for found, _ in layers) if self.reorders else None
        needs, gains = [self.need(found, holders) for found, _ in layers], {}
        for at, ((found, plan), need) in enumerate(zip(layers, needs)):
            plan = self._in_order(plan, rates, need)
            bare = without(plan, rates, lambda _, choice, need=need: not need[choice.path], "")
            total = sum(need[path] for path in _paths(plan))
            gains[at] = (_slower(bare, plan) - 1) * _weight(found) / total if total else math.inf
        made = {at: self.fit(*layers[at], rates, needs[at]) for at in sorted(gains, key=lambda at: -gains[at])}
        return [made[at] for at in range(len(layers))]

    def _in_order(self, plan: LayerPlan, rates: Rates | None, need: dict[str, int]) -> LayerPlan:
        """The plan, if the layer can be reordered, for one that is. With the hot neurons first, packing many tokens
        whole would overflow the first tiles: either that is given up or the hot part, whichever costs less."""
        splits = [path for path in _paths(plan) if PATHS[path].splits]

        def packs(tokens: int, choice: Choice) -> bool:
            return PATHS[choice.path].packs and choice.path not in splits and tokens > decode.MOST_TOKENS

        if not self.reorders or not splits or any(need[path] for path in splits):
            return plan
        if not any(packs(tokens, choice) for tokens, choice in plan.choices.items()):
            return plan
        ways = [
            without(plan, rates, lambda tokens, choice: not packs(tokens, choice), "overflows in reordered neurons"),
            without(plan, rates, lambda _, choice: choice.path not in splits, "is not worth the reordering"),
        ]
        return min(ways, key=lambda way: _slower(way, plan))


def without(plan: LayerPlan, rates: Rates | None, takes: Callable[[int, Choice], bool], why: str) -> LayerPlan:
    """The plan with other choices in the classes whose choice is not taken. takes: of a class's largest count and a
    choice. why: what to say of the choices that are not."""
    found: list[Candidate] = []
    for tokens in dict.fromkeys(each.tokens for each in plan.candidates):
        weighed = [each for each in plan.candidates if each.tokens == tokens]
        old = next(each.choice for each in weighed if each.chosen)
        if not takes(tokens, old):
            if not any(each.choice == DENSE for each in weighed):
                weighed.append(Candidate(tokens, DENSE.path, DENSE.hot, 0.0, None, False, "dense is always possible"))
            new = _next_best(plan, weighed, rates, [each.choice for each in weighed if takes(tokens, each.choice)])
            said = {old: f"{old} {why}", new: f"{old} {why}; the best of the others"}
            weighed = [
                replace(each, chosen=each.choice == new, why=said.get(each.choice, each.why)) for each in weighed
            ]
        found += weighed
    return replace(plan, candidates=tuple(found))


def _next_best(plan: LayerPlan, weighed: list[Candidate], rates: Rates | None, left: list[Choice]) -> Choice:
    """The best of these choices of one class that may be taken; dense if none may."""
    dense = next(each for each in weighed if each.choice == DENSE)
    predicted = {each.choice: each.predicted_us for each in weighed}
    if dense.measured_us is not None:
        times = _trial(plan, weighed).times
        margin = MARGIN if dense.timed_on in (None, plan.name) else MARGIN_SHARED
    else:
        timed = [each.tokens for each in plan.candidates if each.choice == DENSE and each.measured_us is not None]
        last = [each for each in plan.candidates if timed and each.tokens == max(timed)]
        times, margin = expected(predicted, _trial(plan, last) if last else None), MARGIN_PREDICTED
    saved = 0.0
    if rates is not None:
        firing = Firing(plan.d_model, plan.gated, torch.zeros(plan.d_ff, device="cpu"), torch.zeros(0, device="cpu"))
        saved = costs.compiling_saves(firing, rates, dense.tokens, getattr(torch, rates.dtype).itemsize)
        saved = min(saved, predicted[DENSE] / 4)
    taken = [each for each in left if each != DENSE and each in times]
    taken = [each for each in taken if barred(each, times, margin, saved=saved) is None]
    return min(taken, key=lambda each: times[each].call, default=DENSE)


def _trial(plan: LayerPlan, weighed: list[Candidate]) -> Trial:
    """What was timed in one class, as a trial."""
    timed = [each for each in weighed if each.measured_us is not None]
    times: dict[Choice | None, Times] = {
        each.choice: Times(each.measured_us, each.host_us, each.device_us)
        for each in timed
        if each.measured_us is not None
    }
    before = next(each.before_us for each in timed if each.choice == DENSE)
    times[None] = times[DENSE] if before is None else times[DENSE]._replace(call=before)
    return Trial(plan.name, {each.choice: each.predicted_us for each in timed}, times)


def _slower(plan: LayerPlan, than: LayerPlan) -> float:
    """How many times as long the calls of one plan take as those of another with the same classes, on average."""
    ratios = []
    for tokens in plan.choices:
        us, other = (_chosen_us(each, tokens) for each in (plan, than))
        ratios.append(us / other if us and other else 1.0)
    return sum(ratios) / len(ratios)


def _chosen_us(plan: LayerPlan, tokens: int) -> float:
    found = next(each for each in plan.candidates if each.chosen and each.tokens == tokens)
    return found.predicted_us if found.measured_us is None else found.measured_us


def _paths(plan: LayerPlan) -> set[str]:
    return {choice.path for choice in plan.choices.values()}


def _weight(found: FeedForward) -> int:
    return sum(part.weight.nbytes for part in (found.gate, found.up, found.down) if part is not None)


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
