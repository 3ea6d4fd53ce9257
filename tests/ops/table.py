"""The table of the kernels' tests: every case runs in the simulator or on a GPU, beside its reference.

The files of tests/ops/rows/ hold the cases, one file an operation: a list `CASES` each. tests/ops/test_kernels.py runs
those that the simulator can run, tests/gpu/test_kernels.py all of them on the GPU at hand."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda.compile import with_headers
from twell_lab.cuda.launch import Source, capability, run
from twell_lab.ops import accuracy


@dataclass(frozen=True)
class Case:
    """One operation on one drawn input.

    draw: () -> the arguments: CPU tensors, None, and tuples of them. operation: operation(call, *arguments), which adds
    launches to a call and returns buffers. reference: reference(*arguments) -> tensors as the operation returns them.

    tolerance: 0 where the same values are asked for. Otherwise the error of a row, against the reference of float64
    arguments, may be `tolerance` times what the library allows (accuracy.worst_row) beside `dense` of the arguments as
    they are; dense: the same by torch's operations, None for the reference. reads: given what was returned, what of it
    is compared: words that nobody reads aside. oldest: compute capability, where that is not the sources' own. large:
    whether the simulator does not take it, or takes too long; long: whether it takes so long that the ordinary tests leave
    it to tests/nightly."""

    name: str
    sources: tuple[Source, ...]
    draw: Callable[[], tuple]
    operation: Callable
    reference: Callable
    tolerance: float = 0.0
    dense: Callable | None = None
    reads: Callable[[Any], Any] = lambda result: result
    oldest: tuple[int, int] = (7, 5)
    large: bool = False
    long: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def simulated(self) -> bool:
        """Whether the simulator runs it: with C++ in the place of its PTX, which stands in headers called ptx_ alone."""
        return not self.large and all(file in STAND_INS for source in self.sources for file in _ptx(source))


STAND_INS = [path.name for path in (Path(__file__).parents[1] / "simulator" / "ptx").iterdir()]


def _ptx(source: Source) -> list[str]:
    return [file for file in with_headers(source.file) if file.startswith("ptx_")]


def cases(simulated: bool = False, usual: bool = False) -> list:
    """List all cases as parameters of a test. simulated: those that the simulator can run; usual: of these one of each
    two that differ in 16-bit types alone, and none that takes it long."""
    from tests.ops import rows

    modules = [import_module(f"{rows.__name__}.{found.name}") for found in pkgutil.iter_modules(rows.__path__)]
    every = [case for module in modules for case in module.CASES if case.simulated or not simulated]
    names = {case.name for case in every}
    twin = lambda case: "float16" in case.name and re.sub(r"\b(float16)", r"b\1", case.name) in names - {case.name}  # noqa: E731
    picked = [case for case in every if not usual or not (case.long or twin(case))]
    return [pytest.param(case, id=case.name) for case in picked]


def moved(given, to: Callable[[Tensor], Tensor]):
    """Return the arguments with `to` applied to each tensor, inside of tuples as well."""
    if isinstance(given, Tensor):
        return to(given)
    if isinstance(given, tuple):
        parts = [moved(one, to) for one in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def like(device: str) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor to the device with its strides and its alignment."""

    def copied(t: Tensor) -> Tensor:
        before = t.data_ptr() % 16 // t.element_size()
        span = before + 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else before
        room = torch.zeros(span, dtype=t.dtype, device=device)
        copy = room.as_strided(t.shape, t.stride(), before)
        return copy.copy_(t)

    return copied


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch fill what it allocates with NaN, or the largest integer, so that what is not written is noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def without_any_ptx(case: Case, watch: str | None = None, replace: dict[str, Path] | None = None):
    """Return a context in which the simulator runs a case's kernels with C++ in the place of their PTX; watch, replace:
    as for simulator.watching."""
    files = {source.file: without_ptx(source.file) for source in case.sources if _ptx(source)}
    return simulator.watching(watch, replace=files | (replace or {}))


def run_twice(case: Case, device: str, **watched) -> tuple[tuple, list[Tensor]]:
    """Run a case on "cpu" (the simulator, `watched` as by without_any_ptx) or "cuda" twice, compare both runs, and
    return (arguments, results)."""
    if device == "cuda":
        here = capability(torch.cuda.current_device())
        if here < case.oldest or not all(source.runs_on(here) for source in case.sources):
            pytest.skip(f"does not run on compute capability {here}")
    arguments, results = case.draw(), []
    for _ in range(2):
        given = moved(arguments, like(device))
        with poisoned(), without_any_ptx(case, **watched) if device == "cpu" else nullcontext():
            result = run(case.operation, *given)
        results.append(_listed(case.reads(moved(result, lambda t: t.cpu()))))
    for first, second in zip(*results):
        assert first.dtype == second.dtype and torch.equal(bits(first), bits(second)), "two runs differ"
    return arguments, results[0]


def check(case: Case, device: str, **watched) -> None:
    """Run a case as `run_twice` does, and compare: both runs, and the results with those of its reference."""
    arguments, results = run_twice(case, device, **watched)
    if not case.tolerance:
        wanted = _listed(case.reads(case.reference(*arguments)))
        assert len(wanted) == len(results)
        for found, right in zip(results, wanted):
            torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)  # which says what differs
        return
    wide = moved(arguments, lambda t: t.double() if t.is_floating_point() else t)
    exact = _listed(case.reads(case.reference(*wide)))
    beside = (case.dense or case.reference)(*moved(arguments, lambda t: t.to(device)))  # torch, on the same device
    dense = _listed(case.reads(moved(beside, lambda t: t.cpu())))
    assert len(results) == len(exact) == len(dense)
    for found, beside, right in zip(results, dense, exact):
        assert found.dtype == beside.dtype and found.shape == right.shape
        if not found.is_floating_point():
            assert torch.equal(found, right)
            continue
        ratio, row = accuracy.worst_row(*(t.reshape(-1, t.shape[-1]) for t in (found, beside, right)))
        assert ratio <= case.tolerance, f"row {row} is off by {ratio:.3g} times what is allowed"


def _listed(result) -> list[Tensor]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part for part in parts if part is not None]


def bits(t: Tensor) -> Tensor:
    t = t if t.dim() else t.reshape(1)
    return t.new_empty(t.shape).copy_(t).view(torch.uint8)  # .contiguous() may keep odd strides of a single column


def shifted(t: Tensor) -> Tensor:
    """Return the same values in a tensor that does not start at a multiple of 16 bytes."""
    room = t.new_zeros(t.numel() + 1)
    return room[1:].view(t.shape).copy_(t)
