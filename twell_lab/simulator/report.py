"""The structures that Python and the C++ runtime exchange (the same as in runtime.h), and the words for a fault."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from ctypes import c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from . import faults

MOST_FRAMES = 12
WATCH_FAULTS, WATCH_COUNTS = 1, 2
ANY_USE, NO_WRITES, WRITES_UNLIKELY = 0, 1, 2
OWN_MEMORY, UNKNOWN_ADDRESS = -2, 2**64 - 1
_PATH = [("pc", c_uint64 * MOST_FRAMES), ("depth", c_int32), ("pad", c_int32)]
_TOTALS = ["requests", "accesses", "bytes", "sectors", "lines", "wavefronts", "ideal_wavefronts", "divergent"]


class Path(ctypes.Structure):
    _fields_ = _PATH


class Buffer(ctypes.Structure):
    _fields_ = [("begin", c_uint64), ("bytes", c_uint64), ("kind", c_uint64)]  # kind: BufferKind of runtime.h


class Shared(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("bytes", c_uint64)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("call", c_void_p),
        ("arguments", c_void_p),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("workers", c_uint32),
        ("watch", c_uint32),
        ("trace_block", c_int64),
        ("trace_limit", c_int64),
        ("seconds", c_double),
        ("buffers", c_void_p),
        ("shared", c_void_p),
        ("n_buffers", c_int32),
        ("n_shared", c_int32),
        ("thread_local_bytes", c_uint64),
        ("stacks", c_void_p),
        ("cancel", c_int32),
        ("guard", c_void_p),
    ]


class Waiting(ctypes.Structure):
    _fields_ = [("thread", c_int32), ("kind", c_int32), ("path", Path)]


class Fault(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("thread", c_int32),
        ("other_thread", c_int32),
        ("is_write", c_int32),
        ("other_is_write", c_int32),
        ("pad", c_int32),
        ("size", c_uint64),
        ("block", c_int64),
        ("other_block", c_int64),
        ("address", c_uint64),
        ("lane_or_mask", c_uint64),
        ("shared_offset", c_int64),
        ("text", ctypes.c_char_p),
        ("path", Path),
        ("other_path", Path),
        ("waiting", ctypes.POINTER(Waiting)),
        ("n_waiting", c_int64),
    ]


class Report(ctypes.Structure):
    _fields_ = [
        ("fault", Fault),
        *(
            (name, kind)
            for part in ("sites", "footprint", "steps", "lanes")
            for name, kind in ((part, c_void_p), (f"n_{part}", c_int64))
        ),
        ("truncated", c_int32),
        ("pad", c_int32),
    ]


SITES = np.dtype(
    [
        ("path", "u8", (MOST_FRAMES,)),
        ("depth", "i4"),
        ("kind", "i4"),
        ("space", "i4"),
        ("pad", "i4"),
        *((name, "i8") for name in _TOTALS),
    ]
)
FOOTPRINT = np.dtype([("array", "i8"), ("read_sectors", "i8"), ("written_sectors", "i8"), ("block_read_sectors", "i8")])
STEPS = np.dtype(
    [
        ("warp", "i4"),
        ("kind", "i4"),
        ("space", "i4"),
        ("size", "i4"),
        ("path", "u8", (MOST_FRAMES,)),
        ("depth", "i4"),
        ("pad", "i4"),
        ("first", "i8"),
        ("lanes", "i4"),
        ("name", "i4"),
    ]
)
LANES = np.dtype([("thread", "i4"), ("array", "i4"), ("offset", "i8"), ("value", "u1", (16,))])


@dataclass(frozen=True)
class ArrayInfo:
    """An array that a launch used.

    space: "global" (an argument) or "shared". dtype: np.dtype, or "bfloat16", which numpy lacks. before: its bytes
    (uint8) when the launch began; None for shared memory and where no steps are kept.
    """

    name: str
    space: str
    dtype: object
    shape: tuple[int, ...]
    before: np.ndarray | None = None

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return 2 if str(self.dtype) == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


def table(report: Report, name: str, dtype: np.dtype) -> np.ndarray:
    """A copy of one of the report's tables."""
    count = getattr(report, f"n_{name}")
    return (
        np.frombuffer(ctypes.string_at(getattr(report, name) or 0, count * dtype.itemsize), dtype)
        if count
        else np.empty(0, dtype)
    )


