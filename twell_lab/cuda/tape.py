"""Calls that launch several kernels: recorded the first time they run, replayed from then on.

Most of the host's work for a call is the same each time: checks, the choice of kernels, their grids and arguments, and
the allocation of the buffers between them. A `Tape` does that work once. A replay computes the addresses of this call's
tensors, writes them into the recorded arguments, and launches (`Batch`). The buffers between the kernels
become parts of one allocation, in which buffers that are not in use at the same time share memory. A CUDA graph saves
the same work, but its inputs must lie at the same addresses each time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from . import launcher
from .batch import Batch, Recorded
from .launcher import Kernel, Structure, address

_BOUNDARY = 256  # bytes: each buffer between the kernels starts at a multiple of it
_SHARED = 2**21  # bytes that each thread keeps on a device for calls that need no more between their kernels


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, for code that a Tape may record."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if launcher.own.recording is not None:
        launcher.own.recording.allocated(made)
    return made


class Tape:
    """One call, for inputs of certain shapes. Several threads may play it at once."""

    def __init__(self) -> None:
        self._recorded: _Replay | None = None

    @property
    def recorded(self) -> bool:
        """Whether the launches are known: calls whose inputs are aligned as those of the recorded call replay them."""
        return self._recorded is not None

    def play(self, run: Callable, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor | None] = ()) -> Any:
        """What run(*inputs, *fixed) returns. The first call records the launches of `run`; later calls replay them.

        Every call must pass the same `run`, inputs of the same shapes, strides, types and devices, and `fixed` at the
        same addresses: this is not checked. The addresses of the inputs may change; where their alignment to 16 bytes
        changes, or another one of them is None, `run` is called instead of a replay. No tensor is kept alive.

        Some calls are never recorded, and always call `run`: on a CPU, where two inputs (or an input and a tensor of
        `fixed`) share memory, and where a kernel or the result has an address outside of the inputs, `fixed` and what
        `empty` allocated, such as that of a copy. A call within one that is being recorded is recorded as part of it.

        Args:
            run: a function that does nothing to the GPU's memory but launch kernels, allocates with `empty`, and
                returns a tensor that it allocated, an input, None, or a tuple of these.
            inputs: tensors that may lie elsewhere on each call.
            fixed: tensors that lie at the same addresses on each call, such as weights; they may share memory.
        """
        recorded, recording = self._recorded, launcher.own.recording
        if recorded is not None and recording is None:
            at = [0 if t is None else t.data_ptr() for t in inputs]
            return recorded.replay(inputs, at) if recorded.fits(at) else run(*inputs, *fixed)
        if recording is not None or not any(t.is_cuda for t in (*inputs, *fixed) if t is not None):
            return run(*inputs, *fixed)
        launcher.own.recording = recording = _Recording(inputs, fixed)
        try:
            result = run(*inputs, *fixed)
        finally:
            launcher.own.recording = None
        self._recorded = recording.finished(result)
        return result

    def replayed(self, inputs: Sequence[Tensor | None]) -> Any:
        """What `play` would return with these inputs, None where it would have to call `run`. The inputs may have other
        numbers of dimensions than the recorded ones, as long as their elements lie in the same order. A result that had
        the shape and the type of the first input when it was recorded gets that input's shape."""
        recorded = self._recorded
        if recorded is None or launcher.own.recording is not None:
            return None
        at = [0 if t is None else t.data_ptr() for t in inputs]
        return recorded.replay(inputs, at) if recorded.fits(at) else None


