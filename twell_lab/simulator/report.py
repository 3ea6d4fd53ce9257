"""The structures that Python and the C++ runtime exchange (the same as in runtime.h), and the words for a fault."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from . import faults
from .arguments import Array

WATCH_FAULTS, WATCH_COUNTS = 1, 2
ANY_USE, NO_WRITES, WRITES_UNLIKELY = 0, 1, 2
OWN_MEMORY, UNKNOWN_ADDRESS = -2, 2**64 - 1

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f64": ctypes.c_double,
    "address": ctypes.c_void_p,
    "text": ctypes.c_char_p,
    "pc": ctypes.c_uint64 * 12,
    "xyz": ctypes.c_uint32 * 3,
    "value": ctypes.c_uint8 * 16,
}


def _structure(name: str, declared: str) -> Any:
    """A class of ctypes structures from "type field field; type field": types of _TYPES, to which this one is added."""
    words = [line.split() for line in declared.split(";")]
    fields = [(field, _TYPES[kind]) for kind, *names in words for field in names]
    _TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return _TYPES[name]


Buffer = _structure("buffer", "u64 begin bytes kind")  # kind: BufferKind of runtime.h
Shared = _structure("shared", "u64 offset bytes")
Launch = _structure(
    "launch",
    "address call arguments; xyz grid block; u32 workers watch; i64 trace_block trace_limit; f64 seconds;"
    "address buffers shared; i32 n_buffers n_shared; u64 thread_local_bytes; i32 cancel guarded",
)
_structure("path", "pc pc; i32 depth pad")
_TYPES["waiting"] = ctypes.POINTER(_structure("waiting", "i32 thread kind; path path"))
Fault = _structure(
    "fault",
    "i32 kind thread other_thread is_write other_is_write pad; u64 size; i64 block other_block;"
    "u64 address; i64 lane_or_mask shared_offset; text text; path path other_path; waiting waiting; i64 n_waiting",
)
Report = _structure(
    "report",
    "fault fault; address sites; i64 n_sites; address footprint; i64 n_footprint; address steps; i64 n_steps;"
    "address lanes; i64 n_lanes; i32 truncated pad",
)
SITES, FOOTPRINT, STEPS, LANES = map(
    np.dtype,
    (
        _structure(
            "sites",
            "pc path; i32 depth kind space pad;"
            "i64 requests accesses bytes sectors lines wavefronts ideal_wavefronts divergent",
        ),
        _structure("footprint", "i64 array read_sectors written_sectors block_read_sectors"),
        _structure("steps", "i32 warp kind space size; pc path; i32 depth pad lanes name"),
        _structure("lanes", "i32 thread array; i64 offset; value value"),
    ),
)


def table(report: Any, name: str, dtype: np.dtype) -> np.ndarray:
    """A copy of one of the report's tables."""
    nbytes = getattr(report, f"n_{name}") * dtype.itemsize
    return np.frombuffer(ctypes.string_at(getattr(report, name) or 0, nbytes), dtype)


