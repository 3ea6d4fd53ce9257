"""Small launches that every mutant should fail, and the process that runs them on one mutant after another.

    python -m tests.nightly.mutants.mutant_battery FOLDER < mutants, one JSON list [file, [number, shift, compiled], ...] a
    line

It answers each with a line of JSON: what killed it ("OutOfBounds", "differs", ...), or null if nothing did.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch

from tests.nightly.mutants import mutants
from tests.ops.rows import gated, int8, pack
from tests.ops.rows.drawn import gate_of
from tests.ops.rows.pooled import Pooled, case_of
from tests.ops.table import Case, check
from twell_lab import simulator
from twell_lab.ops.down import ANY_NUMBER
from twell_lab.simulator import Program
from twell_lab.simulator import program as programs

BF16 = {"VALUE_BF16": True}
# One warp with a chunk that is not full, and every way of several warps and teams.
DEFINES = {
    "smxx_pack.cu": [BF16],
    "smxx_down.cu": [
        BF16 | {"D_MODEL": 264, "WARPS": 1},
        BF16 | {"D_MODEL": 264, "WARPS": 2, "TEAMS": 3},
        BF16 | {"D_MODEL": 264, "WARPS": 2, "TEAMS": 2, "POOL": True},
        BF16 | {"D_MODEL": 264, "WARPS": 1, "POOL": True},
        BF16 | {"D_MODEL": 264, "WARPS": 2, "POOL": True, "HIDDEN": True},
    ],
    "smxx_gated.cu": [
        BF16 | {"D_MODEL": 264, "WARPS": 1},
        BF16 | {"D_MODEL": 264, "WARPS": 2},
        BF16 | {"D_MODEL": 264, "WARPS": 2, "TEAMS": 2},
        BF16 | {"D_MODEL": 264, "WARPS": 2, "TEAMS": 2, "POOL": True},
        BF16 | {"D_MODEL": 264, "WARPS": 1, "POOL": True},
    ],
    "smxx_up.cu": [BF16 | {"D_MODEL": 264, "WARPS": warps, "POOL": True} for warps in (1, 2)],
    "smxx_quantise_rows.cu": [BF16, BF16 | {"E4M3": True}],
}
UNWRITTEN = {torch.int8: 77}  # what a result holds before a launch, others 12,345: the poison could be meant


class Differs(Exception):
    """The result is not the reference's."""


def launch(program: Program, case: Case) -> None:
    """Run a case as the library does, with this program's kernels in the place of its own; of two passes the other is
    not a mutant."""
    ours, sizes = programs.launch, program.defines

    def in_its_place(file, kernel, macros, grid, block, arguments, shared=0):
        if kernel in program.kernels:
            for t in (t for t in arguments if isinstance(t, torch.Tensor)):
                if t.numel() and (t == 127 if t.dtype == torch.int8 else t.isnan()).all():
                    t.fill_(UNWRITTEN.get(t.dtype, 12345))
            if "WARPS" in sizes and not kernel.endswith("_v1") or "POOL" in sizes:
                block = 32 * sizes["WARPS"] * sizes.get("TEAMS", 1)
            program.launch(kernel, grid, block, arguments, watch="faults", seconds=1, cores=1)
        else:
            with simulator.watching("faults"):  # it reads what a mutant wrote
                ours(file, kernel, macros, grid, block, arguments, shared)

    programs.launch = in_its_place
    try:
        check(case, "cpu")
    except AssertionError as error:
        raise Differs from error
    finally:
        programs.launch = ours


def pack_cases() -> Iterator[Case]:
    for *shape, patterns in [
        (3, 40, 16, 5, ["some over", "full tiles", "one over", "odd values", "all", "silent"]),
        (13, 24, 8, 9, ["all", "dense"]),
        (2, 840, 520, 40, ["dense", "sparse"]),  # more than a warp's vectors hold
        (3, 37, 16, 5, ["some over", "full tiles", "odd values"]),
        (2, 40, 35, 36, ["all"]),
        (1, 1, 1, 2, ["all"]),
    ]:
        for pattern in patterns:
            for version in (1, 2, 3, 4) if shape[1] % 8 == shape[2] % 8 == 0 else (1, 2):
                yield pack.case(pattern, torch.bfloat16, version, *shape)


def quantise_cases(kind: torch.dtype) -> Iterator[Case]:
    """Every kind of row, with padding and without; in each warp's part the largest once; more columns than a thread
    holds, the largest of a row among these or just before; rows whose scale is nearly too small for a float."""
    for columns, version, padded in ((264, 2, 12), (300, 1, 10), (37, 1, 12)):
        yield int8.rounding("", partial(int8.odd_rows, columns, torch.bfloat16), kind, version, padded)
    spread = torch.eye(8).repeat_interleave(32, 1).repeat_interleave(8, 1).mul(3).add(1).bfloat16()  # 2,048 columns
    wide = int8.odd_rows(8192 + 2048 + 72, torch.bfloat16)[[0, 4, 8]]
    wide[0, -1], wide[1, 8192], wide[2, 7000] = 900, 500, 1200
    tiny = torch.finfo(torch.float32).tiny * torch.linspace(0, 800, 40).expand(3, 40)  # scales around the least
    small = (tiny * torch.tensor([[0.1], [0.2], [1.0]])).bfloat16()
    for x, version, padded in ((spread, 2, 8), (spread[:, ::8].contiguous(), 1, 8), (wide, 2, 4), (small, 1, 3)):
        yield int8.rounding("", lambda x=x: x, kind, version, padded)


# ---- down and gated

Packed = tuple[Pooled, int, int]  # a layer, of which nothing lies in a pool; tile and words


