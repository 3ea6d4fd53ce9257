"""Reads the text of CUDA sources: watches, what the preprocessed text declares, and what no CPU can run."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import accumulate
from os.path import normpath
from typing import NamedTuple

from ..core import InputError
from .arguments import TYPES
from .faults import Unsupported

_COMMENT_OR_STRING = re.compile(
    r'R"([^\s()\\]{0,16})\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\''
    r"|//(?:\\\n|[^\n])*|/\*(?:.|\n)*?\*/"
)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"((?:\\.|[^"\\])*)"')
_TYPEDEF = re.compile(r"\btypedef\s+([\w\s:]+?[\s*]+)(\w+)\s*;|\busing\s+(\w+)\s*=\s*([\w\s:*]+);")
_ATTRIBUTE = re.compile(r"\b(?:__attribute__|alignas|__align__|__launch_bounds__)\s*\(")
_FUNCTION = re.compile(r"(\w+)\s*\([^;{}]*\)[^;{}]*\{")
_DECLARATOR = re.compile(r"\s*(.*?[\s*&>])??(\w+)\s*((?:\[[^\]]*\]\s*)*)(?:=.*)?", re.S)  # type, name, extents


class Parameter(NamedTuple):
    """A kernel's parameter. type: what it is or, with `pointer`, points to; typedefs resolved, no qualifiers. const:
    whether the kernel says that it does not write through the pointer."""

    type: str
    name: str
    pointer: bool
    const: bool = False


class Declaration(NamedTuple):
    """A variable as the source declares it, in space "shared", "device" or "constant". function: the outermost one that
    it stands in, or "". type: typedefs resolved. shape: () for a single value, None where the launch sets the size; an
    extent that is more than arithmetic with constants is -1."""

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


def with_watches(sources: Mapping[str, str], values: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The sources with `sim_watch(i, (expression));` at the end of the lines that `values` names, and the expressions.
    A key of `values` is "file:58", "file:some text of the line" or, for the first file, "58". Raises InputError unless
    there is one such line, and a statement can follow it."""
    lines = {file: text.split("\n") for file, text in sources.items()}
    code = {file: code_only(text).split("\n") for file, text in sources.items()}
    names = tuple(str(expression).strip() for expression in values.values())
    places = [_place(place, code) for place in values]
    for number, ((file, row), name) in enumerate(zip(places, names, strict=True)):
        end = len(code[file][row].rstrip())  # before a comment
        watch = f" sim_watch({number}, ({name}));"
        code[file][row] = code[file][row][:end] + watch
        lines[file][row] = code[file][row] + lines[file][row][end:]
    return {file: "\n".join(rows) for file, rows in lines.items()}, names


def _place(place: str, code: Mapping[str, list[str]]) -> tuple[str, int]:
    """File and row, from 0, of "file:line", "file:text" or "line"."""
    file, _, wanted = place.partition(":")
    file, wanted = (file.strip(), wanted) if file.strip() in code else (next(iter(code)), place)
    words = " ".join(code_only(wanted).split())
    rows = [row for row, line in enumerate(code[file]) if words in " ".join(line.split())]
    if words.isdigit():
        rows = [int(words) - 1] if 1 <= int(words) <= len(code[file]) else []
    if len(rows) != 1:
        which = f"lines {', '.join(str(row + 1) for row in rows[:8])}" if rows else "no line"
        has = f"{file}, which has {len(code[file])}"
        raise InputError(f"{place!r} is {which} of {has}; one is accepted, in {', '.join(code)}")
    line = code[file][rows[0]].rstrip()
    if not line.endswith((";", "{")):
        raise InputError(f"{place!r}: line {rows[0] + 1} ends in {line[-1:] or 'nothing'!r}; a watch follows a ; or {{")
    return file, rows[0]


