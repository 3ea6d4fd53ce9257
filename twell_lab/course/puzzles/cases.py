"""The kernels that readers write: how each is launched, what it has to give, and what would miss the point. Inputs are
multiples of a quarter: every order of adding gives the same sum, so that results are compared bit for bit, and a kernel
that keeps them in whole numbers is wrong. Where the order matters, products are exact: a GPU that does not round them
before it adds gives the same bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...formats.twell import TwELL
from ...simulator.counts import SECTOR
from ...simulator.program import Run
from ..capstone.cases import sectors_of
from ..verdicts import UNWRITTEN


class Out(NamedTuple):
    """An output of a kernel: what it must hold afterwards. used: the places that count. read: what makes all right ways
    to fill it alike. before: what it holds until then, if not UNWRITTEN or NaN."""

    wanted: Tensor
    used: Tensor | None = None
    read: Callable[[Tensor], Tensor] | None = None
    before: Tensor | None = None

    def begin(self) -> Tensor:
        """Return what a launch finds there."""
        fill = torch.nan if self.wanted.is_floating_point() else UNWRITTEN
        empty = torch.full(self.wanted.shape, fill, dtype=self.wanted.dtype)
        return empty if self.before is None else self.before


class Case:
    """One launch. said: the sizes, in words. look: the block whose steps are kept. race: what is said of a race on
    shared memory, if not that a barrier is missing. given: the kernel's arguments by name, in its order, outputs as
    Out."""

    def __init__(
        self, said: str, grid: tuple, block: tuple, look: int = 0, race: str = "", **given: Tensor | int | Out
    ):
        self.said, self.grid, self.block, self.look, self.race = said, tuple(grid), block, look, race
        outs = {name: out for name, out in given.items() if isinstance(out, Out)}
        self.arguments: dict[str, Tensor | int] = given | {name: out.begin() for name, out in outs.items()}
        self.wanted = {name: out.wanted for name, out in outs.items()}
        self.used = {name: out.used for name, out in outs.items() if out.used is not None}
        self.read = {name: out.read for name, out in outs.items() if out.read}


class Seen:
    """What the simulator saw of a launch: `counts` of all of it, and the steps of one block."""

    def __init__(self, run: Run) -> None:
        self.counts, self.trace = run.counts, run.trace

    def reads(self, array: str | None = None) -> Counter[int]:
        """Thread -> how many elements of an array it read; None: of all arrays together."""
        found: Counter[int] = Counter()
        for step in self.trace:
            if step.kind == "read":
                for thread, name in zip(step.threads, step.arrays, strict=True):
                    found[thread] += max(1, step.count) if name and array in (None, name) else 0
        return found

    def sectors(self, array: str) -> int:
        """The sectors that reads of an array touch, instruction by instruction."""
        size, steps = self.trace.arrays[array].itemsize, self.trace.touching(array)
        return sum(len({size * element // SECTOR for element in step.covered}) for step in steps if step.kind == "read")

    def operations(self) -> list[str]:
        """The warp-wide operations that hand something around, one for each time that a warp comes to one."""
        return [step.operation for step in self.trace if step.kind == "warp" and step.operation != "__syncwarp"]


Point = Callable[[Case, Seen], str | None]


@dataclass(frozen=True)
class Puzzle:
    """cases: makes fresh launches. point: what of a right launch misses the point, in words, or None. right: what is
    said of an answer that passes. notebook: the number of the one that asks for it."""

    title: str
    minutes: int
    cases: Callable[[], list[Case]]
    point: Point
    right: str
    notebook: str = "06"


PUZZLES: dict[str, Puzzle] = {}  # by the name of the kernel, its file and its exercise
TILE, WORDS = 64, 8  # of pack_words
SIDE = 16  # of the tiles in gemm_tile
STAGE = 32  # rows and columns of a stage of two_stages
MOST_READS = 16  # of one thread in block_sum: folding 64 values in half six times takes 14
SPARE = 4  # reads of one entry: the compiler that watches an index may read it twice, and so may a reader


def _puzzle(title: str, minutes: int, point: Point, right: str, notebook: str = "06"):
    """Enter a function that makes the launches of a puzzle, which is called as the puzzle is."""

    def enter(cases: Callable[[], Iterator[Case]]) -> None:
        drawn = lambda: list(cases())
        PUZZLES[cases.__name__.removeprefix("_")] = Puzzle(title, minutes, drawn, point, right, notebook)

    return enter


def _numbers(*shape: int) -> Tensor:
    """Multiples of a quarter from -9 to 9. None is zero, so that a place that nobody added is noticed, but one +0 and
    one -0 where there are more than 8."""
    drawn = torch.randint(1, 37, shape) * (2 * torch.randint(0, 2, shape) - 1) / 4
    if drawn.numel() > 8:
        drawn.view(-1)[torch.randperm(drawn.numel())[:2]] = torch.tensor([0.0, -0.0])
    return drawn


def _busiest(threads: Iterable[int]) -> tuple[int, int]:
    """(thread, how often) of the one that comes up most often; (0, 0) where there is none."""
    return next(iter(Counter(threads).most_common(1)), (0, 0))


def _first(*limits: tuple[bool, str]) -> str | None:
    """Return what is said of the first that is passed, or None."""
    return next((said for passed, said in limits if passed), None)


def _spread(what: str, moved: int, least: int, advice: str) -> tuple[bool, str]:
    """Whether loads of something touch more sectors than it lies in, and what is said of it."""
    return moved > least, f"the loads of {what} touch {moved:,} sectors, and the values lie in {least:,}: {advice}."


def _one_place_each(case: Case, seen: Seen) -> str | None:
    thread, places = _busiest(chain(*seen.trace.writes("out").values()))
    stores, warps = seen.counts.global_writes.requests, math.prod(case.grid) * -(-math.prod(case.block) // 32)
    by_itself = f"thread {thread} writes {places} places of out by itself; one for each thread is asked."
    elsewhere = f"{warps} warps store {stores} times; each thread has one place of out, to be written once."
    return _first((places > 1, by_itself), (stores > warps, elsewhere))  # the second: in blocks not looked at


@_puzzle("map", 5, _one_place_each, "each of the 32 threads has one value.")
def _map() -> Iterator[Case]:
    x = _numbers(32)
    yield Case("32 values", (1,), (32,), x=x, out=Out(2 * x))


@_puzzle("guard", 5, _one_place_each, "threads past the end do nothing, at every size tried.")
def _guard() -> Iterator[Case]:
    for n in (37, 64, 100, 1):
        x, blocks = _numbers(n), -(-n // 32)
        yield Case(f"n = {n}", (blocks,), (32,), look=blocks - 1, x=x, out=Out(2 * x), n=n)


def _strided(case: Case, seen: Seen) -> str | None:
    n, threads = case.arguments["n"], case.grid[0] * case.block[0]
    (thread, places), share = _busiest(chain(*seen.trace.writes("out").values())), -(-n // threads)
    advice = "neighbouring threads should take neighbouring values, and then all step on by the number of threads"
    return _first(
        (places > share, f"thread {thread} writes {places} places; shared out evenly, none has more than {share}."),
        _spread("x", seen.counts.global_reads.sectors, -(-4 * n // SECTOR), advice),
    )


@_puzzle("grid-stride", 10, _strided, "any number of threads does any number of values.")
def _grid_stride() -> Iterator[Case]:
    for n, blocks, threads in ((150, 2, 32), (1000, 3, 64), (777, 1, 32), (5, 2, 32)):
        x, said = _numbers(n), f"n = {n}, {blocks} blocks of {threads} threads"
        yield Case(said, (blocks,), (threads,), x=x, out=Out(2 * x), n=n)


@_puzzle("2-D indices", 10, _one_place_each, "a thread has a row and a column, and stays within both.")
def _add_bias() -> Iterator[Case]:
    for rows, columns in ((6, 40), (4, 32), (9, 7), (1, 65)):
        x, bias, grid = _numbers(rows, columns), _numbers(columns), (-(-columns // 32), -(-rows // 4))
        given = {"x": x, "bias": bias, "out": Out(x + bias), "rows": rows, "columns": columns}
        yield Case(f"{rows} rows of {columns}", grid, (32, 4), look=math.prod(grid) - 1, **given)


def _read_once(case: Case, seen: Seen) -> str | None:
    reads, values = sum(seen.reads("x").values()), case.block[0]
    again = f"a block reads x {reads} times, and its row has {values} values"
    return _first(
        (reads > values, f"{again}: let each thread read its own, and get its neighbours' from shared memory."),
        _spread("x", seen.sectors("x"), 4 * values // SECTOR, "let each thread read its own value"),
    ) or _one_place_each(case, seen)


@_puzzle(
    "shared memory and its barrier",
    15,
    _read_once,
    "each value is read once, and nobody reads a neighbour's before it is there.",
)
def _neighbours() -> Iterator[Case]:
    x = _numbers(3, 64)
    sums = x + torch.nn.functional.pad(x, (1, 0))[:, :-1] + torch.nn.functional.pad(x, (0, 1))[:, 1:]
    yield Case("3 rows of 64", (3,), (64,), look=1, x=x, out=Out(sums))


def _folded(case: Case, seen: Seen) -> str | None:
    (thread, reads), atomics = _busiest(seen.reads()), seen.counts.atomics.accesses
    folded = "where the halves are folded onto each other, none reads more than 14"
    return _first(
        (atomics > 0, f"{atomics} atomics wait for each other; fold the halves in shared memory instead."),
        (reads > MOST_READS, f"thread {thread} reads {reads} values while the others wait; {folded}."),
    )


@_puzzle("reduction", 15, _folded, "64 values folded by all threads together.")
def _block_sum() -> Iterator[Case]:
    x = _numbers(3, 64)
    yield Case("3 rows of 64", (3,), (64,), look=2, x=x, out=Out(x.sum(1)))


def _one_ballot(case: Case, seen: Seen) -> str | None:
    (thread, reads), used = _busiest(chain(*seen.trace.reads("x").values())), seen.operations()
    adds = "the lanes add with atomics, one after the other; a ballot asks all of them at once."
    other = f"no lane votes: the warp-wide operations are {', '.join(dict.fromkeys(used)) or 'none'}."
    return _first(
        (reads > 1, f"lane {thread} reads {reads} values; one for each lane is asked."),
        (seen.counts.atomics.accesses > 0, adds),
        ("__ballot_sync" not in used, other),
        (len(used) > 1, f"the warp comes to {len(used)} warp-wide operations; one ballot and __popc are enough."),
    )


@_puzzle("ballot and popcount", 10, _one_ballot, "one vote, and its bits counted.")
def _ballot_count() -> Iterator[Case]:
    for width in (27, 32, 1):
        x = torch.randint(-3, 4, (5, width)) / 4
        x[:, 0] = torch.tensor([0.0, 0.25, -0.25, -0.0, 0.5])
        counts = Out((x > 0).sum(1, dtype=torch.int32))
        yield Case(f"rows of {width}", (5,), (32,), look=4, x=x, counts=counts, width=width)


def _by_shuffles(seen: Seen, distances: str) -> str | None:
    steps, through = len(seen.operations()), seen.counts.shared_writes.accesses or seen.counts.atomics.accesses
    return _first(
        (through > 0, "the sums go through memory; a shuffle hands a value from lane to lane without it."),
        (steps > 6, f"the warp comes to {steps} shuffles; with distances {distances} it is 5."),
    )


def _five_steps(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(seen.reads("x"))
    alone = f"lane {thread} reads {reads} values of x; let each read its own, and get sums from other lanes."
    return alone if reads > 1 else _by_shuffles(seen, "1, 2, 4, 8 and 16")


@_puzzle("prefix sum in a warp", 15, _five_steps, "32 running sums in a handful of shuffles.")
def _prefix_sum() -> Iterator[Case]:
    x = torch.randint(-9, 10, (3, 32), dtype=torch.int32)
    yield Case("3 rows of 32", (3,), (32,), look=1, x=x, out=Out(x.cumsum(1, dtype=torch.int32)))


def _along_rows(array: str, rows: list[int], case: Case, seen: Seen) -> str | None:
    """Return what is wrong with loads that touch more than the sectors of these rows, in words."""
    width = case.arguments[array].shape[1]
    steps = [(width * row + column, min(32, width - column)) for row in rows for column in range(0, width, 32)]
    least = sum(sectors_of(*step, size=4) for step in steps)
    return _first(_spread(array, seen.sectors(array), least, "let neighbouring lanes read neighbouring columns"))


def _dot_by_shuffles(case: Case, seen: Seen) -> str | None:
    return _by_shuffles(seen, "16, 8, 4, 2 and 1") or _along_rows("x", [case.look], case, seen)


@_puzzle("a dot product in a warp", 15, _dot_by_shuffles, "32 partial sums, and five shuffles make one of them.")
def _warp_dot() -> Iterator[Case]:
    for rows, width in ((3, 80), (2, 32), (3, 37), (2, 5)):
        x, w = _numbers(rows, width), _numbers(width)
        yield Case(f"{rows} rows of {width}", (rows,), (32,), look=rows - 1, x=x, w=w, out=Out(x @ w), width=width)


def _sixteen_bytes(case: Case, seen: Seen) -> str | None:
    n = case.arguments["n"]
    least, limits, advice = -(-n // 128), [], "let neighbouring lanes take neighbouring values"
    for what, traffic in (("x", seen.counts.global_reads), ("out, and its stores,", seen.counts.global_writes)):
        need = f"the warps need {traffic.requests} load instructions"
        many = f"{need}; where each lane reads 16 bytes at once, {least} are enough."
        limits += [_spread(what, traffic.sectors, -(-4 * n // SECTOR), advice), (traffic.requests > least, many)]
    return _first(*limits)


@_puzzle("vector loads", 10, _sixteen_bytes, "a quarter of the instructions.")
def _vector_loads() -> Iterator[Case]:
    for n in (1000, 512, 4):
        x = _numbers(n)
        yield Case(f"n = {n}", (-(-n // 256),), (64,), x=x, out=Out(2 * x), n=n)


def _one_entry_each(array: str, arrays: int) -> Point:
    """arrays: how many a thread has to read, this one among them."""

    def point(case: Case, seen: Seen) -> str | None:
        thread, reads = _busiest(seen.reads(array))
        loads, least = seen.counts.global_reads.requests, arrays * -(-case.arguments["n"] // 32)
        need = f"the warps need {loads} load instructions; where each thread reads one entry, {least} are enough."
        return _first(
            (reads > SPARE, f"thread {thread} reads {reads} entries of {array}; one for each thread is asked."),
            (loads > SPARE * least, need),
        )

    return point


@_puzzle("atomics", 5, _one_entry_each("fired", 1), "no firing is lost, in any order of threads.")
def _neuron_counts() -> Iterator[Case]:
    for n, neurons in ((300, 40), (64, 3), (1, 5)):
        fired = torch.randint(0, neurons, (n,), dtype=torch.int32)
        wanted = torch.bincount(fired, minlength=neurons).int()
        counts = Out(wanted, before=torch.zeros_like(wanted))
        yield Case(f"n = {n}, {neurons} neurons", (-(-n // 64),), (64,), fired=fired, counts=counts, n=n)


def _whole_sectors(case: Case, seen: Seen) -> str | None:
    return _along_rows("table", [int(case.arguments["index"][case.look])], case, seen)


@_puzzle("a row gather", 10, _whole_sectors, "each sector of a row is touched once.")
def _gather_rows() -> Iterator[Case]:
    for rows, width in ((6, 80), (3, 32), (4, 37), (3, 150), (2, 6)):
        table, index = _numbers(20, width), torch.randint(0, 20, (rows,), dtype=torch.int32)
        given = {"table": table, "index": index, "out": Out(table[index.long()]), "width": width}
        yield Case(f"{rows} rows of {width}", (rows,), (32,), look=rows - 1, **given)


def _gathered_once(case: Case, seen: Seen) -> str | None:
    stores, least = seen.counts.global_writes.requests, case.grid[0] * -(-case.arguments["width"] // 32)
    again = f"the warps store {stores} times, and {least} are enough: add up in a variable, and write it once."
    return again if stores > least else _along_rows("table", case.arguments["index"][case.look].tolist(), case, seen)


@_puzzle("gather and multiply", 15, _gathered_once, "each row that is wanted is read once, times its value.")
def _gather_multiply() -> Iterator[Case]:
    for rows, count, width in ((3, 5, 150), (2, 1, 64), (4, 7, 20)):
        table, index = _numbers(20, width), torch.stack([torch.randperm(20)[:count] for _ in range(rows)])
        values = _numbers(rows, count)
        out = Out((values[..., None] * table[index]).sum(1))
        given = {"values": values, "index": index.int(), "table": table, "out": out, "count": count, "width": width}
        yield Case(f"{rows} rows of {count} values, and {width} columns", (rows,), (64,), look=rows - 1, **given)


def _votes(case: Case, seen: Seen) -> str | None:
    asked = "the lanes ask each other nothing; a ballot tells every lane at once which lanes below it fire."
    return None if seen.operations() else asked


def _packed_by_all(case: Case, seen: Seen) -> str | None:
    thread, reads = _busiest(chain(*seen.trace.reads("gate").values()))
    many = f"lane {thread} reads {reads} of the {TILE} columns; {TILE // 32} for each lane are enough."
    return many if reads > TILE // 32 else _votes(case, seen)


@_puzzle(
    "packing one tile",
    20,
    _packed_by_all,
    "the words of TwELL, with the true count of tiles that overflow, and NaN kept.",
)
def _pack_words() -> Iterator[Case]:
    firing = (0, 1, WORDS - 1, WORDS, 33, TILE, 5)
    gate = torch.rand(len(firing), TILE) + 0.01
    order = torch.rand(len(firing), TILE).argsort(1)
    gate = torch.where(order < torch.tensor(firing)[:, None], gate, -gate)
    gate[0, 3], gate[0, 40], gate[6] = -0.0, 0.0, gate[6].where(gate[6] <= 0, torch.nan)  # five NaN fire too
    gate = gate.to(torch.bfloat16)
    stored = TwELL.from_gate(gate, TILE, WORDS)
    packed = Out(stored.packed[:, 0].int(), torch.arange(WORDS) <= stored.counts)
    said = f"{len(firing)} tiles in which {', '.join(map(str, firing))} values fire"
    yield Case(said, (len(firing),), (32,), look=3, gate=gate.view(torch.int16), packed=packed)


def _shared_tiles(case: Case, seen: Seen) -> str | None:
    values, limits = SIDE * case.arguments["depth"], []
    for array in ("a", "b"):
        reads = sum(seen.reads(array).values())
        often = f"{reads:,} times for {values:,} different values, each {reads / values:.3g} times"
        again = f"a block reads {array} {often}: let each thread bring one value of each tile to shared memory."
        spread = _spread(array, seen.sectors(array), 4 * values // SECTOR, "let threads read along a row")
        limits += [(reads > values, again), spread]
    return _first(*limits)


@_puzzle("a small GEMM tile", 25, _shared_tiles, "each value is read once for 16 products.")
def _gemm_tile() -> Iterator[Case]:
    for rows, columns, depth in ((32, 48, 64), (16, 16, 16)):
        a, b = _numbers(rows, depth), _numbers(depth, columns)
        said, grid = f"{rows} x {depth} times {depth} x {columns}", (columns // SIDE, rows // SIDE)
        yield Case(said, grid, (SIDE, SIDE), a=a, b=b, c=Out(a @ b), columns=columns, depth=depth)


# ---- notebook 08: bfloat16, and what twell.cuh has ----


def _touched_once(case: Case, seen: Seen) -> str | None:
    """A sector of `gate` is read once; rows of other widths begin in the middle of one."""
    moved, least = seen.counts.global_reads.sectors, seen.counts.unique_bytes("gate", "read") // SECTOR
    once = f"the loads touch {moved:,} sectors; {least:,} are enough."
    return once if case.arguments["columns"] % 256 == 0 and moved > least else None


def _drawn(rows: int, columns: int, share: float) -> Tensor:
    """A gate, bfloat16 [rows, columns], of which about this share fires, with a NaN and a -0 in it."""
    gate = (torch.rand(rows, columns) + 0.01) * torch.where(torch.rand(rows, columns) < share, 1.0, -1.0)
    gate[0, 1], gate[-1, 17] = torch.nan, -0.0
    return gate.to(torch.bfloat16)


_TILES = "the counts of every tile, NaN and narrow tiles included, and each sector of a full tile is touched once."


@_puzzle("counts of tiles", 10, _touched_once, _TILES, "08")
def _tile_counts() -> Iterator[Case]:
    for rows, columns, share in ((4, 1024, 0.1), (3, 600, 0.5), (1, 24, 1.0)):
        gate = _drawn(rows, columns, share)
        want = TwELL.from_gate(gate).counts.int()
        last = want.shape[1] - 1  # of a row: the narrow one
        yield Case(
            f"{columns} columns", want.shape[::-1], (32,), look=last, gate=gate, counts=Out(want), columns=columns
        )


def _two_loads(case: Case, seen: Seen) -> str | None:
    loads, tiles = seen.counts.global_reads.requests, math.prod(case.grid)
    two = "load instructions, and two are enough: let each lane read one word, once, into a variable."
    return f"a tile takes {loads / tiles:.3g} {two}" if loads > 2 * tiles else None


_WORDS = "a lane for each word, nothing past the count, and a tile's columns moved to where the tile begins."


@_puzzle("unpacking", 15, _two_loads, _WORDS, "08")
def _unpack() -> Iterator[Case]:
    for rows, columns, share in ((4, 1024, 0.05), (3, 600, 0.03), (1, 24, 1.0), (2, 512, 0.0)):
        gate = _drawn(rows, columns, share)
        if rows == 4:  # a tile in which the column that equals its count fires: where a count taken for a word goes
            gate[1, :256] = -1.0
            gate[1, [2, 5, 40, 77, 200]] = torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5], dtype=gate.dtype)
        gate[TwELL.from_gate(gate).overflow_rows] = -1.0  # they would need the tail, which the kernel does not get
        form = TwELL.from_gate(gate)
        words = torch.where(torch.arange(32) > form.counts[..., None], 7 << 16 | 3, form.packed)  # past it anything
        filled = lambda out: out.nan_to_num(9.0)
        out = Out(filled(torch.where(gate <= 0, 0, gate)), read=filled, before=torch.zeros_like(gate))
        yield Case(f"{columns} columns", form.counts.shape[::-1], (32,), packed=words.int(), out=out, columns=columns)


_ROWS = "thread 0 adds up when all four warps have written, and each sector is still touched once."


@_puzzle("counts of rows", 10, _touched_once, _ROWS, "08")
def _row_counts() -> Iterator[Case]:
    for rows, columns, share in ((3, 1024, 0.3), (2, 600, 0.9), (1, 40, 1.0)):
        gate = _drawn(rows, columns, share)
        counts = Out((~(gate <= 0)).sum(1).int())
        yield Case(f"{columns} columns", (rows,), (128,), gate=gate, counts=counts, columns=columns)


# ---- notebook 09 ----


def _own_barriers(case: Case, seen: Seen) -> str | None:
    (blocks,), (threads,), depth = case.grid, case.block, case.arguments["depth"]
    late = min((thread for lanes in seen.trace.reads("x").values() for thread in lanes if thread >= 32), default=None)
    own = [len(seen.trace.reads(name)) for name in seen.trace.arrays if name not in case.arguments]
    meet = "all threads meet at a __syncthreads: while one warp adds, the other has to be able to copy."
    both = f"thread {late} reads x itself; warp 0 alone copies, and warp 1 adds what lies in shared memory."
    alone = "one stage alone is used: while it is read, nothing can be copied."
    return _first(
        (seen.counts.barriers > blocks * threads // 32, meet),
        (late is not None, both),
        _spread("x", seen.sectors("x"), 4 * STAGE * depth // SECTOR, "let lanes copy along a row"),
        (depth > STAGE and max(own, default=0) < 2 * STAGE**2, alone),
    )


@_puzzle("two stages", 25, _own_barriers, "one warp copies while the other adds, and neither is too early.", "09")
def _two_stages() -> Iterator[Case]:
    for rows, depth in ((64, 160), (32, 32), (32, 64)):
        x, race = _numbers(rows, depth), "Who uses a stage has to wait until the others have arrived at its barrier."
        yield Case(f"{rows} rows of {depth}", (rows // STAGE,), (64,), race=race, x=x, out=Out(x.sum(1)), depth=depth)


@_puzzle("an epilogue that packs", 20, _votes, "the words leave the chip, and the sums never do.", "09")
def _gemm_pack() -> Iterator[Case]:
    for rows, columns, depth in ((16, 64, 96), (8, 32, 32)):
        sizes = (rows, depth), (depth, columns)
        a, b = (torch.randint(1, 3, of) * (2 * torch.randint(0, 2, of) - 1) / 2 for of in sizes)  # exact in 16 bits
        a[:, 0], b[0] = 1, -depth // 12  # few fire,
        a[3, 0], a[5, 2] = -1, torch.nan  # many in one row, and all of another
        form = TwELL.from_gate((a @ b).bfloat16(), 32, WORDS)
        counts, word = form.counts.reshape(-1, 1), torch.arange(WORDS)
        used = (word <= counts) & ((counts < 32) | (word == 0))  # the bits of a NaN are not said
        said, packed = f"{rows} x {depth} times {depth} x {columns}", Out(form.packed.reshape(-1, WORDS).int(), used)
        yield Case(said, (columns // 32, rows // 8), (32, 8), a=a, b=b, packed=packed, columns=columns, depth=depth)


# ---- notebook 11 ----


@_puzzle("lists by neuron", 15, _one_entry_each("neuron", 3), "every entry has a place of its own.", "11")
def _neuron_lists() -> Iterator[Case]:
    for tokens, d_ff, share in ((40, 12, 0.3), (7, 3, 1.0), (64, 40, 0.05)):
        fired = torch.rand(tokens, d_ff) < share
        fired[0, 0] = True
        token, neuron = (each.int() for each in fired.nonzero(as_tuple=True))
        owner, by_neuron = fired.T.nonzero(as_tuple=True)
        counts, n = fired.sum(0), len(token)
        order = lambda lists, first=owner << 40: (first + lists).sort()[0] - first  # each list by itself
        given = {"token": token, "neuron": neuron, "starts": (counts.cumsum(0) - counts).int()}
        given |= {"cursor": torch.zeros(d_ff, dtype=torch.int32), "lists": Out(by_neuron.int(), read=order), "n": n}
        yield Case(f"n = {n}, {d_ff} neurons", (-(-n // 64),), (64,), **given)


def _in_order(case: Case, seen: Seen) -> str | None:
    if seen.counts.atomics.accesses:
        return "sums of floats by atomics come out otherwise in each run, as the order does: walk the list in order."
    first, end = case.arguments["starts"][case.look : case.look + 2].tolist()
    return _along_rows("x", case.arguments["lists"][first:end].tolist(), case, seen)


@_puzzle("the gradient of up", 15, _in_order, "silent tokens are not read, and every run gives the same bits.", "11")
def _up_gradient() -> Iterator[Case]:
    for tokens, d_ff, d_model in ((40, 5, 80), (9, 3, 20)):
        fired = torch.rand(tokens, d_ff) < 0.4
        fired[:, 1], fired[:3, 2] = False, True
        counts, lists = fired.sum(0), fired.T.nonzero()[:, 1]
        starts, x = torch.cat([counts.new_zeros(1), counts.cumsum(0)]), torch.randn(tokens, d_model)
        du = 2.0 ** torch.randint(-3, 4, lists.shape) * (2 * torch.randint(0, 2, lists.shape) - 1)  # exact products
        wanted = torch.zeros(d_ff, d_model)
        for neuron in range(d_ff):
            for k in range(int(starts[neuron]), int(starts[neuron + 1])):
                wanted[neuron] += du[k] * x[lists[k]]
        given = {"starts": starts.int(), "lists": lists.int(), "du": du, "x": x, "dup": Out(wanted), "d_model": d_model}
        yield Case(f"{tokens} tokens, {d_ff} neurons, d_model {d_model}", (d_ff,), (64,), look=2, **given)
