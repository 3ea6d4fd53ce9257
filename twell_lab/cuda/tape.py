"""Calls that launch several kernels, recorded the first time they run and replayed from then on.

Most of what a call costs the host is the same each time: checks, choosing kernels, grids and numbers, and allocating
what lies between the kernels. A `Tape` keeps all that. A replay fills in where the tensors are, and launches. What lies
between the kernels becomes one piece of memory, in which results that are not in use at the same time share a place.
A CUDA graph does the same for the GPU's side of a call, but its tensors may not lie elsewhere the next time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launcher
from .launcher import Kernel, Structure, address

_BOUNDARY = 256  # bytes: what lies between kernels starts at a multiple of it


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, for what is allocated while a Tape may be recording."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if launcher.own.recording is not None:
        launcher.own.recording.allocated(made)
    return made


class Tape:
    """One call, for tensors of certain shapes. Any number of threads may play it."""

    def __init__(self) -> None:
        self._take: _Take | None = None

    @property
    def recorded(self) -> bool:
        """Whether the next call with tensors on the same boundaries replays."""
        return self._take is not None

    def play(self, run: Callable, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor | None] = ()) -> Any:
        """run(*inputs, *fixed), or, once that was recorded, the launches that it made.

        run: all that it does to a GPU's memory are launches; it allocates with `empty`, and returns what it allocated,
        inputs, None, or a tuple of these. inputs: may lie elsewhere on each call. All else that decides what is
        launched has to be the same on each call: shapes, strides and types, and the addresses of `fixed`.

        No tensor is held alive. A call is not recorded where the inputs share memory, or where a kernel was given an
        address of something else, such as a copy that `run` made. On a CPU nothing is recorded."""
        take = self._take
        if take is not None and take.fits(inputs):
            return take.replay(inputs)
        on_gpu = any(t.is_cuda for t in (*inputs, *fixed) if t is not None)
        if take is not None or launcher.own.recording is not None or not on_gpu:
            return run(*inputs, *fixed)
        launcher.own.recording = recording = _Recording(inputs, fixed)
        try:
            result = run(*inputs, *fixed)
        finally:
            launcher.own.recording = None
        self._take = recording.take(result)
        return result


class _Launch(NamedTuple):
    """One launch. values: its arguments; of a pointer, what is to be added to a base. bases: (argument, base) of each
    pointer. structures: (argument, Structure.make, (base, what is to be added) for each address in it)."""

    kernel: Kernel
    grid: tuple[int, int]
    values: list
    bases: list[tuple[int, int]]
    structures: list[tuple[int, Callable[..., bytes], list[tuple[int, int]]]]


class _Recording:
    """What a call does while it runs.

    Addresses are written as a base and what is to be added to it. Base 0 is address 0, for what is fixed; then come the
    inputs, then what was allocated, in order."""

    def __init__(self, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor | None]) -> None:
        self.inputs = inputs
        self.launches: list[_Launch] = []
        self.allocations: list[Tensor] = []  # on the GPU's "meta" twin: shape and type alone
        self.known: list[tuple[int, int, int]] = []  # first byte, the byte after the last one, base
        self.whole = True  # whether every address is of something known
        for t in fixed:
            self._know(t, 0)
        for base, t in enumerate(inputs, 1):
            first, end = _span(t)
            self.whole &= not any(first < other_end and other_first < end for other_first, other_end, _ in self.known)
            self._know(t, base)

    def _know(self, t: Tensor | None, base: int) -> None:
        first, end = _span(t)
        if first < end:
            self.known.append((first, end, base))

    def allocated(self, t: Tensor) -> None:
        self.allocations.append(t.new_empty(t.shape, device="meta"))
        self._know(t, len(self.inputs) + len(self.allocations))

    def _place(self, at: int) -> tuple[int, int]:
        """An address as (base, what is to be added)."""
        if at:
            for first, end, base in reversed(self.known):  # the last one first: freed memory is given out again
                if first <= at < end:
                    return base, at - first if base else at
            self.whole = False
        return 0, at

    def launched(self, kernel: Kernel, grid: tuple[int, int], arguments: Sequence) -> None:
        launch = _Launch(kernel, grid, [], [], [])
        for at, (parameter, given) in enumerate(zip(kernel.entry.parameters, arguments)):
            if isinstance(given, Structure):
                places = [self._place(address(t)) for t in given.of]
                if any(base for base, _ in places):
                    launch.structures.append((at, given.make, places))
                given = given.image()
            elif parameter.pointer:
                base, given = self._place(address(given))
                if base:
                    launch.bases.append((at, base))
            launch.values.append(given)
        self.launches.append(launch)

    def take(self, result: Any) -> _Take | None:
        """What there is to replay; None where not every address is of something known."""
        results = [self._result(t) for t in (result if isinstance(result, tuple) else (result,))]
        return _Take(self, results, isinstance(result, tuple)) if self.whole else None

    def _result(self, t: Tensor | None) -> int | None:
        """The base that a returned tensor is."""
        if t is None:
            return None
        base, inside = self._place(t.data_ptr())
        there = None if not base or inside else [*self.inputs, *self.allocations][base - 1]
        alike = there is not None and (there.shape, there.dtype, there.stride()) == (t.shape, t.dtype, t.stride())
        self.whole &= alike
        return base

    def used(self, base: int) -> tuple[int, int]:
        """The first launch that gets an address with this base, and the first one that may write over it."""
        getting = [
            number
            for number, launch in enumerate(self.launches)
            if base
            in {each for _, each in launch.bases}.union(each for *_, places in launch.structures for each, _ in places)
        ]
        if not getting:
            return 0, 0
        free = getting[-1] + 1
        # A kernel that may start early starts while the one before it still reads.
        return getting[0], free + (free < len(self.launches) and self.launches[free].kernel.early)


class _Take:
    """What was recorded, to be replayed."""

    def __init__(self, recording: _Recording, results: list[int | None], several: bool) -> None:
        given, allocated = len(recording.inputs), recording.allocations
        self.alignments = [*map(_alignment, recording.inputs)]
        self.device = next(t.device for t in recording.inputs if t is not None)
        new = [base for base in range(given + 1, given + 1 + len(allocated)) if base in results]
        between = [base for base in range(given + 1, given + 1 + len(allocated)) if base not in results]
        self.new = [(allocated[base - given - 1].shape, allocated[base - given - 1].dtype) for base in new]
        sizes = [allocated[base - given - 1].nbytes for base in between]
        self.offsets, self.size = _places(sizes, [*map(recording.used, between)])
        # From here on bases are: 0, the inputs, what is returned and new, what lies between.
        order = {base: base for base in range(given + 1)} | {
            base: given + 1 + at for at, base in enumerate(new + between)
        }
        self.results = [None if base is None else order[base] - 1 for base in results]
        self.several = several
        self.launches = [
            _Launch(
                each.kernel,
                each.grid,
                each.values,
                [(at, order[base]) for at, base in each.bases],
                [(at, make, [(order[base], more) for base, more in places]) for at, make, places in each.structures],
            )
            for each in recording.launches
        ]

    def fits(self, inputs: Sequence[Tensor | None]) -> bool:
        return [*map(_alignment, inputs)] == self.alignments

    def replay(self, inputs: Sequence[Tensor | None]) -> Any:
        device = self.device
        with launcher.on(device.index):
            new = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.new]
            tensors = [*inputs, *new]
            bases = [0, *map(address, tensors)]
            if self.size:
                between = torch.empty(self.size, dtype=torch.uint8, device=device)
                begin = between.data_ptr()
                bases += [begin + offset for offset in self.offsets]
            stream = launcher.current_stream(device.index)
            for kernel, grid, values, pointers, structures in self.launches:
                values = values.copy()
                for at, base in pointers:
                    values[at] += bases[base]
                for at, make, places in structures:
                    values[at] = make(*[bases[base] + more for base, more in places])
                launcher.start(kernel, device.index, grid, stream, values)
        found = tuple([None if at is None else tensors[at] for at in self.results])
        return found if self.several else found[0]


def _alignment(t: Tensor | None) -> int:
    """Where t starts, as far as a choice of kernels depends on it: bytes beyond a multiple of 16; -1 for None."""
    return -1 if t is None else t.data_ptr() & 15


def _span(t: Tensor | None) -> tuple[int, int]:
    """The first byte of a tensor, and the byte after its last one."""
    if t is None or not t.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _places(sizes: list[int], uses: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Where pieces of memory lie, in bytes from the start, and where the last one ends. Two overlap only if one is free
    before the other is used.

    uses: the number of the first launch that uses a piece, and of the first one that finds it free."""
    found = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size, (first, free), at = -(-sizes[number] // _BOUNDARY) * _BOUNDARY, uses[number], 0
        for begin, end in sorted((begin, end) for begin, end, used, until in placed if used < free and first < until):
            if begin >= at + size:
                break
            at = max(at, end)
        found[number] = at
        placed.append((at, at + size, first, free))
    return found, max((end for _, end, *_ in placed), default=0)
