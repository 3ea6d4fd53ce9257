"""What Python reads from a kernel's source: its tokens, its headers, the numbers that macros stand for, and its
entries.

A number that a kernel and its launch share stands only in the kernel's source, and Python reads it from there
(`number`); likewise a kernel's parameters and the size of its blocks (`entries`). No compiler is needed: this is a
small C preprocessor, which knows what the files of kernels/ use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from .. import core
from ..core import CompileError

if TYPE_CHECKING:  # the simulator takes a tenth of a second to import, and a number needs nothing of it
    from ..simulator.source import Parameter

Macros = Iterable[tuple[str, object]]


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched. parameters: in order, typedefs resolved. From its __launch_bounds__: threads, the
    most that a block may have; resident, how many blocks a multiprocessor must at least be able to hold."""

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    resident: int


def with_headers(file: str) -> dict[str, str]:
    """The text of kernels/`file` and, recursively, of every header there that it includes: name -> text.

    Raises CompileError for a file that is not there."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = core.kernels_dir() / name
        if not path.is_file():
            raise CompileError(f"no kernel source {name} in {core.kernels_dir()}")
        found[name] = path.read_text(encoding="utf-8")
        waiting += re.findall(r'^\s*#\s*include\s+"([^"]+)"', found[name], re.M)[::-1]
    return found


def number(file: str, name: str, macros: Macros = ()) -> int:
    """The whole number that the macro `name` stands for in kernels/`file`, compiled with `macros`.

    Where the number depends on the type of values, and no macro names one, 16-bit values are assumed.
    Raises CompileError where the macro is not defined, or stands for no whole number."""
    return _preprocessed(file, macros).number(name)


def entries(file: str, macros: Macros = ()) -> dict[str, Entry]:
    """The kernels of kernels/`file` that are compiled with `macros`, by name, in the order of the source.

    Raises CompileError for a file that is not there or that cannot be read."""
    return _preprocessed(file, macros).entries


def _preprocessed(file: str, macros: Macros) -> _Preprocessed:
    texts = tuple(with_headers(file).items())
    return _read(file, texts, tuple(macros.items() if isinstance(macros, Mapping) else macros))


@lru_cache(maxsize=512)
def _read(file: str, texts: tuple, macros: tuple) -> _Preprocessed:
    return _Preprocessed(file, dict(texts), dict(macros))


# ---- tokens


_TOKEN = re.compile(
    r"""
    (?P<space>   [^\S\n]+ | /\*.*?\*/ | //[^\n]* )
  | (?P<newline> \n )
  | (?P<raw>     (?:u8|[uUL])?R"(?P<fence>[^()\\\s]{0,16})\(.*?\)(?P=fence)" )
  | (?P<string>  (?:u8|[uUL])?"(?:[^"\\\n]|\\.)*" | (?:u8|[uUL])?'(?:[^'\\\n]|\\.)+' )
  | (?P<word>    \.?\d(?:[eEpP][+-]|'[0-9a-zA-Z]|[\w.])* | [^\W\d]\w* )
  | (?P<mark>    <<=|>>=|\.\.\.|->\*|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|::|\#\#|[^\s\w"'] )
""",
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=256)
def tokens(text: str) -> tuple[str, ...]:
    """The tokens of a CUDA C++ source. The end of a preprocessor line is a token, other white space is left out.

    In `#define F(x)` the opening bracket becomes the token "(argument", to tell it from `#define F (x)`. Raises
    CompileError for a string that does not end."""
    text = text.replace("\\\n", "")
    found, at, directive, line_start, spaced = [], 0, False, True, False
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise CompileError(f"line {line} has an unfinished string or character: {text[at : at + 40]!r}")
        at, kind, token = match.end(), match.lastgroup, match[0]
        if kind == "newline":
            if directive:
                found.append("\n")
            directive, line_start, spaced = False, True, True
        elif kind == "space":
            spaced = True
        else:
            if line_start and token == "#":
                directive = True
            # `#define F(x)` takes an argument, `#define F (x)` does not.
            if token == "(" and directive and not spaced and found[-2:-1] == ["define"]:
                token = "(argument"
            found.append(token)
            line_start = spaced = False
    return (*found, "\n") if directive else tuple(found)


# ---- the preprocessor


class _Preprocessed:
    """A source after preprocessing: its macros at the end of the file, and its declarations without function bodies."""

    def __init__(self, file: str, texts: dict[str, str], given: dict[str, object]):
        self._file, self._texts = file, texts
        self._seen: set[str] = set()
        self._macros: dict[str, tuple[list[str] | None, list[str]]] = {}  # name: (parameters, tokens)
        for name, value in given.items():
            self._macros[name] = (None, ["1"] if value is True else list(tokens(str(value))))
        self._declared: list[str] = []
        self._depth = 0  # of braces
        self._include(file)

    def number(self, name: str) -> int:
        """The whole number that the macro stands for."""
        if name not in self._macros or self._macros[name][0] is not None:
            raise CompileError(f"{self._file} has no macro {name} that stands for a number")
        return self._integer(self._expanded([name]), name)

    @cached_property
    def _own(self):
        """What is declared, as the simulator's reader takes it."""
        from ..simulator.source import OwnText

        # __align__ is an attribute that the reader passes over; the size of a cluster it does not know.
        text = " ".join(self._declared).replace("__cluster_dims__", "__align__").replace("__global__", "SIM_GLOBAL")
        return OwnText(f'# 1 "{self._file}"\n{text}', {self._file})

    @cached_property
    def entries(self) -> dict[str, Entry]:
        from ..simulator import source

        found = {}
        # What begins with __global__ and ends before the body, beside what the simulator reads of it.
        text = " ".join(self._declared)
        heads = [part.rpartition("__global__")[2] for part in text.split("{ }")[:-1] if "__global__" in part]
        heads = [head for head in heads if ";" not in head]
        for head, (name, signature) in zip(heads, source.kernels(self._own).items(), strict=True):
            threads, resident = 1024, 1
            if "__launch_bounds__" in head:
                opening = head.index("(", head.index("__launch_bounds__"))
                inside = head[opening + 1 : source.closing(head, opening)]
                bounds = [self._integer(part.split(), f"__launch_bounds__ of {name}") for part in inside.split(",")]
                threads, resident = (*bounds, 1)[:2]
            found[name] = Entry(name, signature.parameters, threads, resident)
        return found

    def _include(self, file: str) -> None:
        if file in self._seen:  # each has a #pragma once
            return
        self._seen.add(file)
        waiting: list[str] = []
        taken: list[tuple[bool, bool]] = []  # of each open #if: whether a part of it was used, and whether this one is
        all_tokens, at = tokens(self._texts[file]), 0
        while at < len(all_tokens):
            if all_tokens[at] != "#":
                if not taken or taken[-1][1]:
                    waiting.append(all_tokens[at])
                at += 1
                continue
            end = all_tokens.index("\n", at)
            kind, rest = all_tokens[at + 1], list(all_tokens[at + 2 : end])
            at = end + 1
            outer = all(used for _, used in taken[: -1 if kind in ("elif", "else", "endif") else None])
            if kind in ("if", "ifdef", "ifndef"):
                holds = outer and self._condition(kind, rest)
                taken.append((holds, holds))
            elif kind in ("elif", "else"):
                before = taken.pop()[0]
                holds = outer and not before and (kind == "else" or self._condition("if", rest))
                taken.append((before or holds, holds))
            elif kind == "endif":
                taken.pop()
            elif outer:
                self._declare(waiting)
                waiting = []
                if kind == "define":
                    self._define(rest)
                elif kind == "undef":
                    self._macros.pop(rest[0], None)
                elif kind == "include" and rest[0].startswith('"'):
                    self._include(rest[0].strip('"'))
        self._declare(waiting)

    def _define(self, rest: list[str]) -> None:
        name, parameters, body = rest[0], None, rest[1:]
        if body[:1] == ["(argument"]:
            end = body.index(")")
            parameters, body = [word for word in body[1:end] if word != ","], body[end + 1 :]
        self._macros[name] = (parameters, body)

    def _condition(self, kind: str, rest: list[str]) -> bool:
        if kind != "if":
            return (rest[0] in self._macros) == (kind == "ifdef")
        plain, at = [], 0
        while at < len(rest):
            if rest[at] == "defined":
                name, at = (rest[at + 2], at + 4) if rest[at + 1] == "(" else (rest[at + 1], at + 2)
                plain.append(str(int(name in self._macros)))
            else:
                plain.append(rest[at])
                at += 1
        words = ["0" if re.match(r"[^\W\d]", word) else word for word in self._expanded(plain)]
        return bool(self._integer(words, f"#if {' '.join(rest)}"))

    def _declare(self, found: list[str]) -> None:
        for token in self._expanded(found):
            if token == "{":
                self._depth += 1
            if self._depth == 0 or (self._depth == 1 and token in "{}"):
                self._declared.append(token)
            if token == "}":
                self._depth -= 1

    def _expanded(self, found: list[str], hidden: frozenset[str] = frozenset()) -> list[str]:
        """These tokens with all macros replaced; hidden: the names that are being replaced already, and stay."""
        done, at = [], 0
        while at < len(found):
            token = found[at]
            at += 1
            if token in hidden or token not in self._macros:
                done.append(token)
                continue
            parameters, body = self._macros[token]
            if parameters is not None:
                if found[at : at + 1] != ["("]:
                    done.append(token)
                    continue
                given, at = _arguments(found, at)
                values = dict(zip(parameters, given))
                pasted = list(body)
                while "##" in pasted:
                    i = pasted.index("##")
                    sides = ["".join(values.get(word, [word])) for word in (pasted[i - 1], pasted[i + 1])]
                    pasted[i - 1 : i + 2] = ["".join(sides)]
                body = [
                    word
                    for each in pasted
                    for word in (self._expanded(values[each], hidden) if each in values else [each])
                ]
            expanded = self._expanded(body, hidden | {token})
            if expanded and found[at : at + 1] == ["("] and self._macros.get(expanded[-1], (None,))[0] is not None:
                name = expanded.pop()  # the macro stands for the name of another one, which takes arguments
                _, end = _arguments(found, at)
                expanded += self._expanded([name, *found[at:end]], hidden)
                at = end
            done += expanded
        return done

    # ---- whole numbers

    def _integer(self, words: list[str], what: str) -> int:
        try:
            return _evaluated(self._without_types(words))
        except (ValueError, SyntaxError, ArithmeticError, NameError, TypeError) as error:
            raise CompileError(f"{what} of {self._file} is no whole number: {' '.join(words)}") from error

    def _without_types(self, words: list[str]) -> list[str]:
        """These tokens without casts, and with each sizeof replaced by its number."""
        plain, at = [], 0
        while at < len(words):
            end = words.index(")", at) if "(" in words[at : at + 2] and ")" in words[at:] else at
            inside = [word for word in words[at:end] if word not in ("(", "sizeof")]
            size = self._size(inside)
            if words[at] == "sizeof":
                if size is None:
                    raise ValueError(inside)
                plain.append(str(size))
                at = end + 1
            elif words[at] == "(" and size is not None:
                at = end + 1
            else:
                plain.append(words[at])
                at += 1
        return plain

    def _size(self, words: list[str]) -> int | None:
        """The bytes of a type, for the types that occur in numbers of kernels/; None for anything else."""
        sizes = {"int": 4, "unsigned": 4, "value_t": 4 if "VALUE_FP32" in self._macros else 2}
        return sizes.get(words[0]) if len(words) == 1 else None


def _arguments(found: list[str], opening: int) -> tuple[list[list[str]], int]:
    """The arguments between the bracket at `opening` and the one that closes it, and the index after that one."""
    given: list[list[str]] = [[]]
    depth, at = 0, opening
    while True:
        token = found[at]
        depth += (token == "(") - (token == ")")
        if depth == 0:
            return given, at + 1
        if token == "," and depth == 1:
            given.append([])
        elif at > opening:
            given[-1].append(token)
        at += 1


_SPELLED = {"&&": "and", "||": "or", "!": "not", "/": "//"}


def _evaluated(words: list[str]) -> int:
    """The value of an expression of whole numbers, as C++ computes it."""
    while "(" in words:  # the innermost ones first
        opening = len(words) - 1 - words[::-1].index("(")
        end = words.index(")", opening)
        words = [*words[:opening], str(_evaluated(words[opening + 1 : end])), *words[end + 1 :]]
    if "?" in words:
        first = words.index("?")
        depth, at = 1, first
        while depth:
            at += 1
            depth += (words[at] == "?") - (words[at] == ":")
        return _evaluated(words[first + 1 : at] if _evaluated(words[:first]) else words[at + 1 :])
    plain = [re.sub(r"(?<=[\da-fA-F])[uUlL]+$", "", _SPELLED.get(word, word)) for word in words]
    if any(re.match(r"[^\W\d]", word) and word not in ("and", "or", "not") for word in plain) or not plain:
        raise ValueError(words)
    return int(eval(" ".join(plain), {"__builtins__": {}}))