# By the numbers of SimCollective in cuda_on_cpu.h.
_WAITS = (
    "__shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync __ballot_sync __any_sync __all_sync "
    "__match_any_sync __syncwarp __reduce_add_sync __reduce_min_sync __reduce_max_sync __reduce_min_sync "
    "__reduce_max_sync __reduce_and_sync __reduce_or_sync __reduce_xor_sync __syncthreads __syncthreads_or "
    "__syncthreads_and __syncthreads_count"
).split()


_DOES = {0: "reads", 1: "writes", 2: "changes atomically"}
_FLAG = (
    "between an atomic and a plain access, too, there has to be a barrier, or a fence and a flag: __threadfence() "
    "before the atomic that says so"
)


class Describer:
    """Puts a fault of one launch into words.

    lines_of: path -> list of Lines. arrays: (name, begin, bytes, bytes of an element, a description) of each array
    argument; shared: the same of each shared array, begin counted from the start of the thread-local block. nulls:
    names of the arguments that were given as None.
    """

    def __init__(self, kernel, grid, block, lines_of, arrays, shared, nulls=()) -> None:
        self.kernel, self.grid, self.block, self.lines_of = kernel, grid, block, lines_of
        self.arrays, self.shared, self.nulls = arrays, shared, nulls

    def exception(self, fault: Fault) -> faults.Fault:
        path = self.lines_of(fault.path)
        facts = {"kernel": self.kernel, "block": fault.block, "thread": fault.thread, "path": path}
        kind = [
            None,
            self._out_of_bounds,
            self._misaligned,
            self._barrier,
            self._shared_race,
            self._global_race,
            self._uninitialised,
            self._lane,
            self._mask,
            self._assertion,
            self._too_long,
            self._division,
            self._stack_overflow,
            self._broken_heap,
            self._process_end,
            self._constant_write,
            self._mixed_calls,
            self._mixed_masks,
            self._width,
        ][fault.kind]
        make, what, hint = kind(fault, facts)
        who = f"thread {fault.thread} of block {fault.block} (grid {_size(self.grid)}, block {_size(self.block)})"
        parts = [what, *self._calls(path), f"  by {who}"]
        if make is faults.MismatchedBarrier:
            parts = [what, f"  in block {fault.block} (grid {_size(self.grid)}, block {_size(self.block)})"]
        if fault.kind in (4, 5, 16, 17):
            facts |= {"other_thread": fault.other_thread, "other_block": fault.other_block}
            other = self.lines_of(fault.other_path)
            facts["other_line"] = other[-1] if other else None
            did = f"{_DOES[fault.other_is_write]} it" if fault.kind < 6 else "waits in it, too"
            same = "the same block" if fault.other_block == fault.block else f"block {fault.other_block}"
            parts += [f"and thread {fault.other_thread} of {same} {did}", *self._calls(other)]
        return make("\n".join([*parts, hint]) if hint else "\n".join(parts), **facts)

    def _calls(self, path) -> list[str]:
        return [f"  at {line.file}:{line.number} in {line.function}: {line.text}" for line in reversed(path)]

    def _place(self, fault) -> tuple[str, str | None, int | None]:
        """(description of the fault's address, the array that holds it or is nearest, the element there)."""
        address, size, best = fault.address, fault.size, None
        if fault.shared_offset == OWN_MEMORY:
            return "past one of the thread's own variables", None, None
        if address == UNKNOWN_ADDRESS:
            return "at an address that no memory has", None, None
        if address < 4096:
            given = f", as of a null pointer; given as None: {', '.join(self.nulls)}" if self.nulls else ""
            return f"at an address near zero ({address:#x}){given}", None, None
        if (shared := fault.kind != 5 and fault.shared_offset >= 0) and self.shared:
            address = fault.shared_offset
        for name, begin, nbytes, itemsize, words in self.shared if shared else self.arrays:
            element, end = (address - begin) // itemsize, begin + nbytes
            if begin <= address and address + size <= end:
                return f"{name}[{element:,}], {words}", name, element
            away = begin - address if address < begin else max(address - end, 0)
            if best is None or away < best[0]:
                side = (
                    f"{begin - address:,} bytes before the start"
                    if address < begin
                    else (
                        f"{address - end:,} bytes past the end"
                        if address > end
                        else "just past the end"
                        if address == end
                        else "across the end"
                    )
                )
                best = (away, f"{side} of {name} (it would be element {element:,}), {words}", name, element)
        if best is None or best[0] > 1 << 24:
            return f"at an address in no array ({address:#x}; memory from malloc or new is none)", None, None
        return best[1:]

    def _verb(self, fault) -> str:
        return _DOES.get(fault.is_write, "uses")

    def _out_of_bounds(self, fault, facts):
        if fault.text:  # the compiler's own check
            index = fault.lane_or_mask - (fault.lane_or_mask >> 63 << 64)
            line = facts["path"][-1].text if facts["path"] else ""
            kind = fault.text.decode().strip("'").replace(" [", "[", 1)
            array, words = next(((a[0], a[4]) for a in self.shared if f"{a[0]}[" in line), (None, ""))
            facts["array"], facts["element"] = array, index if words.endswith(kind[kind.index("[") :]) else None
            return (
                faults.OutOfBounds,
                f"{self.kernel} goes out of bounds: index {index:,} of {array or 'an array'}, {kind}",
                "",
            )
        place, facts["array"], facts["element"] = self._place(fault)
        what = f"{fault.size:,} bytes" if fault.size else "memory"  # of a crash, the address alone is known
        return faults.OutOfBounds, f"{self.kernel} {self._verb(fault)} {what} out of bounds: {place}", ""

    def _misaligned(self, fault, facts):
        place, facts["array"], facts["element"] = self._place(fault)
        return (
            faults.Misaligned,
            (
                f"{self.kernel} {self._verb(fault)} {fault.size} bytes at once at {place}, whose address "
                f"is no multiple of {fault.size}"
            ),
            "",
        )

    def _shared_race(self, fault, facts):
        place, facts["array"], facts["element"] = self._place(fault)
        return (
            faults.SharedRace,
            f"{self.kernel} has a race on shared memory: one thread {self._verb(fault)} {place}",
            (
                "with no barrier in between that both come to: __syncwarp() would do, they are of one warp"
                if fault.thread // 32 == fault.other_thread // 32
                else "with no __syncthreads() in between that both come to"
            )
            + (f"\n{_FLAG}" if 2 in (fault.is_write, fault.other_is_write) else ""),
        )

    def _global_race(self, fault, facts):
        place, facts["array"], facts["element"] = self._place(fault)
        return (
            faults.GlobalRace,
            f"{self.kernel} has a race: one thread {self._verb(fault)} {place}",
            (
                "and nothing puts one before the other"
                if fault.block == fault.other_block
                else "and the order of blocks is not defined (also where both write the same value)"
            )
            + (f"\n{_FLAG}" if 2 in (fault.is_write, fault.other_is_write) else ""),
        )

    def _uninitialised(self, fault, facts):
        place, facts["array"], facts["element"] = self._place(fault)
        return faults.UninitialisedRead, f"{self.kernel} reads {place}, which no thread of the block has written", ""

    def _lane(self, fault, facts):
        return (
            faults.WarpFault,
            (
                f"{self.kernel} shuffles from lane {fault.lane_or_mask}, which takes no part in it: it has "
                "left the kernel, went another way or is not named in the mask"
            ),
            "",
        )

    def _mask(self, fault, facts):
        return (
            faults.WarpFault,
            (
                f"{self.kernel} calls a warp-wide operation with mask {fault.lane_or_mask:#010x}, "
                f"which leaves out the caller, lane {fault.thread % 32}"
            ),
            "",
        )

    def _constant_write(self, fault, facts):
        place, facts["array"], facts["element"] = self._place(fault)
        return (
            faults.ConstantWrite,
            f"{self.kernel} {self._verb(fault)} {place}, which is __constant__: nobody writes it",
            "",
        )

    def _mixed_calls(self, fault, facts):
        return (
            faults.WarpFault,
            f"{self.kernel} lets lanes of one warp meet in a warp-wide operation that they call at different places",
            "every lane that the mask names must come to the same call",
        )

    def _mixed_masks(self, fault, facts):
        mine, other = fault.lane_or_mask & 0xFFFFFFFF, fault.lane_or_mask >> 32
        return (
            faults.WarpFault,
            f"{self.kernel} calls a warp-wide operation with mask {mine:#010x}, and another lane with {other:#010x}",
            "every lane that the masks name must give the same mask",
        )

    def _width(self, fault, facts):
        width = fault.lane_or_mask - (fault.lane_or_mask >> 63 << 64)
        return faults.WarpFault, f"{self.kernel} shuffles with width {width}; 1, 2, 4, 8, 16 and 32 are accepted", ""

    def _assertion(self, fault, facts):
        return faults.AssertionFault, f"{self.kernel} failed {fault.text.decode()}", ""

    def _division(self, fault, facts):
        return faults.DivisionByZero, f"{self.kernel} divides a whole number by zero, or the least one by -1", ""

    def _too_long(self, fault, facts):
        return faults.TooLong, f"{self.kernel} took longer than it was allowed; is there a loop that never ends?", ""

    def _stack_overflow(self, fault, facts):
        return (
            faults.StackOverflow,
            (
                f"{self.kernel} needs more memory for the arrays and calls of one thread than a thread "
                "has; a GPU gives it at most 512 KiB"
            ),
            "",
        )

    def _broken_heap(self, fault, facts):
        what = fault.text.decode()
        if fault.size:  # it lies in an array
            place, facts["array"], facts["element"] = self._place(fault)
            what += f": {place}"
        return faults.BrokenHeap, f"{self.kernel} breaks the memory of malloc and new: {what}", ""

    def _process_end(self, fault, facts):
        return (
            faults.ProcessEnd,
            f"{self.kernel} would end this process with {fault.text.decode()}; a GPU's code has no such call",
            "",
        )

    def _barrier(self, fault, facts):
        places: dict[str, list[int]] = {}
        for i in range(fault.n_waiting):
            w = fault.waiting[i]
            line = (self.lines_of(w.path) or [None])[-1]
            where = f"{line.file}:{line.number}: {line.text}" if line else "?"
            places.setdefault(f"{_WAITS[w.kind]} at {where}", []).append(w.thread)
        words = [f"  {_span(threads)}: {place}" for place, threads in places.items()]
        total = self.block[0] * self.block[1] * self.block[2] - fault.n_waiting
        left = f"\n  {total} threads have left the kernel" if total else ""
        who = "the threads of a block"
        rule = "every thread of the block must come to the same __syncthreads() the same number of times"
        if not any("__syncthreads" in place for place in places):
            who = "the lanes of a warp"
            rule = "every lane that the mask names must come to the same warp-wide operation"
        return (
            faults.MismatchedBarrier,
            (f"{self.kernel}: {who} wait for each other at different places\n" + "\n".join(words) + left),
            rule,
        )


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of each run of consecutive numbers, for numbers in ascending order."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def _span(numbers: list[int]) -> str:
    """ "threads 0-31, 64" """
    spans = runs(sorted(numbers))
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:6]) + (", ..." if len(spans) > 6 else "")
    return f"thread{'s' if len(numbers) > 1 else ''} {text}"


def _size(size: tuple[int, int, int]) -> str:
    kept = list(size)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return " x ".join(map(str, kept))
