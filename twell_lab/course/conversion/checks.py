"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch.nn import functional as F

from ..verdicts import NotYet, close, near, same_list, skipping, written


def _threshold_for(answer) -> str:
    for count, share, silent in ((40, 0.5, 0), (40, 0.9, 0), (200, 0.25, 20), (10, 0.0, 0), (40, 0.5, 30)):
        values = torch.randn(count)
        values[torch.randperm(count)[:silent]] = 0.0
        wanted = max(round(share * count), silent)
        asked = f"threshold_for of {count} values, {silent} of them zero, and sparsity {share:g}"
        got = float(written(answer(values.clone(), share)))
        zeros = int(((values.abs() < got) | (values == 0)).sum())
        if zeros != wanted:
            raise NotYet(f"{asked} should leave {wanted} zeros; with yours, {got:.4g}, there are {zeros}.")
    return "so many of the smallest magnitudes lie below it, and what is zero already counts."


def _cut_token(answer) -> str:
    for trial in range(3):
        x, gate, up = torch.randn(24), torch.randn(60, 24), torch.randn(60, 24)
        down, threshold = torch.randn(24, 60), random.uniform(0.15, 0.25)
        gate = gate - 0.3 * x  # most activations small and negative
        activation = F.silu(gate @ x)
        kept = activation.abs() >= threshold
        exact = (down.double() * (activation * kept * (up @ x)).double()).sum(1)
        if trial:
            up[~kept], down[:, ~kept] = torch.nan, torch.nan
        asked = "cut_token" + " with NaN in the weights of neurons that are cut" * bool(trial)
        most = 2 * 24 * (60 + 2 * int(kept.sum()))
        close(skipping(answer, (x, gate, up, down, threshold), most, asked), exact, asked)
    return "what is large in magnitude is kept, of either sign, and no other neuron's weights were read."


def _paired_interval(answer) -> str:
    for count in (2, 12, 100):
        before = 2 + torch.rand(count, dtype=torch.float64)  # windows differ more than a cut changes any of them
        difference = 0.05 + 0.02 * torch.randn(count, dtype=torch.float64)
        reach = 1.96 * difference.std().item() / math.sqrt(count)
        middle = difference.mean().item()
        asked = f"paired_interval for {count} windows"
        got = written(answer(before, before + difference))
        if not isinstance(got, tuple) or len(got) != 3:
            raise NotYet(f"{asked} should give three numbers, low, change, high; yours gave a {type(got).__name__}.")
        for name, mine, want in zip(("low", "change", "high"), got, (middle - reach, middle, middle + reach)):
            near(float(mine), want, f"{name} of {asked}")
    return "the windows differ from each other, but each is compared with itself."


def _l1_at(answer) -> str:
    for l1, delay, ramp in ((1e-3, 10, 20), (2.0, 0, 5), (0.5, 100, 0), (3e-3, random.randint(1, 40), 8)):
        for step in {1, delay, delay + 1, delay + 3, delay + ramp, delay + ramp + 50} - {0}:
            want = l1 if step >= delay + ramp and step > delay else max(0.0, l1 * (step - delay) / max(ramp, 1))
            near(answer(step, l1, delay, ramp), want, f"l1_at({step}, {l1:g}, delay={delay}, ramp={ramp})")
    return "nothing during the delay, a straight line, and then the whole."


def _won_back(answer) -> str:
    for before, at_once, after, twin in ((2.0, 2.4, 2.0, 1.9), (2.0, 2.4, 1.8, 1.9), (3.0, 3.1, 3.05, 3.0)):
        before = before + random.random() / 10
        want = 1 - (after - twin) / (at_once - before)
        asked = f"won_back(before={before:.3f}, at_once={at_once}, after={after}, twin={twin})"
        near(answer(before, at_once, after, twin), want, asked)
    return "training improves any model, so the gap to the twin is what counts."


def _front(answer) -> str:
    cases = [[(0.1, 1.0)], [(0.1, 1.0), (0.2, 2.0)], [(0.1, 5.0), (0.2, 2.0), (0.05, 9.0), (0.2, 3.0), (0.1, 5.5)]]
    cases += [[(random.randint(1, 9) / 10, float(random.randint(0, 9))) for _ in range(8)] for _ in range(4)]
    for points in cases:
        points = [*dict.fromkeys(points)]
        want = [a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)]
        same_list(answer(list(points)), sorted(want), f"front({points})", lambda got: [tuple(each) for each in got])
    return "each of these is beaten by no other in both."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "threshold_for": _threshold_for,
    "cut_token": _cut_token,
    "paired_interval": _paired_interval,
    "l1_at": _l1_at,
    "won_back": _won_back,
    "front": _front,
}
