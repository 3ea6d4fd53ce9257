"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ...ops import reference
from ..verdicts import NotYet, close, number, skipping, written


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
        asked = f"several_tokens for {tokens} token(s)"
        close(skipping(answer, (x, gate, up, down), most, asked), exact, asked)
    return "a neuron may be skipped only if it fires for none of the tokens. More tokens, fewer such neurons."


ACTIVATIONS = {
    "relu": torch.relu,
    "silu": functional.silu,  # zero at 0, and where the gate is so negative that nothing is left
    "relu squared": lambda gate: gate.relu() ** 2,
    "hardswish": functional.hardswish,  # exactly zero below -3
    "leaky relu": functional.leaky_relu,
    "elu": functional.elu,
    "relu6": functional.relu6,
    "softshrink": functional.softshrink,  # zero from -0.5 to 0.5
    "softplus": functional.softplus,
    "relu of g + 0.5": lambda gate: (gate + 0.5).relu(),  # zero up to -0.5 alone
    "hardshrink at 1.5": lambda gate: functional.hardshrink(gate, 1.5),  # and here from -1.5 alone
}


def _may_be_skipped(answer) -> str:
    gate = torch.cat([torch.linspace(-100, -20, 200), torch.linspace(-20, 0, 4001)])
    for name, activation in ACTIVATIONS.items():
        values = activation(gate)
        got = written(answer(lambda given, run=activation: run(given)))
        if got != bool((values == 0).all()):
            at = gate[values.abs().argmax()]
            makes = f"{activation(at):.3g} of {at:.4g}" if values.any() else "0 of all that is not positive"
            raise NotYet(f"may_be_skipped gave {got!r} for {name}, which makes {makes}.")
    return "ReLU and its kin give exact zeros; SiLU, GELU and others only small values, so leaving those out is lossy."


def _cut_error(answer) -> str:
    for d_model, d_ff, threshold in ((24, 60, 0.5), (24, 60, 0.0), (8, 300, 1.2), (24, 60, -0.5), (24, 60, 9.0)):
        gate, up, down = torch.randn(d_ff), torch.randn(d_ff), torch.randn(d_model, d_ff)
        gate[::4] = max(threshold, 0.0)  # some at the threshold, which are not above it
        exact = down.double() @ (gate.relu() * up).double()
        cut = down.double() @ (gate.relu() * up * (gate > threshold)).double()
        want, got = float((cut - exact).norm() / exact.norm()), written(answer(gate, up, down, threshold))
        only_silent = ", where a cut takes silent neurons alone," * (threshold < 0)
        asked = f"cut_error of {d_ff} neurons at {threshold}{only_silent}"
        if isinstance(got, torch.Tensor) and got.numel() == 1:
            got = got.item()
        if not isinstance(got, float | int) or not abs(got - want) <= 1e-4:
            raise NotYet(f"{asked} should be {want:.4g}; yours gave {got!r}.")
    return "the outputs are compared: what the hidden values lose says little of it."


CHECKS: dict[str, Callable] = {
    "at_most": _at_most,
    "several_tokens": _several_tokens,
    "may_be_skipped": _may_be_skipped,
    "cut_error": _cut_error,
}
