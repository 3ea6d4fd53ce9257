"""A driver that runs nothing and remembers each launch: what it was given, read back from memory as the driver reads it."""

import ctypes
import itertools
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from twell_lab.cuda import launcher

CONFIG = [*((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared"))]
CONFIG += [("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]
SIZES = {"int": 4, "unsigned": 4, "float": 4, "long long": 8, "Hidden": 16, "TensorMap": 128}  # bytes; of a pointer 8


class Config(ctypes.Structure):
    """CUlaunchConfig, as cuda.h declares it."""

    _fields_ = CONFIG


@dataclass(frozen=True)
class Launch:
    """One launch as the driver saw it. arguments: (address, bytes) of each."""

    file: str
    name: str
    defines: tuple
    grid: tuple
    block: tuple
    shared: int
    stream: int
    early: bool
    arguments: list

    def values(self) -> list:
        """Whole numbers for pointers and integers, pairs for structures of two pointers, bytes for tensor maps."""
        found = []
        for _, data in self.arguments:
            words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
            found.append(data if len(data) == 128 else tuple(words) if len(data) == 16 else words[0])
        return found


class Driver:
    """What `launcher.driver()` gives, with cuLaunchKernelEx as a C function."""

    def __init__(self):
        self.launches: list[Launch] = []
        self.status: list[int] = []  # the error codes that the next launches return; 0 when it is empty
        self.kernels: list[launcher.Kernel] = []
        self.compute, self.failed = None, []  # called with each Launch, or None; the exceptions that it raised
        launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
        self.cuLaunchKernelEx = launch(self._launch)
        self.version = 13_000
        self.handles = itertools.count(100)  # of streams and graphs
        self.captured: dict[int, list[Launch]] = {}  # of each stream that is captured and each graph
        self.graphs: list[int] = []  # how many launches each graph had that was started
        self.entered = threading.local()  # .context: which context each thread has; none at first

    def load(self, made: launcher.Kernel, device: torch.device) -> int:
        self.kernels.append(made)
        return len(self.kernels)  # the handle

    def cuCtxGetCurrent(self, context):
        context._obj.value = getattr(self.entered, "context", 0)
        return 0

    def cuDevicePrimaryCtxRetain(self, context, index):
        context._obj.value = 1 + index
        return 0

    def cuCtxSetCurrent(self, context):
        self.entered.context = context.value
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def _launch(self, config, function, addresses, extra):
        if not hasattr(self.entered, "context"):
            return launcher.NO_CONTEXT
        assert not extra
        made, read = self.kernels[function - 1], Config.from_address(config)
        parameters = made.entry.parameters
        places = (ctypes.c_void_p * len(parameters)).from_address(addresses)
        sizes = [8 if each.pointer else SIZES[each.type] for each in parameters]
        arguments = [(at, ctypes.string_at(at, size)) for at, size in zip(places, sizes)]
        grid, block = (read.gx, read.gy, read.gz), (read.bx, read.by, read.bz)
        early = bool(read.count) and ctypes.c_uint.from_address(read.attributes).value == 6
        seen = Launch(made.file, made.name, made.defines, grid, block, read.shared, read.stream or 0, early, arguments)
        if seen.stream in self.captured:
            self.captured[seen.stream].append(seen)
            return 0
        self._run(seen)
        return self.status.pop(0) if self.status else 0

    def _run(self, seen: Launch) -> None:
        self.launches.append(seen)
        if self.compute is not None:
            try:
                self.compute(seen)
            except BaseException as error:  # ctypes would only print it
                self.failed.append(error)

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuStreamCreate(self, stream, flags):
        stream._obj.value = next(self.handles)
        return 0

    def cuStreamDestroy_v2(self, stream):
        return 0

    def cuStreamBeginCapture_v2(self, stream, mode):
        self.captured[stream.value] = []
        return 0

    def cuStreamEndCapture(self, stream, graph):
        graph._obj.value = next(self.handles)
        self.captured[graph._obj.value] = self.captured.pop(stream.value)
        return 0

    def cuGraphInstantiateWithFlags(self, made, graph, flags):
        made._obj.value = next(self.handles)
        self.captured[made._obj.value] = self.captured[graph.value]
        return 0

    def cuGraphLaunch(self, made, stream):
        if self.status and (status := self.status.pop(0)):
            return status
        self.graphs.append(len(self.captured[made.value]))
        for each in self.captured[made.value]:
            self._run(replace(each, stream=stream.value or 0))
        return 0

    def cuGraphExecDestroy(self, made):
        del self.captured[made.value]
        return 0

    cuGraphDestroy = cuGraphExecDestroy


@contextmanager
def driving(monkeypatch, capability=(9, 0), stream=77):
    """A context in which launches on any CUDA device go to the Driver that it gives."""
    made = Driver()
    monkeypatch.setattr(launcher, "driver", lambda: made)
    monkeypatch.setattr(launcher, "_load", made.load)
    monkeypatch.setattr(launcher, "_loaded", {})
    monkeypatch.setattr(launcher, "own", launcher._Own())
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda index: stream)
    monkeypatch.setattr(launcher, "capturing", lambda: False)
    monkeypatch.setattr(launcher, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(launcher, "capability", lambda index: capability)
    facts = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: facts)
    launcher.may_start_early.cache_clear()
    yield made
    launcher.may_start_early.cache_clear()
