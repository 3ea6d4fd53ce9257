"""Turns what a C++ compiler said about a kernel file into an exception that speaks of that file alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..core import CompileError
from .faults import Unsupported
from .source import CUDA_HEADER

UNIT = "sim_unit.cpp"  # the generated file that includes the .cu
_MOST_LINES = 20
_GENERATED = re.compile(rf"^(?:In file included|\s+) from (?:<command-line>|<built-in>|\S*{UNIT}).*\n", re.M)
_UNDEFINED = re.compile(r"(?:(?<=[\s/:])([^\s/:]+:\d+): )?undefined (?:reference to|symbol:) [`']?(.*?)'?$", re.M)
_NO_HEADER = re.compile(r"^(\S.*?:\d+):\d+: fatal error: '?([^':\n]+)'?(?:: No such file| file not found)", re.M)
# Names of CUDA's own start with two underscores; g++ and clang++ say in many ways that they know none.
_UNKNOWN = re.compile(
    r"^(\S.*?:\d+):\d+: error: (?:use of undeclared identifier|unknown type name|there are no arguments to)? ?"
    r"'(__\w+)'(?: was not declared| does not name| that depend|[;\n])(?:.*(; did you mean '\w+'\?))?",
    re.M,
)


def complaint(entry: str, messages: str, hidden: Mapping[str, str]) -> CompileError | Unsupported:
    """Unsupported for a name or a header of CUDA's that the simulator lacks, else CompileError with the first lines.

    hidden: folders that mean nothing to the user -> what to write instead.
    """
    for folder, instead in hidden.items():
        messages = messages.replace(folder, instead)
    messages = re.sub(r"(?m)(^|\s)\./", r"\1", _GENERATED.sub("", messages))
    if (header := _NO_HEADER.search(messages)) and CUDA_HEADER.fullmatch(header[2]):
        return Unsupported(f"{header[1]}: <{header[2]}> cannot run in the simulator: the header is CUDA's own")
    if name := _UNKNOWN.search(messages):
        return Unsupported(f"{name[1]}: {name[2]} is not known to the simulator{name[3] or ''}")
    lines = [line for line in messages.split("\n") if line.strip()]
    if undefined := _UNDEFINED.findall(messages):
        undefined = dict.fromkeys((at or entry, name) for at, name in undefined)
        lines = [f"{at}: {name} is declared and used, and defined nowhere" for at, name in undefined]
    more = [f"({len(lines) - _MOST_LINES} more lines)"] if len(lines) > _MOST_LINES else []
    return CompileError("\n".join([f"{entry} does not compile for the simulator:", *lines[:_MOST_LINES], *more]))
