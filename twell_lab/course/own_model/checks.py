"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

from ..verdicts import NotYet, near, same, written


def _hiding_window(answer) -> str:
    cases = [(101, 10, 0.1), (101, 10, 1.0), (37, 37, 0.1), (5, 20, 0.1), (64, 8, 0.5), (65, 8, 0.5)]
    cases += [(random.randint(1, 2000), random.randint(1, 90), random.choice([0.25, 0.125, 0.5])) for _ in range(5)]
    for first, later, within in cases:
        want = max(1, ceil(Fraction(first - later) / (Fraction(str(within)) * later)))
        same(answer(first, later, within), want, f"hiding_window({first}, {later}, within={within})")
    return "with n tokens, the first adds (first - later) / n to the mean."


def _share_saved(answer) -> str:
    cases = [[(1024, 20.5, True)], [(1024, 20.5, False)], [(8, 8.0, True)], [(100, 1.0, True), (900, 90.0, False)]]
    for _ in range(3):
        widths = [random.randint(1, 40) * 64 for _ in range(5)]
        cases.append([(d_ff, round(random.random() * d_ff, 1), random.random() < 0.7) for d_ff in widths])
    for layers in cases:
        saved = sum(2 * (d_ff - nnz) for d_ff, nnz, swapped in layers if swapped)
        near(answer(list(layers)), saved / sum(3 * d_ff for d_ff, *_ in layers), f"share_saved({layers})")
    return "a third is always read, wide layers count for more, and who stays dense saves nothing."


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, acts=F.relu, inner=lambda h: h) -> Tensor:
    hidden = inner(acts(x @ gate.T) * (x @ up.T))
    half = hidden.shape[1] // 2  # two sums, so that a layer which computes the formula is off by rounding
    return hidden[:, :half] @ down[:, :half].T + hidden[:, half:] @ down[:, half:].T


# What is nearly a ReLU layer, and where it differs: of what a layer of each kind computes.
_OTHERS = {
    "gelu": {"acts": F.gelu},  # a ReLU again for large x
    "silu": {"acts": F.silu},
    "clamped": {"acts": lambda gate: gate.clamp(0, 200)},  # a ReLU as long as x is small
    "squared": {"acts": lambda gate: gate.relu().square()},
    "scaled": {"inner": lambda h: 0.9 * h},
    "normed": {"inner": lambda h: F.rms_norm(h, h.shape[-1:])},
}


def _must_stay(answer) -> str:
    for trial in range(3):
        kinds = ["relu"] * 4 + random.sample([*_OTHERS], 3) if trial else [*_OTHERS, "relu", "relu"]
        random.shuffle(kinds)
        layers: dict[str, tuple] = {}
        for number, kind in enumerate(kinds):
            d_model, d_ff = random.choice([16, 24]), random.choice([48, 96])
            weights = torch.randn(d_ff, d_model), torch.randn(d_ff, d_model), torch.randn(d_model, d_ff)
            layer = lambda x, weights=weights, kind=kind: _gated(x, *weights, **_OTHERS.get(kind, {}))  # noqa: E731
            layers[f"layers.{number}.mlp"] = (layer, *weights)
        want = {name for name, kind in zip(layers, kinds, strict=True) if kind != "relu"}
        got = written(answer(dict(layers)))
        if not isinstance(got, (list, tuple, set)):
            raise NotYet(f"must_stay should give names; yours gave a {type(got).__name__}.")
        named = dict(zip(layers, kinds, strict=True))
        if missed := sorted(want - {*got}):
            raise NotYet(f"{missed[0]} is missing among the names: it computes something else ({named[missed[0]]}).")
        if wrong := sorted(map(str, {*got} - want)):
            raise NotYet(f"{wrong[0]} computes the formula, up to rounding, and may be swapped.")
    return "each was asked what it computes, at small and at large x, row by row."


def _is_faster(answer) -> str:
    cases = [
        [(1.0, 0.9)] * 3 + [(1.0, 1.2)],
        [(1.0, 0.9)] * 3 + [(1.0, 1.2)] * 2,
        [(1.0, 1.0)] * 4,
        [(9.0, 3.0), (1.0, 1.1), (1.0, 1.1)],  # the sums say yes
        [(1.0, 0.9)] * 7 + [(1.0, 60.0)],  # the sums say no
        [(1.0, 0.99), (5.0, 4.99), (9.0, 8.99), (2.0, 8.5)],  # faster, though each time alone spreads further
    ]
    for _ in range(5):
        turns = [
            (dense := random.uniform(1, 5), dense * random.uniform(0.5, 1.15)) for _ in range(random.randint(1, 12))
        ]
        cases.append(turns)
    for turns in cases:
        shown = ", ".join(f"({dense:.2f}, {ours:.2f})" for dense, ours in turns)
        want = 4 * sum(ours < dense for dense, ours in turns) >= 3 * len(turns)
        same(answer(list(turns)), want, f"is_faster([{shown}])")
    return "what disturbs one time of a pair disturbs the other, and a single bad turn decides nothing."


def _cut_or_train(answer) -> str:
    cases = [((6.0, 8.1), (-0.8, 0.7)), ((-0.2, 0.3), (0.5, 0.9)), ((0.1, 0.9), (0.5, 2.0)), ((0.5, 2.0), (0.1, 0.9))]
    cases += [((0.0, 3.0), (1.0, 1.2)), ((1.0, 1.2), (0.0, 3.0))]  # one within the other
    for _ in range(4):
        low = random.uniform(-1, 3), random.uniform(-1, 3)
        cases.append(((low[0], low[0] + random.random()), (low[1], low[1] + random.random())))
    for cut, trained in cases:
        want = "train" if trained[1] < cut[0] else "cut" if cut[1] < trained[0] else "measure more"
        got = written(answer(cut, trained))
        if got != want:
            asked = "cut_or_train(({:.2f}, {:.2f}), ({:.2f}, {:.2f}))".format(*cut, *trained)
            raise NotYet(f"{asked} should be {want!r}; yours gave {got!r}.")
    return "where intervals overlap, either may cost less."


def _deepest_cut(answer) -> str:
    points = [(0.5, -0.1, 0.0, 0.1), (0.9, 0.4, 0.7, 0.9), (0.95, 0.3, 0.8, 1.3), (0.98, 5.0, 6.0, 7.0)]
    cases = [(points, 1.0), (points, 0.05), (points, 8.0), (points[::-1], 1.0), (points[3:], 1.0), (points, 1.3)]
    for _ in range(4):
        made, change = [], 0.0
        for sparsity in sorted(random.sample(range(1, 96), 6)):
            change += random.random()
            made.append((sparsity / 100, change - random.random(), change, round(change + random.random(), 3)))
        random.shuffle(made)
        cases.append((made, random.uniform(0.5, 4.0)))
    for given, most in cases:
        want = max((sparsity for sparsity, *_, high in given if high <= most), default=0.0)
        shown = ", ".join("({:g}, {:.2f}, {:.2f}, {:.2f})".format(*each) for each in given)
        got = answer(list(given), most)
        if written(got) != want:
            raise NotYet(f"deepest_cut([{shown}], most={most:.3g}) should be {want:g}; yours gave {got!r}.")
    return "what the interval allows for may be true, so its upper end has to be within the limit."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "hiding_window": _hiding_window,
    "share_saved": _share_saved,
    "must_stay": _must_stay,
    "is_faster": _is_faster,
    "cut_or_train": _cut_or_train,
    "deepest_cut": _deepest_cut,
}
