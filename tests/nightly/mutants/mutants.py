"""Mutants of kernels/: every barrier deleted, every bound shifted by one either way, one at a time.

They are found in the text of the sources, so a new kernel gets its mutants without being listed. All mutants of a file
are compiled at once (a schema, as Untch, Offutt and Harrold called it in 1993): a bound becomes `bound + mutant(17)`,
which is 0 unless mutant 17 was chosen before the launch. Sizes of shared arrays are known to the compiler and need a
build each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twell_lab.simulator import source

HEADER = "mutants.cuh"
CHOOSE = "choose_mutant"
_SCHEMA = f"""#pragma once
#ifndef MUTANT
#define MUTANT 0
#endif
#define MUTANT_SHIFT(number) ((number) == MUTANT ? SHIFT : 0)
__device__ int chosen_mutant, chosen_shift;
SIM_UNWATCHED static inline int mutant(int number) {{ return number == chosen_mutant ? chosen_shift : 0; }}
extern "C" __global__ void {CHOOSE}(int number, int shift) {{ chosen_mutant = number, chosen_shift = shift; }}
"""
# In a line of code without its comment. `n` stands for mutant(number).
_RULES = [
    ("barrier", r"__syncthreads\(\);", "if (!{n}) __syncthreads();"),
    ("barrier", r"__syncthreads_or\((\w+)\)", r"({n} ? \1 : __syncthreads_or(\1))"),
    # of floats: half way to the next would be too little
    ("bound", r"(?<= )(<|<=|>|>=|==|!=) (?=[1-9][\d.]*e)", r"\1 (1 + {n}) * "),
    ("bound", r"(?<= )(<|<=|>|>=|==|!=) (?![1-9][\d.]*e)", r"\1 {n} + "),
    ("bound", r"\bmin\(", "{n} + min("),
    ("offset", r"([+-]) 1\b(?!\.)", r"\1 1 + {n}"),
    ("offset", r"(?<=[\[(])1 \+", "1 + {n} +"),
    ("start", r"(for \(\w+ \w+ =) ", r"\1 {n} + "),
    ("stride", r"(\w+ \+=) (?=WARP|blockDim)", r"\1 {n} + "),
]
_SIZES = [  # these are known when the file is compiled
    ("size", r"(?<=\[)([^\]]+)(?=\])", r"(\1) + {n}", re.compile(r"^\s*__shared__ ")),
    ("size", r"(?<=SLAB )(\d+)", r"(\1 + {n})", re.compile(r"^#define SLAB ")),
    ("offset", r"- 1\b", "- 1 + {n}", re.compile(r"^#define CHUNKS ")),
]


@dataclass(frozen=True)
class Mutant:
    """shift: what is added to the bound; 1 for a barrier, which is deleted. compiled: needs a build of its own."""

    number: int
    file: str
    line: int
    kind: str
    text: str  # what is changed, with « » around it, in its line
    shift: int
    compiled: bool

    def __str__(self) -> str:
        what = "deleted" if self.kind == "barrier" else f"{self.shift:+d}"
        return f"{self.file}: {self.text}: {what}"


def _marked(line: str, start: int, end: int) -> str:
    return f"{line[:start]}«{line[start:end].strip()}»{line[end:]}".strip()


def _of_line(file: str, number: int, code: str, first: int) -> tuple[str, list[Mutant]]:
    """(the line with a place for each of its mutants, these mutants); `first` is the number of the first one."""
    found = []
    if not code.lstrip().startswith(("#", "static_assert", "template")):
        found = [(match, kind, new, False) for kind, old, new in _RULES for match in re.finditer(old, code)]
    sizes = [size for size in _SIZES if size[3].match(code)]
    found += [(match, kind, new, True) for kind, old, new, _ in sizes for match in re.finditer(old, code)]
    mutants, changed = [], code
    for name, (match, kind, new, compiled) in enumerate(sorted(found, key=lambda f: -f[0].start()), first):
        call = f"MUTANT_SHIFT({name})" if compiled else f"mutant({name})"
        text = _marked(code, *match.span())
        # A larger shared array does no harm, and a barrier can only be deleted.
        shifts = {"barrier": [1], "size": [-1]}.get(kind, [1, -1]) if not code.startswith("#") else [1, -1]
        mutants += [Mutant(name, file, number, kind, text, shift, compiled) for shift in shifts]
        changed = changed[: match.start()] + match.expand(new.replace("{n}", call)) + changed[match.end() :]
    return changed, mutants


# What the battery does not compile: activations other than the ReLU. Held against float64 by test_decode.py here, and by
# tests/ops/calls/test_computed.py, but not mutated yet.
NOT_MUTATED = ("activation.cuh",)
_OTHERS = re.compile(r"#\s*(if|ifdef|elif)\b.*\b(BOTH|SIGNED|FALLS_BACK|ACTS_\w+)\b")


def mutated(file: str, text: str) -> str:
    """The code of a source that gets mutants: with empty lines in the place of comments, and of what NOT_MUTATED names
    or only other activations compile."""
    lines, inside = [], []  # of each conditional around a line, whether its branch is left out
    for line in source.code_only(text).split("\n"):
        word = re.match(r"\s*#\s*(\w+)", line)
        directive = word[1] if word else ""
        if directive in ("endif", "else", "elif"):
            inside.pop()
        if directive in ("if", "ifdef", "ifndef", "else", "elif"):
            inside.append(directive != "else" and bool(_OTHERS.match(line.strip())))
        lines.append("" if file in NOT_MUTATED or any(inside) and not directive else line)
    return "\n".join(lines)


def of_sources(sources: dict[str, str]) -> tuple[dict[str, str], list[Mutant]]:
    """The sources with every mutant in them, none chosen, and the list of the mutants."""
    changed, mutants, number = {HEADER: _SCHEMA}, [], 1
    for file, text in sources.items():
        lines, mutants_of = [], mutated(file, text).split("\n")
        for i, code in enumerate(source.code_only(text).split("\n"), 1):
            line, more = _of_line(file, i, code, number) if mutants_of[i - 1] else (code, [])
            number = max([number - 1, *(m.number for m in more)]) + 1
            lines.append(line)
            mutants += more
        assert not lines[0].strip(), f"{file}: its first line is a comment, whose place the header takes"
        changed[file] = "\n".join([f'#include "{HEADER}"', *lines[1:]])
    return changed, mutants
