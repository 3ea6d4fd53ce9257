"""Reads the text of CUDA sources: watches, what the preprocessed text declares, and what no CPU can run.

Nothing here starts a compiler; toolchain.py does and hands over the preprocessed text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os.path import normpath

import numpy as np

from ..core import InputError
from .arguments import TYPES
from .faults import Unsupported

# Bytes of the types whose names are the end of a typedef chain. "int" is left out of a name wherever another
# word says the size or the sign.
SIZES = {name: np.dtype(kind).itemsize for name, kind in TYPES.items()}
SIZES |= {"signed char": 1, "__nv_bfloat16": 2, "__half2": 4, "__nv_bfloat162": 4}
SIZES |= {
    f"{unsigned}{name}{n}": SIZES[of] * n
    for n in (1, 2, 3, 4)
    for name, of in {**{t: t for t in ("char", "short", "int", "float", "double")}, "longlong": "long long"}.items()
    for unsigned in (("u", "") if name not in ("float", "double") else ("",))
}

_COMMENT_OR_STRING = re.compile(
    r'R"([^\s()\\]{0,16})\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\''
    r"|//(?:\\\n|[^\n])*|/\*(?:.|\n)*?\*/"
)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"((?:\\.|[^"\\])*)"')
_TYPEDEF = re.compile(r"\btypedef\s+([\w\s:]+?[\s*]+)(\w+)\s*;|\busing\s+(\w+)\s*=\s*([\w\s:*]+);")
_ATTRIBUTE = re.compile(r"\b(?:__attribute__|alignas|__align__|__launch_bounds__)\s*\(")


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter. type: what it is or, with `pointer`, points to; typedefs resolved, no qualifiers. const:
    the kernel does not write through the pointer, unless it casts this away."""

    type: str
    name: str
    pointer: bool
    const: bool = False


@dataclass(frozen=True)
class Signature:
    """A kernel's name and its parameters in order."""

    name: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Declaration:
    """A variable as the source declares it. space: "shared", "device" or "constant".

    function: the name of the function it stands in, "" outside all. type: typedefs resolved. shape: () for a
    single value, None where the launch sets the size; an extent that depends on more than integers is -1.
    """

    name: str
    space: str
    function: str
    type: str
    shape: tuple[int, ...] | None


def code_only(text: str, strings: bool = True) -> str:
    """`text` with comments (and, unless `strings`, what is between quotes) as blanks: every position stays."""

    def blank(match: re.Match) -> str:
        found = match[0]
        if found[0] != "/":
            return found if strings else found[0] + re.sub(r"[^\n]", " ", found[1:-1]) + found[-1]
        return re.sub(r"[^\n]", " ", found)

    return _COMMENT_OR_STRING.sub(blank, text)


# ---- watches


