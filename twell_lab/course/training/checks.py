"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ..verdicts import NotYet, close, near, same_list, written
from .data import firing_share


def _listed(got) -> list:
    return torch.as_tensor(got).tolist()


def _gate_push(answer) -> str:
    # Few values first, in which a sign that was lost, or a gate of exactly zero, can be seen.
    gates, ups = [2.0, 1.0, -1.0, 0.0], [1.5, -3.0, 2.0, 4.0]
    got = answer(torch.tensor(gates), torch.tensor(ups), 1.0)
    same_list(got, [1.5, 3.0, 0.0, 0.0], f"gate_push of gates {gates}, ups {ups} and c 1", _listed)
    for shape, c in (((4, 16), 1.0), ((3, 2, 40), 0.01)):
        gate, up = torch.randn(shape), torch.randn(shape)
        gate[..., 0] = 0.0  # what is exactly zero does not fire
        with torch.enable_grad():
            leaf = gate.double().requires_grad_()
            (exact,) = torch.autograd.grad(c * (leaf.relu() * up.double()).abs().sum(), leaf)
        asked = f"gate_push for gate and up {list(shape)} and c {c:g}"
        close(answer(gate.clone(), up.clone(), c), exact, asked)
    return "the part of up that is behind a gate decides how hard it is pushed, and a silent gate is left alone."


def _formula_l1(answer) -> str:
    for layers, shape, l1 in ((1, (4, 8), 0.5), (3, (2, 5, 24), 1e-3)):
        hidden = [torch.randn(shape) for _ in range(layers)]
        exact = l1 * torch.stack(hidden).double().abs().mean()
        close(answer(hidden, l1), exact, f"formula_l1 for {layers} layer(s) of {list(shape)} and l1 {l1:g}")
    return "averaged over layers, tokens and neurons."


def _seed_verdict(answer) -> str:
    cases = [
        (2.0, 2.1, 2.05),
        (2.0, 2.1, 1.95),
        (2.0, 2.1, 2.15),
        (2.0, 2.1, 1.85),
        (2.0, 1.9, 1.95),
        (2.0, 1.9, 2.15),
        (3.0, 2.5, 2.4),
        (2.0, 2.5, 2.5),  # exactly as far as the other seed is no further
        (2.0, 1.5, 2.5),
    ]
    cases += [(2 + random.random(), 2 + random.random(), 2 + random.random()) for _ in range(6)]
    for base, again, run in cases:
        noise, change = abs(again - base), run - base
        want = "no difference" if abs(change) <= noise else "worse" if change > 0 else "better"
        got = written(answer(base, again, run))
        if got != want:
            raise NotYet(f"seed_verdict({base:.3g}, {again:.3g}, {run:.3g}) should be {want!r}; yours gave {got!r}.")
    return "what another seed does, in either direction, is no difference."


def _firing_share(answer) -> str:
    cases = [
        (torch.tensor(counts), share)
        for counts, share in (
            ([1, 1, 1, 1], 0.5),
            ([8, 0, 1, 1], 0.8),
            ([0, 0, 7, 90, 3], 0.95),
            ([5, 4, 3, 2, 1, 0, 0, 0], 1.0),
        )
    ]
    cases += [(torch.randint(0, 50, (60,)) ** 2, 0.8) for _ in range(3)]
    for counts, share in cases:
        asked = f"firing_share({counts.tolist()}, {share})"
        got = answer(counts, share)
        close(torch.as_tensor(written(got)).double(), torch.tensor(firing_share(counts, share)).double(), asked)
    return "the busiest first, added up, until the share is reached."


def _silent_for(answer) -> str:
    for tokens, d_ff, share in ((5, 6, 0.4), (40, 10, 0.05), (3, 4, 0.0), (1, 3, 1.0)):
        fired = torch.rand(tokens, d_ff) < share
        want = [next((back for back in range(tokens) if fired[tokens - 1 - back, n]), tokens) for n in range(d_ff)]
        asked = f"silent_for(torch.tensor({fired.tolist()}))" if tokens < 9 else f"silent_for of {tokens} tokens"
        same_list(answer(fired.clone()), want, asked, _listed)
    return "0 where it fired just now, and all tokens where it never did."


def _sparsest_within(answer) -> str:
    cases = [([(99.0, 2.0), (40.0, 2.03), (12.0, 2.1)], 2.0, 0.02), ([(5.0, 3.0)], 2.0, 0.02)]
    cases.append(([(5.0, 3.0), (2.0, 3.5)], 2.0, 0.5))  # exactly 1 + more times the twin's is good enough
    for _ in range(5):
        runs = [(round(random.uniform(1, 90), 1), round(random.uniform(1.9, 2.2), 3)) for _ in range(8)]
        cases.append((runs, 2.0, 0.05))
    for runs, twin, more in cases:
        want = min((nnz for nnz, loss in runs if loss <= (1 + more) * twin), default=None)
        near(answer(list(runs), twin, more), want, f"sparsest_within({runs}, twin={twin:g}, more={more:g})")
    return "and None where every run costs more."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "gate_push": _gate_push,
    "formula_l1": _formula_l1,
    "seed_verdict": _seed_verdict,
    "firing_share": _firing_share,
    "silent_for": _silent_for,
    "sparsest_within": _sparsest_within,
}
