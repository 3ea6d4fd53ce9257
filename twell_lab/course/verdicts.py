"""What the checks of exercises are made of: a reader's result beside what it should be, and words for what is off."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..simulator.report import runs
from ..simulator.trace import Trace

UNWRITTEN = -559038737  # what integer outputs of kernels hold before a launch; those of floats hold NaN
CLOSE = 1e-4  # the largest error of an answer that passes, relative to the size of the exact result
CHECKS: dict[str, Callable] = {}  # of each exercise: it takes an answer, and returns what is said of a right one
THEIRS: dict[str, tuple[Callable, ...]] = {}  # what the library has for an exercise already


class NotYet(Exception):
    """The answer does not pass; the message says what was asked and what came."""


def _refuse(*_, **__):
    from twell_lab.course.verdicts import NotYet  # this code runs with another module's names

    raise NotYet("that is the library's own; write one.")


def by_hand(answer: Callable, theirs: tuple[Callable, ...]) -> Callable:
    """The reader's function, called while these of the library, which do what it is to do, raise NotYet, under whatever
    name a reader imported them."""
    functions = [inspect.unwrap(getattr(own, "__func__", own)) for own in theirs]
    bodies = [function.__code__ for function in functions]

    def asked(*given, **named):
        try:
            for function in functions:
                function.__code__ = _refuse.__code__
            return answer(*given, **named)
        finally:
            for function, body in zip(functions, bodies, strict=True):
                function.__code__ = body

    return asked


def exercise(right: str, *theirs: Callable) -> Callable:
    """Enter a judge, which raises NotYet for a wrong answer, as the check of the exercise that is called as it is.
    right: what is said of a right answer. theirs: what the library has for it, which refuses to work meanwhile."""

    def enter(judge: Callable) -> Callable:
        def check(answer) -> str:
            judge(by_hand(answer, theirs) if callable(answer) else answer)
            return right

        CHECKS[judge.__name__], THEIRS[judge.__name__] = check, theirs
        return judge

    return enter


def formula(right: str, cases: Iterable[tuple] | Callable[[], Iterable[tuple]], *theirs: Callable) -> Callable:
    """Enter a function as an exercise: the reader's has to return the same for each of these tuples of arguments, or of
    those that `cases` draws. right, theirs: as of `exercise`."""

    def enter(exact: Callable) -> Callable:
        def judge(answer) -> None:
            for given in cases() if callable(cases) else cases:
                asked = f"{exact.__name__}({', '.join(map(_shown, given))})"
                alike(answer(*copy.deepcopy(given)), exact(*given), asked)

        judge.__name__ = exact.__name__
        exercise(right, exact, *theirs)(judge)
        return exact

    return enter


def written(got):
    """Return the reader's prediction or the result of their function; raise NotYet if it is None or still dots."""
    if got is ...:
        raise NotYet("write your answer in place of the dots.")
    if got is None:
        raise NotYet("the function returns None so far.")
    return got


def alike(got, want, asked: str) -> None:
    """Raise NotYet unless a result is this one: tensors as of `close`, other floats up to CLOSE, all else exactly.
    Tensors and arrays pass for lists and numbers. asked: the call."""
    if isinstance(want, Tensor) and want.is_floating_point():
        close(got, want, asked)
    elif (want is not None or got is not None) and not _equal(_plain(written(got)), _plain(want)):
        should = f"{want:,}" if type(want) is int else _shown(want)
        raise NotYet(f"{asked} should be {should}; yours gave {got!r}.")


def match_parts(got, want: Iterable, names: Sequence[str], asked: str) -> None:
    """Raise NotYet unless a result is a tuple of as many as there are names, and each is `alike` the wanted one."""
    if not isinstance(written(got), tuple) or len(got) != len(names):
        raise NotYet(f"{asked} should give ({', '.join(names)}); yours gave {got!r:.80}.")
    for name, mine, right in zip(names, got, want, strict=True):
        alike(mine, right, f"{name} of {asked}")


def _plain(given):
    """Return lists and numbers of torch or numpy as Python's own, wherever they stand."""
    if isinstance(given, list | tuple):
        return [_plain(part) for part in given]
    return given.tolist() if hasattr(given, "tolist") else given


def _equal(got, want) -> bool:
    if isinstance(want, list):
        return isinstance(got, list) and len(got) == len(want) and all(map(_equal, got, want))
    if isinstance(want, float):
        return isinstance(got, int | float) and math.isclose(got, want, rel_tol=CLOSE)
    return got == want


def _shown(given) -> str:
    """Return a value as a call of a function shows it, with few digits; of a large tensor the shape alone."""
    if isinstance(given, Tensor):
        return _shown(given.tolist()) if given.numel() <= 60 else f"a tensor of {list(given.shape)}"
    if isinstance(given, list | tuple):
        inside = ", ".join(map(_shown, given))
        return f"[{inside}]" if isinstance(given, list) else f"({inside})"
    return f"{given:.4g}" if isinstance(given, float) else repr(given)


