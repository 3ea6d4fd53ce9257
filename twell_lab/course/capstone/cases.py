"""Inputs for a reader's `down`, what it has to give on them, and the usual mistakes, each computed so that it can be
named. What must not be used is poisoned: words past a tile's count hold a large number, the gate is NaN except in tiles
that overflow, and so are most rows of down_t whose neuron is silent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS, TwELL, fires, join_words, split_words
from ...ops import clock
from ...simulator.counts import SECTOR

SLOTS = WORDS - 1
LARGE = 30_000.0  # in words past the count; float16 holds it, too
UNWRITTEN = 0x7FAB  # the bits of y before a launch: a NaN that no sum gives
D_MODEL, D_FF, NNZ = 2048, 5632, 29  # of the launches that are counted and timed
COUNTED, TIMED = 4, 16384  # rows of these
ROUNDED = 2.0**-8  # relative: what rounding y to 16 bits may change
SUMMED = 2.0**-14  # relative to the sum of the magnitudes: what sums in float32 may change


@dataclass(frozen=True, eq=False)
class Case:
    """One launch. said: the input, in words. hidden: [rows, columns], what is packed, zeros elsewhere.

    packed: int32 [rows, tiles, WORDS]. gate: [rows, columns]. down_t: [columns, d_model]. All lie on one device."""

    said: str
    packed: Tensor
    gate: Tensor
    down_t: Tensor
    hidden: Tensor

    @property
    def columns(self) -> int:
        return self.hidden.shape[1]

    @property
    def kept(self) -> Tensor:
        """Where a value is kept, bool [rows, columns]."""
        return self.hidden != 0  # NaN is not 0

    def y(self) -> Tensor:
        """Return what a launch writes to: [rows, d_model], not written yet."""
        bits = torch.full((len(self.packed), self.down_t.shape[1]), UNWRITTEN, dtype=torch.int16)
        return bits.to(self.packed.device).view(self.down_t.dtype)


def case(said: str, gate: Tensor, down_t: Tensor, poison: bool = True) -> Case:
    """The launch for a gate [rows, columns] before its ReLU, packed and poisoned. poison: whether rows of down_t are
    NaN where a neuron is silent, too; with NaN, many mistakes look alike."""
    kept, form = fires(gate), TwELL.from_gate(gate)
    columns, tiles = gate.shape[1], form.packed.shape[1]
    past = torch.arange(WORDS) > form.counts[..., None]
    large = join_words(torch.tensor(LARGE, dtype=gate.dtype), torch.tensor(0))
    crowded = (form.counts > SLOTS).repeat_interleave(TILE, 1)[:, :columns]
    silent = ~kept.any(0)
    silent[torch.arange(tiles) * TILE] = False  # where the words past the count point
    return Case(
        said,
        torch.where(past, large.int(), form.packed).contiguous(),
        torch.where(crowded, gate, torch.nan),
        torch.where(silent[:, None], torch.nan, down_t) if poison else down_t,
        torch.where(kept, gate, 0),
    )


def _gate(counts: list[list[int]], columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A gate of which so many values fire in each tile of each row."""
    gate = -torch.rand(len(counts), columns) - 0.01
    for row, of_row in zip(gate, counts, strict=True):
        for t, count in enumerate(of_row):
            tile = row[t * TILE : (t + 1) * TILE]
            tile[torch.randperm(len(tile))[:count]] *= -1
    return gate.to(dtype)


