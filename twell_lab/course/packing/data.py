"""What the notebook on packing computes, as functions: data in, data out, nothing drawn.

`view` describes one row under one geometry; `figures` draws it and `widget` moves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import InputError
from ...formats.classic import COO, CSR, ELL, Hybrid
from ...formats.twell import TILE, WORDS, TwELL, check_geometry
from ...plots import decode, tile_of

# The sorts of columns in a tile, as a view numbers them.
SILENT, BELOW, IN_WORDS, IN_TAIL = range(4)


# ---- the formats, side by side ----


def forms(x: Tensor, limit: int = 128) -> dict[str, COO | CSR | ELL | Hybrid | TwELL]:
    """The same matrix [rows, columns] in every format of the library.

    limit: entries of a light row of Hybrid.
    """
    return {
        "COO": COO.from_dense(x),
        "CSR": CSR.from_dense(x),
        "ELL": ELL.from_dense(x),
        "Hybrid": Hybrid.from_dense(x, limit),
        "TwELL": TwELL.from_dense(x),
    }


def sizes(x: Tensor, limit: int = 128) -> dict[str, int]:
    """Bytes of the matrix as it is and in each format."""
    packed = {name: form.nbytes for name, form in forms(x, limit).items()}
    return {"dense": x.numel() * x.element_size()} | packed


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN equals itself, and -0 does not equal +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def one_tile(firing: int, seed: int = 0) -> Tensor:
    """A gate, bfloat16 [1, TILE], with exactly `firing` positive columns at random places; the others are negative."""
    if not 0 <= firing <= TILE:
        raise InputError(f"firing is {firing}; 0 to {TILE} (the columns) are accepted")
    generator = torch.Generator().manual_seed(seed)
    gate = -torch.rand(1, TILE, generator=generator) - 0.01
    gate[0, torch.randperm(TILE, generator=generator)[:firing]] *= -1
    return gate.bfloat16()


# ---- a packing that loses values, and two ways to look for it ----


def toy_unpack(gate: Tensor, tile: int = TILE, words: int = WORDS) -> Tensor:
    """relu(gate), packed without a tail and unpacked again: values that a tile's slots cannot hold are gone.

    gate: [rows, d_ff].
    """
    packed = TwELL.from_gate(gate, tile, words)
    no_tail = (torch.zeros_like(packed.tail_pointer), packed.tail_column[:0], packed.tail_value[:0])
    return TwELL(packed.packed, *no_tail, packed.shape, packed.dtype, packed.tile).to_dense()


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want| of each row, float64 [rows]; 0 where both are zero."""
    got, want = got.double(), want.double()
    off, size = (got - want).norm(dim=1), want.norm(dim=1)
    return torch.where(off == 0, 0.0, off / size)


def found_by(errors: Tensor) -> str:
    """Return which checks find a packing that loses values. errors: `row_errors` [rows]."""
    wrong, median, worst = int((errors > 0).sum()), float(errors.median()), float(errors.max())
    if not wrong:
        return "No row is wrong here: only made-up tiles, as above, would have shown it."
    passes = "the median passes" if median == 0 else "even the median shows it"
    return f"{wrong} of {len(errors):,} wrong, worst by {worst:.0%}; {passes}"


# ---- geometry: how large a tile, how many words ----


def geometries(gate: Tensor, tiles: list[int], words: list[int]) -> list[dict]:
    """relu(gate) packed with each pair of tile and words. gate: [rows, d_ff].

    Rows: {tile, words, bytes (of a row, with its tail), slots_used (share), overflow (share of rows), tail (values of a
    row)}. Pairs with more words than the tile has columns, plus one, are left out: TwELL does not take them.
    """
    table = []
    for tile in tiles:
        for count in words:
            if count > tile + 1:
                continue
            packed = TwELL.from_gate(gate, tile, count)
            rows = gate.shape[0]
            table.append(
                {
                    "tile": tile,
                    "words": count,
                    "bytes": packed.nbytes / rows,
                    "slots_used": packed.counts.clamp(max=packed.slots).sum().item()
                    / (packed.counts.numel() * packed.slots),
                    "overflow": len(packed.overflow_rows) / rows,
                    "tail": packed.tail_value.numel() / rows,
                }
            )
    return table


def smallest(table: list[dict], overflow: float) -> dict | None:
    """The row of `geometries` with the fewest bytes among those in which at most this share of rows overflows."""
    fitting = [row for row in table if row["overflow"] <= overflow]
    return min(fitting, key=lambda row: row["bytes"], default=None)