def close(got, exact: Tensor, asked: str) -> None:
    """Raise NotYet unless the result is a tensor of this shape, off by no more than CLOSE of its norm. Of a single
    number the message says what it should be."""
    if not isinstance(written(got), Tensor) or got.shape != exact.shape:
        shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise NotYet(f"{asked} should have shape {list(exact.shape)}; yours is {shape}.")
    if got.isnan().any():
        raise NotYet(f"{asked} holds NaN: something was read that should not have been.")
    error = float((got.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    if not error <= CLOSE and exact.dim() == 0:
        raise NotYet(f"{asked} should be {exact:.4g}; yours gave {got:.4g}.")
    if not error <= CLOSE:
        raise NotYet(f"{asked} is off by {error:.2g} of its size; at most {CLOSE:g} passes.")


def number(got, want: float, asked: str, within: float = 0.02) -> None:
    """Raise NotYet unless a predicted number is near this one; the message says only which way it is off."""
    if isinstance(got, bool) or not isinstance(written(got), (int, float)):
        raise NotYet(f"{asked} should be a number; yours is {got!r}.")
    if not math.isclose(got, want, rel_tol=within):
        raise NotYet(f"{asked} is {'less' if got > want else 'more'} than {got:,}.")


def said(got, want: dict[str, object], asked: str) -> None:
    """Raise NotYet unless a prediction in words is this one; the message names what is off, and not what is right."""
    if not isinstance(got, dict) or set(got) != set(want):
        raise NotYet(f"{asked} should be a dictionary with the keys {', '.join(map(repr, want))}.")
    empty = [key for key in want if got[key] is None or got[key] is ...]
    if empty:
        raise NotYet(f"{asked} says nothing yet of {empty[0]!r}.")
    off = [key for key in want if got[key] != want[key]]
    if off:
        raise NotYet(f"{asked} is off in {len(off)} of {len(want)}; one of these: {off[0]!r} is not {got[off[0]]!r}.")


def _elementwise(a, b, *_, out_shape=None, **__) -> int:
    """Of vectors nothing is counted: each neuron's value times another's is no product of matrices."""
    both = isinstance(a, torch.Size) and isinstance(b, torch.Size)
    return 2 * math.prod(out_shape) if both and len(out_shape) > 1 else 0


# What torch's counter of the operations in products leaves out: a matrix times a vector, a vector times a vector, and
# products of elements, which make a product of matrices as soon as they are summed.
_PRODUCTS = {
    torch.ops.aten.mv: lambda a, b, *_, **__: 2 * a[0] * a[1],
    torch.ops.aten.dot: lambda a, b, *_, **__: 2 * a[0],
    torch.ops.aten.mul: _elementwise,
    torch.ops.aten.mul_: _elementwise,
}


def skipping(answer: Callable, given: tuple, most: int, asked: str, needs: str = "the rest can be skipped"):
    """Return what the reader's function returns. NotYet if its products take more than `most` operations: then it
    computes what should be skipped, and hides it. needs: what has to be computed, or what has not, in words."""
    with FlopCounterMode(display=False, custom_mapping=_PRODUCTS) as counter:
        got = answer(*given)
    if counter.get_total_flops() > most:
        raise NotYet(
            f"{asked}: its products take {counter.get_total_flops():,} operations, and {most:,} are enough: {needs}."
        )
    return got


# ---- kernels: what the steps of one block say, beside the result ----


def not_met(trace: Trace) -> str | None:
    """Return what is wrong where threads of a block do not meet, in words; None where all do. A launch in which a
    thread leaves before a barrier, or before an operation whose mask names it, ends in the simulator, and may end on a
    GPU, since what has left holds nobody up. Whether the others had waited is chance: every thread has to come."""
    barriers = Counter({thread: 0 for thread in range(math.prod(trace.block_shape))})
    for step in trace:
        if step.kind == "barrier":
            barriers.update(step.threads)
        if step.absent:
            first, last = runs(thread % 32 for thread in step.absent)[0]
            one = first == last
            lanes = f"lane {first} is" if one else f"lanes {first} to {last} are"
            votes = step.operation in ("__ballot_sync", "__any_sync", "__all_sync")
            return (
                f"{lanes} named in the mask of {step.operation} and never {'comes' if one else 'come'} to it: let "
                f"{'it' if one else 'them'} {'vote no' if votes else 'come, too'}."
            )
    (most, high), (least, low) = (barriers.most_common()[end] for end in (0, -1))
    if high == low:
        return None
    return f"thread {most} comes to {high} barriers and thread {least} to {low}: every thread has to come to each."


def coming(trace: Trace) -> str:
    """A sentence, after a blank, for a wrong result: where lanes come to warp-wide operations not equally often."""
    times = Counter({thread: 0 for thread in range(math.prod(trace.block_shape))})
    names = {}
    for step in trace:
        if step.kind == "warp":
            times.update(step.threads)
            names[step.operation] = True
    different = sorted(set(times.values()))
    if len(different) < 2:
        return ""
    often = f"{', '.join(map(str, different[:-1]))} or {different[-1]}"
    return f" Lanes come to {' and '.join(names)} {often} times: all that the mask names have to come to each."
