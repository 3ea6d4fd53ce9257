"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...ops import reference
from ..verdicts import close, number, skipping


def _at_most(answer) -> str:
    number(answer, 1 / (1 / 3 + 0.05 * 2 / 3), "with 5% of the neurons firing, the most that can be gained")
    return "the gate is a third, and of the other two thirds 5% stay: 1 / (1/3 + 0.05 * 2/3) = 2.73."


def _several_tokens(answer) -> str:
    for tokens in (1, 2, 5):
        drawn = torch.Generator().manual_seed(tokens)  # so that the same fault is told in the same words
        shapes = ((60, 24), (60, 24), (24, 60), (tokens, 24))
        gate, up, down, x = (torch.randn(shape, generator=drawn) for shape in shapes)
        gate = gate - 0.3 * x.mean(0)  # most gates below zero
        exact = reference.gated_ffn(*(t.double() for t in (x, gate, up, down)))
        fires = (x @ gate.T > 0).any(0)
        up[~fires], down[:, ~fires] = torch.nan, torch.nan
        # The whole gate, up and down of who fires for anybody, and a few products of as many values as neurons.
        most = 2 * tokens * (24 * (60 + 2 * int(fires.sum())) + 4 * 60)
        asked = f"several_tokens for {tokens} token(s), {int(fires.sum())} of 60 neurons firing for at least one"
        close(skipping(answer, (x, gate, up, down), most, asked), exact, f"{asked},")
    return "a neuron may be skipped only if it fires for none of the tokens. More tokens, fewer such neurons."


CHECKS: dict[str, Callable] = {"at_most": _at_most, "several_tokens": _several_tokens}
