"""Launches that follow each other in the same way again and again, for tensors at other addresses each time.

The driver reads all of them from one piece of memory, into which a `Batch` writes the new addresses at once. Many
launches at addresses that were met before are one CUDA graph, which costs the host about as much as two launches.
Training at the same shapes, and a model that is called again, get the same memory again in most steps; a graph for
every step would have to be told of each new address, and telling it costs as much as a launch."""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from . import launcher
from .launcher import Kernel, Prepared

_LEAST = 4  # launches that are worth a graph
_VARIANTS = 4  # sets of addresses for which a Batch has a graph,
_UNUSED = 64  # unless one was not met in so many runs: then another may take its place
_MOST_SEEN = 16  # sets of addresses that were met once and are remembered
_MOST_GRAPHS = 1024  # of a thread: each holds memory
_RELAXED = 2  # CUstreamCaptureMode of cuda.h
_OWN_STREAM = 1  # CU_STREAM_NON_BLOCKING of cuda.h


class Recorded(NamedTuple):
    """One launch of a Batch. Addresses that change from call to call are kept as a pair: the number of a tensor, and
    the bytes from its start.

    values: an address, a number or bytes for each parameter. pointers: (index of a parameter, number of the tensor);
    there `values` holds the bytes from the tensor's start. structures: (index of a parameter, Structure.make, a pair
    for each address that `make` takes); the number 0 stands for what does not change, and the bytes are the address."""

    kernel: Kernel
    grid: tuple[int, int]
    values: list
    pointers: list[tuple[int, int]]
    structures: list[tuple[int, Callable[..., bytes], list[tuple[int, int]]]]

    def tensors(self) -> set[int]:
        """The numbers of the tensors that an argument lies in."""
        inside = {number for *_, pairs in self.structures for number, _ in pairs} - {0}
        return inside | {number for _, number in self.pointers}