class OwnText:
    """What the preprocessor left of one's own files, without those of the system and the simulator. text: the lines,
    without comments; code: with strings blanked as well; everything: the whole output."""

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
        return self._where[bisect_right(self._starts, position) - 1]

    @cached_property
    def namespaces(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r"\bnamespace\s+([\w:]+)\s*\{", self.code)))

    @cached_property
    def kernels(self) -> dict[str, tuple[Parameter, ...]]:
        """The parameters of the __global__ functions that are defined, by name; without templates, since nothing says
        for which arguments to compile them."""
        found = {}
        for m in re.finditer(r"\bSIM_GLOBAL\b[^;{}()]*?(\w+)\s*\(", self.code):
            end = closing(self.code, m.end() - 1)
            before = self.code[self._statement(m.start()) : m.start()]
            if not re.search(r"\btemplate\b", before) and self.code[end + 1 :].lstrip()[:1] == "{":
                parts = [part for part in _split(self.code[m.end() : end]) if part.strip() != "void"]
                found[m[1]] = tuple(map(self._parameter, parts))
        return found

    def _statement(self, position: int) -> int:
        return max(self.code.rfind(c, 0, position) for c in ";{}") + 1

    def _parameter(self, text: str) -> Parameter:
        m = _DECLARATOR.fullmatch(text)
        named = m and _canonical(m[1] or "") and m[2] not in TYPES
        kind = self.resolve(m[1] if named else re.split(r"[=\[]", text)[0])
        pointer = "[" in text or kind.endswith(" *")
        const = bool(re.search(r"\bconst\b", re.split(r"[*\[]", text)[0]))
        return Parameter(kind.removesuffix(" *"), m[2] if named else "", pointer, pointer and const)

    @cached_property
    def variables(self) -> tuple[Declaration, ...]:
        """The __shared__, __device__ and __constant__ variables in the order of the text; several may have one name."""
        headers = _FUNCTION.finditer(self.code)
        functions = [(m.start(), closing(self.code, m.end() - 1), m[1]) for m in headers]
        found = []
        for m in re.finditer(r"\bSIM_(SHARED|DEVICE|CONSTANT)\b", self.code):
            statement = self.code[self._statement(m.start()) : self.code.find(";", m.end())]
            head = re.split(r"[={]", statement)[0]
            if m[1] == "DEVICE" and ("(" in head or "SIM_CONSTANT" in head):
                continue  # a function, or one that its other word finds
            statement = re.sub(r"\b(?:SIM_\w+|extern|static|inline|volatile|const)\b", " ", statement)
            function = next((name for first, last, name in functions if first < m.start() < last), "")
            kind = "char"
            for declarator in filter(None, map(_DECLARATOR.fullmatch, _split(statement))):
                kind = self.resolve(declarator[1]) if (declarator[1] or "").strip() else kind
                extents = re.findall(r"\[([^\]]*)\]", declarator[3])
                shape = None if extents and not extents[0].strip() else tuple(map(self._integer, extents))
                found.append(Declaration(declarator[2], m[1].lower(), function, kind, shape))
        return tuple(found)

    @cached_property
    def _typedefs(self) -> dict[str, str]:
        """Simple typedefs (`typedef A B;`, `using B = A;`): B -> A. One's own come first."""
        found: dict[str, str] = {}
        for m in (m for text in (self.code, self.everything) for m in _TYPEDEF.finditer(text)):
            found.setdefault(m[2] or m[3], m[1] or m[4])
        return found

    def resolve(self, spelled: str) -> str:
        """The type at the end of the chain of typedefs, without qualifiers; `*` at the end of a pointer's."""
        seen: set[str] = set()
        name = _canonical(spelled)
        while name not in TYPES and name not in seen and re.fullmatch(r"[\w:]+(?: \*)?", name):
            seen.add(name)
            word, star, _ = name.partition(" *")
            word = word.removeprefix("::").removeprefix("std::")
            name = _canonical(self._typedefs.get(word, word) + star)
        return name

    def _integer(self, expression: str) -> int:
        for _ in range(8):  # constants may be made of constants
            expression = re.sub(r"\b[A-Za-z_]\w*\b", self._constant, expression)
        expression = re.sub(r"(?<=[\da-fA-F])[uUlL]+\b", "", expression)
        if not re.fullmatch(r"(?:0[xX][\da-fA-F]+|[\d\s()+*/%<>&|-])+", expression) or "**" in expression:
            return -1
        try:
            value = eval(expression.strip().replace("/", "//"), {"__builtins__": {}})  # numbers and operators alone
        except (SyntaxError, TypeError, ValueError, ArithmeticError, MemoryError):
            return -1
        return int(value) if 0 <= value < 2**40 else -1

    def _constant(self, name: re.Match) -> str:
        said = set(re.findall(rf"\bconst(?:expr)?\s+[\w\s]*\b{name[0]}\s*=\s*([^;,]+)[;,]", self.code))
        return f"({said.pop()})" if len(said) == 1 else "?"


def closing(code: str, opening: int) -> int:
    """Position of the bracket that closes the one at `opening`; the end of the text where none does."""
    depth, first = 0, code[opening]
    for m in re.compile(r"[(){}]").finditer(code, opening):
        depth += (m[0] == first) - (m[0] == {"(": ")", "{": "}"}[first])
        if depth == 0:
            return m.start()
    return len(code)


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for c in text:
        depth += (c in "(<[{") - (c in ")>]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part for part in parts if part.strip()]


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


_PTX = (
    (r"(?:wgmma|tcgen05|w?mma\.)[\w.:]*", "a tensor-core instruction: warps multiply small matrices together"),
    (r"(?:cp\.(?:reduce\.)?async\.bulk|(?:prefetch\.)?tensormap)[\w.:]*", "work for the tensor memory accelerator"),
    (r"(?:ld|st|mov)matrix[\w.:]*", "a matrix moved between shared memory and the registers of a warp"),
    (r"cp\.async[\w.:]*", "a copy to shared memory in the background"),
    (r"mbarrier[\w.:]*", "a barrier in shared memory that the hardware counts down"),
)
_NAMES = (
    (r"<<<", "kernels are launched from Python here; keep only kernels and device functions in the file"),
    (r"\b__cluster_dims__", "blocks of a cluster read each other's shared memory"),
    (r"\bCUtensorMap\b", "tensor maps are for the tensor memory accelerator"),
    (r"\bcooperative_groups\b", "cooperative groups are not simulated; __syncthreads and the _sync functions are"),
    (
        r"\b(?:nvcuda|cuda::(?:barrier|pipeline|ptx|memcpy_async|atomic\w*|std))\b",
        "CUDA's C++ library is not simulated",
    ),
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
