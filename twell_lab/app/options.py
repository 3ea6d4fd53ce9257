"""The command line of a function: each parameter is an option. Its annotation may hold its help, a text, and its kind, a
pair: what help calls a value, and what reads one. Imports no torch."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, _ArgumentGroup
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..core import RecordError, check_folder, check_target

LARGEST = 2**63 - 1  # the largest size that torch takes
# In a docstring: a line that is the title of a section, or a field with its text, whose further lines are indented.
_ENTRY = re.compile(r"^(?P<title>\w[\w ]*):$|^(?P<indent> *)(?P<name>\w+): (?P<text>.+(?:\n(?P=indent) {4}.+)*)", re.M)


def source(text: str) -> str:
    """Return a path or another name, as it was typed. ArgumentTypeError for one that no path has."""
    try:
        if text and "\0" not in text and os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ArgumentTypeError(f"{text!r} is no path; a file or folder is accepted")


def path(text: str) -> Path:
    return Path(source(text))


def _writable(check: Callable[[Path], None]) -> Callable[[str], Path]:
    """Return what reads a path that is checked before the work whose result goes there."""

    def checked(text: str) -> Path:
        try:
            check(place := path(text))
        except RecordError as error:
            raise ArgumentTypeError(str(error)) from None
        return place

    return checked


def _number(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "whole number" if kind is int else "number"
            raise ArgumentTypeError(f"{text!r:.80} is not a {what} from {least} up to {most}")
        return value

    return parsed


Count = Annotated[int, ("N", _number(int, 1, LARGEST))]
FromZero = Annotated[int, ("N", _number(int, 0, LARGEST))]
Amount = Annotated[float, ("X", _number(float, 0.0, sys.float_info.max))]
Seconds = Annotated[float, ("S", _number(float, 1e-9, 3600))]
Source = Annotated[str, ("PATH", source)]
Target = Annotated[Path, ("FILE", _writable(check_target))]
Folder = Annotated[Path, ("FOLDER", _writable(check_folder))]
Dtype = Literal["bfloat16", "float16", "float32"]
PATHS = "twell, hot_cold, two_four, blocks, or lossy: int8, fp8, twell_int8, predicted, experts"
Model = Annotated[str, ("PATH", source), "a folder of twell-lab train's or of transformers', or a name on the Hub"]
Text = Annotated[Source | None, "read whole, or what training held out of it [as much of Python's standard library]"]
Device = Annotated[str | None, "cpu, cuda, cuda:1 [a GPU where there is one]"]
OwnDtype = Annotated[Dtype | None, "[bfloat16 on a GPU, float16 on one older than sm_80, else float32]"]
_KINDS = {int: ("N", int), float: ("X", float), Path: ("PATH", path), str: ("WORD", str)}


def add_parameters(parser: ArgumentParser, made: Callable) -> None:
    """Add the parameters of a command to its parser: an argument for each positional one, an option for each other.

    Of a dataclass each field is an option. Its help is its text in the docstring, its group the section there."""
    hints, texts = get_type_hints(made, include_extras=True), {}
    group: ArgumentParser | _ArgumentGroup = parser
    for entry in _ENTRY.finditer(inspect.getdoc(made) or "") if isinstance(made, type) else ():  # none under -OO
        if entry["title"]:
            group = parser.add_argument_group(entry["title"][0].lower() + entry["title"][1:])
        else:
            texts[entry["name"]] = group, " ".join(entry["text"].split()).rstrip(".")
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        group, text = texts.get(name, (parser, ""))
        text = re.sub(r"\b[a-z0-9]+_\w+", lambda word: _option(word[0]) if word[0] in hints else word[0], text)
        needed = parameter.default is parameter.empty
        how = _how(hints[name], None if needed else parameter.default, text)
        if parameter.kind is parameter.KEYWORD_ONLY or isinstance(made, type):
            group.add_argument(_option(name), dest=name, required=needed, **how)
        else:
            group.add_argument(name, **({} if needed else {"nargs": "?"}) | how | {"metavar": name.upper()})


def _option(name: str) -> str:
    return f"--{name.rstrip('_').replace('_', '-')}"  # from_: `from` is a word of Python's


def _how(hint: Any, default: Any, text: str) -> dict[str, Any]:
    """Return the arguments of add_argument that follow from an annotation, which may hold the help text, and a default,
    which is added to that in brackets unless it has some."""
    leaves = [*_leaves(hint)]
    text = [text, *(leaf for leaf in leaves if isinstance(leaf, str))][-1]
    if default not in (None, False, ()) and "[" not in text:
        values = default if isinstance(default, tuple) else (default,)
        text += f" [{' '.join(f'{value:g}' if isinstance(value, float) else str(value) for value in values)}]"
    how: dict[str, Any] = {"help": text.strip().replace("%", "%%")}
    if bool in leaves:
        return how | {"action": BooleanOptionalAction}
    if Sequence in leaves:
        how["nargs"] = "+"
    if words := [get_args(leaf) for leaf in leaves if get_origin(leaf) is Literal]:
        return how | {"choices": words[0]}
    kinds = [leaf for leaf in leaves if isinstance(leaf, tuple)] or [_KINDS[leaf] for leaf in leaves if leaf in _KINDS]
    return how | {"metavar": kinds[0][0], "type": kinds[0][1]}


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield what an annotation is made of: types, kinds, texts, and choices of words."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        yield get_origin(hint)
        for part in get_args(hint):
            yield from _leaves(part)