@cache
def layers(d_model: int) -> list[Packed]:
    """Of a few rows each: part full, all kept, silent; more tiles than lanes; strips; rows that are not finite."""
    made = []
    for d_ff, tile, words, patterns, spoilt in [
        (75, 16, 5, ["some over", "all"], None),
        (73, 33, 3, ["one over", "silent", "full tiles"], None),
        (132, 4, 3, ["sparse", "full tiles"], None),
        (129, 4, 5, ["all", "dense"], -torch.inf),
        (20, 16, 17, ["sparse", "dense", "all"], torch.nan),
    ]:
        gates = [gate_of(pattern, 1, d_ff, torch.bfloat16, tile, words, seed=3) for pattern in patterns]
        layer = Pooled.draw(torch.cat(gates), d_model, biases=len(made) % 2 == 0)
        if spoilt is not None:
            layer.x[-1, 0] = spoilt
        made.append((layer, tile, words))
    return made


@cache
def spoilt_layers(d_model: int) -> list[Packed]:
    """One value of each row of x is not finite. Nothing fires in the first layer; all does in most rows of the
    second."""
    columns = sorted({0, min(7, d_model - 1), min(8, d_model - 1), min(128, d_model - 1), d_model - 1})
    silent = Pooled.draw(torch.full((len(columns), 33), -1.0).bfloat16(), d_model)
    silent.x[range(len(columns)), columns] = torch.inf
    gate = torch.full((4, 132), 1.0).bfloat16()
    gate[1, 5] = gate[2, -1] = -1
    full = Pooled.draw(gate, d_model)
    full.up.abs_(), full.down_t.abs_()
    full.x[:, 0] = torch.inf  # so that y is infinite where every neuron fires, and NaN elsewhere
    return [(silent, 16, 5), (full, 4, 5)]


def token_cases(name: str, versions: list[int], layers: list[Packed], tails=(False, True)) -> Iterator[Case]:
    for layer, *geometry in layers:
        for tail in tails:
            for version in versions:
                yield gated.case_of(name, version, lambda layer=layer: layer[:-1], tail, *geometry)


# ---- what takes its overflow from the pool


@cache
def pooled_layers() -> list[tuple[Pooled, int]]:
    """A pool that a row just fills and the next exceeds; rows that are not finite; more tiles than lanes; a single
    row. With each, how many values a row may have at most; in the last some have as many, and some more."""
    gate = torch.full((18, 300), -1.0)
    # 9 + 1 + 2 + 14 + 29 + 9 = 64 in the pool, then 1
    for row, kept in enumerate([40, 31, 32, 33, 30, 45, 60, 40, 32, 1]):
        gate[row, 256 - kept : 256] = 1.0 + 0.125 * torch.arange(kept)
    gate[10], gate[11, 255:] = 1.0, 2.0  # a row that is lost, one behind it
    gate[15:, 100:150] = 0.5  # both sides of a group's end
    first = Pooled.draw(gate.bfloat16(), 264, biases=True, start=True)
    first.x[4, 3], first.x[9, 263], first.x[10, 0] = torch.nan, torch.inf, torch.nan
    full = Pooled.draw(torch.tensor([1.0, 1.0, -1.0]).repeat_interleave(32).view(3, 32).bfloat16(), 264)
    full.gate[1, 9], full.x[:2] = -1.0, full.x[:2].abs()
    full.x[:2, 7] = torch.inf
    full.up.abs_(), full.down_t.abs_()
    wide = Pooled.draw(gate_of(0.02, 2, 256 * 32 + 60, torch.bfloat16), 264)  # 33 tiles
    wide.gate[0, -50:] = wide.gate[1, -6:] = 1.0
    single = Pooled.draw(gate_of(0.05, 1, 300, torch.bfloat16), 264, biases=True)
    return [*((layer, ANY_NUMBER) for layer in (first, full, wide, single)), (first, 40)]


@cache
def cases(file: str, defines: int) -> list[Case]:
    sizes, name = DEFINES[file][defines], file.removeprefix("smxx_").removesuffix(".cu")
    if name == "pack":
        return [*pack_cases()]
    if name == "quantise_rows":
        return [*quantise_cases(torch.float8_e4m3fn if "E4M3" in sizes else torch.int8)]
    if "POOL" in sizes:
        two_passes = name == "up" or "HIDDEN" in sizes
        name, version = ("gated", 7) if two_passes else (name, {"gated": 5, "down": 4}[name] + ("TEAMS" in sizes))
        return [case_of(name, version, lambda layer=layer: layer, most=most) for layer, most in pooled_layers()]
    newest = {"gated": [2, 3, 4], "down": [2, 3]}[name]
    versions = newest[-1:] if "TEAMS" in sizes else newest[:-1]
    first = [1] if defines == 0 else []
    made = [*token_cases(name, versions, layers(264)), *token_cases(name, first, [*layers(7), layers(4096)[1]])]
    if name == "gated":
        made += token_cases(name, versions + first, spoilt_layers(264), (False,))
    return made


@cache
def program(folder: Path, file: str, defines: int, number: int = 0, shift: int = 0) -> Program:
    return simulator.compile(
        folder / file.partition(".")[0] / file, DEFINES[file][defines] | {"MUTANT": number, "SHIFT": shift}
    )


def killed(folder: Path, file: str, number: int, shift: int, compiled: bool) -> str | None:
    for i in range(len(DEFINES[file])):
        mutated = program(folder, file, i, *((number, shift) if compiled else ()))
        mutated.launch(mutants.CHOOSE, 1, 1, (number, shift), watch="faults")
        try:
            for case in cases(file, i):
                launch(mutated, case)
        except Differs:
            return "differs"
        except simulator.Fault as fault:
            return type(fault).__name__
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(killed(Path(sys.argv[1]), *json.loads(line))), flush=True)
