"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...formats.twell import WORDS, TwELL
from ..verdicts import NotYet, said, same, written
from .data import toy_unpack, warp_slots

BY_HAND = (-1.0, 2.0, 0.0, 0.5, -0.0, 1.0, 3.0, -2.0)  # the tile that the reader packs into four words


def _by_hand(answer) -> str:
    want = [word % 2**32 for word in TwELL.from_gate(torch.tensor([BY_HAND]).bfloat16(), 8, 4).packed[0, 0].tolist()]
    if not isinstance(answer, (list, tuple)) or len(answer) != 4:
        raise NotYet("four words are asked for, as a list of whole numbers.")
    for place, (mine, word) in enumerate(zip(answer, want, strict=True)):
        if written(mine) != word:
            shown = f"0x{mine:08x}" if isinstance(mine, int) and mine >= 0 else repr(mine)
            where = "" if place else ": it counts all that fire, those without a slot too"
            raise NotYet(f"word {place} is not {shown}{where}.")
    return "four values fire, three have a slot, the fourth goes to the tail; word 0 says four."


def _exact(gate: Tensor) -> Tensor:
    return TwELL.from_gate(gate).to_dense()


def _one_slot_less(gate: Tensor) -> Tensor:
    back, fires = _exact(gate), ~(gate <= 0)
    return torch.where((fires.cumsum(1) == WORDS - 1) & fires, 0, back)


def _count_in_a_byte(gate: Tensor) -> Tensor:
    return torch.where((gate > 0).all(1, keepdim=True), 0, _exact(gate))


# What loses values, and for which gates.
LOSING = {
    "drops what finds no slot": toy_unpack,
    "turns NaN into zero": lambda gate: torch.where(gate > 0, gate, 0),
    "has one slot less than it should, so that value 31 is lost": _one_slot_less,
    "counts in 8 bits, so that a full tile of 256 counts as empty": _count_in_a_byte,
}


def _lossless(answer) -> str:
    if not bool(written(answer(_exact))):
        raise NotYet(
            "the library's packing loses nothing, and yours says that it does. (A NaN does not equal itself, and a "
            "ReLU may change its bits.)"
        )
    for what, round_trip in LOSING.items():
        if bool(answer(round_trip)):
            raise NotYet(f"a packing that {what} passes.")
    return f"it passes what is exact, and finds all of {len(LOSING)} packings that lose values."


def _larger_tile(answer) -> str:
    want = {"bytes of words": "fewer", "rows that overflow": "more", "values lost": "the same"}
    said(answer, want, "larger_tile")
    return "half as many tiles, so half of the words; each has to do for twice the columns; and nothing is ever lost."


def _warp_slot(answer) -> str:
    for share in (0.2, 0.8, 1.0, 0.05):
        fires = torch.rand(32) < share
        ballot, slots = warp_slots(fires)
        for lane in fires.nonzero()[:, 0].tolist():
            same(answer(ballot, lane), slots[lane], f"warp_slot(0x{ballot:08x}, lane={lane})")
    return "one after word 0, and one for each lower lane that fires."


CHECKS: dict[str, Callable] = {
    "by_hand": _by_hand,
    "lossless": _lossless,
    "larger_tile": _larger_tile,
    "warp_slot": _warp_slot,
}