def usual(table: list[dict]) -> dict:
    """The row of `geometries` with TILE columns and WORDS words. InputError where there is none."""
    found = next((row for row in table if (row["tile"], row["words"]) == (TILE, WORDS)), None)
    if found is None:
        raise InputError(f"the table has no tile {TILE} with {WORDS} words; one that has this pair is accepted")
    return found


def framed(table: list[dict], dense: int, overflow: float = 0.01) -> str:
    """Return what the tile and words cost that `figures.geometries` frames, beside a dense row of so many bytes."""
    best = smallest(table, overflow)
    if best is None:
        return f"None framed: with all of them more than {overflow:.0%} of the rows overflow."
    beside = "more" if best["bytes"] > dense else "less" if best["bytes"] < dense else "no less"
    return f"Framed: {best['bytes']:,.0f} bytes a row, {beside} than dense ({dense:,})."


# ---- the packing algorithm, as a warp does it ----


def warp_slots(fires: Tensor) -> tuple[int, list[int]]:
    """One step of a warp: (ballot, slot of each lane), for 32 lanes. fires: bool [32].

    The ballot is a 32-bit word, the same for every lane, in which bit i says whether lane i fires. A lane's slot is the
    number of bits below its own, plus 1 because word 0 is the count.
    """
    if fires.shape != (32,):
        raise InputError(f"fires has shape {list(fires.shape)}; 32 lanes are accepted")
    ballot = sum(1 << lane for lane in range(32) if fires[lane])
    return ballot, [1 + (ballot & ((1 << lane) - 1)).bit_count() for lane in range(32)]


# ---- one row, as the interactive tile shows it ----


def view(
    gate: Tensor, row: int = 0, part: int = 0, tile: int = TILE, words: int = WORDS, threshold: float = 0.0
) -> dict:
    """One row of a gate under one geometry, and one of its tiles in full. gate: [rows, d_ff]; part: which tile.

    A value g is kept if `not (g <= threshold)`; packing itself has threshold 0. Returns {row, part, tile, words,
    slots, threshold, dtype, width (columns of this tile), counts (kept values of each tile of the row), columns (a
    {column, value, sort} for each column of the tile; sort: SILENT, BELOW the threshold but positive, IN_WORDS,
    IN_TAIL), stored (the used words of the tile, as whole numbers, the count first), entries ((value, column) of those
    after the count), tail ((value, column in the matrix) of this tile), tail_row (number of values in the row's tail),
    nnz (kept values of the row), bytes (of the packed row), dense_bytes, lost (the share of the row's norm that the
    threshold takes)}.
    """
    check_geometry(tile, words)
    if not 0 <= row < gate.shape[0]:
        raise InputError(f"row is {row!r}; this gate has rows 0 to {gate.shape[0] - 1}")
    tiles = -(-gate.shape[1] // tile)
    if not 0 <= part < tiles:
        raise InputError(f"part is {part!r}; a row of {gate.shape[1]} has tiles 0 to {tiles - 1} of {tile}")
    if not threshold >= 0:
        raise InputError(f"threshold is {threshold!r}; 0 or more is accepted")
    line = gate[row : row + 1].detach().cpu()
    silent = torch.zeros_like(line)  # not 0.0, which would turn whole numbers into values that can be packed
    positive, kept = (torch.where(~(line <= limit), line, silent) for limit in (0, threshold))
    packed = TwELL.from_dense(kept, tile, words)
    at = tile_of(packed, 0, part)
    first, end = part * tile, part * tile + at["width"]
    tail = [
        (value, column)
        for value, column in zip(packed.tail_value.tolist(), packed.tail_column.tolist(), strict=True)
        if first <= column < end
    ]
    in_tail = {column for _, column in tail}
    columns = []
    for column, (value, stays) in enumerate(
        zip(positive[0, first:end].tolist(), kept[0, first:end].tolist(), strict=True)
    ):
        if stays != 0:
            sort = IN_TAIL if first + column in in_tail else IN_WORDS
        else:
            sort = BELOW if value != 0 else SILENT
        columns.append({"column": column, "value": value, "sort": sort})
    size, gone = positive.double().norm(), (positive.double() - kept.double()).norm()
    entries = [decode(word, at["dtype"]) for word in at["words"][1:]]
    return {
        "row": row,
        "part": part,
        "tile": tile,
        "words": words,
        "slots": words - 1,
        "threshold": threshold,
        "dtype": at["dtype"],
        "width": at["width"],
        "counts": packed.counts[0].tolist(),
        "columns": columns,
        "stored": at["words"],
        "entries": entries,
        "tail": tail,
        "tail_row": packed.tail_value.numel(),
        "nnz": packed.nnz,
        "bytes": packed.nbytes,
        "dense_bytes": line.numel() * line.element_size(),
        "lost": float(gone / size) if size > 0 and size.isfinite() else 0.0,
    }
