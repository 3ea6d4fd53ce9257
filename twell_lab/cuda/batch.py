"""Launches that follow each other in the same way again and again, for tensors at other addresses each time.

The driver reads all of them from one piece of memory, into which a `Batch` writes the new addresses at once. From its
third run on a Batch is one CUDA graph: starting that costs the host less than two launches, and a launch in it is told
of new addresses only where there are any. Training at the same shapes mostly gets the same memory again, so that most
steps tell nothing."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from . import launcher
from .launcher import Kernel, Prepared

_FIRST_AS_GRAPH = 2  # runs before a Batch becomes a graph: many shapes are met once
_LEAST, _MOST_GRAPHS = 2, 512  # launches that are worth a graph; graphs of a thread, each of which holds memory
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
        slots, numbers, more = [], [], []  # words of the memory; there goes the address of a tensor, and so many bytes
        self._launches: list[_Launch] = []
        self._structures, self._made = [], []
        for each, (at, layout, offsets) in zip(launches, laid):
            prepared, at = Prepared(each.kernel, index), begin + at
            layout.pack_into(self._room, at, *each.grid, *prepared.fixed, 0, *prepared.attributes, *each.values)
            slots.append((at - begin + launcher.STREAM) // 8)
            numbers.append(0)
            more.append(0)
            for parameter, number in each.pointers:
                slots.append((at - begin + offsets[parameter]) // 8)
                numbers.append(number)
                more.append(each.values[parameter])
            for parameter, make, pairs in each.structures:
                self._structures.append((at + offsets[parameter], make, pairs))
                self._made.append(None)
            start = prepared.starter(ctypes.addressof(self._room) + at, offsets)
            self._launches.append(_Launch(prepared, each.grid, start))
        self._words = np.frombuffer(self._room, np.uint64, size // 8, begin)
        self._slots, self._numbers, self._more = np.array(slots), np.array(numbers), np.array(more, np.uint64)
        used = [each.tensors() for each in launches]
        most = max((0, *(number for some in used for number in some)))
        # For each tensor which launches use it.
        self._users = [{i for i, some in enumerate(used) if number in some} for number in range(most + 1)]
        self._runs, self._graph = 0, None

    def run(self, starts: list[int]) -> None:
        """Launch all. starts: the stream, then the address of each tensor by its number."""
        captured = launcher.capturing()
        if self._graph is None or captured:
            self._write(starts)
            for each in self._launches:
                if status := each.start():
                    each.prepared.retry(status, each.start, each.grid)
            self._runs += not captured
            if self._runs == _FIRST_AS_GRAPH and not captured and self._worth_a_graph():
                self._graph = _Graph.of(self._launches, lambda stream: self._write([stream, *starts[1:]]))
                self._told = starts
            return
        others = set()
        for users, new, old in zip(self._users, starts, self._told):
            if new != old:
                others |= users
        if others:
            self._write(starts)
        graph, self._graph = self._graph, None  # after an error nobody knows what the graph was told
        graph.run(starts[0], others)
        self._graph, self._told = graph, starts

    def _worth_a_graph(self) -> bool:
        return len(self._launches) >= _LEAST and len(launcher.own.graphs) < _MOST_GRAPHS

    def _write(self, starts: list[int]) -> None:
        """Write the stream and the addresses into the memory."""
        self._words[self._slots] = np.array(starts, np.uint64)[self._numbers] + self._more
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


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        *((name, ctypes.c_void_p) for name in ("arguments", "extra", "kernel", "context")),
    ]


class _Graph:
    """Launches as one CUDA graph, to which new arguments of single launches can be told."""

    @classmethod
    def of(cls, launches: Sequence[_Launch], write: Callable[[int], None]) -> _Graph | None:
        """A graph of these launches; None where the driver cannot make one. write: has them go to this stream."""
        driver, relaxed, stream = launcher.driver(), ctypes.c_int(_RELAXED), ctypes.c_void_p()
        if not hasattr(driver, "cuStreamGetCaptureInfo_v3"):  # CUDA 12.3
            return None
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
        nodes, graph = [], ctypes.c_void_p()
        status, last, edges, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        for each in launches:
            failed = each.start() or driver.cuStreamGetCaptureInfo_v3(
                stream,
                ctypes.byref(status),
                None,
                None,
                ctypes.byref(last),
                ctypes.byref(edges),
                ctypes.byref(count),
            )
            if failed or count.value != 1 or not last.value:
                break
            nodes.append(ctypes.c_void_p.from_address(last.value).value)
        ended = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
        if ended or not graph:
            return None
        made = ctypes.c_void_p()
        if len(nodes) < len(launches) or driver.cuGraphInstantiateWithFlags(
            ctypes.byref(made), graph, ctypes.c_ulonglong(0)
        ):
            driver.cuGraphDestroy(graph)
            return None
        return cls(driver, launches, graph, made, nodes)

    def __init__(self, driver, launches: Sequence[_Launch], graph, made, nodes: list) -> None:
        self._device, self._made, self._start = launches[0].prepared.device, made, driver.cuGraphLaunch
        self._parameters = []  # kept for the driver, which reads them
        self._tell: list[Callable[[], int]] = []
        for each, node in zip(launches, nodes):
            arguments = ctypes.addressof(each.prepared.addresses)
            one, threads, _, _, shared = each.prepared.fixed
            told = _Node(each.prepared.function, *each.grid, one, threads, 1, 1, shared, arguments)
            self._parameters.append(told)
            tell = partial(driver.cuGraphExecKernelNodeSetParams_v2, made, ctypes.c_void_p(node), ctypes.byref(told))
            self._tell.append(tell)
        weakref.finalize(self, _destroy, driver, made, graph).atexit = False
        launcher.own.graphs.add(self)

    def run(self, stream: int, others: set[int]) -> None:
        """Start it on a stream. others: the launches whose arguments changed. Raises DeviceError."""
        status = self._tried(stream, others)
        if status == launcher.NO_CONTEXT:
            launcher.enter(self._device)
            status = self._tried(stream, others)
        if status:
            raise launcher.refused(f"{len(self._tell)} launches as a CUDA graph", status)

    def _tried(self, stream: int, others: set[int]) -> int:
        for each in others:
            if status := self._tell[each]():
                return status
        return self._start(self._made, ctypes.c_void_p(stream))


def _destroy(driver, made: ctypes.c_void_p, graph: ctypes.c_void_p) -> None:
    driver.cuGraphExecDestroy(made)
    driver.cuGraphDestroy(graph)
