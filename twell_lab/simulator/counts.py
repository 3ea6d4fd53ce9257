"""What a launch read and wrote, counted by the simulator, and the time that would take.

The counts are those of the source as it is written. A GPU's compiler may keep in registers what is counted here as a
second read, and its caches serve most repeated reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..core import InputError

SECTOR = 32  # bytes: the smallest piece that moves between the caches and the device memory
READ, WRITE, ATOMIC, BRANCH, WARP, BARRIER = range(6)  # kinds of a site
GLOBAL, SHARED = 1, 2  # spaces of a site


class Traffic(NamedTuple):
    """Accesses of one sort. requests: instructions of a warp, however many of its lanes take part. accesses: lanes that
    took part, over all requests. bytes: what the lanes asked for. sectors, lines: of 32 and of 128 bytes, touched by
    each request and summed over them; global memory only. wavefronts: passes over the 32 banks, and ideal_wavefronts:
    how few these could be; shared memory only."""

    requests: int = 0
    accesses: int = 0
    bytes: int = 0
    sectors: int = 0
    lines: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    @property
    def coalescing(self) -> float:
        """Bytes asked for, as a share of the bytes of the sectors they lie in; nan without sectors, and above 1 where
        several lanes of a request ask for the same bytes."""
        return self.bytes / (SECTOR * self.sectors) if self.sectors else math.nan

    @property
    def bank_conflicts(self) -> int:
        """Passes over the banks beyond those that the bytes alone would take."""
        return self.wavefronts - self.ideal_wavefronts

    def scaled(self, factor: float) -> Traffic:
        return Traffic(*(round(n * factor) for n in self))


class Footprint(NamedTuple):
    """The different 32-byte sectors of one array that a launch read and wrote: each counted once, however often it was
    used. block_read_sectors: those that each block read, summed over the blocks. bytes: the array's size."""

    read_sectors: int = 0
    written_sectors: int = 0
    block_read_sectors: int = 0
    bytes: int = 0

    def scaled(self, factor: float, same_size: bool) -> Footprint:
        size = self.bytes if same_size else round(self.bytes * factor)
        most = math.ceil(size / SECTOR)
        read, written = (min(round(n * factor), most) for n in (self.read_sectors, self.written_sectors))
        return Footprint(read, written, round(self.block_read_sectors * factor), size)


# Which sites count to what: their kind and space (None: any), and of numbers the field that is summed.
_SORTS = {
    "global_reads": (READ, GLOBAL),
    "global_writes": (WRITE, GLOBAL),
    "shared_reads": (READ, SHARED),
    "shared_writes": (WRITE, SHARED),
    "atomics": (ATOMIC, None),
}
_NUMBERS = {
    "collectives": (WARP, "requests"),
    "barriers": (BARRIER, "requests"),
    "divergent_branches": (BRANCH, "divergent"),
}


