"""What is read from a built library: where its __shared__ variables lie, and the source line of an address."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os.path import basename, normpath
from pathlib import Path

import numpy as np

from ..core import StackError
from .arguments import TYPES, Array, itemsize, lanes
from .source import Declaration

Tool = Callable[[str], str | None]  # the path of a program, None where it is not there


@dataclass(frozen=True)
class Line:
    """A source line. file: its name; number: from 1; text: without blanks around it; function: what it stands in."""

    file: str
    number: int
    text: str
    function: str


@dataclass(frozen=True)
class Variable:
    """A variable of a library. offset, size: bytes, from the start of the thread-local block (__shared__) or from where
    the library is loaded. function: what it is declared in, "" for none. type: typedefs resolved ("char" where the
    declaration was not found). shape: in elements; a dynamic array has the most that there can be."""

    name: str
    function: str
    offset: int
    size: int
    type: str
    shape: tuple[int, ...]
    dynamic: bool = False

    def array(self, base: int = 0) -> Array:
        """The array that it is, at an address or in shared memory; vectors and structs get one more axis, of values or
        of bytes."""
        kind = TYPES.get(lanes(self.type)[0], "uint8")
        dtype, item = kind if kind == "bfloat16" else np.dtype(kind), itemsize(kind)
        shape = self.shape or (self.size // item,)
        element = self.size // max(1, math.prod(shape)) or 1
        words = f"{dtype if base else f'shared {self.type}'} {list(shape)}"
        shape += (element // item,) * (element > item)
        space = "global" if base else "shared"
        return Array(self.name, space, base + self.offset, self.size, dtype, shape, element, words)


UNKNOWN = Line("?", 0, "", "?")


def _output(program: str | None, *options: object, text: str = "") -> str:
    if not program:
        raise StackError("the simulator needs binutils (readelf, c++filt, addr2line), which come with g++")
    command = [program, *map(str, options)]
    return subprocess.run(command, input=text, capture_output=True, encoding="utf-8", errors="replace").stdout


def symbols_of(tool: Tool, file: Path | str) -> list[list[str]]:
    """The symbols of a library or an object: number, value, size, type, binding, visibility, section, name."""
    lines = _output(tool("readelf"), "--wide", "--symbols", file).splitlines()
    return [row for row in map(str.split, lines) if len(row) == 8]


_OWN = re.compile(r"_ZGV|_ZT|_*sim_|completed\.|DW\.|__")  # the simulator's, the compiler's and the C library's


def find_variables(
    tool: Tool, library: Path, declared: Iterable[Declaration]
) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """The shared arrays of `library`, and those of the kernels' other variables that can be written, joined with what
    the source declares; each in the order of their offsets."""
    filt = tool("c++filt")
    rows = [row for row in symbols_of(tool, library) if row[3] in ("TLS", "OBJECT") and row[6] != "UND"]
    sections = {row[6] for row in rows if row[7] in ("sim_zeros", "sim_data")}
    rows = [row for row in rows if row[3] == "TLS" or row[6] in sections]
    own = {(row[7], row[3] == "TLS"): row for row in rows if not _OWN.match(row[7])}  # a symbol may be listed twice
    names = _output(filt, text="".join(f"{name}\n" for name, _ in own)).splitlines()
    found: dict[bool, list[Variable]] = {True: [], False: []}
    for name, ((_, shared), row) in zip(names, own.items(), strict=True):
        # What stands before the last `::`, and after it without abi tags.
        function, last = re.fullmatch(r"(?:(.*)::)?(\w+).*?", name, re.S).groups("")
        if not last.startswith("sim_") and not function.startswith("sim_"):
            same = [d for d in declared if d.name == last and (d.space == "shared") == shared]
            found[shared].append(_variable(last, short_name(function), int(row[1], 16), int(row[2], 0), same))
    shared, others = (sorted(found[kind], key=lambda variable: variable.offset) for kind in (True, False))
    return tuple(shared), tuple(others)


def _variable(name: str, function: str, offset: int, size: int, same: list[Declaration]) -> Variable:
    last = re.sub(r"<.*", "", function).rpartition("::")[2]
    outside = [d for d in same if d.shape is None and not function]  # `extern` in a function: a name of the whole file
    same = [d for d in same if d.function == last] or outside or same
    fitting = [d for d in same if d.shape and math.prod(d.shape) * _item(d) == size] or same
    if not fitting:
        return Variable(name, function, offset, size, "char", (size,))
    d = fitting[0]
    item, shape = _item(d), list(d.shape or (-1,) * (d.shape is None))
    rest = item * math.prod(n for n in shape if n >= 0)
    if shape.count(-1) == 1 and rest and size % rest == 0:  # what the others leave
        shape[shape.index(-1)] = size // rest
    if -1 in shape or (item and item * math.prod(shape) != size):
        shape = [size // item if item and size % item == 0 else size]
    return Variable(name, function, offset, size, d.type, tuple(shape), d.shape is None)


def _item(d: Declaration) -> int:
    kind, n = lanes(d.type)
    return n * itemsize(TYPES[kind]) if kind in TYPES else 8 * d.type.endswith(" *")


# An answer of addr2line: its address, which an inlined caller lacks, and "f at k.cu:3" ("?? ??:0": unknown).
_ANSWER = re.compile(r"(?:0x([0-9a-f]+): | \(inlined by\) )(?:(.*?) at|\?\?) (\S.*?):(\d+|\?).*")


def find_lines(tool: Tool, library: Path, pcs: Iterable[int], sources: Mapping[str, str]) -> dict[int, Line]:
    """The source line of each return address of `library`, from one run of addr2line on the byte before it: of
    functions inlined into one another, the innermost of the user's own sources."""
    pcs = list(pcs)
    asked = "".join(f"{max(pc - 1, 0):#x}\n" for pc in pcs)
    texts = {name: text.split("\n") for name, text in sources.items()}
    answers = _output(tool("addr2line"), "-afipC", "-e", library, text=asked).splitlines()
    frames: list[list[Line]] = []
    for m in filter(None, map(_ANSWER.fullmatch, answers)):
        frames += [[]] if m[1] else []
        if m[4].strip("0?"):
            name, number = normpath(m[3]), int(m[4])
            text = "".join(texts.get(name, ())[number - 1 : number]).strip()
            frames[-1].append(Line(basename(name), number, text, short_name(m[2])))
    if len(frames) != len(pcs):
        return dict.fromkeys(pcs, UNKNOWN)
    chosen = (next((line for line in lines if line.text), (*lines, UNKNOWN)[0]) for lines in frames)
    return dict(zip(pcs, chosen, strict=True))


def short_name(function: str) -> str:
    """A demangled function without its result and its parameters: "void f<4>(int, float*)" -> "f<4>"."""
    name = function.replace("(anonymous namespace)::", "").replace("operator()", "operator\0")
    depth, start = 0, 0
    for position, c in enumerate(name):
        depth += (c in "<{") - (c in ">}")
        if depth == 0 and c == "(" and position > start:
            name = name[:position]
            break
        if depth == 0 and c == " ":
            start = position + 1
    return name[start:].replace("\0", "()").removesuffix(".cold")  # GCC's name for a part it put elsewhere
