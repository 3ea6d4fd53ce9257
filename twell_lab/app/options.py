"""The command line of a function: each parameter is an option, whose annotation may hold its help. Imports no torch."""

from __future__ import annotations

import inspect
import re
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, _ArgumentGroup
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# In a docstring: a line that is the title of a section, or a field with its text, whose further lines are indented.
_ENTRY = re.compile(r"^(?P<title>\w[\w ]*):$|^(?P<indent> *)(?P<name>\w+): (?P<text>.+(?:\n(?P=indent) {4}.+)*)", re.M)


def path(text: str) -> Path:
    if not text or "\0" in text:
        raise ArgumentTypeError(f"{text!r} is no path; a file or folder is accepted")
    return Path(text)


Dtype = Literal["bfloat16", "float16", "float32"]
PATHS = "twell, hot_cold, two_four, blocks, or lossy: int8, fp8, twell_int8"
Model = Annotated[str, "a folder of twell-lab train's or of transformers', or a name on the Hub"]
Text = Annotated[str | None, "read whole, or what training held out of it [as much of Python's standard library]"]
Device = Annotated[str | None, "cpu, cuda, cuda:1 [a GPU where there is one]"]
OwnDtype = Annotated[Dtype | None, "[bfloat16 on a GPU, float16 on one older than sm_80, else float32]"]
_KINDS: dict[type, tuple[str, Callable]] = {
    int: ("N", int),
    float: ("X", float),
    Path: ("PATH", path),
    str: ("WORD", str),
}


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
    metavar, read = next(_KINDS[leaf] for leaf in leaves if leaf in _KINDS)
    return how | {"metavar": metavar, "type": read}


def _leaves(hint: Any) -> Iterator[Any]:
    """Yield what an annotation is made of: types, texts, and choices of words."""
    if get_origin(hint) is Literal or not get_args(hint):
        yield hint
    else:
        yield get_origin(hint)
        for part in get_args(hint):
            yield from _leaves(part)
