"""The steps of one block, as the simulator recorded them, and the contents of every array after any of them.

A step is one instruction of one warp. A GPU may run the steps of different warps in another order wherever nothing
makes them wait."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..core import InputError
from .arguments import Array
from .faults import Fault
from .report import runs
from .symbols import Line

KINDS = {0: "read", 1: "write", 2: "atomic", 4: "warp", 5: "barrier", 6: "watch"}
SPACES = {0: None, 1: "global", 2: "shared"}
MEMORY = ("read", "write", "atomic")
_VERBS = {"read": "read", "write": "write", "atomic": "update", "barrier": "wait", "warp": "take"}


@dataclass(frozen=True)
class Step:
    """One instruction of one warp; the tuples have an entry for each lane that takes part.

    kind: "read", "write", "atomic", "warp" (a shuffle, vote or ballot), "barrier", "watch" or, of the last, "fault".
    line: where it stands; path: the calls that lead there, outermost first. arrays: the name of each lane's array;
    array: the one name, None where there are none or several. space: "global", "shared" or None. threads: numbers
    within the block. elements: the first that a lane touches, in the flat array (None outside every array); count: how
    many neighbours it touches (0: a part of one). values: what was read or is there now; what a warp operation gives;
    the watched value. name: what is watched, or the fault. absent: the threads that the mask of a "warp" step names and
    that had left the kernel."""

    index: int
    warp: int
    kind: str
    line: Line | None
    path: tuple
    array: str | None
    arrays: tuple
    space: str | None
    threads: tuple[int, ...]
    elements: tuple[int | None, ...]
    count: int
    values: tuple
    name: str | None
    absent: tuple[int, ...] = ()

    def describe(self) -> str:
        """One sentence: "warp 0, smxx_pack.cu:58: 3 lanes write packed[33..35]"."""
        line = f", {self.line.file}:{self.line.number}" if self.line else ""
        one, s = len(self.threads) == 1, "s" * (len(self.threads) == 1)
        who = f"thread {self.threads[0]}" if one else f"{len(self.threads)} lanes"
        did = f"{who} {_VERBS.get(self.kind, '')}{s}"
        if self.kind == "fault":
            did = str(self.name)
        elif self.kind == "watch":
            did = f"{self.name} is {_span(self.values)} in {who}"
        elif self.kind == "barrier":
            did += " at the barrier"
        elif self.kind == "warp":
            did += f" part in {self.operation}"
            if len(set(self.values)) == 1 and not one:
                did += f", all get {self.values[0]} (0x{self.values[0] % 2**32:x})"
        elif self.array is None:
            named = sorted({name for name in self.arrays if name})
            did += f" {' and '.join(named) or 'memory outside the arrays'}"
        else:
            did += f" {self.array}[{_elements(self.covered)}]{f' = {_number(self.values[0])}' if one else ''}"
        return f"warp {self.warp}{line}: {did}"

    @property
    def covered(self) -> tuple[int, ...]:
        """Every element that the lanes touch, ascending, each once."""
        neighbours = range(max(1, self.count))
        return tuple(sorted({first + i for first in self.elements if first is not None for i in neighbours}))

    @property
    def operation(self) -> str:
        """Return what a collective is called in the source, such as "__ballot_sync"."""
        named = (re.search(r"__\w*sync\w*", line.text) for line in reversed(self.path))
        return next((found[0] for found in named if found), "a warp operation")


class LastTouch(NamedTuple):
    """Who touched each element of an array last: flat arrays of thread and step, -1 where nobody did. wrote: whether
    that was a write or an atomic; written: whether there has been one at all."""

    thread: np.ndarray
    step: np.ndarray
    wrote: np.ndarray
    written: np.ndarray


class State:
    """The arrays after a step: state[name] is a masked array in the array's shape, bfloat16 as float32. What is masked
    was never written. Global arrays begin as at the start of the launch; what other blocks write is not in them."""

    def __init__(self, trace: Trace, step: int) -> None:
        self.step, self._trace = step, trace

    def __getitem__(self, name: str) -> np.ma.MaskedArray:
        return self.part(name, 0, self._trace.size(name)).reshape(self._trace.arrays[name].shape)

    @cached_property
    def watched(self) -> dict[str, dict[int, float]]:
        """Watch name -> thread -> the value it had last."""
        found: dict[str, dict[int, float]] = {}
        for step in self._trace.watches:
            if step.index <= self.step:
                found.setdefault(step.name, {}).update(zip(step.threads, step.values, strict=True))
        return found

    def part(self, array: str, first: int, count: int) -> np.ma.MaskedArray:
        """`count` elements of the flat array from `first`: cheaper than the whole of a large one."""
        of = self._trace.array(array)
        begin, end = first * of.itemsize, (first + count) * of.itemsize
        content = np.zeros(end - begin, np.uint8) if of.before is None else of.before[begin:end].copy()
        known = np.full(end - begin, of.before is not None)
        places, bytes_, when = self._trace.changes[array]
        done = np.flatnonzero((when <= self.step) & (places >= begin) & (places < end))
        content[places[done] - begin] = bytes_[done]  # where a byte is written twice, the later one stays
        known[places[done] - begin] = True
        return np.ma.MaskedArray(_decoded(content, of.dtype), mask=~known.reshape(-1, of.itemsize).all(1))

    def last(self, array: str, first: int = 0, count: int | None = None) -> LastTouch:
        """Who touched each element of this array last, or each of `count` elements from `first`."""
        size = self._trace.size(array) - first if count is None else count
        thread, at, wrote, written = np.full(size, -1), np.full(size, -1), np.zeros(size, bool), np.zeros(size, bool)
        places, threads, steps, writes = self._trace.touches[array]
        done = np.flatnonzero((steps <= self.step) & (places >= first) & (places < first + size))
        places, writes = places[done] - first, writes[done]
        thread[places], at[places], wrote[places] = threads[done], steps[done], writes
        written[places[writes]] = True
        return LastTouch(thread, at, wrote, written)


class Trace(Sequence):
    """The steps of one block, in order: trace[3], len(trace), or `.steps`. arrays: by name. block_shape: threads in x,
    y and z. truncated: whether steps past the recorder's limit are missing. fault: what stopped the block; its step is
    then the last one."""

    fault: Fault | None = None

    def __init__(
        self,
        steps: np.ndarray,
        lanes: np.ndarray,
        lines: Mapping,
        arrays: Iterable,
        names: Sequence[str],
        block_shape: tuple[int, ...],
        truncated: bool = False,
    ) -> None:
        """From what the runtime recorded: a row for each step, with how many rows of `lanes` are its own (report.py).
        lines: pc -> Line; names: of the watches, which `name` of a step counts."""
        self._all = arrays = list(arrays)  # two may have one name
        self.arrays, self.block_shape, self.truncated = {a.name: a for a in arrays}, tuple(block_shape), truncated
        owner = np.repeat(np.arange(len(steps)), steps["lanes"])
        values = _values(steps, owner, lanes, arrays)
        ends = np.cumsum(steps["lanes"]).tolist()
        self.steps = [
            self._step(index, row, lanes[end - row["lanes"] : end], values[end - row["lanes"] : end], lines, names)
            for index, (row, end) in enumerate(zip(steps, ends, strict=True))
        ]
        # Of each array: (place, byte, step) of all that was written, in order.
        self.changes = {array.name: _changes(number, steps, owner, lanes) for number, array in enumerate(arrays)}

    def _step(self, index: int, row, lanes: np.ndarray, values: list, lines: Mapping, names: Sequence[str]) -> Step:
        kind, warp = KINDS[int(row["kind"])], int(row["warp"])
        path = tuple(lines[int(pc)] for pc in row["path"][: row["depth"]])
        numbers, offsets = (lanes[field].tolist() for field in ("array", "offset"))
        owners = [self._all[number] if number >= 0 and kind in MEMORY else None for number in numbers]
        named = tuple(array.name if array else None for array in owners)
        item = next((array.itemsize for array in owners if array), 0)
        return Step(
            index=index,
            warp=warp,
            kind=kind,
            line=path[-1] if path else None,
            path=path,
            array=named[0] if len(set(named)) == 1 else None,
            arrays=named,
            space=SPACES[int(row["space"])],
            threads=tuple(lanes["thread"].tolist()),
            elements=tuple(at // array.itemsize if array else None for at, array in zip(offsets, owners, strict=True)),
            count=int(row["size"]) // item if item and row["size"] % item == 0 else 0,
            values=tuple(values),
            name=names[int(row["name"])] if kind == "watch" else None,
            absent=_absent(warp, lanes, math.prod(self.block_shape)) if kind == "warp" else (),
        )

    def end_with(self, fault: Fault) -> None:
        """Add the step that the fault stopped, which has changed nothing."""
        self.fault, fault.trace = fault, self
        both = fault.other_thread is not None and fault.other_block == fault.block
        threads = tuple(dict.fromkeys((fault.thread, fault.other_thread))) if both else (fault.thread,)
        what, nobody = str(fault).partition("\n")[0], (None,) * len(threads)
        at = (len(self.steps), fault.thread // 32, "fault", fault.line, tuple(fault.path))
        self.steps.append(Step(*at, None, nobody, None, threads, nobody, 0, nobody, what))

    def of_thread(self, thread: int) -> list[int]:
        """The indices of the steps in which a thread of the block takes part."""
        return [step.index for step in self.steps if thread in step.threads]

    def __getitem__(self, index):
        return self.steps[index]

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def barriers(self) -> list[int]:
        """Of each meeting at a block barrier, the index of the step with which its last warp arrives."""
        passed: Counter[int] = Counter()  # the barriers that a warp has come to
        meetings: dict[int, int] = {}
        for step in self.steps:
            if step.kind == "barrier":
                warps = {thread // 32 for thread in step.threads}  # one step may hold the whole block
                passed.update(warps)
                meetings[passed[min(warps)]] = step.index
        return sorted(meetings.values())

    def at(self, step: int) -> State:
        """The state after this step; -1: before the first."""
        if not -1 <= step < len(self.steps):
            raise InputError(f"step is {step!r}; this trace has steps 0 to {len(self.steps) - 1}, and -1 before them")
        return State(self, step)

    def array(self, name: str) -> Array:
        if name not in self.arrays:
            raise InputError(f"array is {name!r}; this trace has {', '.join(self.arrays) or 'none'}")
        return self.arrays[name]

    def size(self, array: str) -> int:
        return math.prod(self.array(array).shape)

    def touching(self, array: str) -> list[Step]:
        """The steps that read or write this array."""
        return self._touching.get(self.array(array).name, [])

    def writes(self, array: str) -> dict[int, tuple[int, ...]]:
        """Element -> the threads that wrote or atomically updated it, ascending."""
        return self._who(array, "read")

    def reads(self, array: str) -> dict[int, tuple[int, ...]]:
        """Element -> the threads that read or atomically updated it, ascending."""
        return self._who(array, "write")

    def _who(self, array: str, other_than: str) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {}
        for element, thread, step, _ in zip(*self.touches[self.array(array).name], strict=True):
            if self.steps[step].kind != other_than:
                found.setdefault(int(element), set()).add(int(thread))
        return {element: tuple(sorted(threads)) for element, threads in sorted(found.items())}

    @cached_property
    def watches(self) -> list[Step]:
        return [step for step in self.steps if step.kind == "watch"]

    @cached_property
    def touches(self) -> dict[str, tuple]:
        """(element, thread, step, whether written) of every access to each array, in order, as flat arrays."""
        found = {}
        for name in self.arrays:
            rows = [
                (first + i, thread, step.index, step.kind != "read")
                for step in self.touching(name)
                for thread, first, array in zip(step.threads, step.elements, step.arrays, strict=True)
                if array == name
                for i in range(max(1, step.count))
            ]
            columns = np.array(rows, np.int64).reshape(-1, 4).T
            found[name] = (*columns[:3], columns[3].astype(bool))
        return found

    @cached_property
    def _touching(self) -> dict[str, list[Step]]:
        found: dict[str, list[Step]] = {}
        for step in self.steps:
            for name in set(step.arrays) - {None}:
                found.setdefault(name, []).append(step)
        return found


def _absent(warp: int, lanes: np.ndarray, threads: int) -> tuple[int, ...]:
    bits = int(np.bitwise_or.reduce(np.ascontiguousarray(lanes["value"][:, 8:12]).view("<u4").reshape(-1)))
    return tuple(thread for thread in range(32 * warp, min(32 * warp + 32, threads)) if bits >> thread % 32 & 1)


def _values(steps: np.ndarray, owner: np.ndarray, lanes: np.ndarray, arrays: list) -> list:
    found: list = [None] * len(lanes)
    sorts = np.stack([steps["kind"][owner], steps["size"][owner], lanes["array"]], 1)
    for kind, size, number in np.unique(sorts, axis=0):
        rows = np.flatnonzero((sorts == (kind, size, number)).all(1))
        word = KINDS[int(kind)]
        if word not in MEMORY:
            size, dtype = 8, "<f8" if word == "watch" else "<i8"
        elif number < 0 or size % arrays[number].itemsize:
            dtype = f"<u{size}" if size in (1, 2, 4, 8) else "u1"
        else:
            dtype = arrays[number].dtype
        content = np.ascontiguousarray(lanes["value"][rows][:, :size]).reshape(-1)
        for row, value in zip(rows.tolist(), _decoded(content, dtype).reshape(len(rows), -1).tolist(), strict=True):
            found[row] = value[0] if len(value) == 1 else tuple(value)
    return found


def _changes(number: int, steps: np.ndarray, owner: np.ndarray, lanes: np.ndarray) -> tuple:
    chosen = np.flatnonzero(np.isin(steps["kind"][owner], (1, 2)) & (lanes["array"] == number))
    sizes = steps["size"][owner[chosen]]
    within = np.arange(lanes["value"].shape[1])[None] < sizes[:, None]
    places = lanes["offset"][chosen][:, None] + np.arange(within.shape[1])
    return places[within], lanes["value"][chosen][within], np.repeat(owner[chosen], sizes)


def _decoded(bytes_: np.ndarray, dtype) -> np.ndarray:
    if str(dtype) == "bfloat16":  # the upper half of a float
        return (bytes_.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return bytes_.view(np.dtype(dtype))


def _number(value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_number, value))})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _span(values: tuple) -> str:
    least, most = min(values), max(values)
    return _number(least) if least == most else f"{_number(least)}..{_number(most)}"


def _elements(elements: Sequence[int]) -> str:
    """[33, 34, 35] -> "33..35"; up to four runs are listed, of more the first two and the last."""
    texts = [f"{first}..{last}" if last > first else f"{first}" for first, last in runs(elements)]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:2], "..", texts[-1]])
