"""Options of the `twell-lab` command, as entries of a table or made from a dataclass. Imports no torch."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


_TYPES: dict[str, Callable[[str], Any]] = {
    "N": _number(int, 1, LARGEST),
    "SEED": _number(int, 0, LARGEST),
    "S": _number(float, 1e-9, 3600),  # seconds
    "X": _number(float, 0.0, sys.float_info.max),
    "PATH": source,
    "OUT": _writable(check_target),  # before the work
    "FOLDER": _writable(check_folder),
    **dict.fromkeys(("DIR", "FILE", "MODEL"), path),
}
Option = tuple[str, dict]  # what `add_argument` is given for one option, or one argument


def option(name: str, metavar: str | None, text: str, default: Any = None, **more: Any) -> Option:
    """Return an entry of the table of options.

    Args:
        name: with two dashes of an option, without them of an argument.
        metavar: what its value is called; "N", "DIR" and the like (_TYPES) say its type, too. None: it has no value;
            "": its choices are named.
        text: its help. The default is added in brackets, unless the text has some.
        default: a list where several values are taken.
        more: as add_argument takes it.
    """
    if metavar is None:
        return name, {"action": "store_true", "help": text, **more}
    if default is not None and "[" not in text:
        text += f" [{' '.join(map(str, default)) if isinstance(default, list) else default}]"
    how = {"default": default, "help": text}
    how |= {"metavar": metavar} if metavar else {}
    how |= {"type": _TYPES[metavar]} if metavar in _TYPES else {}
    how |= {"nargs": "+"} if isinstance(default, list) else {}
    return name, how | more


def add_fields(parser: ArgumentParser, config: type) -> None:
    """Add an option for each field of the dataclass `config`. An option that is not given is None.

    The type of an option is the field's annotation; a field called text takes a path. Its help is the field's text in
    the docstring of `config`, with the default; its group is the section of the docstring that the text stands in.
    """
    kinds, texts = get_type_hints(config), {}
    group: ArgumentParser | _ArgumentGroup = parser
    for entry in _ENTRY.finditer(inspect.getdoc(config) or ""):  # none under -OO
        if entry["title"]:
            group = parser.add_argument_group(entry["title"][0].lower() + entry["title"][1:])
        else:
            texts[entry["name"]] = group, " ".join(entry["text"].split()).rstrip(".")
    for field in fields(config):
        name, default = _option(field.name), field.default
        group, text = texts.get(field.name, (parser, ""))
        text = re.sub(r"\b[a-z0-9]+_\w+", lambda word: _option(word[0]) if word[0] in kinds else word[0], text)
        if default is not None and default is not False:
            text += f" [{name if default is True else f'{default:g}' if isinstance(default, float) else default}]"
        kind = {"type": source, "metavar": "PATH"} if field.name == "text" else _kind(kinds[field.name])
        group.add_argument(name, help=text.strip().replace("%", "%%"), dest=field.name, **kind)


def _option(field: str) -> str:
    return f"--{field.rstrip('_').replace('_', '-')}"  # from_: `from` is a word of Python's


def _kind(hint) -> dict:
    """Return the arguments of add_argument that follow from a field's annotation."""
    among = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:  # the dataclass checks the value
        return {"metavar": f"{{{','.join(among)}}}"}
    if bool in among:
        return {"action": BooleanOptionalAction}
    types: dict[type, tuple[Any, str]] = {int: (int, "N"), float: (float, "X"), Path: (path, "DIR")}
    kind, metavar = next((types[part] for part in among if part in types), (str, "WORD"))
    return {"type": kind, "metavar": metavar}


def given(options: Namespace, config: type) -> dict:
    """Return the values of those fields of `config` that were given as options."""
    return {field.name: value for field in fields(config) if (value := getattr(options, field.name)) is not None}