@dataclass(frozen=True, repr=False)
class Counts:
    """The counts of one launch, summed over the grid. collectives: warps at a shuffle, vote or ballot. barriers: warps
    at a block barrier. divergent_branches: how often the lanes of a warp went different ways. threads: of the whole
    grid. footprints: by the array's name."""

    global_reads: Traffic = Traffic()
    global_writes: Traffic = Traffic()
    shared_reads: Traffic = Traffic()
    shared_writes: Traffic = Traffic()
    atomics: Traffic = Traffic()
    collectives: int = 0
    barriers: int = 0
    divergent_branches: int = 0
    threads: int = 0
    footprints: Mapping[str, Footprint] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: np.ndarray, footprint: np.ndarray, arrays: Sequence, threads: int) -> Counts:
        """From what the runtime recorded: a row for each place in the code, and for each array (report.py)."""
        found: dict[str, Any] = {}
        for name, (kind, space) in _SORTS.items():
            chosen = sites[(sites["kind"] == kind) & ((sites["space"] == space) | (space is None))]
            found[name] = Traffic(*(int(chosen[number].sum()) for number in Traffic._fields))
        for name, (kind, summed) in _NUMBERS.items():
            found[name] = int(sites[summed][sites["kind"] == kind].sum())
        touched = {
            arrays[at].name: Footprint(read, written, block_read, arrays[at].nbytes)
            for at, read, written, block_read in footprint.tolist()
        }
        return cls(**found, threads=threads, footprints=touched)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The five sorts of accesses by name."""
        return {name: getattr(self, name) for name in _SORTS}

    def unique_bytes(self, array: str, way: str) -> int:
        """Bytes of the different sectors of an array: those "read", or those "written"."""
        if way not in ("read", "written"):
            raise InputError(f"way is {way!r}; 'read' and 'written' are accepted")
        self.check_touched([array], "array")
        return SECTOR * getattr(self.footprints[array], f"{way}_sectors")

    def check_touched(self, names: Iterable[str], what: str) -> None:
        if unknown := sorted(set(names) - set(self.footprints)):
            touched = ", ".join(self.footprints) or "none"
            raise InputError(f"{what} names {', '.join(map(repr, unknown))}; this launch touched {touched}")

    def scaled(self, factor: float, same_size: Iterable[str] = ()) -> Counts:
        """The counts of a launch `factor` times as large, where the work grows with the rows, as in all kernels here.
        same_size: arrays that do not grow with the rows, such as the weights; no more of them can be touched than there
        is."""
        if not factor > 0:
            raise InputError(f"factor is {factor!r}; a number above 0 is accepted")
        self.check_touched(same_size := set(same_size), "same_size")
        grown: dict = {name: sort.scaled(factor) for name, sort in self.traffic.items()}
        grown |= {name: round(getattr(self, name) * factor) for name in _NUMBERS}
        touched = {name: at.scaled(factor, name in same_size) for name, at in self.footprints.items()}
        return replace(self, **grown, threads=round(self.threads * factor), footprints=touched)

    def __repr__(self) -> str:
        lines = []
        for name, sort in self.traffic.items():
            numbers = {**sort._asdict(), "bank conflicts": sort.bank_conflicts}
            said = [f"{count:,} {what.replace('_', ' ')}" for what, count in numbers.items() if count]
            said += [f"{sort.coalescing:.0%} coalescing"] if sort.sectors else []
            lines += [f"{name.replace('_', ' ')}: {', '.join(said)}"] if said else []
        for name in self.footprints:
            read, written = (self.unique_bytes(name, way) for way in ("read", "written"))
            lines.append(f"{name}: {read:,} different bytes read, {written:,} written")
        said = [f"{getattr(self, name):,} {name.replace('_', ' ')}" for name in ("threads", *_NUMBERS)]
        return "\n".join([*lines, ", ".join(said)])


@dataclass(frozen=True)
class Gpu:
    """What a prediction needs to know of a GPU. Rates are what a kernel can reach, not a datasheet's peak. kept_bytes:
    how many bytes of rows that are read again and again its L2 cache keeps, the most read ones."""

    name: str
    multiprocessors: int
    clock_hz: float
    memory_bytes_per_s: float
    l2_bytes_per_s: float
    source: str
    kept_bytes: float = math.inf


H100 = Gpu(
    "H100 SXM",
    132,
    1.98e9,
    3.0e12,
    7.4e12,
    source="rates that were reached on an H100 SXM: 3.0 TB/s by a large copy, about 7.4 TB/s by reads of the L2; "
    "1.98 GHz while the packing kernels run; four fifths of 50 MiB of L2 are taken to keep rows",
    kept_bytes=0.8 * 50 * 2**20,
)


@dataclass(frozen=True)
class Prediction:
    """The time each part of a GPU would need, in seconds by name; the slowest of them is the prediction. Nothing here
    knows of instructions, latencies or the cost of starting, so most kernels are slower."""

    gpu: Gpu
    bounds: Mapping[str, float]

    @property
    def limit(self) -> str:
        """The name of the slowest part."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def seconds(self) -> float:
        return self.bounds[self.limit]


def _read_again(counts: Counts, kept_bytes: float, rows: Mapping[str, np.ndarray | Sequence[float]]) -> float:
    """Sectors that come from memory once more for a block, since the L2 no longer keeps their row."""
    counts.check_touched(rows, "rows")
    all_rows = []  # (share of its array's reads, bytes, sectors that would come again) of each row of each array
    for name, reads in rows.items():
        often, of = np.asarray(reads, float), counts.footprints[name]
        if often.ndim != 1 or not (np.isfinite(often) & (often >= 0)).all() or not often.sum() > 0:
            raise InputError(f"rows[{name!r}] is {often}; finite numbers from 0 up, not all 0, are accepted")
        share, asked = often / often.sum(), max(0, of.block_read_sectors - of.read_sectors)
        all_rows += [np.stack([share, np.full(len(share), of.bytes / len(share)), share * asked])]
    share, size, again = np.concatenate([np.empty((3, 0)), *all_rows], 1)
    order = np.argsort(-share, kind="stable")
    return float(again[order[np.cumsum(size[order]) > kept_bytes]].sum())


def predicted_time(
    counts: Counts, gpu: Gpu = H100, rows: Mapping[str, np.ndarray | Sequence[float]] = MappingProxyType({})
) -> Prediction:
    """Return how long the parts of a GPU would need for these counts, in seconds, each alone and at its full rate.

    rows: of arrays that many blocks read, such as weights: how often each row of one is read, in any unit. Those that
    the L2 does not keep (Gpu.kept_bytes) come from memory for each block that reads them. Raises InputError for an
    array that was not touched, and for what cannot be such numbers.

    "device memory": every different sector once, read and written, and those rows again. "L2 cache": the different
    sectors that each block reads, and those of every write. "L1 cache": each 128-byte line of each request, and each
    pass over the banks of shared memory, takes its multiprocessor a cycle, as counters of an H100 confirm."""
    unique = sum(at.read_sectors + at.written_sectors for at in counts.footprints.values())
    again = _read_again(counts, gpu.kept_bytes, rows)
    passed_on = sum(at.block_read_sectors for at in counts.footprints.values())
    passed_on += counts.global_writes.sectors + counts.atomics.sectors
    looked_up = sum(sort.lines + sort.wavefronts for sort in counts.traffic.values())
    bounds = {
        "device memory": SECTOR * (unique + again) / gpu.memory_bytes_per_s,
        "L2 cache": SECTOR * passed_on / gpu.l2_bytes_per_s,
        "L1 cache": looked_up / (gpu.multiprocessors * gpu.clock_hz),
    }
    return Prediction(gpu, bounds)
