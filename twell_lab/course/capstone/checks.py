"""Checks of the capstone's exercises, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from ...formats.twell import TILE, WORDS
from ..verdicts import NotYet, near, same, skipping, written
from . import cases
from .data import judge, least_us, medal, next_step


def _read_word(answer) -> str:
    drawn = [(1.0, 0), (0.5, 255), (3.140625, 1), (2.0**-20, 128)]
    drawn += [(2.0 ** random.randint(-9, 9), random.randrange(256)) for _ in range(4)]
    for value, column in drawn:
        for t in (0, 3, 21):
            word = int(torch.tensor(value).bfloat16().view(torch.int16)) << 16 | column
            asked = f"read_word(0x{word:08x}, t={t})"
            got = written(answer(word, t))
            if not isinstance(got, tuple) or len(got) != 2:
                raise NotYet(f"{asked} should be a value and a column; yours gave {got!r:.80}.")
            near(float(got[0]), value, f"the value of {asked}")
            same(got[1], TILE * t + column, f"the column of {asked}")
    return "the upper half is the value, the lower half the column within its tile."


def _row_sectors(answer) -> str:
    shapes = [(0, 2048), (7, 2048), (3, 40), (4, 40), (1, 8), (1, 12), (1, 20), (2, 20), (5, 100), (11, 260)]
    for column, d_model in shapes + [(random.randrange(5000), random.randint(1, 2400)) for _ in range(4)]:
        want = cases.sectors_of(column * d_model, d_model)
        same(answer(column, d_model), want, f"row_sectors(column={column}, d_model={d_model})")
    return "a row that begins in the middle of a sector may touch one more."


def _floor_bytes(answer) -> str:
    given = [[0] * 22, [1] * 22, [7, 8], [31, 31], [31, 0, 15, 16]]
    for counts in given + [[random.randint(0, 31) for _ in range(22)] for _ in range(3)]:
        words = sum(-(-4 * (1 + count) // 32) * 32 for count in counts)
        want = words + 2 * 2048 * sum(counts)
        same(answer(list(counts), 2048), want, f"floor_bytes({counts}, d_model=2048)")
    return "whole sectors of words, the count's included, and a row of down_t for every value."


def _least_us(answer) -> str:
    given = [(2.0e9, 1.0e8, 7.4e12, 3.0e12), (1.0e8, 1.0e8, 7.4e12, 3.0e12), (5.0e8, 4.0e8, 2.0e12, 3.2e11)]
    for of in given:
        near(answer(*of), least_us(*of), "least_us({:.3g}, {:.3g}, {:.3g}, {:.3g})".format(*of))
    return "the slower of the two, since they work at the same time."


def _down_row(answer) -> str:
    for of in cases.small(32):
        if of.said.startswith("d_model"):
            continue
        exact, size = cases.sums(of)
        for row in range(len(of.packed)):
            asked = f"down_row, with {of.said}, row {row}"
            most = 2 * int(of.kept[row].sum()) * of.down_t.shape[1]
            given = (of.packed[row].clone(), of.gate[row].clone(), of.down_t.clone())
            got = written(skipping(answer, given, most, asked))
            if not isinstance(got, torch.Tensor) or got.shape != exact[row].shape:
                shape = list(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
                raise NotYet(f"{asked}, should have shape {list(exact[row].shape)}; yours is {shape}.")
            if not cases.agrees(got, exact[row], size[row]).all():
                at = int((~cases.agrees(got, exact[row], size[row])).nonzero()[0])
                raise NotYet(f"{asked}, should have {exact[row, at]:.4g} at {at}; yours has {float(got[at]):.4g}.")
    return f"the words of a tile, or the gate where its count says more than {WORDS - 1}."


def _kernel(name: str) -> Callable[[str], str]:
    """The check of `down`, or of a step on the way to it: of the reader's kernel file."""

    def check(file) -> str:
        judged = judge(file, name)
        if not judged.right:
            raise NotYet(judged.said)
        if name in cases.STEPS:
            return judged.said
        won = medal(judged)
        return f"{won}. {judged.said[0].upper()}{judged.said[1:]} {next_step(won, judged)}"

    return check


CHECKS: dict[str, Callable[[Callable], str]] = {
    "read_word": _read_word,
    "row_sectors": _row_sectors,
    "floor_bytes": _floor_bytes,
    "down_row": _down_row,
    "least_us": _least_us,
} | {name: _kernel(name) for name in ("down", *cases.STEPS)}