# In the order of FaultKind in runtime.h: the exception, what the kernel does and, behind a |, what would be right.
_SAID = """
OutOfBounds {does} {bytes} out of bounds: {place}
Misaligned {does} {size} bytes at once at {place}, whose address is no multiple of {size}
MismatchedBarrier: {who} wait for each other at different places{waiting}|{rule}
SharedRace has a race on shared memory: one thread {does} {place}|with no {barrier}{flag}
GlobalRace has a race: one thread {does} {place}|and {order}{flag}
UninitialisedRead reads {place}, which no thread of the block has written
WarpFault shuffles from lane {value}, which takes no part in it: it has left the kernel, went another way or is not \
named in the mask
WarpFault calls a warp-wide operation with mask {value:#010x}, which leaves out the caller, lane {lane}
AssertionFault failed {text}
TooLong took longer than it was allowed; is there a loop that never ends?
DivisionByZero divides a whole number by zero, or the least one by -1
StackOverflow needs more memory for the arrays and calls of one thread than a thread has; a GPU gives it at most 512 KiB
BrokenHeap breaks the memory of malloc and new: {text}
ProcessEnd would end this process with {text}; a GPU's code has no such call
ConstantWrite {does} {place}, which is __constant__: nobody writes it
WarpFault lets lanes of one warp meet in a warp-wide operation that they call at different places|every lane that the \
mask names must come to the same call
WarpFault calls a warp-wide operation with mask {low:#010x}, and another lane with {high:#010x}|every lane that the \
masks name must give the same mask
WarpFault shuffles with width {value}; 1, 2, 4, 8, 16 and 32 are accepted
""".split("\n")
_OUT_OF_BOUNDS, _BARRIER, _GLOBAL_RACE, _BROKEN_HEAP = 1, 3, 5, 13
_OF_TWO = (4, 5, 16, 17)  # kinds that another thread has a part in
_DOES = {0: "reads", 1: "writes", 2: "changes atomically"}
_FLAG = (
    "\nbetween an atomic and a plain access, too, there has to be a barrier, or a fence and a flag: __threadfence() "
    "before the atomic that says so"
)
# What would order two threads: of different warps, of one; and why nothing does: of different blocks, of one.
_BARRIERS = (
    "__syncthreads() in between that both come to",
    "barrier in between that both come to: __syncwarp() would do, they are of one warp",
)
_ORDERS = (
    "the order of blocks is not defined (also where both write the same value)",
    "nothing puts one before the other",
)
# By the numbers of SimCollective in cuda_on_cpu.h.
_WAITS = (
    "__shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync __ballot_sync __any_sync __all_sync "
    "__match_any_sync __syncwarp __reduce_add_sync __reduce_min_sync __reduce_max_sync __reduce_min_sync "
    "__reduce_max_sync __reduce_and_sync __reduce_or_sync __reduce_xor_sync __syncthreads __syncthreads_or "
    "__syncthreads_and __syncthreads_count"
).split()


def _place(fault: Any, arrays: Sequence[Array], nulls: Sequence[str]) -> tuple[str, str | None, int | None]:
    """(description of the fault's address, the array that holds it or is nearest, the element there)."""
    address = fault.address
    if fault.shared_offset == OWN_MEMORY:
        return "past one of the thread's own variables", None, None
    if address == UNKNOWN_ADDRESS:
        return "at an address that no memory has", None, None
    if address < 4096:
        given = f", as of a null pointer; given as None: {', '.join(nulls)}" if nulls else ""
        return f"at an address near zero ({address:#x}){given}", None, None
    shared = [a for a in arrays if a.space == "shared"]
    in_shared = fault.kind != _GLOBAL_RACE and fault.shared_offset >= 0 and bool(shared)
    address = fault.shared_offset if in_shared else address
    inside = lambda a: a.begin <= address and address + fault.size <= a.begin + a.nbytes  # noqa: E731
    away = lambda a: max(a.begin - address, address - a.begin - a.nbytes, 0)  # noqa: E731
    there = shared if in_shared else [a for a in arrays if a.space == "global"]
    nearest = min(there, key=lambda a: (not inside(a), away(a)), default=None)
    if nearest is None or away(nearest) > 1 << 24:
        return f"at an address in no array ({address:#x}; memory from malloc or new is none)", None, None
    name, past = nearest.name, address - nearest.begin - nearest.nbytes
    element = (address - nearest.begin) // nearest.element
    if inside(nearest):
        return f"{name}[{element:,}], {nearest.words}", name, element
    side = "just past the end" if past == 0 else "across the end"
    if past > 0 or address < nearest.begin:
        side = f"{past:,} bytes past the end" if past > 0 else f"{nearest.begin - address:,} bytes before the start"
    return f"{side} of {name} (it would be element {element:,}), {nearest.words}", name, element


