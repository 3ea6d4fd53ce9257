"""Checks of this notebook's exercises, for course.exercises. Kernel files run in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ... import simulator
from ...core import CompileError, InputError, StackError
from ...formats.twell import TILE, WORDS, TwELL
from ...simulator.program import Run
from ..puzzles.cases import Case
from ..puzzles.data import in_words
from ..verdicts import UNWRITTEN, NotYet, added_to, not_met, number, said, same, same_list


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


# ---- kernel files ----


@contextmanager
def _told() -> Iterator[None]:
    """Reasons why the simulator cannot run a file, as NotYet."""
    try:
        yield
    except (CompileError, InputError, StackError, simulator.Unsupported) as error:
        raise NotYet(str(error)) from None


def _launched(program: simulator.Program, kernel: str, grid, block: int, arguments: tuple, **options) -> Run:
    """Return what `Program.launch` does; faults are NotYet."""
    try:
        return program.launch(kernel, grid, block, arguments, **options)
    except simulator.faults.SharedRace as fault:  # within a block: where its two threads stand says enough
        at = f"line {fault.line.number} (thread {fault.thread})"
        other = f"line {fault.other_line.number} (thread {fault.other_thread})"
        raise NotYet(f"a SharedRace on {fault.array}: {at}, {other}.") from None
    except simulator.Fault as fault:
        names = (parameter.name for parameter in program.kernels[kernel])
        grid = grid if isinstance(grid, tuple) else (grid,)
        case = Case("", grid, (block,), dict(zip(names, arguments, strict=True)), {})
        raise NotYet(in_words(fault, case)) from None


def _drawn(rows: int, columns: int, share: float) -> Tensor:
    """A gate, bfloat16 [rows, columns], of which about this share fires, with a NaN and a -0 in it."""
    gate = (torch.rand(rows, columns) + 0.01) * torch.where(torch.rand(rows, columns) < share, 1.0, -1.0)
    gate[0, 1], gate[-1, 17] = torch.nan, -0.0
    return gate.to(torch.bfloat16)


def _counted(run: Run, got: Tensor, want: Tensor, columns: int) -> None:
    """NotYet unless a kernel's second argument, `counts`, holds what it should, and all threads meet."""
    name = list(run.trace.arrays)[1]
    if not torch.equal(got, want):
        if added_to(run.trace, name):
            raise NotYet(f"{name} does not begin at 0: write it, do not add to it.")
        at = (got != want).nonzero()[0].tolist()
        place, value = "counts" + "".join(f"[{i}]" for i in at), int(got[tuple(at)])
        if value == UNWRITTEN:
            raise NotYet(f"with {columns} columns, {place} was never written; it should be {want[tuple(at)]}.")
        raise NotYet(f"with {columns} columns, {place} should be {want[tuple(at)]}; yours is {value}.")
    if missed := not_met(run.trace):
        raise NotYet(f"the counts are right. But with {columns} columns, {missed}")


def _read_once(counts, columns: int) -> None:
    """NotYet if loads of `gate` touch a sector twice. Rows of other widths begin in the middle of a sector."""
    moved, least = counts.global_reads.sectors, counts.unique_bytes("gate", "read") // 32
    if columns % TILE == 0 and moved > least:
        raise NotYet(f"the counts are right, but the loads touch {moved:,} sectors; {least:,} are enough.")


def _tile_counts(file) -> str:
    with _told():
        program = simulator.compile(Path(file), {"VALUE_BF16": True})
        for rows, columns, share in ((4, 1024, 0.1), (3, 600, 0.5), (1, 24, 1.0)):
            gate = _drawn(rows, columns, share)
            want = TwELL.from_gate(gate).counts.int()
            got = torch.full_like(want, UNWRITTEN)
            grid, last = tuple(reversed(want.shape)), want.shape[1] - 1  # the last tile of a row is the narrow one
            run = _launched(program, "tile_counts", grid, 32, (gate, got, columns), watch="counts", trace=last)
            _counted(run, got, want, columns)
            _read_once(run.counts, columns)
    return "the counts of every tile, NaN and narrow tiles included, and each sector of a full tile is touched once."


def _row_counts(file) -> str:
    with _told():
        program = simulator.compile(Path(file), {"VALUE_BF16": True})
        for rows, columns, share in ((3, 1024, 0.3), (2, 600, 0.9), (1, 40, 1.0)):
            gate = _drawn(rows, columns, share)
            want = (~(gate <= 0)).sum(1).int()
            got = torch.full_like(want, UNWRITTEN)
            run = _launched(program, "row_counts", rows, 128, (gate, got, columns), watch="counts", trace=0)
            _counted(run, got, want, columns)
            _read_once(run.counts, columns)
    return "thread 0 adds up when all four warps have written, and each sector is still touched once."


def _unpack(file) -> str:
    with _told():
        program = simulator.compile(Path(file), {"VALUE_BF16": True})
        for rows, columns, share in ((4, 1024, 0.05), (3, 600, 0.03), (1, 24, 1.0), (2, 512, 0.0)):
            gate = _drawn(rows, columns, share)
            if rows == 4:  # a tile in which the column that equals its count fires: where a count taken for a word goes
                gate[1, :TILE] = -1.0
                gate[1, [2, 5, 40, 77, 200]] = torch.tensor([0.5, 1.5, 2.5, 3.5, 4.5], dtype=gate.dtype)
            stored = TwELL.from_gate(gate)
            if len(stored.overflow_rows):  # would need the tail, which the kernel does not get
                gate[stored.overflow_rows] = -1.0
                stored = TwELL.from_gate(gate)
            words = stored.packed.clone()
            words[torch.arange(WORDS) > stored.counts[..., None]] = 7 << 16 | 3  # past the count anything may lie
            got, want = torch.zeros_like(gate), torch.where(gate <= 0, 0, gate)
            grid = tuple(reversed(stored.counts.shape))
            counts = _launched(program, "unpack", grid, 32, (words, got, columns), watch="counts").counts
            if not torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0)):
                row, column = (got.nan_to_num(9.0) != want.nan_to_num(9.0)).nonzero()[0].tolist()
                raise NotYet(
                    f"with {columns} columns, out[{row}][{column}] should be {want[row, column]:.4g}; "
                    f"yours is {got[row, column]:.4g}."
                )
            least = 2 * grid[0] * rows  # an instruction for the count, one for the words
            if counts.global_reads.requests > least:
                raise NotYet(
                    f"the values are right. But a tile takes {counts.global_reads.requests / (grid[0] * rows):.3g} "
                    "load instructions, and two are enough: let each lane read one word, once, into a variable."
                )
    return "a lane for each word, nothing past the count, and a tile's columns moved to where the tile begins."


CHECKS: dict[str, Callable] = {
    "launch_of": _launch_of,
    "sectors": _sectors,
    "every_other": _every_other,
    "teams": _teams,
    "tile_counts": _tile_counts,
    "row_counts": _row_counts,
    "unpack": _unpack,
}
