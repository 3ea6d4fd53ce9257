"""Checks of this notebook's exercises, for course.exercises."""

from __future__ import annotations

import random
from collections.abc import Callable

from ..verdicts import NotYet, same, written
from . import tile


def _stages(answer) -> str:
    shared = 227 * 1024
    for rows, columns, depth, kept in (
        (128, 256, 64, 34_000),
        (64, 256, 64, 0),
        (128, 128, 128, 50_000),
        (256, 256, 64, 231_000),
    ):
        given = rows, columns, depth, shared, kept
        same(answer(*given), tile.stages_that_fit(*given), f"stages{given}")
    return "2 bytes a value, whole stages, and what the epilogue keeps is left alone."


def _sum_place(answer) -> str:
    held = tile.sums()
    places = [(0, 0), (0, 9), (8, 0), (63, 255)] + [(random.randrange(64), random.randrange(256)) for _ in range(200)]
    for row, column in places:
        want = tuple(int(each[row, column]) for each in held)
        got = written(answer(row, column))
        if not isinstance(got, (tuple, list)) or tuple(got) != want:
            raise NotYet(f"sum_place({row}, {column}) should be {want}; yours gave {got!r}.")
    return "16 rows a warp, and four lanes a row, which take turns by pairs of columns."


def _neuron_at(answer) -> str:
    for place in range(256):
        same(answer(place), tile.neuron_at(place), f"neuron_at({place})")
    return "each lane holds 64 neighbours, in the order of its registers, and no byte was moved for it."


def _l2_bytes(answer) -> str:
    for tokens, d_model, d_ff in ((256, 64, 256), (16384, 2048, 5632), (1024, 4096, 14336)):
        for cluster in (1, 2):
            given = tokens, d_model, d_ff, cluster
            same(answer(*given), tile.l2_bytes(*given), f"l2_bytes{given}")
    return "each tile asks for all of its x, and for its part of the weights."


CHECKS: dict[str, Callable] = {
    "stages": _stages,
    "sum_place": _sum_place,
    "neuron_at": _neuron_at,
    "l2_bytes": _l2_bytes,
}