def _sparse(rows: int, columns: int, most: int) -> Tensor:
    tiles = -(-columns // TILE)
    widths = [min(TILE, columns - t * TILE) for t in range(tiles)]
    return _gate([[int(torch.randint(1, min(most, width) + 1, ())) for width in widths] for _ in range(rows)], columns)


def small(threads: int, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """The launches that have to be right, drawn anew, the plainest first. threads: of a block."""
    one_pass = 8 * threads  # columns of y that a block's threads cover with 16 bytes each

    def down_t(columns: int, d_model: int) -> Tensor:
        return torch.randn(columns, d_model).to(dtype)

    plain, odd = _sparse(3, 600, 20).to(dtype), _sparse(3, 257, 20).to(dtype)
    special = _gate([[5, 9, 3], [4, 9, 3], [12, 40, 3], [2, 40, 2]], 520, dtype)
    special[:, 301:303] = -1  # nobody fires there, so that whoever takes a zero for a value reads a poisoned row
    special[0, 3], special[1, 300], special[3, 300] = torch.nan, torch.inf, torch.nan
    special[2, 5], special[2, 7], special[2, 301], special[2, 302] = -0.0, 0.0, -0.0, 0.0
    weights = down_t(520, 40)
    weights[:, ::3] = -0.0
    weights[300, 1] = 0  # times infinity
    return [
        case("600 columns, the last tile 88 wide, and d_model 264", plain, down_t(600, 264), poison=False),
        case(f"d_model {one_pass + 8}", _sparse(2, 300, 9).to(dtype), down_t(300, one_pass + 8)),
        case("257 columns, the last tile one wide, and d_model 8", odd, down_t(257, 8)),
        case("24 columns", _sparse(2, 24, 20).to(dtype), down_t(24, 72)),
        case("no value at all in one row", _gate([[0, 0], [5, 0]], 512, dtype), down_t(512, 40)),
        case(
            "0, 31, 32, 33 and 256 values in a tile",
            _gate([[0, 31, 32, 33, 256, 60], [32, 31, 31, 0, 200, 99], [31] * 6], 5 * TILE + 100, dtype),
            down_t(5 * TILE + 100, 40),
        ),
        case("NaN, infinity, and zeros of both signs", special, weights),
        case("248 positive values in a row", _gate([[31] * 8] * 2, 8 * TILE, dtype), down_t(8 * TILE, 64).abs()),
    ]


STEPS = {  # on the way to a right kernel: its name -> what is said of one that passes
    "one_tile": "the words up to the count, each times its row of down_t.",
    "all_tiles": "a tile's columns begin where its tile does.",
    "wide_rows": "the threads go along a row, however wide it is.",
    "full_tiles": "the words of a tile, or its gate where the count says more. Call it down: that is bronze.",
}


def step(name: str, threads: int) -> list[Case]:
    """The launches of one of STEPS. Each has to do what the one before it does, and one thing more."""

    def drawn(gate: Tensor, d_model: int, poison: bool = True) -> Case:
        columns = gate.shape[1]
        said = f"{columns} columns and d_model {d_model}"
        return case(said, gate, torch.randn(columns, d_model).bfloat16(), poison)

    if name == "one_tile":
        return [drawn(_gate([[5], [0], [9]], 200), 24, poison=False), drawn(_gate([[1], [31]], 256), 8)]
    if name == "all_tiles":
        return [drawn(_sparse(3, 600, 20), 24, poison=False), drawn(_sparse(2, 257, 9), 8)]
    if name == "wide_rows":
        return [drawn(_sparse(2, 300, 9), 3 * threads + 8, poison=False), drawn(_sparse(2, 300, 9), 24)]
    special = _gate([[5, 9, 3], [4, 33, 3]], 520)
    special[0, 3], special[1, 300] = torch.nan, torch.nan
    return [drawn(_gate([[0, 31, 32], [33, 256, 60]], 612), 24, poison=False), drawn(special, 24)]


def counted() -> Case:
    """The launch whose sectors are counted: the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    rates = clock.firing_rates(D_FF, NNZ).clamp(min=1e-12)
    order = (torch.rand(COUNTED, D_FF, generator=generator, dtype=torch.float64).log() / rates).argsort(descending=True)
    size = torch.rand(COUNTED, D_FF, generator=generator) + 0.01
    fired = torch.zeros(COUNTED, D_FF, dtype=torch.bool).scatter_(1, order[:, :NNZ], True)
    down_t = torch.randn(D_FF, D_MODEL, generator=generator)
    gate = torch.where(fired, size, -size).bfloat16()
    return case(f"{COUNTED} rows of {D_FF:,} columns and d_model {D_MODEL:,}", gate, down_t.bfloat16())


def floor_sectors(of: Case) -> int:
    """The fewest sectors that the loads of a launch can touch: of each tile the words that are used, or the count and
    the gate where it overflows, and for each kept value the row of down_t."""
    columns, d_model, total = of.columns, of.down_t.shape[1], 0
    for row, counts in enumerate(of.packed[..., 0].tolist()):
        for t, count in enumerate(counts):
            used = 1 + count if count <= SLOTS else 1
            total += -(-4 * used // SECTOR)
            if count > SLOTS:
                total += sectors_of(row * columns + t * TILE, min(TILE, columns - t * TILE))
    return total + sum(sectors_of(column * d_model, d_model) for column in of.kept.nonzero()[:, 1].tolist())


def needed_sectors(of: Case) -> int:
    """The different sectors of down_t that rows of neurons that fire lie in."""
    size, d_model = of.down_t.element_size(), of.down_t.shape[1]
    starts = [size * d_model * column for column in of.kept.any(0).nonzero()[:, 0].tolist()]
    return len({at for start in starts for at in range(start // SECTOR, (start + size * d_model - 1) // SECTOR + 1)})


def sectors_of(first: int, count: int, size: int = 2) -> int:
    """The sectors that `count` values of `size` bytes lie in, from value number `first` of an array on."""
    return (size * (first + count) - 1) // SECTOR - size * first // SECTOR + 1


# ---- what is right, and what the usual mistakes give ----

MISTAKES = {  # what is said of a kernel that makes it -> its name in `entries`
    "that is what comes out where the column within a tile is taken as the column of the matrix.": "within",
    "that is what comes out where the last word is left out, or word 0, the count, read in its place.": "count read",
    "that is what comes out where all words of a tile are read: those past its count hold anything.": "past",
    f"a tile with more than {SLOTS} values keeps {SLOTS} of them in its words; all of them stand in the gate.": "cut",
    "a tile that overflows was added from its words and from the gate: the gate alone holds all of its values.": (
        "twice"
    ),
    "the tiles that overflow were left out: their values stand in the gate.": "left out",
    f"a tile of {WORDS} values overflows, too: beside the count there is room for {SLOTS}.": "edge",
}


def entries(of: Case, row: int, t: int, mistake: str = "") -> tuple[Tensor, Tensor]:
    """(values, columns of the matrix) that are added of a row's tile, by a kernel that makes this mistake, or none."""
    tile, count = of.hidden[row, t * TILE : (t + 1) * TILE], int(of.packed[row, t, 0])
    columns = (tile != 0).nonzero()[:, 0]
    if mistake == "within":
        return tile[columns], columns
    spans = {"count read": (0, count), "past": (1, WORDS)}
    if count > SLOTS:
        spans = {"cut": (1, WORDS), "left out": (1, 1), "twice": (1, WORDS), "edge": (1, WORDS)}
    right = tile[columns], columns + t * TILE
    if mistake not in spans or (mistake == "edge" and count > WORDS):
        return right
    values, columns = split_words(of.packed[row, t, slice(*spans[mistake])], of.down_t.dtype)
    read = values, columns + t * TILE
    return (torch.cat([read[0], right[0]]), torch.cat([read[1], right[1]])) if mistake == "twice" else read


def sums(of: Case, mistake: str = "") -> tuple[Tensor, Tensor]:
    """(y in float64, the sum of the magnitudes of its terms) of what `entries` gives. IndexError where that names a
    column that the matrix does not have."""
    rows, tiles = of.packed.shape[:2]
    y = torch.zeros(rows, of.down_t.shape[1], dtype=torch.float64)
    size = y.clone()
    for row in range(rows):
        for t in range(tiles):
            values, columns = entries(of, row, t, mistake)
            terms = values.double()[:, None] * of.down_t[columns].double()
            y[row] += terms.sum(0)
            size[row] += terms.abs().sum(0)
    return y, size


def agrees(y: Tensor, exact: Tensor, size: Tensor) -> Tensor:
    """Where y is as near to the exact sums as sums in float32, rounded once, are; bool, of y's shape."""
    y = y.double()
    same = (y == exact) | y.isnan() & exact.isnan()
    return torch.where(exact.isfinite(), (y - exact).abs() <= ROUNDED * exact.abs() + SUMMED * size, same)


def wrong(of: Case, y: Tensor) -> str | None:
    """Return what is wrong with y (on the CPU), with the mistake's name where it is a usual one; None if nothing is."""
    untouched = y.view(torch.int16) == UNWRITTEN
    if untouched.all():
        return "your kernel writes nothing to y yet."
    exact, size = sums(of)
    off = untouched if untouched.any() else ~agrees(y, exact, size)
    if not off.any():
        return None
    row, column = off.nonzero()[0].tolist()
    place, want, got = f"y[{row}][{column}]", float(exact[row, column]), float(y[row, column])
    if untouched.any():
        return f"{place} was never written; it should be {want:.4g}."
    return f"{place} should be {want:.4g}; yours is {got:.4g}. {_named(of, y, exact, size)}".rstrip()


def _named(of: Case, y: Tensor, exact: Tensor, size: Tensor) -> str:
    for said, mistake in MISTAKES.items():
        try:
            mistaken, terms = sums(of, mistake)
        except IndexError:
            continue
        if agrees(y, mistaken, terms).all() and 2 * mistaken.isfinite().sum() > mistaken.numel():
            return f"{said[0].upper()}{said[1:]}"
    finite = exact.isfinite()
    if (y.isnan() & finite).any():
        return (
            "No NaN fires there. What was used may be a silent neuron's row of down_t, the gate of a tile that fits "
            "its words, or a word past the count (the slots of a tile are words - 1)."
        )
    if ((y.double() - exact).abs() <= 0.1 * size)[finite].all() and finite.all():
        return "Nearly right: sums in 16 bits lose digits like this; keep them in float, and round once."
    return ""
