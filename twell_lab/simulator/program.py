"""A kernel file built for the CPU, and launches of its kernels on torch tensors or NumPy arrays."""

from __future__ import annotations

import ctypes
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core import InputError
from . import arguments as args
from . import faults, source, toolchain
from . import report as raw
from .counts import Counts
from .trace import Trace

WATCHES = (None, "faults", "counts")
_GAP = 16 << 20  # unused addresses between two arrays of a watched launch, so that no overrun reaches the next
_MOST_THREADS = 1024
_MOST_STATIC = 48 << 10  # bytes of __shared__ arrays of fixed size
_OWN_HEADERS = re.compile(r"(cuda|sim)_\w+\.h$")


@dataclass(frozen=True)
class Run:
    """What one launch gave: the seconds that it took here, and the counts and steps that were asked for."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    seconds: float
    counts: Counts | None = None
    trace: Trace | None = None


def compile(file: str | Path, defines: Mapping[str, object] = {}) -> Program:
    """The kernels of a file, for launching on the CPU: `Program.launch` builds them, once for fast and once for watched
    runs. file: the name of one of kernels/, or the path of one's own; headers are looked for beside it, then in
    kernels/. defines: macros and their values; True for one that is defined without a value. Raises CompileError for a
    file that is not there or that the compiler refuses, StackError without a C++ compiler, and Unsupported for a source
    that uses what only a GPU has."""
    return Program(file, dict(defines))


class Program:
    """What `compile` returns. `.kernels`: name -> the Parameters of each kernel of the file."""

    def __init__(self, file: str | Path, defines: dict[str, object]) -> None:
        self.file, self.defines = Path(file).name, defines
        self.sources = toolchain.sources(file)
        self.kernels = toolchain.listing(self.sources, self.file, defines).kernels

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence,
        *,
        watch: str | None = "faults",
        trace: int | None = None,
        values: Mapping[str, str] | None = None,
        shared_bytes: int = 0,
        steps: int = 100_000,
        seconds: float = 120.0,
        cores: int | None = None,
    ) -> Run:
        """Run a kernel for every thread of grid x block; arrays are changed in place, as on a GPU.

        Args:
            grid, block: one to three sizes each; a block has at most 1,024 threads.
            arguments: contiguous CPU tensors or NumPy arrays for pointers (None: a null pointer), numbers for the rest.
            watch: "faults" checks every access. "counts" also counts them (Run.counts). None runs optimised code and
                finds only what makes a kernel stop; an access out of bounds may then damage this process.
            trace: number of a block whose steps are kept (Run.trace), at most `steps` of them.
            values: expressions whose values are kept among the steps, each after a source line, which its number or
                some of its text names: {"smxx_pack.cu:69": "count"}.
            shared_bytes: size of an `extern __shared__` array. seconds: how long the launch may take at most. cores:
                how many blocks run at a time; all cores by default.

        Raises InputError for arguments that the kernel does not take and sizes that a GPU does not; faults.Fault for
        what the kernel does wrong (if it was watched, the arrays are as they were), and its TooLong after `seconds` or
        where a thread is counted or traced for 16 million steps without meeting others.
        """
        grid, block = _three("grid", grid, 2**31 - 1), _three("block", block, _MOST_THREADS)
        if math.prod(block) > _MOST_THREADS:
            raise InputError(f"block is {block}, {math.prod(block)} threads; at most {_MOST_THREADS} are accepted")
        if kernel not in self.kernels:
            known = ", ".join(self.kernels) or "none (a kernel is marked __global__; templates are not counted)"
            raise InputError(f"{self.file} has no kernel {kernel!r}; it has {known}")
        if watch not in WATCHES:
            raise InputError(f"watch is {watch!r}; one of {WATCHES} is accepted")
        blocks = math.prod(grid)
        if trace is not None and (type(trace) is not int or not 0 <= trace < blocks):
            raise InputError(f"trace is {trace!r:.80}; a block number from 0 to {blocks - 1} is accepted")
        if cores is not None and cores < 1:
            raise InputError(f"cores is {cores}; at least 1 is accepted")
        sources, names = source.with_watches(self.sources, dict(values or {}))
        watched = watch is not None or trace is not None
        kind, defines = "watched" if watched else "fast", tuple(sorted(self.defines.items()))
        built = _built(kind, self.file, tuple(sorted(sources.items())), defines)
        flags = (raw.WATCH_FAULTS if watched else 0) | (raw.WATCH_COUNTS if watch == "counts" else 0)
        asked = {"watch": flags, "trace_block": -1 if trace is None else trace, "trace_limit": steps}
        call = _Call(built, kernel, grid, block, self.kernels[kernel], arguments, shared_bytes, asked, names)
        workers = min(cores or len(os.sched_getaffinity(0)), blocks)
        if not watched:
            return call.run(workers, seconds)
        with call.arrays_apart():
            start = time.perf_counter()
            try:
                return call.run(workers, seconds)
            except faults.Fault as fault:
                if workers == 1 or isinstance(fault, faults.TooLong):
                    raise
                met = fault
            # On several cores it is chance which of several faults is met first. On one core it is always the same, so
            # the launch is repeated there, if there is time left.
            call.reset_arrays()
            with suppress(faults.TooLong):
                call.run(1, seconds - (time.perf_counter() - start))
            raise met  # on one core it was not met, or not in time


_building = threading.Lock()


@lru_cache(maxsize=512)
def _built(kind: str, file: str, sources: tuple, defines: tuple) -> toolchain.Built:
    with _building:
        return toolchain.build(dict(sources), file, dict(defines), kind)


class _Call:
    """One launch: arguments as the C++ side takes them, and what comes back."""

    def __init__(self, built, kernel, grid, block, parameters, arguments, shared_bytes, asked, names) -> None:
        self.built, self.kernel, self.grid, self.block = built, kernel, grid, block
        self.asked, self.names = asked, names  # what to watch, as fields of Launch; the watched expressions
        # In this library the shared arrays of all kernels lie side by side; on a GPU a launch has its own alone.
        others = set(built.kernels) - {kernel}
        own = [s for s in built.shared if s.function not in others]
        taken = sum(s.size for s in own if not s.dynamic)
        if taken > _MOST_STATIC:
            fixed = f"the shared arrays of {kernel} ({', '.join(s.name for s in own if not s.dynamic)})"
            most = (
                f"{_MOST_STATIC:,} in arrays of fixed size, more only in an `extern __shared__` one with shared_bytes"
            )
            raise InputError(f"{fixed} have {taken:,} bytes; a GPU takes {most}")
        if not 0 <= shared_bytes <= (left := toolchain.MOST_SHARED - taken):
            beside = f"beside {taken:,} bytes in arrays of fixed size 0 to {left} is accepted"
            raise InputError(f"shared_bytes is {shared_bytes}; {beside}")
        own = [replace(s, size=shared_bytes, shape=()) if s.dynamic else s for s in own]
        named = [s.name for s in own]  # of two with one name, the function is told as well
        own = [replace(s, name=f"{s.function}::{s.name}") if named.count(s.name) > 1 else s for s in own]
        sizes = built.sizes(kernel)
        if len(arguments) != len(sizes):
            wanted = ", ".join(p.name for p in parameters)
            raise InputError(f"{kernel} takes {len(sizes)} arguments ({wanted}); {len(arguments)} were given")
        # A kernel gets a copy of a read-only array, which thus stays as it is.
        arguments = [a.copy() if isinstance(a, np.ndarray) and not a.flags.writeable else a for a in arguments]
        self.given = arguments  # kept while the launch runs
        self.values: list[Any] = []
        for parameter, argument, size in zip(parameters, arguments, sizes):
            if not parameter.pointer:
                self.values.append(args.value(kernel, parameter, argument, size))
            elif argument is None:
                self.values.append(ctypes.c_void_p(0))
            else:
                self.values.append(args.array(kernel, parameter, argument))
        self.nulls = [p.name for p, given in zip(parameters, self.values) if isinstance(given, ctypes.c_void_p)]
        self.arrays = [given for given in self.values if isinstance(given, args.Array)]
        of = zip(parameters, self.values)
        self.written = [given for p, given in of if isinstance(given, args.Array) and not p.const]
        self.call = ctypes.cast(getattr(built.handle, f"sim_call_{kernel}"), ctypes.c_void_p)
        base = built.runtime.sim_base(self.call)
        self.variables = [v.array(base) for v in built.variables]
        self.buffers = self.arrays + self.variables
        self.shared = [s.array() for s in own]
        # Of each array: the memory as it was given, and where a watched launch has its copy.
        self.copies: list[tuple[np.ndarray, np.ndarray]] = []

    @contextmanager
    def arrays_apart(self) -> Iterator[None]:
        """A context with copies that lie far apart, so that no access past the end of an array meets another one."""
        self.before = [args.bytes_at(v.begin, v.nbytes).copy() for v in self.variables]
        self.room = np.empty(sum(a.nbytes + 2 * args.ALIGNED + _GAP for a in self.arrays) + _GAP, np.uint8)
        at, end, away = self.room.ctypes.data, 0, 0
        for a in sorted(self.arrays, key=lambda a: (a.begin, a.nbytes)):
            if a.begin >= end:  # no array before reaches into this one
                at += _GAP
                at += -at % args.ALIGNED + a.phase
                away = at - a.begin
            end = max(end, a.begin + a.nbytes)
            at = end + away
            self.copies.append((args.bytes_at(a.begin, a.nbytes), args.bytes_at(a.begin + away, a.nbytes)))
            a.begin += away
        self.reset_arrays()
        try:
            yield
        except BaseException:
            self.reset_arrays()
            raise
        for original, changed in self.copies:
            if not np.array_equal(changed, original):
                original[:] = changed

    def reset_arrays(self) -> None:
        for original, changed in self.copies:
            changed[:] = original
        for variable, before in zip(self.variables, self.before):
            args.bytes_at(variable.begin, variable.nbytes)[:] = before

    def _kind(self, buffer: args.Array) -> int:
        """Return what is expected of the uses of a buffer: BufferKind of runtime.h."""
        if buffer in self.variables:
            return raw.NO_WRITES if buffer.name in self.built.constants else raw.ANY_USE
        end = buffer.begin + buffer.nbytes
        overlaps = (a.begin < end and buffer.begin < a.begin + a.nbytes for a in self.written)
        return raw.ANY_USE if any(overlaps) else raw.WRITES_UNLIKELY

    def run(self, workers: int, seconds: float) -> Run:
        values = [ctypes.c_void_p(v.begin) if isinstance(v, args.Array) else v for v in self.values]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        buffers = (raw.Buffer * len(self.buffers))(*((a.begin, a.nbytes, self._kind(a)) for a in self.buffers))
        shared = (raw.Shared * len(self.shared))(*((s.begin, s.nbytes) for s in self.shared))
        for a in self.buffers if self.asked["trace_block"] >= 0 else ():
            a.before = args.bytes_at(a.begin, a.nbytes).copy()
        launch = raw.Launch(
            call=self.call.value,
            arguments=ctypes.addressof(addresses),
            grid=self.grid,
            block=self.block,
            workers=workers,
            seconds=seconds,
            **self.asked,
            buffers=ctypes.addressof(buffers),
            shared=ctypes.addressof(shared),
            n_buffers=len(buffers),
            n_shared=len(shared),
            thread_local_bytes=max((s.offset + s.size for s in self.built.shared), default=0),
        )
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # so that Ctrl-C ends it within a few moments
            done = pool.submit(self.built.runtime.sim_launch, ctypes.byref(launch))
            try:
                report = done.result()
            except BaseException:  # raised by a signal handler, as KeyboardInterrupt is
                launch.cancel = 1
                done.add_done_callback(lambda it: self.built.runtime.sim_free(it.result()))
                raise
        took = time.perf_counter() - start
        if not report:
            raise MemoryError("no memory for the stacks of a block's threads")
        try:
            return self._result(report.contents, took)
        finally:
            self.built.runtime.sim_free(report)

    def _result(self, report, took: float) -> Run:
        counts = steps = None
        arrays, trace = self.buffers + self.shared, self.asked["trace_block"]
        if self.asked["watch"] & raw.WATCH_COUNTS and not report.fault.kind:
            footprint = raw.table(report, "footprint", raw.FOOTPRINT)
            sites = raw.table(report, "sites", raw.SITES)
            counts = Counts.of(sites, footprint, arrays, math.prod(self.grid + self.block))
        if trace >= 0:
            rows, lines = self._resolved(raw.table(report, "steps", raw.STEPS))
            lanes, cut = raw.table(report, "lanes", raw.LANES), bool(report.truncated)
            steps = Trace(rows, lanes, lines, arrays, self.names, self.block, truncated=cut)
        if report.fault.kind:
            fault = raw.exception(report.fault, self.kernel, self.grid, self.block, self._lines_of, arrays, self.nulls)
            if steps is not None and fault.block == trace:
                steps.end_with(fault)
            raise fault
        return Run(self.kernel, self.grid, self.block, took, counts, steps)

    def _resolved(self, rows: np.ndarray):
        """The rows with the simulator's own headers taken off the ends of their paths, and pc -> Line."""
        lines = self.built.lines({pc for row in rows for pc in row["path"][: row["depth"]].tolist()})
        own = {pc for pc, line in lines.items() if _OWN_HEADERS.search(line.file)}
        rows = rows.copy()
        for row in rows:
            while row["depth"] > 1 and int(row["path"][row["depth"] - 1]) in own:
                row["depth"] -= 1
        return rows, lines

    def _lines_of(self, path) -> list:
        pcs = path.pc[: path.depth]
        lines = self.built.lines(pcs)
        return [lines[pc] for pc in pcs if lines[pc].number and not _OWN_HEADERS.search(lines[pc].file)]


