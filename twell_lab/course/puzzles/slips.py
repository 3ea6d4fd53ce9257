"""Name the mistake behind a wrong result: it is compared with what typical mistakes give, which slips.toml lists."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ...simulator.source import code_only
from ..verdicts import UNWRITTEN
from .cases import SIDE, STAGE, TILE, Case


def moved(values: Tensor, places: int) -> Tensor:
    """Values moved along their rows, with NaN where none comes from."""
    result, end = values.roll(places, -1), values.shape[-1]
    result[..., :places] = torch.nan if places > 0 else result[..., :places]
    result[..., end + min(places, 0) :] = torch.nan
    return result


def beside(x: Tensor, places: int) -> Tensor:
    """Each place's neighbour so many places before it; 0 where there is none."""
    return moved(x, places).nan_to_num(nan=0.0)


def tiles_turned(values: Tensor) -> Tensor:
    """A matrix with rows and columns swapped within each of its tiles."""
    rows, columns = (size // SIDE for size in values.shape)
    return values.view(rows, SIDE, columns, SIDE).permute(0, 3, 2, 1).reshape(values.shape)


def last_in_stage(x: Tensor) -> Tensor:
    """Sums of rows where each stage holds the last tile that was copied there when it is read."""
    tiles = x.view(len(x), -1, STAGE).sum(2)
    last = tiles.shape[1] - 1 - torch.arange(tiles.shape[1]).sub(tiles.shape[1] - 1).abs() % 2
    return tiles[:, last].sum(1)


def by_lanes(x: Tensor, adds: Callable[[int], int], distances: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Tensor:
    """Running sums by shuffles up, where a lane without one below gets its own. adds: distance -> first lane to add."""
    lane = torch.arange(x.shape[-1])
    for distance in distances:
        below = torch.where(lane >= distance, x.roll(distance, -1), x)
        x = torch.where(lane >= adds(distance), x + below, x)
    return x


def words(want: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Packed words with all but their counts changed."""
    changed = change(want.long() & 0xFFFFFFFF)
    changed = torch.where(changed < 2**31, changed, changed - 2**32).double()
    changed[:, 0] = want[:, 0]
    return changed


def one_on(want: Tensor) -> Tensor:
    """Packed words with each value one word further on."""
    return torch.cat([want[:, :1], moved(want[:, 1:], 1)], 1)


def counts(want: Tensor, fires: Tensor) -> Tensor:
    """Packed words with the counts of these tiles, and anything behind them."""
    return torch.cat([fires.sum(1, keepdim=True), want[:, 1:] * torch.nan], 1)


HELPERS = (moved, beside, tiles_turned, last_in_stage, by_lanes, words, one_on, counts)
NAMES = {"torch": torch, "SIDE": SIDE, "STAGE": STAGE, "TILE": TILE} | {each.__name__: each for each in HELPERS}


@cache
def _slips() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("slips.toml").read_text(encoding="utf-8"))


def likely(puzzle: str, case: Case, output: str, got: Tensor, code: str = "") -> str:
    """Return the likely mistake behind a wrong output of a kernel with this code, as a sentence after a blank; or
    ""."""
    want, used = case.wanted[output].double(), case.used.get(output, torch.tensor(True))
    empty = got.isnan() if got.is_floating_point() else got == UNWRITTEN
    got = got.double().where(~empty, torch.nan)
    if name := _never_set(code):
        return f" `{name}` is added to before it has a value."
    for said, expression in (_slips().get(puzzle, {}) | _slips()["all"]).items():
        guessed = eval(expression, NAMES | case.arguments | {"want": want}).double()  # from our own file
        matters = used & ~guessed.isnan()
        if ((guessed == got) | ~matters).all() and (matters & (guessed != want)).any():
            return f" {said[0].upper()}{said[1:]}{'' if said.endswith('?') else '.'}"
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