class _Recording:
    """What a call does while it runs.

    Tensors are numbered: the inputs from 1 on, then what was allocated, in order. The number 0 stands for all that does
    not change from call to call: there the bytes from the start are the address itself (of a tensor of `fixed`, or 0
    for None)."""

    def __init__(self, inputs: Sequence[Tensor | None], fixed: Sequence[Tensor | None]) -> None:
        self.inputs = inputs
        self.launches: list[Recorded] = []
        self.allocations: list[Tensor] = []  # their shapes and types, on the device "meta", which has no memory
        # The memory of each tensor: its first byte, the one after its last, the tensor's number, and a weak reference
        # to its storage. Once that is freed, other tensors may get the same addresses.
        self.known: list[tuple[int, int, int, ref]] = []
        self.complete = True  # whether each address that was met belongs to a numbered tensor
        for t in fixed:
            self._know(t, 0)
        for number, t in enumerate(inputs, 1):
            first, end = _span(t)
            self.complete &= not any(first < other_end and start < end for start, other_end, *_ in self.known)
            self._know(t, number)

    def _know(self, t: Tensor | None, number: int) -> None:
        if t is not None and t.numel():
            self.known.append((*_span(t), number, ref(t.untyped_storage())))

    def allocated(self, t: Tensor) -> None:
        self.allocations.append(t.new_empty(t.shape, device="meta"))
        self._know(t, len(self.inputs) + len(self.allocations))

    def _located(self, at: int) -> tuple[int, int]:
        """An address as the number of a tensor and the bytes from its start."""
        if at:
            for first, end, number, storage in self.known:
                if first <= at < end and storage() is not None:
                    return number, at - first if number else at
            self.complete = False
        return 0, at

    def launched(self, kernel: Kernel, grid: tuple[int, int], arguments: Sequence) -> None:
        launch = Recorded(kernel, grid, [], [], [])
        for index, (parameter, given) in enumerate(zip(kernel.entry.parameters, arguments)):
            if isinstance(given, Structure):
                pairs = [self._located(address(t)) for t in given.of]
                if any(number for number, _ in pairs):
                    launch.structures.append((index, given.make, pairs))
                given = given.image()
            elif parameter.pointer:
                number, given = self._located(address(given))
                if number:
                    launch.pointers.append((index, number))
            launch.values.append(given)
        self.launches.append(launch)

    def finished(self, result: Any) -> _Replay | None:
        """What there is to replay, for a `run` that returned `result`; None where it cannot be replayed."""
        results = [self._returned(t) for t in (result if isinstance(result, tuple) else (result,))]
        return _Replay(self, results, isinstance(result, tuple)) if self.complete else None

    def _returned(self, t: Tensor | None) -> int:
        """The number of a tensor that `run` returned, 0 for None. A part of a tensor, or another view, has none."""
        if t is None:
            return 0
        number, inside = self._located(t.data_ptr())
        whole = [*self.inputs, *self.allocations][number - 1] if number and not inside else None
        alike = whole is not None and (whole.shape, whole.dtype, whole.stride()) == (t.shape, t.dtype, t.stride())
        self.complete &= alike
        return number

    def in_use(self, tensor: int) -> tuple[int, int]:
        """From which launch on this tensor's memory is in use, and from which one on it is free again."""
        users = [index for index, launch in enumerate(self.launches) if tensor in launch.tensors()]
        if not users:
            return 0, 0
        free = users[-1] + 1
        # A kernel that may start early may start while the kernels before it still read.
        while free < len(self.launches) and self.launches[free].kernel.early:
            free += 1
        return users[0], free


