"""The twelve puzzles: how each kernel is launched, what it has to give, and what would miss the point.

Inputs are multiples of a quarter: every order of adding gives the same sum, so that results are compared bit for bit,
and a kernel that keeps them in whole numbers is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...formats.twell import TwELL
from ...simulator.counts import SECTOR
from ...simulator.program import Run
from ..verdicts import UNWRITTEN


@dataclass(frozen=True)
class Case:
    """One launch. arguments: by name, in the order of the kernel's; wanted: what outputs must hold afterwards.

    said: the sizes, in words. look: the block whose steps are kept. used: output -> the places that count (None: all).
    """

    said: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: dict[str, Tensor | int]
    wanted: dict[str, Tensor]
    look: int = 0
    used: dict[str, Tensor] = field(default_factory=dict)


class Seen:
    """What the simulator saw of a launch: `counts` of all of it, and the steps of one block."""

    def __init__(self, run: Run) -> None:
        self.counts, self.trace = run.counts, run.trace

    def elements(self, array: str) -> Counter[int]:
        """Thread -> how many different elements of an array it read."""
        return Counter(thread for threads in self.trace.reads(array).values() for thread in threads)

    def reads(self, array: str | None = None) -> Counter[int]:
        """Thread -> how many elements of an array it read; None: of all arrays together."""
        found: Counter[int] = Counter()
        for step in self.trace:
            if step.kind == "read":
                for thread, name in zip(step.threads, step.arrays, strict=True):
                    found[thread] += max(1, step.count) if name and array in (None, name) else 0
        return found

    def places(self, array: str) -> Counter[int]:
        """Thread -> how many different elements of an array it wrote."""
        return Counter(thread for threads in self.trace.writes(array).values() for thread in threads)

    def sectors(self, array: str) -> int:
        """The sectors that reads of an array touch, instruction by instruction."""
        size = self.trace.arrays[array].itemsize
        return sum(
            len({size * element // SECTOR for element in step.covered})
            for step in self.trace.touching(array)
            if step.kind == "read"
        )

    def operations(self) -> list[str]:
        """The warp-wide operations that hand something around, one for each time that a warp comes to one."""
        return [step.operation for step in self.trace if step.kind == "warp" and step.operation != "__syncwarp"]


Point = Callable[[Case, Seen], str | None]


@dataclass(frozen=True)
class Puzzle:
    """cases: makes fresh launches. point: what of a right launch misses the point, in words, or None. right: what is
    said of an answer that passes."""

    title: str
    minutes: int
    cases: Callable[[], list[Case]]
    point: Point
    right: str


PUZZLES: dict[str, Puzzle] = {}  # by the name of the kernel, its file and its exercise


def _puzzle(title: str, minutes: int, point: Point, right: str):
    """Enter a function that makes the launches of a puzzle, which is called as the puzzle is."""

    def enter(cases: Callable[[], list[Case]]) -> Callable[[], list[Case]]:
        PUZZLES[cases.__name__.removeprefix("_")] = Puzzle(title, minutes, cases, point, right)
        return cases

    return enter


def _numbers(*shape: int) -> Tensor:
    """Multiples of a quarter from -9 to 9. None is zero, so that a place that nobody added is noticed, but one +0 and
    one -0 where there are more than 8."""
    drawn = torch.randint(1, 37, shape) * (2 * torch.randint(0, 2, shape) - 1) / 4
    if drawn.numel() > 8:
        drawn.view(-1)[torch.randperm(drawn.numel())[:2]] = torch.tensor([0.0, -0.0])
    return drawn


def _empty(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan)


def _whole(*shape: int) -> Tensor:
    return torch.full(shape, UNWRITTEN, dtype=torch.int32)


def _busiest(times: Counter[int]) -> tuple[int, int]:
    """(thread, how often) of the thread with the most accesses; (0, 0) where there are none."""
    return max(times.items(), key=lambda item: item[1], default=(0, 0))


def _one_place_each(array: str) -> Point:
    def point(case: Case, seen: Seen) -> str | None:
        thread, places = _busiest(seen.places(array))
        if places > 1:
            return f"thread {thread} writes {places} places of {array} by itself; one for each thread is asked."
        stores, warps = seen.counts.global_writes.requests, math.prod(case.grid) * -(-math.prod(case.block) // 32)
        if stores > warps:  # in a block whose steps were not kept
            return f"{warps} warps store {stores} times; each thread has one place of {array}, to be written once."
        return None

    return point


@_puzzle("map", 5, _one_place_each("out"), "each of the 32 threads has one value.")
def _map() -> list[Case]:
    x = _numbers(32)
    return [Case("32 values", (1,), (32,), {"x": x, "out": _empty(32)}, {"out": 2 * x})]


@_puzzle("guard", 5, _one_place_each("out"), "threads past the end do nothing, at every size tried.")
def _guard() -> list[Case]:
    made = []
    for n in (37, 64, 100, 1):
        x, blocks = _numbers(n), -(-n // 32)
        arguments = {"x": x, "out": _empty(n), "n": n}
        made.append(Case(f"n = {n}", (blocks,), (32,), arguments, {"out": 2 * x}, look=blocks - 1))
    return made


def _strided(case: Case, seen: Seen) -> str | None:
    n, threads = case.arguments["n"], case.grid[0] * case.block[0]
    thread, places = _busiest(seen.places("out"))
    if places > (share := -(-n // threads)):
        return f"thread {thread} writes {places} places; shared out evenly, none has more than {share}."
    moved, least = seen.counts.global_reads.sectors, -(-4 * n // SECTOR)
    if moved > least:
        return (
            f"the loads touch {moved} sectors of {SECTOR} bytes, and the values lie in {least}: neighbouring threads "
            "should take neighbouring values, and then all step on by the number of threads."
        )
    return None


@_puzzle("grid-stride", 10, _strided, "any number of threads does any number of values.")
def _grid_stride() -> list[Case]:
    made = []
    for n, blocks, threads in ((150, 2, 32), (1000, 3, 64), (777, 1, 32), (5, 2, 32)):
        x = _numbers(n)
        said = f"n = {n}, {blocks} blocks of {threads} threads"
        made.append(Case(said, (blocks,), (threads,), {"x": x, "out": _empty(n), "n": n}, {"out": 2 * x}))
    return made


def _read_once(case: Case, seen: Seen) -> str | None:
    reads, values = sum(seen.reads("x").values()), case.block[0]
    if reads > values:
        return (
            f"a block reads x {reads} times, and its row has {values} values: let each thread read its own, and get "
            "its neighbours' from shared memory."
        )
    moved, least = seen.sectors("x"), 4 * values // SECTOR
    if moved > least:
        return f"the loads of x touch {moved} sectors, and a row lies in {least}: let each thread read its own value."
    return _one_place_each("out")(case, seen)


@_puzzle(
    "shared memory and its barrier",
    15,
    _read_once,
    "each value is read once, and nobody reads a neighbour's before it is there.",
)
def _neighbours() -> list[Case]:
    x = _numbers(3, 64)
    sums = x + torch.nn.functional.pad(x, (1, 0))[:, :-1] + torch.nn.functional.pad(x, (0, 1))[:, 1:]
    return [Case("3 rows of 64", (3,), (64,), {"x": x, "out": _empty(3, 64)}, {"out": sums}, look=1)]


MOST_READS = 16  # of one thread in block_sum: folding 64 values in half six times takes 14


def _folded(case: Case, seen: Seen) -> str | None:
    if seen.counts.atomics.accesses:
        return f"{seen.counts.atomics.accesses} atomics wait for each other; fold the halves in shared memory instead."
    thread, reads = _busiest(seen.reads())
    if reads > MOST_READS:
        return (
            f"thread {thread} reads {reads} values while the others wait; where the halves are folded onto each other, "
            "none reads more than 14."
        )
    return None


@_puzzle("reduction", 15, _folded, "64 values folded by all threads together.")
def _block_sum() -> list[Case]:
    x = _numbers(3, 64)
    return [Case("3 rows of 64", (3,), (64,), {"x": x, "out": _empty(3)}, {"out": x.sum(1)}, look=2)]


def _one_ballot(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(seen.elements("x"))
    if reads > 1:
        return f"lane {thread} reads {reads} values; one for each lane is asked."
    if seen.counts.atomics.accesses:
        return "the lanes add with atomics, one after the other; a ballot asks all of them at once."
    used = seen.operations()
    if "__ballot_sync" not in used:
        return f"no lane votes: the warp-wide operations are {', '.join(dict.fromkeys(used)) or 'none'}."
    if len(used) > 1:
        return f"the warp comes to {len(used)} warp-wide operations; one ballot and __popc are enough."
    return None


@_puzzle("ballot and popcount", 10, _one_ballot, "one vote, and its bits counted.")
def _ballot_count() -> list[Case]:
    made = []
    for width in (27, 32, 1):
        x = torch.randint(-3, 4, (5, width)) / 4
        x[:, 0] = torch.tensor([0.0, 0.25, -0.25, -0.0, 0.5])
        arguments = {"x": x, "counts": _whole(5), "width": width}
        wanted = {"counts": (x > 0).sum(1, dtype=torch.int32)}
        made.append(Case(f"rows of {width}", (5,), (32,), arguments, wanted, look=4))
    return made


def _five_steps(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(seen.reads("x"))
    if reads > 1:
        return f"lane {thread} reads {reads} values of x; let each read its own, and get sums from other lanes."
    if seen.counts.shared_writes.accesses or seen.counts.atomics.accesses:
        return "the sums go through memory; a shuffle hands a value from lane to lane without it."
    if (steps := len(seen.operations())) > 6:
        return f"the warp comes to {steps} shuffles; with distances 1, 2, 4, 8 and 16 it is 5."
    return None


@_puzzle("prefix sum in a warp", 15, _five_steps, "32 running sums in a handful of shuffles.")
def _prefix_sum() -> list[Case]:
    x = torch.randint(-9, 10, (3, 32), dtype=torch.int32)
    wanted = {"out": x.cumsum(1, dtype=torch.int32)}
    return [Case("3 rows of 32", (3,), (32,), {"x": x, "out": _whole(3, 32)}, wanted, look=1)]


def _sixteen_bytes(case: Case, seen: Seen) -> str | None:
    n = case.arguments["n"]
    for traffic, verb, kind in (
        (seen.counts.global_reads, "reads", "load"),
        (seen.counts.global_writes, "writes", "store"),
    ):
        least, sectors = -(-n // 128), -(-4 * n // SECTOR)
        if traffic.sectors > sectors:
            return (
                f"the warps touch {traffic.sectors} sectors with their {kind}s, and the values lie in {sectors}: each "
                f"sector is touched {traffic.sectors / sectors:.3g} times as often as needed."
            )
        if traffic.requests > least:
            return (
                f"the warps need {traffic.requests} {kind} instructions; where each lane {verb} 16 bytes at once, "
                f"{least} are enough."
            )
    return None


@_puzzle("vector loads", 10, _sixteen_bytes, "a quarter of the instructions.")
def _vector_loads() -> list[Case]:
    made = []
    for n in (1000, 512, 4):
        x = _numbers(n)
        arguments = {"x": x, "out": _empty(n), "n": n}
        made.append(Case(f"n = {n}", (-(-n // 256),), (64,), arguments, {"out": 2 * x}))
    return made


SPARE = 4  # reads of one entry: the compiler that watches an index may read it twice, and so may a reader


def _counted_once(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(seen.reads("fired"))
    if reads > SPARE:
        return f"thread {thread} reads {reads} entries of fired; one for each thread is asked."
    loads, least = seen.counts.global_reads.requests, -(-case.arguments["n"] // 32)
    if loads > SPARE * least:
        return f"the warps need {loads} load instructions; where each thread reads one entry, {least} are enough."
    return None


@_puzzle("atomics", 5, _counted_once, "no firing is lost, in any order of threads.")
def _neuron_counts() -> list[Case]:
    made = []
    for n, neurons in ((300, 40), (64, 3), (1, 5)):
        fired = torch.randint(0, neurons, (n,), dtype=torch.int32)
        wanted = torch.bincount(fired, minlength=neurons).int()
        arguments = {"fired": fired, "counts": torch.zeros(neurons, dtype=torch.int32), "n": n}
        made.append(Case(f"n = {n}, {neurons} neurons", (-(-n // 64),), (64,), arguments, {"counts": wanted}))
    return made


def _whole_sectors(case: Case, seen: Seen) -> str | None:
    width, row = case.arguments["width"], int(case.arguments["index"][case.look])
    moved, least, start = seen.sectors("table"), 0, 4 * width * row
    for column in range(0, width, 32):  # a load of a warp: of odd widths it begins anywhere in a sector
        first, end = start + 4 * column, start + 4 * min(width, column + 32)
        least += -(-end // SECTOR) - first // SECTOR
    if moved > least:
        return (
            f"a row of {width} floats lies in {least} sectors, and the loads of a warp touch {moved}: let neighbouring "
            "lanes read neighbouring columns."
        )
    return None


@_puzzle("a row gather", 10, _whole_sectors, "each sector of a row is touched once.")
def _gather_rows() -> list[Case]:
    made = []
    for rows, width in ((6, 80), (3, 32), (4, 37), (3, 150), (2, 6)):
        table, index = _numbers(20, width), torch.randint(0, 20, (rows,), dtype=torch.int32)
        arguments = {"table": table, "index": index, "out": _empty(rows, width), "width": width}
        wanted = {"out": table[index.long()]}
        made.append(Case(f"{rows} rows of {width}", (rows,), (32,), arguments, wanted, look=rows - 1))
    return made


TILE, WORDS = 64, 8  # of pack_words


def _packed_by_all(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(seen.elements("gate"))
    if reads > TILE // 32:
        return f"lane {thread} reads {reads} of the {TILE} columns; {TILE // 32} for each lane are enough."
    if not seen.operations():
        return "the lanes ask each other nothing; a ballot tells every lane at once which lanes below it fire."
    return None


@_puzzle(
    "packing one tile",
    20,
    _packed_by_all,
    "the words of TwELL, with the true count of tiles that overflow, and NaN kept.",
)
def _pack_words() -> list[Case]:
    firing = (0, 1, WORDS - 1, WORDS, 33, TILE, 5)
    gate = torch.rand(len(firing), TILE) + 0.01
    order = torch.rand(len(firing), TILE).argsort(1)
    gate = torch.where(order < torch.tensor(firing)[:, None], gate, -gate)
    gate[0, 3], gate[0, 40], gate[6] = -0.0, 0.0, gate[6].where(gate[6] <= 0, torch.nan)  # five NaN fire too
    gate = gate.to(torch.bfloat16)
    stored = TwELL.from_gate(gate, TILE, WORDS)
    wanted = stored.packed[:, 0].int()
    used = torch.arange(WORDS) <= stored.counts
    arguments = {"gate": gate.view(torch.int16), "packed": _whole(len(firing), WORDS)}
    said = f"{len(firing)} tiles in which {', '.join(map(str, firing))} values fire"
    return [Case(said, (len(firing),), (32,), arguments, {"packed": wanted}, look=3, used={"packed": used})]


SIDE = 16  # of the tiles in gemm_tile


def _shared_tiles(case: Case, seen: Seen) -> str | None:
    depth = case.arguments["depth"]
    for array in ("a", "b"):
        reads, values = sum(seen.reads(array).values()), SIDE * depth
        if reads > values:
            return (
                f"a block reads {array} {reads:,} times for {values:,} different values, each "
                f"{reads / values:.3g} times: let each thread bring one value of each tile to shared memory."
            )
        moved, least = seen.sectors(array), 4 * values // SECTOR
        if moved > least:
            return (
                f"the loads of {array} touch {moved:,} sectors, and the values lie in {least:,}: let neighbouring "
                "threads read along a row."
            )
    return None


@_puzzle("a small GEMM tile", 25, _shared_tiles, "each value is read once for 16 products.")
def _gemm_tile() -> list[Case]:
    made = []
    for rows, columns, depth in ((32, 48, 64), (16, 16, 16)):
        a, b = _numbers(rows, depth), _numbers(depth, columns)
        arguments = {"a": a, "b": b, "c": _empty(rows, columns), "columns": columns, "depth": depth}
        said = f"{rows} x {depth} times {depth} x {columns}"
        made.append(Case(said, (columns // SIDE, rows // SIDE), (SIDE, SIDE), arguments, {"c": a @ b}))
    return made