def exception(
    fault: Any,
    kernel: str,
    grid: tuple,
    block: tuple,
    lines_of: Callable,
    arrays: Sequence[Array],
    nulls: Sequence[str],
) -> faults.Fault:
    """A fault of one launch in words. lines_of: path -> Lines. nulls: the names of the arguments given as None."""
    what, *hints = _SAID[fault.kind].split("|")
    kind = getattr(faults, re.match(r"\w+", what)[0])
    what = what.removeprefix(kind.__name__)
    path, value, text = lines_of(fault.path), fault.lane_or_mask, (fault.text or b"").decode()
    facts = {"kernel": kernel, "block": fault.block, "thread": fault.thread, "path": path}
    said = {
        "does": _DOES.get(fault.is_write, "uses"),
        "bytes": f"{fault.size:,} bytes" if fault.size else "memory",  # of a crash, the address alone is known
        "size": fault.size,
        "text": text,
        "value": value,
        "low": value & 0xFFFFFFFF,
        "high": value >> 32 & 0xFFFFFFFF,
        "lane": fault.thread % 32,
        "barrier": _BARRIERS[fault.thread // 32 == fault.other_thread // 32],
        "order": _ORDERS[fault.block == fault.other_block],
        "flag": _FLAG if 2 in (fault.is_write, fault.other_is_write) else "",
    }
    if fault.kind == _OUT_OF_BOUNDS and text:  # the compiler's own check of an index: of which array, its type says
        line, of = path[-1].text if path else "", text.strip("'").replace(" [", "[", 1)
        array = next((a for a in arrays if a.space == "shared" and f"{a.name}[" in line), None)
        facts["array"] = array and array.name
        facts["element"] = value if array and array.words.endswith(of[of.index("[") :]) else None
        what = f" goes out of bounds: index {value:,} of {array.name if array else 'an array'}, {of}"
    elif "{place}" in what or (fault.kind == _BROKEN_HEAP and fault.size):
        said["place"], facts["array"], facts["element"] = _place(fault, arrays, nulls)
        what += ": {place}" if fault.kind == _BROKEN_HEAP else ""
    size = f"of block {fault.block} (grid {_size(grid)}, block {_size(block)})"
    lines = [*_calls(path), f"  by thread {fault.thread} {size}"]
    if fault.kind == _BARRIER:
        said |= _met(fault, lines_of, math.prod(block))
        lines = [size.replace("of", "  in", 1)]
    if fault.kind in _OF_TWO:
        other = lines_of(fault.other_path)
        facts |= {"other_thread": fault.other_thread, "other_block": fault.other_block}
        facts["other_line"] = other[-1] if other else None
        did = f"{_DOES[fault.other_is_write]} it" if "{place}" in what else "waits in it, too"
        same = "the same block" if fault.other_block == fault.block else f"block {fault.other_block}"
        lines += [f"and thread {fault.other_thread} of {same} {did}", *_calls(other)]
    return kind("\n".join([kernel + what.format(**said), *lines, *(hint.format(**said) for hint in hints)]), **facts)


def _met(fault: Any, lines_of: Callable, threads: int) -> dict[str, str]:
    """Who waits where, in words, of threads that do not meet."""
    places: dict[str, list[int]] = {}
    for waiting in fault.waiting[: fault.n_waiting]:
        line = (lines_of(waiting.path) or [None])[-1]
        where = f"{line.file}:{line.number}: {line.text}" if line else "?"
        places.setdefault(f"{_WAITS[waiting.kind]} at {where}", []).append(waiting.thread)
    words = [f"\n  {_span(numbers)}: {where}" for where, numbers in places.items()]
    if left := threads - fault.n_waiting:
        words.append(f"\n  {left} threads have left the kernel")
    who = "the threads of a block"
    rule = "every thread of the block must come to the same __syncthreads() the same number of times"
    if not any("__syncthreads" in where for where in places):
        who, rule = "the lanes of a warp", "every lane that the mask names must come to the same warp-wide operation"
    return {"who": who, "rule": rule, "waiting": "".join(words)}


def _calls(path: list) -> list[str]:
    return [f"  at {line.file}:{line.number} in {line.function}: {line.text}" for line in reversed(path)]


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
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in runs(sorted(numbers))]
    return f"thread{'s' * (len(numbers) > 1)} {', '.join([*spans[:6], *['...'] * (len(spans) > 6)])}"


def _size(size: Sequence[int]) -> str:
    used = max((at for at, n in enumerate(size, 1) if n > 1), default=1)
    return " x ".join(map(str, size[:used]))