def _three(name: str, size, most: int) -> tuple[int, int, int]:
    sizes = tuple(size) if isinstance(size, Sequence) else (size,)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, (int, np.integer)) or not 1 <= n <= most for n in sizes):
        raise InputError(f"{name} is {size}; 1 to 3 sizes from 1 to {most:,} are accepted")
    return tuple(int(n) for n in sizes) + (1,) * (3 - len(sizes))


def step(program: Program, kernel: str, grid, block, arguments: Sequence, *, look: int = 0, **options: Any) -> Trace:
    """Return the steps of one block of a launch: of the one that a fault stopped, up to the fault (`.fault`), or else
    of the block `look`. The other arguments, and errors, are those of `Program.launch`; it runs on one core, so that
    the fault is the same each time."""
    options["cores"] = 1
    try:
        return program.launch(kernel, grid, block, arguments, trace=look, **options).trace
    except faults.Fault as fault:
        if fault.trace is None and fault.block != look:  # in another block: once more, with the steps of that one
            return step(program, kernel, grid, block, arguments, look=fault.block, **options)
        if fault.trace is None:
            raise
        return fault.trace


# What `Program.launch` gets, file of kernels/ -> one's own, and the list that the launches fill.
_Session = tuple[dict[str, Any], Mapping[str, str | Path], list[Run]]
_session: ContextVar[_Session | None] = ContextVar("twell_lab simulator session", default=None)


