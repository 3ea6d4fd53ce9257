"""Name the mistake behind a wrong result: it is compared with what typical mistakes give.

A guess is what an output would hold, as float64; NaN stands where it may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from ...simulator.source import code_only
from ..verdicts import UNWRITTEN
from .cases import SIDE, STAGE, TILE, Case

Guess = Callable[..., Tensor]  # of the launch's arguments and the right output


def _moved(values: Tensor, places: int) -> Tensor:
    """Values moved along their rows, with NaN where none comes from."""
    moved, end = values.roll(places, -1), values.shape[-1]
    moved[..., :places] = torch.nan if places > 0 else moved[..., :places]
    moved[..., end + min(places, 0) :] = torch.nan
    return moved


def _beside(x: Tensor, places: int) -> Tensor:
    """Each place's neighbour so many places before it; 0 where there is none."""
    return _moved(x, places).nan_to_num(nan=0.0)


def _tiles_turned(values: Tensor) -> Tensor:
    """A matrix with rows and columns swapped within each of its tiles."""
    rows, columns = (size // SIDE for size in values.shape)
    return values.view(rows, SIDE, columns, SIDE).permute(0, 3, 2, 1).reshape(values.shape)


def _last_in_stage(x: Tensor) -> Tensor:
    """Sums of rows where each stage holds the last tile that was copied there when it is read."""
    tiles = x.view(len(x), -1, STAGE).sum(2)
    last = tiles.shape[1] - 1 - torch.arange(tiles.shape[1]).sub(tiles.shape[1] - 1).abs() % 2
    return tiles[:, last].sum(1)


def _by_lanes(x: Tensor, adds: Callable[[int], int], distances: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Tensor:
    """Running sums by shuffles up, where a lane without one below gets its own. adds: distance -> first lane to add."""
    lane = torch.arange(x.shape[-1])
    for distance in distances:
        below = torch.where(lane >= distance, x.roll(distance, -1), x)
        x = torch.where(lane >= adds(distance), x + below, x)
    return x


def _words(want: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Packed words with all but their counts changed."""
    words = change(want.long() & 0xFFFFFFFF)
    words = torch.where(words < 2**31, words, words - 2**32).double()
    words[:, 0] = want[:, 0]
    return words


def _counts(want: Tensor, fires: Tensor) -> Tensor:
    """Packed words with these counts, and anything behind them."""
    return torch.cat([fires.view(-1, 32).sum(1, keepdim=True), want[:, 1:] * torch.nan], 1)


_OF_ALL: dict[str, Guess] = {
    "every value lost its sign": lambda given, want: want.abs(),
    "every value has the other sign": lambda given, want: -want,
    "every value is half of what it should be": lambda given, want: want / 2,
    "every value is twice what it should be": lambda given, want: 2 * want,
    "each place has the value of the place before it": lambda given, want: _moved(want, 1),
    "each place has the value of the place after it": lambda given, want: _moved(want, -1),
    "the values come in reverse order": lambda given, want: want.flip(-1),
    "every row is like the first: is the row's number in the index?": lambda given, want: (
        want[:1].expand(want.shape) if want.dim() > 1 else -want
    ),
}
_OWN: dict[str, dict[str, Guess]] = {
    "add_bias": {
        "the bias is not added": lambda given, want: given["x"],
        "the bias of the row is added, not that of the column": lambda given, want: (
            given["x"] + given["bias"][torch.arange(len(want)) % want.shape[1], None]
        ),
    },
    "neighbours": {
        "a thread's own value is not added": lambda given, want: want - given["x"],
        "the left neighbour is not added": lambda given, want: want - _beside(given["x"], 1),
        "the right neighbour is not added": lambda given, want: want - _beside(given["x"], -1),
        "the left neighbour is added twice, and the right one never": lambda given, want: (
            given["x"] + 2 * _beside(given["x"], 1)
        ),
        "the right neighbour is added twice, and the left one never": lambda given, want: (
            given["x"] + 2 * _beside(given["x"], -1)
        ),
        "on the right the neighbour's neighbour is added": lambda given, want: (
            given["x"] + _beside(given["x"], 1) + _beside(given["x"], -2)
        ),
        "on the left the neighbour's neighbour is added": lambda given, want: (
            given["x"] + _beside(given["x"], 2) + _beside(given["x"], -1)
        ),
        "the last place has the first for a neighbour": lambda given, want: (
            given["x"] + _beside(given["x"], 1) + given["x"].roll(-1, 1)
        ),
        "the first place has the last for a neighbour": lambda given, want: (
            given["x"] + _beside(given["x"], -1) + given["x"].roll(1, 1)
        ),
    },
    "block_sum": {
        "the last value of a row is missing": lambda given, want: want - given["x"][:, -1],
        "the first value of a row is missing": lambda given, want: want - given["x"][:, 0],
        "the second half of a row is missing": lambda given, want: given["x"][:, :32].sum(1),
        "every second value is missing: is there one fold too few?": lambda given, want: given["x"][:, ::2].sum(1),
        "a sum goes on from that of the row before": lambda given, want: want.cumsum(0),
    },
    "ballot_count": {
        "zeros are counted, too": lambda given, want: (given["x"] >= 0).sum(1),
        "all that is not zero is counted": lambda given, want: (given["x"] != 0).sum(1),
        "the negatives are counted": lambda given, want: (given["x"] < 0).sum(1),
        "values below 1 do not count: is one kept in an `int`?": lambda given, want: (given["x"] >= 1).sum(1),
        "these are the votes themselves, a bit a lane: count them with __popc": lambda given, want: (
            ((given["x"] > 0).long() << torch.arange(given["x"].shape[1])).sum(1).int()
        ),
    },
    "prefix_sum": {
        "a lane's own value is missing": lambda given, want: want - given["x"],
        "the sums run from the other end": lambda given, want: given["x"].flip(1).cumsum(1).flip(1),
        "lanes that have none below them at a distance add as well": lambda given, want: _by_lanes(
            given["x"], lambda distance: 0
        ),
        "a lane just as far up as the distance does not add": lambda given, want: _by_lanes(
            given["x"], lambda distance: distance + 1
        ),
        "the distance 16 is missing": lambda given, want: _by_lanes(given["x"], int, (1, 2, 4, 8)),
        "the distance 1 is missing": lambda given, want: _by_lanes(given["x"], int, (2, 4, 8, 16)),
    },
    "warp_dot": {
        "these are sums of x: each value is to be multiplied by its w": lambda given, want: given["x"].sum(1),
        "columns from 32 on are missing: do the lanes go on?": lambda given, want: given["x"][:, :32] @ given["w"][:32],
        **{
            f"the distance {by} is missing": lambda given, want, by=by: (given["x"] * given["w"])[
                :, torch.arange(len(given["w"])) & by == 0
            ].sum(1)
            for by in (16, 8, 4, 2, 1)
        },
    },
    "vector_loads": {
        f"of each four values the {which} is not doubled": lambda given, want, part=part: torch.where(
            torch.arange(len(want)) % 4 == part, want / 2, want
        )
        for part, which in enumerate(("first", "second", "third", "last"))
    },
    "neuron_counts": {
        "the last firing is not counted": lambda given, want: torch.bincount(given["fired"][:-1], minlength=len(want)),
        "the first firing is not counted": lambda given, want: torch.bincount(given["fired"][1:], minlength=len(want)),
        "neuron 0 is not counted": lambda given, want: want * (torch.arange(len(want)) > 0),
    },
    "gather_rows": {
        "these are the rows in their order: `index` says which is wanted": lambda given, want: given["table"][
            : len(want)
        ],
    },
    "gather_multiply": {
        "these are the first rows of the table: `index` says which are wanted": lambda given, want: (
            given["values"] @ given["table"][: given["values"].shape[1]]
        ),
        "the rows are added without their values": lambda given, want: given["table"][given["index"].long()].sum(1),
        "the last value of a row is missing": lambda given, want: (
            want - given["values"][:, -1:] * given["table"][given["index"][:, -1].long()]
        ),
        "the last value of a row alone is there: is `sum` set to 0 for each?": lambda given, want: (
            given["values"][:, -1:] * given["table"][given["index"][:, -1].long()]
        ),
    },
    "two_stages": {
        "a stage was overwritten before it was read: does the copying warp wait until it is empty?": (
            lambda given, want: _last_in_stage(given["x"])
        ),
        "the last tile is missing": lambda given, want: given["x"][:, :-STAGE].sum(1),
    },
    "neuron_lists": {
        "these are numbers of neurons, and tokens are asked": lambda given, want: given["neuron"].sort()[0],
    },
    "pack_words": {
        "the columns of the second half begin at 0 again": lambda given, want: _words(want, lambda w: w & ~32),
        "value and column are in each other's half of a word": lambda given, want: _words(
            want, lambda w: w >> 16 | (w & 0xFFFF) << 16
        ),
        "each value stands one place too far on: lanes below are those whose bits are lower": lambda given, want: (
            _words(want, lambda w: w).index_copy(1, torch.arange(1, 8), _moved(want[:, 1:], 1))
        ),
        "the count stops where the words do": lambda given, want: torch.cat([want[:, :1].clamp(max=7), want[:, 1:]], 1),
        "NaN does not fire, and it should": lambda given, want: torch.cat(
            [
                (given["gate"].view(torch.bfloat16).view(-1, TILE) > 0).sum(1, keepdim=True),
                want[:, 1:] * torch.nan,
            ],
            1,
        ),
    },
    "gemm_pack": {
        "NaN does not fire, and it should": lambda given, want: _counts(want, given["a"] @ given["b"] > 0),
        "zeros fire, and they should not": lambda given, want: _counts(want, ~(given["a"] @ given["b"] < 0)),
    },
    "gemm_tile": {
        "rows and columns of c are swapped within each tile": lambda given, want: _tiles_turned(want),
        "rows and columns of b's tiles are swapped": lambda given, want: given["a"] @ _tiles_turned(given["b"]),
        "rows and columns of a's tiles are swapped": lambda given, want: _tiles_turned(given["a"]) @ given["b"],
        "only the first tiles along the depth are added": lambda given, want: given["a"][:, :SIDE] @ given["b"][:SIDE],
        "only the last tiles along the depth are added": lambda given, want: given["a"][:, -SIDE:] @ given["b"][-SIDE:],
        "the last tiles along the depth are not added": lambda given, want: given["a"][:, :-SIDE] @ given["b"][:-SIDE],
        "of a the first tile is taken every time": lambda given, want: (
            given["a"][:, :SIDE].repeat(1, given["a"].shape[1] // SIDE) @ given["b"]
        ),
    },
}

_OF_WORDS = list(_OWN["pack_words"].items())[1:4]  # those that hold for tiles of any width
_OWN["gemm_pack"].update(_OF_WORDS)


def likely(puzzle: str, case: Case, output: str, got: Tensor, code: str = "") -> str:
    """Return the mistake that a wrong output comes from, as a sentence after a blank; "" where none is found.

    code: the kernel's text, "" for none."""
    want, used = case.wanted[output].double(), case.used.get(output, torch.tensor(True))
    empty = got.isnan() if got.is_floating_point() else got == UNWRITTEN
    got = got.double().where(~empty, torch.nan)
    if name := _never_set(code):
        return f" `{name}` is added to before it has a value."
    for words, guess in {**_OWN.get(puzzle, {}), **_OF_ALL}.items():
        guessed = guess(case.arguments, want).double()
        matters = used & ~guessed.isnan()
        if ((guessed == got) | ~matters).all() and (matters & (guessed != want)).any():
            return f" {words[0].upper()}{words[1:]}{'' if words.endswith('?') else '.'}"
    floats = case.wanted[output].is_floating_point()
    if floats and ((got - want).abs() <= 1e-5 * want.abs().max()).all():
        return " Only the last digits are off: each addition rounds. Add in the order of the list."
    whole = got.round() == got
    if (whole | empty)[used.expand(got.shape)].all() and (used & (want.round() != want) & whole).any():
        return " The fractions are lost: is a value kept in an `int`?"
    return _end(empty & used)


def _end(empty: Tensor) -> str:
    """Return what is said of places at the end that were not written: of all, or of every row."""
    for name, places in {"": empty.reshape(1, -1), " of a row": empty.reshape(-1, empty.shape[-1])}.items():
        first = int(places[0].int().argmax())
        if places[0].any() and (places == (torch.arange(places.shape[1]) >= first)).all():
            if first + 1 == places.shape[1]:
                return f" It is the last{name}: is a bound one too small?"
            return f" Nor is any place{name} after it: do the threads go on to the end?"
    return ""


def _never_set(code: str) -> str | None:
    """The name of a number that is declared without a value and first used in `+=`, or None."""
    code = code_only(code)
    for declared in re.finditer(r"(?<!__shared__ )\b(?:float|int|unsigned|double)\s+(\w+)\s*;", code):
        after = re.search(rf"\b{declared[1]}\b\s*(\S?.?)", code[declared.end() :])
        if after and after[1] == "+=":
            return declared[1]
    return None