def with_watches(sources: Mapping[str, str], values: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The sources with `sim_watch(i, (expression));` at the end of the lines that `values` names, and the expressions.

    A key of `values` is "file:58", "file:some text of the line" or, for the first file, "58". Lines keep their
    numbers. Raises InputError for a line that is not there, is not the only one with that text, or does not end as a
    line does that a statement can follow.
    """
    lines = {file: text.split("\n") for file, text in sources.items()}
    code = {file: code_only(text, strings=False).split("\n") for file, text in sources.items()}
    added: dict[tuple[str, int], str] = {}
    names = [str(expression).strip() for expression in values.values()]
    for number, (place, name) in enumerate(zip(values, names, strict=True)):
        at = _place(place, lines, code)
        added[at] = f"{added.get(at, '')} sim_watch({number}, ({name}));"
    for (file, row), text in added.items():
        end = len(code[file][row].rstrip())  # before a comment
        lines[file][row] = lines[file][row][:end] + text + lines[file][row][end:]
    return {file: "\n".join(rows) for file, rows in lines.items()}, tuple(names)


def _place(place: str, lines: Mapping[str, list[str]], code: Mapping[str, list[str]]) -> tuple[str, int]:
    """File and row, from 0, of "file:line", "file:text" or "line"."""
    file, _, wanted = place.partition(":")
    if file.strip() not in lines:
        file, wanted = next(iter(lines)), place
    file, words = file.strip(), " ".join(wanted.split())
    if words.isdigit():
        rows = [int(words) - 1] if 1 <= int(words) <= len(lines[file]) else []
    else:
        having = [
            [row for row, line in enumerate(text[file]) if words in " ".join(line.split())] for text in (code, lines)
        ]
        rows = having[0] if len(having[0]) == 1 else having[1]  # a comment may mention the code
    if len(rows) != 1:
        which = f"lines {', '.join(str(row + 1) for row in rows[:8])}" if rows else "no line"
        raise InputError(
            f"{place!r} is {which} of {file}, which has {len(lines[file])}; one is accepted, in {', '.join(lines)}"
        )
    line = code[file][rows[0]].rstrip()
    if not line.endswith((";", "{")):
        raise InputError(f"{place!r}: line {rows[0] + 1} ends in {line[-1:] or 'nothing'!r}; a watch follows a ; or {{")
    return file, rows[0]


# ---- the preprocessed text


class OwnText:
    """What the preprocessor left of one's own files, without those of the system and the simulator.

    text: the lines, without comments; code: with strings blanked as well; everything: the whole output.
    """

    def __init__(self, preprocessed: str, files: Collection[str]):
        kept: list[str] = []
        self._where: list[tuple[str, int]] = []
        file, number = "", 0
        for line in preprocessed.split("\n"):
            if marker := _MARKER.match(line):
                file, number = normpath(re.sub(r"\\(.)", r"\1", marker[2])), int(marker[1])
                continue
            if file in files:
                kept.append("" if line.lstrip().startswith("#") else line)
                self._where.append((file, number))
            number += 1
        self.everything = preprocessed
        self.text = code_only("\n".join(kept))
        self.code = code_only(self.text, strings=False)
        for attribute in reversed(list(_ATTRIBUTE.finditer(self.code))):
            end = closing(self.code, attribute.end() - 1) + 1
            gone = re.sub(r"[^\n]", " ", self.code[attribute.start() : end])
            self.code = self.code[: attribute.start()] + gone + self.code[end:]
        self._starts = [0, *accumulate(len(line) + 1 for line in kept)]

    def at(self, position: int) -> tuple[str, int]:
        """File and line of a position in `text` or `code`."""
        return self._where[bisect_right(self._starts, position) - 1]

    @cached_property
    def types(self) -> Types:
        """Return what the text says of types and constants."""
        return Types(self)

    @property
    def namespaces(self) -> list[str]:
        """The named namespaces, outer ones before those inside: kernels may stand in them."""
        return list(dict.fromkeys(re.findall(r"\bnamespace\s+([\w:]+)\s*\{", self.code)))


def closing(code: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`; the end of the text where none does."""
    pairs = {"(": ")", "{": "}", "[": "]", "<": ">"}
    first, last, depth = code[opening], pairs[code[opening]], 0
    for position in range(opening, len(code)):
        depth += (code[position] == first) - (code[position] == last)
        if depth == 0:
            return position
    return len(code)


def _split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for position, c in enumerate(text):
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


class Types:
    """Simple typedefs (`typedef A B;`, `using B = A;`) and integer constants of a preprocessed text."""

    def __init__(self, own: OwnText):
        self._code = own.code
        self._meaning: dict[str, str] = {}
        for text in (own.code, own.everything):  # one's own come first
            for m in _TYPEDEF.finditer(text):
                self._meaning.setdefault(m[2] or m[3], m[1] or m[4])

    def resolve(self, spelled: str) -> str:
        """The type at the end of the chain, without qualifiers; `*` at the end of a pointer's."""
        seen: set[str] = set()
        name = _canonical(spelled)
        while name not in SIZES and name not in seen and re.fullmatch(r"[\w:]+(?: \*)*", name):
            seen.add(name)
            word, star, _ = name.partition(" *")
            word = word.removeprefix("::").removeprefix("std::")
            name = _canonical(self._meaning.get(word, word) + ("*" if star else ""))
        return name

    def integer(self, expression: str) -> int:
        """The value of integer arithmetic in C++; -1 where it needs more than integers, casts, sizeof and constants."""
        for _ in range(8):  # constants may be made of constants
            expression = re.sub(r"\(\s*(?:(?:unsigned|signed|int|long|short|(?:std::)?size_t)\s*)+\)", "", expression)
            sized = r"\bsizeof\s*\(([^()]*)\)"
            expression = re.sub(sized, lambda m: str(SIZES.get(self.resolve(m[1]), "?")), expression)
            expression = re.sub(r"\b(0[xX][\da-fA-F]+|\d+)[uUlL]+\b", r"\1", expression)
            expression = re.sub(r"\b[A-Za-z_]\w*\b", self._constant, expression)
        if not re.fullmatch(r"(?:0[xX][\da-fA-F]+|[\d\s()+*/%<>&|-])+", expression) or "**" in expression:
            return -1
        try:
            value = eval(expression.strip().replace("/", "//"), {"__builtins__": {}})  # numbers and operators alone
        except (SyntaxError, TypeError, ValueError, ArithmeticError, MemoryError):
            return -1
        return int(value) if 0 <= value < 2**40 else -1

    def _constant(self, name: re.Match) -> str:
        """Return what a constant is, in brackets; "?" where that is not said once."""
        said = set(re.findall(rf"\bconst(?:expr)?\s+[\w\s]*\b{name[0]}\s*=\s*([^;,]+)[;,]", self._code))
        return f"({said.pop()})" if len(said) == 1 else "?"


def _canonical(spelled: str) -> str:
    words = re.findall(r"[\w:]+|\*|<.*>|&", spelled)
    stars = " *" if "*" in words else ""
    dropped = ("const", "volatile", "__restrict__", "__restrict", "*", "struct", "typename", "__grid_constant__")
    words = [w for w in words if w not in dropped]
    if words and set(words) <= {"unsigned", "signed", "int", "long", "short", "char"}:
        sign = ["unsigned"] if "unsigned" in words else ["signed"] if "signed" in words and "char" in words else []
        sizes = sorted(w for w in words if w in ("long", "short", "char"))
        words = sign + (sizes or ([] if sign else ["int"]))
    return " ".join(words).replace(" <", "<") + stars


# ---- what it declares


def kernels(own: OwnText) -> dict[str, Signature]:
    """The __global__ functions that are defined, except templates: nothing says for which arguments to compile them."""
    found = {}
    for m in re.finditer(r"\bSIM_GLOBAL\b", own.code):
        start = max(own.code.rfind(c, 0, m.start()) for c in ";{}") + 1
        opening = own.code.find("(", m.end())
        name = re.search(r"(\w+)\s*$", own.code[m.end() : max(opening, m.end())])
        if opening < 0 or not name or re.search(r"\btemplate\b", own.code[start : m.start()]):
            continue
        end = closing(own.code, opening)
        if own.code[end + 1 :].lstrip()[:1] == "{":
            parts = [p for p in _split(own.code[opening + 1 : end]) if p.strip() != "void"]
            found[name[1]] = Signature(name[1], tuple(_parameter(part, own.types) for part in parts))
    return found


def _parameter(text: str, types: Types) -> Parameter:
    const = bool(re.search(r"\bconst\b", re.split(r"[*\[]", text)[0]))
    text = re.sub(r"\b(?:const|volatile|__restrict__|__restrict)\b", " ", text.partition("=")[0])
    array = "[" in text
    words = text.partition("[")[0].replace("*", " * ").replace("&", " & ").split()
    named = len(words) > 1 and re.fullmatch(r"\w+", words[-1]) and words[-1] not in SIZES and words[-1] != "long"
    kind = types.resolve(" ".join(words[:-1] if named else words))
    pointer = array or kind.endswith(" *")
    return Parameter(kind.removesuffix(" *"), words[-1] if named else "", pointer, pointer and const)


def variables(own: OwnText) -> tuple[Declaration, ...]:
    """The variables behind one of the words SIM_SHARED, SIM_DEVICE and SIM_CONSTANT, in the order of the text."""
    found, functions = [], list(_functions(own.code))
    for m in re.finditer(r"\bSIM_(SHARED|DEVICE|CONSTANT)\b", own.code):
        start = max(own.code.rfind(c, 0, m.start()) for c in ";{}") + 1
        statement = own.code[start : own.code.find(";", m.end())]
        head = re.split(r"[={]", statement)[0]
        if m[1] == "DEVICE" and ("(" in head or "SIM_CONSTANT" in head):
            continue  # a function, or one that its other word finds
        statement = re.sub(r"\b(?:SIM_\w+|extern|static|inline|volatile|const)\b", " ", statement)
        function = next((name for first, last, name in functions if first < m.start() < last), "")
        kind = None
        for part in _split(statement):
            d = re.fullmatch(r"\s*(.*?[\s*&>])??(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:=.*)?", part, re.S)
            if not d:
                continue
            kind = own.types.resolve(d[1]) if d[1] and d[1].strip() else kind
            extents = re.findall(r"\[([^\]]*)\]", d[3])
            shape = None if extents and not extents[0].strip() else tuple(map(own.types.integer, extents))
            found.append(Declaration(d[2], m[1].lower(), function, kind or "char", shape))
    return tuple(found)


def _functions(code: str) -> Iterator[tuple[int, int, str]]:
    """(first position, last position, name) of the outermost blocks that follow something with parentheses."""
    stack, last = [], 0
    for m in re.finditer(r"[{};]", code):
        if m[0] == "{":
            stack.append((m.start(), code[last : m.start()]))
        elif m[0] == "}" and stack:
            start, header = stack.pop()
            inside = any("(" in outer for _, outer in stack)
            if (name := re.search(r"(\w+)\s*\(", header)) and not inside:
                yield start, m.start(), name[1]
        last = m.end()


# ---- what no CPU can run

_PTX = (
    (r"wgmma[\w.:]*", "a tensor-core instruction of a group of warps"),
    (r"(?:cp\.(?:reduce\.)?async\.bulk|(?:prefetch\.)?tensormap)[\w.:]*", "work for the tensor memory accelerator"),
    (r"tcgen05[\w.:]*", "a tensor-core instruction of Blackwell"),
    (r"w?mma\.[\w.:]*", "a tensor-core instruction: a warp multiplies small matrices together"),
    (r"(?:ld|st|mov)matrix[\w.:]*", "a matrix moved between shared memory and the registers of a warp"),
    (r"cp\.async[\w.:]*", "a copy to shared memory in the background"),
    (r"mbarrier[\w.:]*", "a barrier in shared memory that the hardware counts down"),
)
_NAMES = (
    (r"<<<", "kernels are launched from Python here; keep only kernels and device functions in the file"),
    (r"\b__cluster_dims__", "blocks of a cluster read each other's shared memory"),
    (r"\bCUtensorMap\b", "tensor maps are for the tensor memory accelerator"),
    (r"\bcooperative_groups\b", "cooperative groups are not simulated; __syncthreads and the _sync functions are"),
    (r"\bnvcuda\b", "tensor cores (wmma) are not simulated"),
    (r"\bcuda::(?:barrier|pipeline|ptx|memcpy_async|atomic\w*|std)\b", "the CUDA C++ library is not simulated"),
    (r"\b__pipeline_\w+", "a copy to shared memory in the background"),
    (r"\b(?:tex|surf)[123]D\w*(?=\s*[<(])|\bcuda(?:Texture|Surface)Object_t\b", "textures are not simulated"),
)
CUDA_HEADER = re.compile(
    r"mma\.h|cuda\.h|cuda(?:Typedefs|_fp8|_fp6|_fp4|_pipeline\w*|_awbarrier\w*|_texture_types)\.h|cooperative_groups\S*"
    r"|(?:cuda|cub|thrust|cutlass|cute|nv)/\S+|cu(?:rand|blas|dnn|fft|sparse|solver)\w*\.h"
)


def refuse(own: OwnText) -> None:
    """Raises Unsupported for the first thing that needs a GPU's own hardware or library, with its line."""
    found = []
    for pattern, why in _NAMES:
        found += [(m.start(), m[0], why) for m in re.finditer(pattern, own.code)]
    for m in re.finditer(r"\b(?:__asm__|__asm|asm)\b[^;{}(]*\(", own.code):
        end = closing(own.code, m.end() - 1)
        colon = own.code.find(":", m.end(), end)  # what follows it are operands
        ptx = " ".join(re.findall(r'"((?:\\.|[^"\\])*)"', own.text[m.end() : colon if colon > 0 else end]))
        ptx = re.sub(r"\\[nt]", " ", ptx)
        for pattern, why in _PTX:
            if hit := re.search(rf"(?<![\w.]){pattern}", ptx):
                found.append((m.start(), hit[0], why))
                break
        else:
            first = re.search(r"(?<![\w.@%])[a-z]\w*(?:[.:]+\w+)*", ptx)
            if ptx.strip():  # an empty one only keeps the compiler from moving code
                found.append((m.start(), first[0] if first else "asm", "inline PTX is for the GPU only"))
    if found:
        position, name, why = min(found)
        file, line = own.at(position)
        raise Unsupported(f"{file}:{line}: {name} cannot run in the simulator: {why}")