@contextmanager
def watching(
    watch: str | None = "faults",
    *,
    trace: int | None = None,
    values: Mapping[str, str] | None = None,
    replace: Mapping[str, str | Path] | None = None,
    cores: int | None = None,
) -> Iterator[list[Run]]:
    """A context in which the launch functions of twell_lab.ops, on CPU tensors, run watched. Yields the list that the
    Run of each launch is added to. replace: {"smxx_pack.cu": "my_pack.cu"} runs your own file instead of the one in
    kernels/. The rest is as for `Program.launch`."""
    runs: list[Run] = []
    token = _session.set(({"watch": watch, "trace": trace, "values": values, "cores": cores}, replace or {}, runs))
    try:
        yield runs
    finally:
        _session.reset(token)


def launch(file: str, kernel: str, defines: tuple, grid, block, arguments, shared_bytes: int = 0) -> None:
    """What the launch functions of twell_lab.ops call for CPU tensors. Outside of `watching` nothing is watched."""
    options, replace, runs = _session.get() or ({"watch": None}, {}, [])
    own = replace.get(file)
    stamp = os.stat(own).st_mtime_ns if own and os.path.exists(own) else None
    program = _program(str(own or file), defines, stamp)
    runs.append(program.launch(kernel, grid, block, arguments, shared_bytes=shared_bytes, **options))


@lru_cache(maxsize=256)
def _program(file: str, defines: tuple, stamp) -> Program:
    return compile(Path(file) if os.sep in file or stamp else file, dict(defines))
