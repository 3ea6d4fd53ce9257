"""Checks of the exercises on clocks, for course.exercises. None of them looks at a real clock."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import linear

from ...formats.classic import CSR
from ..verdicts import NotYet, near, same, same_list, written
from . import data


class _Machine:
    """A queue and its clock, made up: a launch takes 1 ms of the caller's time, and the work comes later.

    `slower(calls)` says by which factor work takes longer once so many calls were launched."""

    def __init__(self, pending: float = 0.0, slower: Callable[[int], float] = lambda calls: 1.0) -> None:
        self.time, self.slower, self.calls = 100.0, slower, 0
        self.ready = self.time + pending  # when all that was launched is done

    def launch(self, call) -> None:
        self.time += 0.001
        self.ready = max(self.ready, self.time) + call() * self.slower(self.calls)
        self.calls += 1

    def synchronize(self) -> None:
        self.time = max(self.time, self.ready)

    def now(self) -> float:
        return self.time


def _timed_call(answer) -> str:
    for pending, work in ((0.0, 0.05), (0.3, 0.05), (0.0, 2.0), (random.random(), random.random())):
        machine = _Machine(pending)
        got = written(answer(lambda work=work: work, machine, machine.now))
        if not machine.calls:
            raise NotYet("timed_call launched nothing: queue.launch(call) puts the call into the queue.")
        busy = f", with {1000 * pending:.3g} ms of other work still in the queue" * bool(pending)
        near(got, 1000 * (work + 0.001), f"timed_call of {1000 * work:.4g} ms of work and 1 ms of launching{busy}")
    return "the queue is empty when the clock starts, and again when it stops."


def _agrees(answer) -> str:
    def doubled(a, b):
        return 1.02 * (a @ b)

    def nearly(a, b):
        return 1.005 * (a @ b)

    def one_wrong(a, b):
        y = a @ b
        y[-1, -1] = torch.nan
        return y

    products = {
        "a @ b": (lambda a, b: a @ b, True),
        "a @ b, summed in another order": (lambda a, b: (b.T.contiguous() @ a.T.contiguous()).T, True),
        "a product that is half a percent too large": (nearly, True),
        "a product that never reads b": (lambda a, b: data.without_multiplying(CSR.from_dense(a), b), False),
        "a product of the magnitudes": (lambda a, b: a.abs() @ b.abs(), False),
        "a product that is 2% too large": (doubled, False),
        "a product with one NaN": (one_wrong, False),
        "zeros": (lambda a, b: torch.zeros(a.shape[0], b.shape[1]), False),
    }
    for name, (product, right) in products.items():
        got = written(answer(product))
        if bool(got) != right:
            raise NotYet(f"agrees should be {right} for {name}; yours gave {got!r}.")
    return "random values, higher precision, and NaN does not pass."


def _layers() -> list[nn.Module]:
    class Masked(nn.Module):
        def forward(self, x):
            return linear(x, (torch.ones(5, 6, dtype=torch.float64) * torch.eye(5, 6)).float())

    plain = nn.Linear(6, 5, bias=False)
    return [plain, nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), Masked()]


def _ran(answer) -> str:
    for layer in _layers():
        layer.requires_grad_(False)
        x = torch.randn(3, 6)
        want = data.operations(lambda layer=layer, x=x: layer(x))[0]
        with torch.no_grad():
            got = [str(each).removeprefix("aten.").split(".")[0] for each in written(answer(layer, x))]
        same_list(got, want, f"ran for {type(layer).__name__}, x of {list(x.shape)},")
    return "every operation that torch ran, whatever the layer is called."


def _differences(answer) -> str:
    for device, dtype, shape in itertools.product(("cpu", "meta"), (torch.float32, torch.float64), ((4, 6), (6, 4))):
        one, other = torch.empty(4, 6), torch.empty(shape, dtype=dtype, device=device)
        names = ["device"] * (device != "cpu") + ["dtype"] * (dtype != torch.float32) + ["shape"] * (shape != (4, 6))
        asked = f"differences of {data.terms(one)} [4, 6] and {data.terms(other)} {list(shape)}"
        same_list(answer(one, other), names, asked, lambda got: sorted(got))
    return "same place, same precision, same work."


def _clearly_faster(answer) -> str:
    cases = [
        ([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.0, 2.2], True),
        ([1.0, 1.1, 0.9, 1.0, 1.05], [0.5, 0.6, 0.55, 0.5, 0.6], False),
        ([1.0, 1.1, 0.9, 1.0, 9.0], [2.0, 2.1, 1.9, 2.0, 2.2], True),  # one slow sample
        ([1.0, 1.1, 0.9, 5.0, 5.0], [2.0, 2.1, 1.9, 2.0, 2.2], False),  # too many
        ([1.0, 1.4, 0.6, 1.0, 1.6], [1.2, 1.0, 0.8, 1.4, 1.6], False),
        ([1.0, 1.0, 1.0, 1.5, 1.6], [1.2, 1.4, 1.8, 1.9, 2.0], False),
        ([1.0, 1.0, 1.0, 1.4, 1.6], [1.2, 1.4, 1.8, 1.9, 2.0], False),  # equal is not below
        ([1.9, 2.0, 2.1, 2.0, 2.0], [2.2, 2.3, 0.1, 2.2, 2.4], True),  # the best sample says nothing
    ]
    # Twenty orders of each: what looks at the middle of an unsorted list is right in many of them.
    for new, old, right in cases * 20:
        new, old = random.sample(new, 5), random.sample(old, 5)
        got = written(answer(list(new), list(old)))
        if bool(got) != right:
            raise NotYet(f"clearly_faster({new}, {old}) should be {right}; yours gave {got!r}.")
    return "one slow sample changes nothing, and a difference within the spread is none."


def _stopped(call, machine: _Machine) -> float:
    """Milliseconds of a call on a made-up machine."""
    machine.synchronize()
    start = machine.now()
    machine.launch(call)
    machine.synchronize()
    return 1000 * (machine.now() - start)


def _times_in_turns(answer) -> str:
    for rounds in (8, 20):
        drift = lambda calls, rounds=rounds: 1 + 1.5 * calls / rounds  # noqa: E731
        for slower in (drift, lambda calls: 1.0, lambda calls, drift=drift: 1 / drift(calls)):
            timed = functools.partial(_stopped, machine=_Machine(slower=slower))
            calls = {"dense": lambda: 0.02, "sparse": lambda: 0.01}
            got = written(answer(calls, rounds, timed))
            if not isinstance(got, dict) or set(got) != set(calls):
                raise NotYet(f"times_in_turns should give a dictionary with the names {', '.join(calls)}.")
            for name, samples in got.items():
                same(len(samples), rounds, f"the number of samples of {name} for {rounds} rounds")
            found = data.ratio(got, "dense", "sparse")
            if not 1.6 < found < 2.2:
                raise NotYet(
                    f"on a machine whose speed drifts, dense takes {found:.2g} times as long as sparse by your "
                    "samples; it takes about twice as long."
                )
    return "whatever the machine does meanwhile, it does to both."


CHECKS: dict[str, Callable[[Callable], str]] = {
    "timed_call": _timed_call,
    "agrees": _agrees,
    "ran": _ran,
    "differences": _differences,
    "clearly_faster": _clearly_faster,
    "times_in_turns": _times_in_turns,
}
