"""What the notebook on packing computes, as functions: data in, data out, nothing drawn.

`view` describes one row under one geometry; `figures` draws it and `widget` moves it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS, TwELL
from ...plots import decode, tile_of

# The sorts of columns in a tile, as a view numbers them.
SILENT, BELOW, IN_WORDS, IN_TAIL = range(4)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN equals itself, and -0 does not equal +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def one_tile(firing: int, seed: int = 0) -> Tensor:
    """A gate, bfloat16 [1, TILE], with exactly `firing` positive columns at random places; the others are negative."""
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


# ---- geometry: how large a tile, how many words ----


def geometries(gate: Tensor, tiles: list[int], words: list[int]) -> list[dict]:
    """relu(gate) packed with each pair of tile and words. gate: [rows, d_ff].

    Rows: {tile, words, bytes (of a row, with its tail), slots_used (share), overflow (share of rows), tail (values of a
    row)}. Pairs with more words than the tile has columns, plus one, are left out: TwELL does not take them.
    """
    table = []
    for tile, count in itertools.product(tiles, words):
        if count > tile + 1:
            continue
        packed = TwELL.from_gate(gate, tile, count)
        table.append(
            {
                "tile": tile,
                "words": count,
                "bytes": packed.nbytes / len(gate),
                "slots_used": packed.counts.clamp(max=packed.slots).double().mean().item() / packed.slots,
                "overflow": len(packed.overflow_rows) / len(gate),
                "tail": packed.tail_value.numel() / len(gate),
            }
        )
    return table


def smallest(table: list[dict], overflow: float) -> dict | None:
    """The row of `geometries` with the fewest bytes among those in which at most this share of rows overflows."""
    fitting = [row for row in table if row["overflow"] <= overflow]
    return min(fitting, key=lambda row: row["bytes"], default=None)


# ---- the packing algorithm, as a warp does it ----


def warp_slots(fires: Tensor) -> tuple[int, list[int]]:
    """One step of a warp: (ballot, slot of each lane), for 32 lanes. fires: bool [32].

    The ballot is a 32-bit word, the same for every lane, in which bit i says whether lane i fires. A lane's slot is the
    number of bits below its own, plus 1 because word 0 is the count.
    """
    ballot = sum(1 << lane for lane in range(32) if fires[lane])
    return ballot, [1 + (ballot & ((1 << lane) - 1)).bit_count() for lane in range(32)]


# ---- one row, as the interactive tile shows it ----


def view(
    gate: Tensor, row: int = 0, part: int = 0, tile: int = TILE, words: int = WORDS, threshold: float = 0.0
) -> dict:
    """One row of a gate under one geometry, and one of its tiles in full. gate: [rows, d_ff]; part: which tile.

    A value g is kept if `not (g <= threshold)`; packing itself has threshold 0. Returns {row, part, tile, slots,
    threshold, dtype, width (columns of this tile), counts (kept values of each tile of the row), columns ((value, sort)
    of each column of the tile; sort: SILENT, BELOW the threshold but positive, IN_WORDS, IN_TAIL), stored (the used
    words of the tile, as whole numbers, the count first), entries ((value, column) of those after the count), tail
    ((value, column in the matrix) of this tile), tail_row (number of values in the row's tail), nnz (kept values of the
    row), bytes (of the packed row), dense_bytes, lost (the share of the row's norm that the threshold takes)}.
    """
    line = gate[row : row + 1].detach().cpu()
    silent = torch.zeros_like(line)  # not 0.0, which would turn whole numbers into values that can be packed
    positive, kept = (torch.where(~(line <= limit), line, silent) for limit in (0, threshold))
    packed = TwELL.from_dense(kept, tile, words)
    at, first = tile_of(packed, 0, part), part * tile
    values, stays = (whole[0, first : first + at["width"]] for whole in (positive, kept != 0))
    taken = torch.where(stays.cumsum(0) < words, IN_WORDS, IN_TAIL)  # the first of a tile stand in its words
    sorts = torch.where(stays, taken, torch.where(values != 0, BELOW, SILENT))
    size, gone = positive.double().norm(), (positive.double() - kept.double()).norm()
    return {
        "row": row,
        "part": part,
        "tile": tile,
        "slots": words - 1,
        "threshold": threshold,
        "dtype": at["dtype"],
        "width": at["width"],
        "counts": packed.counts[0].tolist(),
        "columns": list(zip(values.tolist(), sorts.tolist(), strict=True)),
        "stored": at["words"],
        "entries": [decode(word, at["dtype"]) for word in at["words"][1:]],
        "tail": [(value, first + column) for value, column in (decode(word, at["dtype"]) for word in at["tail"])],
        "tail_row": packed.tail_value.numel(),
        "nnz": packed.nnz,
        "bytes": packed.nbytes,
        "dense_bytes": line.numel() * line.element_size(),
        "lost": float(gone / size) if size > 0 and size.isfinite() else 0.0,
    }