class _Replay:
    """A call that was recorded, to be replayed. Tensors are numbered as in `_Recording`."""

    def __init__(self, recording: _Recording, results: list[int], several: bool) -> None:
        self.alignments = _alignments([*map(address, recording.inputs)])
        self.device = next(t.device for t in recording.inputs if t is not None)
        self.launches, self.results, self.several = recording.launches, results, several
        allocated = dict(enumerate(recording.allocations, len(recording.inputs) + 1))
        self.unknown, self.nowhere = [None] * len(allocated), [0] * len(allocated)
        # What is returned gets memory of its own, the rest a part of one allocation of `size` bytes.
        first = recording.inputs[0]
        self.returned = [
            (number, None if _alike(t, first) else tuple(t.shape), t.dtype)
            for number, t in allocated.items()
            if number in results
        ]
        between = [number for number in allocated if number not in results]
        offsets, self.size = _offsets([allocated[each].nbytes for each in between], [*map(recording.in_use, between)])
        self.between = [*zip(between, offsets)]
        self.own = threading.local()  # .batch: of each thread that replays

    def fits(self, at: list[int]) -> bool:
        """Whether inputs at these addresses, 0 for None, are aligned as the recorded ones were, and None where those
        were: nothing else of an address decides which kernels are launched."""
        return _alignments(at) == self.alignments

    def replay(self, inputs: Sequence[Tensor | None], at: list[int]) -> Any:
        """at: the addresses of the inputs, 0 for None. Every function that is called here is felt by who calls."""
        device = self.device
        if launcher.current_device() != device.index:
            with torch.cuda.device(device):
                return self.replay(inputs, at)
        tensors = [None, *inputs, *self.unknown]  # by number
        stream = launcher.current_stream(device.index)
        starts = [stream, *at, *self.nowhere]
        for number, shape, dtype in self.returned:
            made = torch.empty_like(inputs[0]) if shape is None else torch.empty(shape, dtype=dtype, device=device)
            tensors[number], starts[number] = made, made.data_ptr()
        if self.size:
            between = _between(self.size, stream, device)
            begin = between.data_ptr()
            for number, offset in self.between:
                starts[number] = begin + offset
        batch = getattr(self.own, "batch", None)
        if batch is None:
            batch = self.own.batch = Batch(device.index, self.launches)
        batch.run(starts)
        if not self.several:
            return tensors[self.results[0]]
        return tuple([tensors[number] for number in self.results])


def _alike(t: Tensor, first: Tensor | None) -> bool:
    """Whether a tensor like this one, which is contiguous, can be made as one like the first input."""
    return first is not None and first.is_contiguous() and (t.shape, t.dtype) == (first.shape, first.dtype)


def _between(size: int, stream: int, device: torch.device) -> Tensor:
    """Memory for what the kernels of one call leave for each other.

    What a thread launches on the default stream runs in the order of its launches, so all its calls there share a small
    piece. On other streams memory may belong to a CUDA graph that is being captured, and has to be its own."""
    if stream or size > _SHARED:
        return torch.empty(size, dtype=torch.uint8, device=device)
    shared = launcher.own.shared.get(device.index)
    if shared is None:
        shared = launcher.own.shared[device.index] = torch.empty(_SHARED, dtype=torch.uint8, device=device)
    return shared


def _alignments(at: list[int]) -> list[int]:
    """The bytes by which each address lies beyond a multiple of 16; -1 for None."""
    return [each & 15 if each else -1 for each in at]


def _span(t: Tensor | None) -> tuple[int, int]:
    """The first byte of a tensor, and the byte after its last one; (0, 0) where it has none."""
    if t is None or not t.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _offsets(sizes: list[int], uses: list[tuple[int, int]]) -> tuple[list[int], int]:
    """Where each buffer starts in one allocation, in bytes, and the size of that allocation.

    Two buffers overlap only where one is free before the other is used: the largest is placed first, each as far in
    front as it fits.

    uses: for each buffer the number of the first launch that uses it, and of the first one that finds it free."""
    found = [0] * len(sizes)
    placed: list[tuple[int, int, int, int]] = []  # (begin, end, first launch, launch that finds it free)
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        size, (first, free), at = -(-sizes[number] // _BOUNDARY) * _BOUNDARY, uses[number], 0
        for begin, end in sorted((begin, end) for begin, end, used, until in placed if used < free and first < until):
            if begin >= at + size:
                break
            at = max(at, end)
        found[number] = at
        placed.append((at, at + size, first, free))
    return found, max((end for _, end, *_ in placed), default=0)
