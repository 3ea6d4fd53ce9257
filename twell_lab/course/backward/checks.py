"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..verdicts import NotYet, close, said, written


def _factor_gradients(answer) -> str:
    for tokens, d_ff in ((5, 9), (1, 4), (12, 30)):
        drawn = torch.Generator().manual_seed(tokens)  # the same each time, so that what is said can be compared
        before, u, dh = (torch.randn(tokens, d_ff, generator=drawn).double() for _ in range(3))
        before[0, 0] = 0  # silent
        before, u, c = before.requires_grad_(), u.requires_grad_(), 0.3
        with torch.enable_grad():
            h = before.relu() * u
            loss = (h * dh).sum() + c * h.abs().sum()
        exact = torch.autograd.grad(loss, (before, u))
        with torch.inference_mode():  # so that autograd does not do it for the reader
            given = (before.clone(), u.clone(), dh.clone(), c)
            got = written(answer(*given))
        if not isinstance(got, tuple) or len(got) != 2:
            raise NotYet("two tensors are asked for, dg and du.")
        for name, mine, each in zip(("dg", "du"), got, exact, strict=True):
            close(mine, each, f"{name} for {tokens} tokens and {d_ff} neurons")
    return "the penalty joins dh before both factors, and a silent gate gets nothing from either."


def _less_room(answer) -> str:
    want = {"bytes kept": "fewer", "tokens lost": "more", "gradients": "the same", "rows read": "more"}
    said(answer, want, "less_room")
    return "room costs bytes; less of it costs time, and never a gradient."


CHECKS: dict[str, Callable] = {
    "factor_gradients": _factor_gradients,
    "less_room": _less_room,
}
