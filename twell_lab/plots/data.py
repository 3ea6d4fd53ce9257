"""What the figures and the tour's page draw, as dicts, lists and numbers. Needs neither torch nor plotly."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

from ..core import InputError

# Rows of these paths say how long a layer takes on kernels that would not be picked for it.
OTHER_KERNELS = ("portable", "mma.sync")


# The format of notes["tour"] in a tour's record, without which another version would misread it, and the names of the
# two trainings there.
FORMAT, WITHOUT, WITH = 1, "without L1", "with L1"


def picked(path: str) -> bool:
    """Whether a row's path is the layer as it runs, or the dense layer; False for kernels timed for comparison only."""
    return path.partition(" (")[0] not in OTHER_KERNELS


def layer_names(names: list[str]) -> list[str]:
    """Short names of modules, such as `layer 3` for `layers.3.mlp`; the full names where those would not be unique."""
    numbers = [next((part for part in name.split(".") if part.isdigit()), None) for name in names]
    if None in numbers or len(set(numbers)) < len(numbers):
        return [name or "layer" for name in names]
    return [f"layer {number}" for number in numbers]


def layer_rows(tour: dict) -> list[dict]:
    """What a tour found (notes["tour"] of its record), a row for each layer, ready to be printed.

    Each row: layer; before, after (share of neurons firing without and with L1); dead_before, dead_after;
    overflow (share of rows with a tile beyond its slots), used (share of slots that hold a value), and the
    bytes a token takes in each format.
    """
    without, sparse = tour["runs"][WITHOUT], tour["runs"][WITH]
    names = layer_names([layer["name"] for layer in tour["profile"]["layers"]])
    return [
        {
            "layer": name,
            "before": share(without["density"][i]),
            "after": share(sparse["density"][i]),
            "dead_before": without["dead"][i],
            "dead_after": sparse["dead"][i],
            "overflow": share(packed["overflow_rows"] / packed["tokens"]),
            "used": share(packed["slots_used"] / packed["slots"]),
            **{kind: round(size / packed["tokens"]) for kind, size in packed["bytes"].items()},
        }
        for i, (name, packed) in enumerate(zip(names, tour["packing"]["layers"], strict=True))
    ]


def share(value: float) -> str:
    """A share of one as a percentage, with two digits where it is small."""
    percent = 100 * value
    if percent == 0 or percent >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.095 else f"{percent:.2g}%"


def tile_of(twell, row: int, tile: int) -> dict:
    """One tile of one row of a formats.TwELL as a dict, which packed_tile draws and JSON can hold.

    {row, tile, width (columns in this tile), count (kept values), dtype, slots, words (the stored words that
    are used, as whole numbers, the count first), tail (the values that did not fit, as words too)}.
    """
    from ..formats.twell import join_words  # not at the top: the other functions of this module need no torch

    rows, tiles, words = twell.packed.shape
    for name, value, end in (("row", row, rows), ("tile", tile, tiles)):
        if not 0 <= value < end:
            raise InputError(f"{name} is {value!r}; this TwELL has {name}s 0 to {end - 1}")
    stored = twell.packed[row, tile].tolist()
    first, width = tile * twell.tile, min(twell.tile, twell.shape[1] - tile * twell.tile)
    mine = slice(*twell.tail_pointer[row : row + 2].tolist())
    column, value = twell.tail_column[mine] - first, twell.tail_value[mine]
    here = (column >= 0) & (column < width)
    tail = join_words(value[here], column[here]).tolist()
    bits = 8 * twell.packed.element_size()
    return {
        "row": row,
        "tile": tile,
        "width": width,
        "count": stored[0],
        "slots": words - 1,
        "dtype": str(twell.dtype).removeprefix("torch."),
        "tail": [word % 2**bits for word in tail],
        "words": [word % 2**bits for word in stored[: min(stored[0], words - 1) + 1]],
    }


def decode(word: int, dtype: str) -> tuple[float, int]:
    """(value, column) of a stored TwELL word, for its value's dtype."""
    if dtype == "float32":
        return struct.unpack("<f", struct.pack("<I", word >> 32))[0], word & 0xFFFFFFFF
    bits, column = word >> 16, word & 0xFFFF
    if dtype == "float16":
        return struct.unpack("<e", struct.pack("<H", bits))[0], column
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0], column


def percentiles(histogram: Iterable[int]) -> tuple[int, int]:
    """The 5th and 95th percentile of what a histogram over 0, 1, 2, ... counts; zeros where it counts nothing."""
    seen = list(accumulate(int(count) for count in histogram))
    total = seen[-1] if seen else 0
    return (bisect_right(seen, 0.05 * total), bisect_left(seen, 0.95 * total)) if total else (0, 0)


def alike(rows: list[dict]) -> list[list[dict]]:
    """Rows grouped by how many neurons fire. A drawn workload has its mean only roughly, so rows within a factor of
    1.5 count as one workload."""
    groups: list[list[dict]] = []
    for row in sorted(rows, key=lambda row: row.get("nnz") or 0):
        if not groups or (row.get("nnz") or 0) > 1.5 * (groups[-1][0].get("nnz") or 0):
            groups.append([])
        groups[-1].append(row)
    return groups


def said_fast(texts: dict) -> str:
    """How fast the model with L1 spoke on its planned layers, and on dense ones (notes["tour"]["texts"])."""
    same = "the same text" if texts["same"] else "not the same text, since sums differ in their last bits"
    return f"{texts['tokens_per_s']:,.0f} tokens a second, {texts['dense_tokens_per_s']:,.0f} with dense layers, {same}"


def apart(heights: list[float], least: float) -> list[float]:
    """Heights for the names of lines that end at these heights, in the same order and at least `least` apart: where
    two are nearer, the upper one is moved up."""
    places, below = [0.0] * len(heights), -math.inf
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        places[i] = below = max(heights[i], below + least)
    return places
