"""Checks of the exercises of notebooks 06 to 09, 11 and 12: packing, kernels, and the backward pass.

Kernel files are judged by `puzzles` and, those of the capstone, by `capstone`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ...formats.twell import TILE, WORDS, TwELL
from ...ops import functional
from ..capstone import cases
from ..capstone.data import judge, least_us, medal, next_step
from ..hopper.data import pool_table
from ..packing.data import toy_unpack, warp_slots
from ..puzzles import data as puzzles
from ..puzzles.cases import PUZZLES
from ..verdicts import CHECKS, NotYet, alike, exercise, formula, match_parts, number, said, skipping, written

# ---- notebook 07 ----


@exercise(
    "the true count, then value and column of what fits, with NaN kept and -0 left out.",
    *(TwELL.from_gate, TwELL.from_dense, functional.pack),
)
def pack_tile(answer) -> None:
    for width, words, share in ((8, 4, 0.3), (40, 9, 0.1), (40, 9, 0.6), (16, 4, 0.0), (16, 17, 1.0)):
        gate = (torch.rand(width) + 0.01) * torch.where(torch.rand(width) < share, 1.0, -1.0)
        gate = gate.to(torch.bfloat16)
        gate[1] = -0.0
        if share == 0.6:
            gate[0] = torch.nan
            gate.view(torch.int16)[2] = -64  # a NaN with its sign bit set, which torch's minus would not set
        stored = TwELL.from_gate(gate[None], width, words).packed[0, 0].tolist()
        want = [word % 2**32 for word in stored[: min(stored[0], words - 1) + 1]]
        tile = f"of {width} columns {want[0]} fire{', two NaN among them' * (share == 0.6)}, with {words} words a tile"
        got = list(written(answer(gate, words)))
        if len(got) != len(want):
            raise NotYet(f"{tile}: {len(want)} hold something, the count and what has a slot; yours are {len(got)}.")
        if got[0] != want[0]:
            raise NotYet(f"{tile}: word 0 should be the count of all that fire, {want[0]}; yours is {got[0]!r}.")
        for place, (mine, word) in enumerate(zip(got, want, strict=True)):
            if mine != word:
                value = f"should be 0x{word:08x}, value 0x{word >> 16:04x} of column {word & 0xFFFF}"
                raise NotYet(
                    f"{tile}: word {place} {value}; yours is {hex(mine) if isinstance(mine, int) else mine!r}."
                )


def _counts() -> Iterator[tuple[Tensor, float]]:
    for tile, most, share in ((256, 150, 0.125), (32, 32, 0.0), (64, 9, 0.25), (16, 1, 1.0)):
        counts = torch.randint(0, most + 1, (48, 5))
        if tile == 256:  # as many rows as may overflow are by far the fullest: what lies between is no count of a row
            counts[torch.randperm(48)[:6], 0] = 200
        yield counts, share


@formula("one word for the count, and slots for the fullest tile of all rows but the allowed few.", _counts)
def fewest_words(counts: Tensor, share: float) -> int:
    return next(words for words in range(2, 258) if (counts >= words).any(1).double().mean() <= share)


BY_HAND = (-1.0, 2.0, 0.0, 0.5, -0.0, 1.0, 3.0, -2.0)  # the tile that the reader packs into four words


@exercise("four values fire, three have a slot, the fourth goes to the tail; word 0 says four.")
def by_hand(answer) -> None:
    want = [word % 2**32 for word in TwELL.from_gate(torch.tensor([BY_HAND]).bfloat16(), 8, 4).packed[0, 0].tolist()]
    if not isinstance(answer, (list, tuple)) or len(answer) != 4:
        raise NotYet("four words are asked for, as a list of whole numbers.")
    for place, (mine, word) in enumerate(zip(answer, want, strict=True)):
        if written(mine) != word:
            shown = f"0x{mine:08x}" if isinstance(mine, int) and mine >= 0 else repr(mine)
            where = "" if place else ": it counts all that fire, those without a slot too"
            raise NotYet(f"word {place} is not {shown}{where}.")


def _exact(gate: Tensor) -> Tensor:
    return TwELL.from_gate(gate).to_dense()


def _one_slot_less(gate: Tensor) -> Tensor:
    back, fires = _exact(gate), ~(gate <= 0)
    return torch.where((fires.cumsum(1) == WORDS - 1) & fires, 0, back)


# What loses values, and for which gates.
LOSING = {
    "drops what finds no slot": toy_unpack,
    "turns NaN into zero": lambda gate: torch.where(gate > 0, gate, 0),
    "has one slot less than it should, so that value 31 is lost": _one_slot_less,
    "counts in 8 bits, so that a full tile of 256 counts as empty": lambda gate: torch.where(
        (gate > 0).all(1, keepdim=True), 0, _exact(gate)
    ),
}


@exercise(f"it passes what is exact, and finds all of {len(LOSING)} packings that lose values.")
def lossless(answer) -> None:
    if not bool(written(answer(_exact))):
        raise NotYet(
            "the library's packing loses nothing, and yours says that it does. (A NaN does not equal itself, and a "
            "ReLU may change its bits.)"
        )
    for what, round_trip in LOSING.items():
        if bool(answer(round_trip)):
            raise NotYet(f"a packing that {what} passes.")


@exercise("half as many tiles, so half of the words; each has to do for twice the columns; and nothing is ever lost.")
def larger_tile(answer) -> None:
    said(answer, {"bytes of words": "fewer", "rows that overflow": "more", "values lost": "the same"}, "larger_tile")


@exercise("one after word 0, and one for each lower lane that fires.")
def warp_slot(answer) -> None:
    for share in (0.2, 0.8, 1.0, 0.05):
        fires = torch.rand(32) < share
        ballot, slots = warp_slots(fires)
        for lane in fires.nonzero()[:, 0].tolist():
            alike(answer(ballot, lane), slots[lane], f"warp_slot(0x{ballot:08x}, lane={lane})")


# ---- notebook 08 ----


@formula(
    "a narrow tile counts whole, and so does the last block; the threads left over return at once.",
    [(64, 5632, 256, 128), (100, 5632, 256, 128), (3, 600, 256, 32), (1, 256, 256, 64)],
)
def launch_of(rows: int, columns: int, tile: int, block: int) -> tuple[int, int]:
    tiles = rows * -(-columns // tile)
    blocks = -(-tiles // block)
    return blocks, blocks * block - tiles


@formula(
    "a sector counts once, however many lanes touch it.",
    lambda: [
        ([4 * lane for lane in range(32)], 4),
        ([2 * lane for lane in range(32)], 2),
        ([6 + 2 * lane for lane in range(32)], 2),  # from the middle of a sector on
        ([128] * 32, 4),
        ([16 * lane for lane in range(32)], 16),
        ([512 * lane for lane in range(32)], 2),
        ((4 * torch.randint(0, 60, (5,))).tolist(), 4),
    ],
)
def sectors(addresses: list[int], size: int) -> int:
    return len({byte // 32 for address in addresses for byte in range(address, address + size)})


@exercise("250, as many as for all 1,000: a sector holds eight floats, and half of each is thrown away.")
def every_other(answer) -> None:
    number(answer, 250, "the number of sectors read", within=0)


@exercise("with a multiple of eight, every team makes the same number of steps, and the mistake does not show.")
def teams(answer) -> None:
    said(answer, {values: values % 8 != 0 for values in (4, 8, 12, 16, 20)}, "teams")


# ---- notebook 09 ----


@formula(
    "each row after the earlier ones, and those that do not fit are lost, though their place stays taken.",
    lambda: [
        *[([0] * 16,), ([31] * 16,), ([32] * 16,), ([40, 20, 40, 100, 33],), ([256, 32],), ([95, 31, 32],)],
        *[([31, 95, 0, 32],), *((torch.randint(0, 60, (16,)).tolist(),) for _ in range(3))],
    ],
    pool_table,
)
def pool_starts(counts: list[int]) -> list[int | None]:
    return [None if row["lost"] else row["start"] for row in pool_table(counts)]


# ---- notebook 11 ----


@exercise("all three gradients, and no weight of a neuron that never fired was read.")
def plain_backward(answer) -> None:
    for tokens, d_model, d_ff in ((9, 8, 20), (1, 4, 6), (30, 16, 12)):
        x, dy = torch.randn(tokens, d_model), torch.randn(tokens, d_model)
        up, down = torch.randn(d_ff, d_model) - 0.3, torch.randn(d_model, d_ff)
        x = x.abs()  # so that many neurons fire for no token
        leaves = [t.double().requires_grad_() for t in (x, up, down)]
        with torch.enable_grad():
            y = torch.relu(leaves[0] @ leaves[1].T) @ leaves[2].T
        exact = torch.autograd.grad(y, leaves, dy.double())
        fired = (leaves[0] @ leaves[1].T > 0).detach()
        silent = ~fired.any(0)
        up[silent], down[:, silent] = torch.nan, torch.nan
        # h, dh and three gradients, of neurons that fire at all, and a mask or two.
        most = 5 * 2 * tokens * d_model * int((~silent).sum()) + 4 * tokens * d_ff
        got = skipping(answer, (x, up, down, dy, fired), most, "plain_backward")
        match_parts(
            got, exact, ("dx", "dup", "ddown"), f"{tokens} tokens, {int(silent.sum())} of {d_ff} neurons silent"
        )


@exercise("the penalty joins dh before both factors, and a silent gate gets nothing from either.")
def factor_gradients(answer) -> None:
    for tokens, d_ff in ((5, 9), (1, 4), (12, 30)):
        drawn = torch.Generator().manual_seed(tokens)  # the same each time, so that what is said can be compared
        before, u, dh = (torch.randn(tokens, d_ff, generator=drawn).double() for _ in range(3))
        before[0, 0] = 0  # silent
        before, u, c = before.requires_grad_(), u.requires_grad_(), 0.3
        with torch.enable_grad():
            h = before.relu() * u
            loss = (h * dh).sum() + c * h.abs().sum()
        exact = torch.autograd.grad(loss, (before, u))
        with torch.inference_mode():  # so that autograd does not do it for the reader
            got = answer(before.clone(), u.clone(), dh.clone(), c)
        match_parts(got, exact, ("dg", "du"), f"{tokens} tokens and {d_ff} neurons")


@exercise("room costs bytes; less of it costs time, and never a gradient.")
def less_room(answer) -> None:
    want = {"bytes kept": "fewer", "tokens lost": "more", "gradients": "the same", "rows read": "more"}
    said(answer, want, "less_room")


# ---- notebook 12 ----


@exercise("the upper half is the value, the lower half the column within its tile.")
def read_word(answer) -> None:
    drawn = [(1.0, 0), (0.5, 255), (3.140625, 1), (2.0**-20, 128)]
    drawn += [(2.0 ** random.randint(-9, 9), random.randrange(256)) for _ in range(4)]
    for value, column in drawn:
        for t in (0, 3, 21):
            word = int(torch.tensor(value).bfloat16().view(torch.int16)) << 16 | column
            want, names = (value, TILE * t + column), ("the value", "the column")
            match_parts(answer(word, t), want, names, f"read_word(0x{word:08x}, t={t})")


@formula(
    "a row that begins in the middle of a sector may touch one more.",
    lambda: [
        *[(0, 2048), (7, 2048), (3, 40), (4, 40), (1, 8), (1, 12), (1, 20), (2, 20), (5, 100), (11, 260)],
        *[(random.randrange(5000), random.randint(1, 2400)) for _ in range(4)],
    ],
)
def row_sectors(column: int, d_model: int) -> int:
    return cases.sectors_of(column * d_model, d_model)


@formula(
    "whole sectors of words, the count's included, and a row of down_t for every value.",
    lambda: [
        (counts, 2048)
        for counts in (
            *([0] * 22, [1] * 22, [7, 8], [31, 31], [31, 0, 15, 16]),
            *([random.randint(0, 31) for _ in range(22)] for _ in range(3)),
        )
    ],
)
def floor_bytes(counts: list[int], d_model: int) -> int:
    return sum(-(-4 * (1 + count) // 32) * 32 for count in counts) + 2 * d_model * sum(counts)


formula(
    "the slower of the two, since they work at the same time.",
    [(2.0e9, 1.0e8, 7.4e12, 3.0e12), (1.0e8, 1.0e8, 7.4e12, 3.0e12), (5.0e8, 4.0e8, 2.0e12, 3.2e11)],
)(least_us)


@exercise(f"the words of a tile, or the gate where its count says more than {WORDS - 1}.")
def down_row(answer) -> None:
    for of in cases.small(32):
        if of.said.startswith("d_model"):
            continue
        exact, size = cases.sums(of)
        for row in range(len(of.packed)):
            asked = f"down_row, with {of.said}, row {row}"
            most = 2 * int(of.kept[row].sum()) * of.down_t.shape[1]
            given = (of.packed[row].clone(), of.gate[row].clone(), of.down_t.clone())
            got = written(skipping(answer, given, most, asked))
            if not isinstance(got, Tensor) or got.shape != exact[row].shape:
                shape = list(got.shape) if isinstance(got, Tensor) else type(got).__name__
                raise NotYet(f"{asked}, should have shape {list(exact[row].shape)}; yours is {shape}.")
            if not cases.agrees(got, exact[row], size[row]).all():
                at = int((~cases.agrees(got, exact[row], size[row])).nonzero()[0])
                raise NotYet(f"{asked}, should have {exact[row, at]:.4g} at {at}; yours has {float(got[at]):.4g}.")


# ---- kernel files ----


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


CHECKS |= {name: partial(puzzles.judge, name) for name in PUZZLES}
CHECKS |= {name: _kernel(name) for name in ("down", *cases.STEPS)}
