"""What the options of the `twell-lab` command accept, and options from the fields of a dataclass. Imports no torch."""

from __future__ import annotations

import inspect
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace, _ArgumentGroup
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1  # a number that torch takes as a size
# A docstring's line that is the title of a section, or a field with its text, whose further lines are indented.
_ENTRY = re.compile(r"^(?P<title>\w[\w ]*):$|^(?P<indent> *)(?P<name>\w+): (?P<text>.+(?:\n(?P=indent) {4}.+)*)", re.M)


@dataclass(frozen=True)
class TourOptions:
    """What a tour may be told: the options of `twell-lab tour`, whose help is read from here.

    text: a file or folder to train on, instead of the source of Python's standard library.
    out: where index.html and tour.json go.
    record_only: write tour.json alone; needs no plotly.
    quick: a few steps and small layers, to see that everything works; its figures say nothing.
    progress: say on stderr how far it is.
    """

    text: str | None = None
    out: Path = Path("build/tour")
    record_only: bool = False
    quick: bool = False
    progress: bool = True


def source(text: str) -> str:
    """A path or another name of a text, as it was typed."""
    if not text:
        raise ArgumentTypeError("the path is empty; a file or folder is accepted")
    try:
        if "\0" not in text and os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ArgumentTypeError(f"{text!r} has a character that no path has; a file or folder is accepted")


def path(text: str) -> Path:
    return Path(source(text))


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to 3600")
    return value


def whole(text: str, least: int = 0) -> int:
    value = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not least <= value <= LARGEST:
        raise ArgumentTypeError(f"{text!r:.80} is not a whole number from {least} up to {LARGEST}")
    return value


def positive(text: str) -> int:
    return whole(text, least=1)


def add_fields(parser: ArgumentParser, config: type) -> None:
    """An option for each field of a dataclass; one that is not given is None.

    Its help is the field's text in the docstring of `config` and the default; its group, the section that text is
    in; its type is the annotation's. A field called text takes a path.
    """
    kinds, groups, texts = get_type_hints(config), {}, {}
    group: ArgumentParser | _ArgumentGroup = parser
    for found in _ENTRY.finditer(inspect.getdoc(config) or ""):  # none under -OO
        if found["title"]:
            group = parser.add_argument_group(found["title"][0].lower() + found["title"][1:])
        else:
            groups[found["name"]], texts[found["name"]] = group, " ".join(found["text"].split()).rstrip(".")
    for field in fields(config):
        name, default = _option(field.name), field.default
        told = re.sub(
            r"\b[a-z0-9]+_\w+",
            lambda word: _option(word[0]) if word[0] in kinds else word[0],
            texts.get(field.name, ""),
        )
        if default is not None and default is not False:
            told += f" [{name if default is True else f'{default:g}' if isinstance(default, float) else default}]"
        kind = {"type": source, "metavar": "PATH"} if field.name == "text" else _kind(kinds[field.name])
        groups.get(field.name, parser).add_argument(name, help=told.strip().replace("%", "%%"), default=None, **kind)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _kind(hint) -> dict:
    """What argparse is told of the values of a field, from its annotation."""
    among = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:  # which of them it is, the dataclass checks
        return {"metavar": f"{{{','.join(among)}}}"}
    if bool in among:
        return {"action": BooleanOptionalAction}
    types = {int: (int, "N"), float: (float, "X"), Path: (path, "DIR")}
    kind, metavar = next((types[each] for each in among if each in types), (str, "WORD"))
    return {"type": kind, "metavar": metavar}


def given(options: Namespace, config: type) -> dict:
    """The fields of `config` that were given as options."""
    return {each.name: value for each in fields(config) if (value := getattr(options, each.name)) is not None}
