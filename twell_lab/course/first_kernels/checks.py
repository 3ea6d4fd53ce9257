"""Checks of this notebook's exercises, for course.exercises. Those of kernel files are puzzles (puzzles.cases)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..verdicts import number, said, same, same_list


def _launch_of(answer) -> str:
    for rows, columns, tile, block in (
        (64, 5632, 256, 128),
        (100, 5632, 256, 128),
        (3, 600, 256, 32),
        (1, 256, 256, 64),
    ):
        tiles = rows * -(-columns // tile)
        blocks = -(-tiles // block)
        asked = f"launch_of({rows}, {columns}, {tile}, {block})"
        same_list(answer(rows, columns, tile, block), [blocks, blocks * block - tiles], asked)
    return "a narrow tile counts whole, and so does the last block; the threads left over return at once."


def _sectors(answer) -> str:
    lanes = range(32)
    for asked, addresses, size in (
        ("32 lanes read floats, one after another", [4 * lane for lane in lanes], 4),
        ("32 lanes read 2-byte values, one after another", [2 * lane for lane in lanes], 2),
        ("the same, from address 6 on", [6 + 2 * lane for lane in lanes], 2),
        ("all lanes read the same float", [128] * 32, 4),
        ("32 lanes read 16 bytes each, one after another", [16 * lane for lane in lanes], 16),
        ("32 lanes read 2-byte values 512 bytes apart", [512 * lane for lane in lanes], 2),
        ("five lanes read floats anywhere", (4 * torch.randint(0, 60, (5,))).tolist(), 4),
    ):
        want = len({byte // 32 for address in addresses for byte in range(address, address + size)})
        same(answer(addresses, size), want, f"sectors({addresses}, {size}) ({asked})")
    return "a sector counts once, however many lanes touch it."


def _every_other(answer) -> str:
    number(answer, 250, "the number of sectors read", within=0)
    return "250, as many as for all 1,000: a sector holds eight floats, and half of each is thrown away."


def _teams(answer) -> str:
    want = {values: values % 8 != 0 for values in (4, 8, 12, 16, 20)}
    said(answer, want, "teams")
    return "with a multiple of eight, every team makes the same number of steps, and the mistake does not show."


CHECKS: dict[str, Callable] = {
    "launch_of": _launch_of,
    "sectors": _sectors,
    "every_other": _every_other,
    "teams": _teams,
}