class Batch:
    """The launches of one thread on one device."""

    def __init__(self, index: int, launches: Sequence[Recorded]) -> None:
        """index: of the CUDA device, which must be the current one."""
        laid, size = [], 0
        for each in launches:
            launcher.check_arguments(each.kernel.entry, each.values)
            layout, offsets = launcher.layout_of(each.kernel.entry.parameters, each.values)
            laid.append((size, layout, offsets))
            size += -(-layout.size // launcher.ALIGNED) * launcher.ALIGNED
        self._room, begin = launcher.room_for(size)
        # Which word of the memory is the address of which tensor, plus so many bytes.
        self._slots: list[tuple[int, int, int]] = []
        self._launches: list[_Launch] = []
        self._structures, self._made = [], []
        for each, (at, layout, offsets) in zip(launches, laid):
            prepared, at = Prepared(each.kernel, index), begin + at
            layout.pack_into(self._room, at, *each.grid, *prepared.fixed, 0, *prepared.attributes, *each.values)
            self._slots.append(((at - begin + launcher.STREAM) // 8, 0, 0))
            for parameter, number in each.pointers:
                self._slots.append(((at - begin + offsets[parameter]) // 8, number, each.values[parameter]))
            for parameter, make, pairs in each.structures:
                self._structures.append((at + offsets[parameter], make, pairs))
                self._made.append(None)
            start = prepared.starter(ctypes.addressof(self._room) + at, offsets)
            self._launches.append(_Launch(prepared, each.grid, start))
        self._words = memoryview(self._room).cast("B")[begin : begin + size].cast("Q")
        # The graphs by the addresses of the tensors, and the number of the run that used each last; and addresses that
        # were met once.
        self._graphs: OrderedDict[tuple, tuple[_Graph, int]] = OrderedDict()
        self._seen: OrderedDict[tuple, None] = OrderedDict()
        self._many, self._runs = len(launches) >= _LEAST, 0

    def run(self, starts: list[int]) -> None:
        """Launch all. starts: the stream, then the address of each tensor by its number."""
        many = self._many and not launcher.capturing()
        if many:
            self._runs += 1
            at = tuple(starts[1:])
            if (found := self._graphs.get(at)) is not None:
                self._graphs[at] = found[0], self._runs
                self._graphs.move_to_end(at)
                return found[0].run(starts[0])
        self._write(starts)
        for each in self._launches:
            if status := each.start():
                each.prepared.retry(status, each.start, each.grid)
        if many:
            self._met(at)

    def _met(self, at: tuple) -> None:
        """Make a graph for these addresses if they were met before and there is room for one."""
        if at not in self._seen:
            self._seen[at] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
            return
        if len(self._graphs) >= _VARIANTS:
            oldest = next(iter(self._graphs))
            if self._runs - self._graphs[oldest][1] < _UNUSED:
                return
            del self._graphs[oldest]
        if len(launcher.own.graphs) < _MOST_GRAPHS:
            graph = _Graph.of(self._launches, lambda stream: self._write([stream, *at]))
            if graph is None:  # this driver makes none
                self._many = False
            else:
                self._graphs[at] = graph, self._runs
                del self._seen[at]

    def _write(self, starts: list[int]) -> None:
        """Write the stream and the addresses into the memory."""
        words = self._words
        for slot, number, more in self._slots:  # for so few, quicker than with NumPy
            words[slot] = starts[number] + more
        for i, (at, make, pairs) in enumerate(self._structures):
            addresses = [starts[number] + more if number else more for number, more in pairs]
            if addresses != self._made[i]:
                image = make(*addresses)
                self._room[at : at + len(image)] = image
                self._made[i] = addresses


class _Launch(NamedTuple):
    """One launch as it stands in the memory. start: launches it, and returns the driver's error code."""

    prepared: Prepared
    grid: tuple[int, int]
    start: Callable[[], int]


class _Graph:
    """Launches as one CUDA graph."""

    @classmethod
    def of(cls, launches: Sequence[_Launch], write: Callable[[int], None]) -> _Graph | None:
        """A graph of these launches; None where the driver cannot make one. write: has them go to this stream."""
        driver, relaxed, stream = launcher.driver(), ctypes.c_int(_RELAXED), ctypes.c_void_p()
        # What this does is no harm to a graph that another thread captures.
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
        try:
            if driver.cuStreamCreate(ctypes.byref(stream), _OWN_STREAM):
                return None
            try:
                write(stream.value or 0)
                return cls._captured(driver, launches, stream)
            finally:
                driver.cuStreamDestroy_v2(stream)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))

    @classmethod
    def _captured(cls, driver, launches: Sequence[_Launch], stream: ctypes.c_void_p) -> _Graph | None:
        if driver.cuStreamBeginCapture_v2(stream, _RELAXED):
            return None
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        failed = any(each.start() for each in launches)
        if driver.cuStreamEndCapture(stream, ctypes.byref(graph)) or not graph:
            return None
        if failed or driver.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, ctypes.c_ulonglong(0)):
            driver.cuGraphDestroy(graph)
            return None
        return cls(driver, launches, graph, made)

    def __init__(self, driver, launches: Sequence[_Launch], graph: ctypes.c_void_p, made: ctypes.c_void_p) -> None:
        self._device, self._count = launches[0].prepared.device, len(launches)
        self._start = partial(driver.cuGraphLaunch, made)
        weakref.finalize(self, _destroy, driver, made, graph).atexit = False
        launcher.own.graphs.add(self)

    def run(self, stream: int) -> None:
        """Start it on a stream. Raises DeviceError."""
        on = ctypes.c_void_p(stream)
        status = self._start(on)
        if status == launcher.NO_CONTEXT:
            launcher.enter(self._device)
            status = self._start(on)
        if status:
            raise launcher.refused(f"{self._count} launches as a CUDA graph", status)


def _destroy(driver, made: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    driver.cuGraphExecDestroy(made)
    driver.cuGraphDestroy(graph)
