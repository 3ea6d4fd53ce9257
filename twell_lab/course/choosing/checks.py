"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from ..verdicts import NotYet, close, near, same, same_list, written
from .data import hot_neurons, occupied, token_bytes


def _occupied(answer) -> str:
    for density, height in ((0.02, 32), (0.5, 1), (0.3, 2), (0.0, 32), (random.random() / 10, 8)):
        near(answer(density, height), occupied(density, height), f"occupied({density:.4g}, {height})")
    return "a column is empty only if all of its values are zero together."


def _without_padding(answer) -> str:
    for shape, share in (((3, 5, 8), 0.5), ((1, 7, 4), 1.0), ((4, 6, 8), 0.0)):
        layer, seen = nn.Linear(shape[-1], 6), []
        layer.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0].numel() // given[0].shape[-1]))
        x, real = torch.randn(shape), torch.rand(shape[:-1]) < share
        wanted = layer(x).detach().double() * real[..., None]
        seen.clear()
        x = torch.where(real[..., None], x, torch.nan)  # padding holds anything
        asked = f"without_padding for x {list(shape)}, {int(real.sum())} of its rows real,"
        with torch.no_grad():
            close(answer(layer, x, real), wanted, asked)
        if sum(seen) != int(real.sum()):
            raise NotYet(f"{asked} is right, but the layer was given {sum(seen)} rows; give it the real ones alone.")
    return "the layer saw the real rows alone, and they are back where they were."


def _hot_neurons(answer) -> str:
    for d_ff, times in ((8, 4.0), (30, 8.0), (30, 0.5), (5, 64.0)):
        shares = (torch.rand(d_ff) ** 3 * 16).round() / 16  # many are equal
        shares[3] = min(1.0, 1 / times)  # one is at the break-even, exactly
        asked = f"hot_neurons(torch.tensor({shares.tolist()}), {times})"
        same_list(answer(shares.clone(), times), hot_neurons(shares, times).tolist(), asked, _whole)
    return "those for which one dense neuron costs less than its firing, busiest first."


def _whole(got) -> list:
    return torch.as_tensor(got).tolist()


def _route(answer) -> str:
    steps = []
    for tokens, experts, top_k in ((6, 4, 2), (40, 4, 1), (400, 64, 3)):
        scores = torch.randn(tokens, experts)
        if tokens == 6:
            scores[:, -1] = -9.0  # nobody's choice
        asked = f"route for scores {list(scores.shape)} and top_k {top_k}"
        with _counting() as lines:
            got = written(answer(scores.clone(), top_k))
        steps.append(len(lines))
        if not isinstance(got, tuple) or len(got) != 2:
            raise NotYet(f"{asked} should give two tensors, rows and counts; yours gave a {type(got).__name__}.")
        chosen = scores.topk(top_k).indices
        wanted = [(chosen == expert).any(1).nonzero()[:, 0].tolist() for expert in range(experts)]
        same_list(got[1], [*map(len, wanted)], f"counts of {asked}", _whole)
        same_list(got[0], sum(wanted, []), f"rows of {asked}", _whole)
    if steps[-1] > steps[0]:
        raise NotYet(f"it is right, but runs {steps[0]} lines for 4 experts and {steps[-1]} for 64: do without a loop.")
    return "sorted by expert, and as many lines of Python for 64 experts as for 4."


@contextlib.contextmanager
def _counting() -> Iterator[list]:
    """Collect each line of Python that runs, those of torch left out."""
    lines: list = []

    def watch(frame, event, _):
        if "torch" in frame.f_globals.get("__name__", "").partition(".")[0]:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield lines
    finally:
        sys.settrace(before)


def _recall_and_precision(answer) -> str:
    cases = [(torch.rand(9, 20) < a, torch.rand(9, 20) < b) for a, b in ((0.3, 0.5), (0.1, 0.9), (0.8, 0.2))]
    lonely = torch.zeros(3, 8, dtype=torch.bool)
    lonely[0, :4] = lonely[1, 0] = True
    cases.append((lonely, lonely.roll(1, 1) | lonely & (torch.arange(8) < 2)))
    for fires, chosen in cases:
        both = float((fires & chosen).sum())
        wanted = both / float(fires.sum()), both / float(chosen.sum())
        got = written(answer(fires.clone(), chosen.clone()))
        if not isinstance(got, tuple) or len(got) != 2:
            raise NotYet(f"two numbers are asked for, recall and precision; yours is {got!r}.")
        for name, mine, right in zip(("recall", "precision"), got, wanted):
            near(float(mine), right, f"{name} where {int(fires.sum())} fire and {int(chosen.sum())} are chosen")
    return "recall of what fires, precision of what was chosen, over all tokens together."


def _token_bytes(answer) -> str:
    for given in ((2048, 5632, 29, 64, 300, 2), (512, 2048, 0, 16, 1, 4), (64, 128, 128, 8, 128, 1)):
        got = written(answer(*given))
        if not isinstance(got, tuple) or len(got) != 3:
            raise NotYet(f"three numbers are asked for: dense, packed, predicted; yours is {got!r}.")
        for name, mine, right in zip(("dense", "packed", "predicted"), got, token_bytes(*given)):
            same(mine, right, f"{name} of token_bytes{given}")
    return "the gate is read whole unless somebody guesses what it would say."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "occupied": _occupied,
    "without_padding": _without_padding,
    "hot_neurons": _hot_neurons,
    "route": _route,
    "recall_and_precision": _recall_and_precision,
    "token_bytes": _token_bytes,
}
