"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..verdicts import NotYet, close, number, said, same, written
from .data import dense_saved, sparse_saved


def _share_left(answer) -> str:
    number(
        answer, (1 + 8 * 0.05) / 9, "the share of a step's multiplications that is left at 5%", within=0.03
    )  # 0.16 is near enough
    return "of nine products the gate's stays whole, and eight keep 5%: (1 + 8 * 0.05) / 9 = 16%."


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


def _kept_bytes(answer) -> str:
    for tokens, d_model, d_ff in ((16384, 2048, 5632), (512, 64, 176), (1, 8, 24)):
        lists = sparse_saved(tokens, d_model, d_ff)
        want = (sum(dense_saved(tokens, d_model, d_ff).values()), lists["words"] + lists["ups"])
        asked = f"kept_bytes(tokens={tokens}, d_model={d_model}, d_ff={d_ff})"
        got = written(answer(tokens, d_model, d_ff))
        if not isinstance(got, tuple) or len(got) != 2:
            raise NotYet(f"{asked} should be two numbers; yours gave {got!r}.")
        same(got[0], want[0], f"the dense part of {asked}")
        same(got[1], want[1], f"the lists of {asked}")
    return "three matrices as wide as d_ff against two lists that do not depend on who fires."


CHECKS: dict[str, Callable] = {
    "share_left": _share_left,
    "factor_gradients": _factor_gradients,
    "less_room": _less_room,
    "kept_bytes": _kept_bytes,
}
