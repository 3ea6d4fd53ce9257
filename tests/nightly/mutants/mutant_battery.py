"""Small launches that every mutant should fail, and the process that runs them on one mutant after another.

    python -m tests.nightly.mutants.mutant_battery FOLDER < mutants, one JSON list [file, [number, shift, compiled], ...] a
    line

It answers each with a line of JSON: what killed it ("OutOfBounds", "differs", ...), or null if nothing did.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.nightly.mutants import mutants
from tests.ops.rows.drawn import gate_of
from tests.ops.rows.int8 import odd_rows
from tests.simulator.pooled_cases import Pooled
from twell_lab import simulator
from twell_lab.formats import TwELL
from twell_lab.ops import accuracy, down, gated
from twell_lab.ops.down import ANY_NUMBER
from twell_lab.ops.reference import relu
from twell_lab.simulator import Program
from twell_lab.simulator import program as programs
from twell_lab.sparsities.quantised import round_rows

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
UNWRITTEN = 12345.0  # what y holds before a launch: a NaN could be meant


class Differs(Exception):
    """The result is not the reference's."""


def launch(program: Program, kernel: str, grid, block: int, arguments) -> None:
    program.launch(kernel, grid, block, arguments, watch="faults", seconds=1, cores=1)


# ---- pack


def pack(program: Program, version: int, gate, tile: int, words: int, expected: TwELL) -> None:
    rows, columns = gate.shape
    block, tiles_a_block = {1: (32, 32), 2: (64, 2), 3: (64, 2), 4: (64, 8)}[version]
    poison = torch.iinfo(torch.int32).max
    packed = torch.full_like(expected.packed, poison)
    items = packed.shape[0] * packed.shape[1]
    launch(program, f"pack_v{version}", -(-items // tiles_a_block), block, (gate, packed, rows, columns, tile, words))
    used = torch.arange(words - 1) < expected.counts[..., None]
    right = torch.where(used, expected.packed[..., 1:], poison)
    if not torch.equal(packed[..., 0], expected.counts) or not torch.equal(packed[..., 1:], right):
        raise Differs


def pack_checks() -> Iterator[Callable[[Program], None]]:
    for rows, columns, tile, words, patterns in [
        (3, 40, 16, 5, ["some over", "full tiles", "one over", "odd values", "all", "silent"]),
        (13, 24, 8, 9, ["all", "dense"]),
        (2, 840, 520, 40, ["dense", "sparse"]),  # more than a warp's vectors hold
        (3, 37, 16, 5, ["some over", "full tiles", "odd values"]),
        (2, 40, 35, 36, ["all"]),
        (1, 1, 1, 2, ["all"]),
    ]:
        for pattern in patterns:
            gate = gate_of(pattern, rows, columns, torch.bfloat16, tile, words)
            expected = TwELL.from_gate(gate, tile, words)
            for version in (1, 2, 3, 4) if columns % 8 == tile % 8 == 0 else (1, 2):
                yield partial(pack, version=version, gate=gate, tile=tile, words=words, expected=expected)


# ---- quantise_rows


def quantised(program: Program, version: int, x: torch.Tensor, padded: int) -> None:
    kind = torch.float8_e4m3fn if "E4M3" in program.defines else torch.int8
    expected = round_rows(x, kind)
    values, scales = torch.full((padded, x.shape[1]), 77, dtype=torch.int8), torch.full((padded,), UNWRITTEN)
    launch(program, f"quantise_rows_v{version}", padded, 256, (x, values, scales, *x.shape))
    rest = F.pad(expected.values.view(torch.int8), (0, 0, 0, padded - len(x)))
    if not torch.equal(values, rest) or not torch.equal(
        scales.nan_to_num(-1.0), F.pad(expected.scale, (0, padded - len(x))).nan_to_num(-1.0)
    ):
        raise Differs


def quantise_checks() -> Iterator[Callable[[Program], None]]:
    """Every kind of row, with padding and without; in each warp's part the largest once; more columns than a thread
    holds, the largest of a row among these or just before; rows whose scale is nearly too small for a float."""
    for columns, version, padded in ((264, 2, 12), (300, 1, 10), (37, 1, 12)):
        yield partial(quantised, version=version, x=odd_rows(columns, torch.bfloat16), padded=padded)
    spread = torch.eye(8).repeat_interleave(32, 1).repeat_interleave(8, 1).mul(3).add(1).bfloat16()  # 2,048 columns
    yield partial(quantised, version=2, x=spread, padded=8)
    yield partial(quantised, version=1, x=spread[:, ::8].contiguous(), padded=8)
    wide = odd_rows(8192 + 2048 + 72, torch.bfloat16)[[0, 4, 8]]
    wide[0, -1], wide[1, 8192], wide[2, 7000] = 900, 500, 1200
    yield partial(quantised, version=2, x=wide, padded=4)
    tiny = torch.finfo(torch.float32).tiny * torch.linspace(0, 800, 40).expand(3, 40)  # scales around the least
    yield partial(quantised, version=1, x=(tiny * torch.tensor([[0.1], [0.2], [1.0]])).bfloat16(), padded=3)


# ---- down and gated


@dataclass
class Layer:
    """A packed gate and the rest of a layer, gated and plain."""

    x: Tensor
    gate: Tensor
    packed: TwELL
    up: Tensor
    down_t: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    tile: int

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, tile: int, words: int, biases: str = "", spoilt: str = ""):
        """biases: letters u and d. spoilt: letters n (NaN), i (infinity), each in a row of x of its own."""
        generator = torch.Generator().manual_seed(d_model + gate.shape[1])
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (rows, d_ff), dtype = gate.shape, gate.dtype
        x, up = normal(rows, d_model), normal(d_ff, d_model) / d_model**0.5
        down_t, up_bias, down_bias = normal(d_ff, d_model) / d_ff**0.5, normal(d_ff), normal(d_model)
        for i, letter in enumerate(spoilt):
            x[-1 - i % rows, [0, -1, d_model // 2][i % 3]] = {"n": torch.nan, "i": -torch.inf}[letter]
        packed = TwELL.from_gate(gate, tile, words)
        used = torch.arange(words - 1) < packed.counts[..., None]
        packed.packed[..., 1:][~used] = -1  # NaN in a column that no matrix has
        biases = [b.to(dtype) if letter in biases else None for b, letter in ((up_bias, "u"), (down_bias, "d"))]
        return cls(x.to(dtype), gate, packed, up.to(dtype), down_t.to(dtype), *biases, tile)

    @property
    def sources(self) -> tuple:
        """The two ways to pass the values that tiles could not hold, each as (gate, tail)."""
        tail = (self.packed.tail_pointer, self.packed.tail_column, self.packed.tail_value)
        return (self.gate, (None,) * 3), (None, tail)

    def error(self, name: str, y: Tensor) -> float:
        """The error of y over what is promised (accuracy.worst_row); at most 1 is right."""
        given = self.x, self.gate, self.up, self.down_t, self.up_bias, self.down_bias
        exact, dense = (
            gated.reference(*those) if name == "gated" else down.reference(relu(those[1]), those[3], those[5])
            for those in ([None if t is None else t.double() for t in given], given)
        )
        return accuracy.worst_row(y, dense, exact)[0]


def token_kernel(program: Program, kernel: str, layer: Layer, gate, tail) -> None:
    d_model = layer.x.shape[1]
    version = int(kernel[-1])
    sizes = program.defines
    threads = 128 if version == 1 else 32 * sizes["WARPS"] * sizes.get("TEAMS", 1)
    y = torch.full_like(layer.x, UNWRITTEN)
    packed, spoilt = layer.packed.packed, kernel.startswith("gated")
    rest = (packed, gate, *tail, layer.down_t, layer.down_bias)
    if spoilt:
        rest = (layer.x, *rest[:5], layer.up, rest[5], layer.up_bias, rest[6])
    numbers = (d_model, layer.gate.shape[1], layer.tile, packed.shape[2])
    launch(program, kernel, (len(y), -(-d_model // 2048) if version == 1 else 1), threads, (*rest, y, *numbers))
    if layer.error("gated" if spoilt else "down", y) > 1:
        raise Differs


@cache
def layers(d_model: int) -> list[Layer]:
    """Of a few rows each: part full, all kept, silent; more tiles than lanes; strips; rows that are not finite."""
    made = []
    for d_ff, tile, words, patterns, spoilt in [
        (75, 16, 5, ["some over", "all"], ""),
        (73, 33, 3, ["one over", "silent", "full tiles"], ""),
        (132, 4, 3, ["sparse", "full tiles"], ""),
        (129, 4, 5, ["all", "dense"], "i"),
        (20, 16, 17, ["sparse", "dense", "all"], "n"),
    ]:
        gates = [gate_of(pattern, 1, d_ff, torch.bfloat16, tile, words, seed=3) for pattern in patterns]
        made.append(Layer.draw(torch.cat(gates), d_model, tile, words, "ud" if len(made) % 2 == 0 else "", spoilt))
    return made


@cache
def spoilt_layers(d_model: int) -> list[Layer]:
    """One value of each row of x is not finite. Nothing fires in the first layer; all does in most rows of the
    second."""
    columns = sorted({0, min(7, d_model - 1), min(8, d_model - 1), min(128, d_model - 1), d_model - 1})
    silent = Layer.draw(torch.full((len(columns), 33), -1.0).bfloat16(), d_model, 16, 5)
    silent.x[range(len(columns)), columns] = torch.inf
    gate = torch.full((4, 132), 1.0).bfloat16()
    gate[1, 5] = gate[2, -1] = -1
    full = Layer.draw(gate, d_model, 4, 5)
    full.up, full.down_t = full.up.abs(), full.down_t.abs()
    full.x[:, 0] = torch.inf  # so that y is infinite where every neuron fires, and NaN elsewhere
    return [silent, full]


def token_checks(kernels: list[str], layers: list[Layer], both: bool = True) -> Iterator[Callable[[Program], None]]:
    for layer in layers:
        for gate, tail in layer.sources if both else layer.sources[:1]:
            for kernel in kernels:
                yield partial(token_kernel, kernel=kernel, layer=layer, gate=gate, tail=tail)


# ---- what takes its overflow from the pool


def pooled(program: Program, name: str, version: int, layer: Pooled, most: int) -> None:
    """As the launch layer has it, with this program in the place of its own; of two passes the other is not a
    mutant."""
    ours, sizes = programs.launch, program.defines

    def in_its_place(file, kernel, macros, grid, block, arguments, shared=0):
        if kernel in program.kernels:
            launch(program, kernel, grid, 32 * sizes["WARPS"] * sizes.get("TEAMS", 1), arguments)
        else:
            with simulator.watching("faults"):  # it reads what a mutant wrote
                ours(file, kernel, macros, grid, block, arguments, shared)

    programs.launch = in_its_place
    try:
        layer.check(name, version, most)
    except AssertionError as error:
        raise Differs from error
    finally:
        programs.launch = ours


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
    full.x[:2, 7], full.up, full.down_t = torch.inf, full.up.abs(), full.down_t.abs()
    wide = Pooled.draw(gate_of(0.02, 2, 256 * 32 + 60, torch.bfloat16), 264)  # 33 tiles
    wide.gate[0, -50:] = wide.gate[1, -6:] = 1.0
    single = Pooled.draw(gate_of(0.05, 1, 300, torch.bfloat16), 264, biases=True)
    return [*((layer, ANY_NUMBER) for layer in (first, full, wide, single)), (first, 40)]


@cache
def checks(file: str, defines: int) -> list[Callable[[Program], None]]:
    if file == "smxx_pack.cu":
        return list(pack_checks())
    if file == "smxx_quantise_rows.cu":
        return list(quantise_checks())
    sizes, name = DEFINES[file][defines], file.removeprefix("smxx_").removesuffix(".cu")
    if "POOL" in sizes:
        two_passes = name == "up" or "HIDDEN" in sizes
        name, version = ("gated", 7) if two_passes else (name, {"gated": 5, "down": 4}[name] + ("TEAMS" in sizes))
        return [partial(pooled, name=name, version=version, layer=layer, most=most) for layer, most in pooled_layers()]
    newest = {"gated": [2, 3, 4], "down": [2, 3]}[name]
    kernels = [f"{name}_v{version}" for version in (newest[-1:] if "TEAMS" in sizes else newest[:-1])]
    first = [f"{name}_v1"] if defines == 0 else []
    made = [*token_checks(kernels, layers(264)), *token_checks(first, [*layers(7), layers(4096)[1]])]
    if name == "gated":
        made += token_checks(kernels + first, spoilt_layers(264), both=False)
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
            for check in checks(file, i):
                check(mutated)
        except Differs:
            return "differs"
        except simulator.Fault as fault:
            return type(fault).__name__
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(killed(Path(sys.argv[1]), *json.loads(line))), flush=True)
