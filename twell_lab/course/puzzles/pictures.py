"""Who should touch what, puzzle by puzzle, as lines of cells; `figures.asked` draws them. Needs no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

GHOST = -1  # the owner of a cell that stands for a thread without an element


@dataclass(frozen=True)
class Cell:
    """text: what stands in it; owner: the thread whose colour it has (None: nobody's); framed: written."""

    text: str
    owner: int | None = None
    framed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines of cells under a caption. labels: what stands left of each line. A panel without lines is a barrier."""

    caption: str
    lines: tuple[tuple[Cell, ...], ...] = ()
    labels: tuple[str, ...] = ()


BARRIER = Panel("__syncthreads(): nobody goes on before all have come")


def picture(name: str) -> tuple[str, list[Panel]]:
    """(title, panels) of a puzzle."""
    return PICTURES[name]()


def _panel(caption: str, cells: Iterable[Cell], across: int = 32, labels: Iterable[str] | None = None) -> Panel:
    cells = list(cells)
    lines = tuple(tuple(cells[i : i + across]) for i in range(0, len(cells), across))
    return Panel(caption, lines, tuple(labels) if labels else tuple(f"{i}" for i in range(0, len(cells), across)))


def _own(count: int, framed: bool = False, owner: Callable[[int], int] = lambda i: i) -> list[Cell]:
    return [Cell(f"{owner(i)}", owner(i), framed) for i in range(count)]


def _map() -> tuple[str, list[Panel]]:
    return "One block of 32 threads, 32 values", [
        _panel("<b>x</b>: read by thread", _own(32)),
        _panel("<b>out</b>: written by thread", _own(32, True)),
    ]


def _guard() -> tuple[str, list[Panel]]:
    over = [Cell(f"{i}", GHOST) for i in range(5, 32)]
    return "n = 37: two blocks of 32 threads, of which 27 find no value", [
        _panel("<b>x</b>: read by thread", [*_own(32), *_own(5), *over], labels=["block 0", "block 1"]),
        _panel(
            "<b>out</b>: written by thread; where there is no frame there is no memory",
            [*_own(32, True), *_own(5, True), *over],
            labels=["block 0", "block 1"],
        ),
    ]


def _grid_stride() -> tuple[str, list[Panel]]:
    cells = [Cell(f"{i % 32}", i % 32, True) for i in range(150)]
    return "n = 150: 64 threads in two blocks take 64 values, then the next 64, then what is left", [
        _panel(
            "<b>out</b>: written by thread (block 0, block 1, and again)",
            cells,
            labels=["0: block 0", "32: block 1", "64: block 0", "96: block 1", "128: block 0"],
        )
    ]


def _add_bias() -> tuple[str, list[Panel]]:
    def block(framed: bool) -> tuple[tuple[Cell, ...], ...]:
        own = lambda x, y: Cell(f"{x}", x, framed) if x < 8 and y < 2 else Cell(f"{x}", GHOST)
        return tuple(tuple(own(x, y) for x in range(32)) for y in range(4))

    rows = tuple(f"row {row}" for row in range(4, 8))
    return "6 rows of 40: the last block, which begins at row 4 and column 32", [
        Panel("<b>x</b>: read by thread x, of each y", block(False), rows),
        _panel("<b>bias</b>: read by thread x", block(False)[0], labels=["from 32"]),
        Panel("<b>out</b>: written by thread x; where there is no frame there is no memory", block(True), rows),
    ]


def _neighbours() -> tuple[str, list[Panel]]:
    around = [Cell(f"{max(i - 1, 0)}–{i + 1}", i) for i in range(16)]
    return "The first 16 threads of a block of 64", [
        _panel("<b>x</b>, global memory: read by thread, once", _own(16), 16),
        _panel("<b>tile</b>, shared memory: written by thread", _own(16, True), 16),
        BARRIER,
        _panel("<b>tile</b>: read by threads", around, 16),
        _panel("<b>out</b>: written by thread", _own(16, True), 16),
    ]


def _block_sum() -> tuple[str, list[Panel]]:
    lines, labels = [], []
    half = 32
    while half:
        lines.append(tuple(Cell(f"{i}", i, True) if i < half else Cell("") for i in range(32)))
        labels.append(f"half {half}")
        half //= 2
    return "64 values folded in half six times, with a barrier before each line", [
        _panel("<b>part</b>, shared memory: written by thread", _own(64, True)),
        Panel(
            "<b>part[0..31]</b>: part[t] += part[t + half], by thread t; grey: nobody has anything to do",
            tuple(lines),
            tuple(labels),
        ),
        _panel("<b>out</b>: written by thread", [Cell("0", 0, True)]),
    ]


VALUES = "0405007002000340000600180000"  # what the pictures of the warp puzzles show, 0 for values that do not fire


def _fires() -> list[bool]:
    return [place < len(VALUES) and VALUES[place] != "0" for place in range(32)]


def _ballot_count() -> tuple[str, list[Panel]]:
    fires, width = _fires(), 27
    fires = [f and lane < width for lane, f in enumerate(fires)]
    signs = [
        Cell(f"{lane}", GHOST) if lane >= width else Cell("+" if fires[lane] else "−", lane if fires[lane] else None)
        for lane in range(32)
    ]
    bits = [Cell(f"{int(fires[lane])}", lane if fires[lane] else None) for lane in range(32)]
    return "One warp, a row of 27: each lane votes, and all get the same 32 bits", [
        _panel("<b>x</b>: the sign of the value that each lane reads; lanes 27 to 31 have none, and vote no", signs),
        _panel("the <b>ballot</b>: bit i is the vote of lane i (bit 0 on the left)", bits),
        _panel("<b>counts</b>: written by lane 0, how many bits are set", [Cell(f"<b>{sum(fires)}</b>", 0, True)]),
    ]


def _prefix_sum() -> tuple[str, list[Panel]]:
    sums = [1 + lane % 3 for lane in range(32)]
    lines, labels, distance = [tuple(Cell(f"{value}") for value in sums)], ["x"], 1
    while distance < 32:
        sums = [value + (sums[lane - distance] if lane >= distance else 0) for lane, value in enumerate(sums)]
        lines.append(tuple(Cell(f"{value}", lane if lane >= distance else None) for lane, value in enumerate(sums)))
        labels.append(f"distance {distance}")
        distance *= 2
    written = [Cell(f"{value}", lane, True) for lane, value in enumerate(sums)]
    return "One warp, 32 sums in registers, five shuffles", [
        Panel(
            "the sum in each lane; coloured: it has just added the sum of the lane that stands so far below it",
            tuple(lines),
            tuple(labels),
        ),
        _panel("<b>out</b>: each lane writes its sum", written),
    ]


def _warp_dot() -> tuple[str, list[Panel]]:
    own, folds = _own(80, owner=lambda i: i % 32), [16, 8, 4, 2, 1]
    lines = [[Cell(f"{lane}", lane) if lane < 2 * by else Cell("") for lane in range(32)] for by in folds]
    return "A row of 80: each lane adds its products, then five shuffles add the lanes", [
        _panel("<b>x</b> and <b>w</b>: read by lane", own),
        Panel(
            "<b>sum</b>: whose still count before the shuffle, by its distance",
            tuple(map(tuple, lines)),
            tuple(f"{by}" for by in folds),
        ),
        _panel("<b>out</b>: written by lane", [Cell("0", 0, True)]),
    ]


def _vector_loads() -> tuple[str, list[Panel]]:
    return "One warp, one load: 128 floats", [
        _panel(
            "<b>x</b>: read by lane; four neighbouring floats are 16 bytes, and eight of them a sector",
            _own(128, owner=lambda i: i // 4),
        )
    ]


FIRED = (3, 7, 3, 0, 3, 5, 0, 7, 3, 6, 1, 3)


def _neuron_counts() -> tuple[str, list[Panel]]:
    who = {neuron: [thread for thread, each in enumerate(FIRED) if each == neuron] for neuron in range(8)}
    counts = [
        Cell(
            ", ".join(map(str, threads)),
            2 * threads[0] if len(threads) == 1 else GHOST if threads else None,
            bool(threads),
        )
        for threads in who.values()
    ]
    return "12 threads, 8 neurons", [
        _panel(
            "<b>fired</b>: the neuron in each place; the colour is the thread that reads it",
            [Cell(f"<b>{neuron}</b>", 2 * thread) for thread, neuron in enumerate(FIRED)],
            12,
            ["thread 0"],
        ),
        _panel("<b>counts</b>: the threads that add 1 to each of the 8", counts, 8, ["neuron 0"]),
    ]


def _gather_rows() -> tuple[str, list[Panel]]:
    index = (5, 0, 2)
    table = tuple(tuple(Cell(f"{lane}", lane) if row in index else Cell("") for lane in range(32)) for row in range(6))
    out = tuple(tuple(Cell(f"{lane}", lane, True) for lane in range(32)) for _ in index)
    return "index = [5, 0, 2]: a block for each row of out, the first 32 columns", [
        Panel("<b>table</b>: read by lane", table, tuple(f"row {row}" for row in range(6))),
        Panel("<b>out</b>: written by lane", out, tuple(f"from {row}" for row in index)),
    ]


def _gather_multiply() -> tuple[str, list[Panel]]:
    index = 5, 0, 2
    used = lambda row, lane: Cell(f"{lane}", lane) if row in index else Cell("")
    table = tuple(tuple(used(row, lane) for lane in range(32)) for row in range(6))
    factors = [f"value {index.index(row)}," if row in index else "" for row in range(6)]
    return "index = [5, 0, 2]: three values for one row of out, the first 32 columns", [
        Panel("<b>table</b>: read by thread", table, tuple(f"{said} row {row}" for row, said in enumerate(factors))),
        _panel("<b>out</b>: the sum of the three, each times its value; written by thread", _own(32, True)),
    ]


def _pack_words() -> tuple[str, list[Panel]]:
    fires = _fires() + [place in (6, 20) for place in range(32)]
    gate = [Cell(f"{lane % 32}", lane % 32) if fires[lane] else Cell("") for lane in range(64)]
    columns = [place for place in range(64) if fires[place]]
    words = [Cell(f"<b>{len(columns)}</b>", 0, True)]
    words += [Cell(f"{column}", column % 32, True) for column in columns[:7]]
    return "A tile of 64 columns, 32 at a time, and its 8 words", [
        _panel("<b>gate</b>: the columns that fire, and the lane that reads each", gate, labels=["base 0", "base 32"]),
        _panel(
            f"<b>words</b>: the true count, {len(columns)}, then the columns of the first seven, with their values",
            words,
            8,
            ["word 0"],
        ),
    ]


def _gemm_tile() -> tuple[str, list[Panel]]:
    return "A block of 16 x 16 threads makes a tile of c, from strips of a and b, tile by tile", []


PICTURES = {
    "map": _map,
    "guard": _guard,
    "grid_stride": _grid_stride,
    "add_bias": _add_bias,
    "neighbours": _neighbours,
    "block_sum": _block_sum,
    "ballot_count": _ballot_count,
    "prefix_sum": _prefix_sum,
    "warp_dot": _warp_dot,
    "vector_loads": _vector_loads,
    "neuron_counts": _neuron_counts,
    "gather_rows": _gather_rows,
    "gather_multiply": _gather_multiply,
    "pack_words": _pack_words,
    "gemm_tile": _gemm_tile,
}
