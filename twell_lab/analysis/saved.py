"""Read the files of profiles, plans and thresholds field by field: what is missing or wrong is a RecordError that names
the file and the field."""

from __future__ import annotations

import os
from dataclasses import fields as fields_of

from ..core import WHOLE, RecordError, read_json

_NUMBER = "a whole number from 0 to 2**63 - 1"
_KINDS = {"str": str, "bool": bool, "int": int, "float": (int, float), "dict": dict, "list": list, "Tensor": list}


def kinds(dataclass: type) -> dict:
    """Return the kinds of a dataclass's fields in a file, by their annotations."""
    return {each.name: _KINDS[str(each.type).partition("[")[0]] for each in fields_of(dataclass)}


def load(path: str | os.PathLike, what: str, form: str, kinds: dict[int, dict]) -> tuple[dict, str, int]:
    """Return the fields of a saved `what`, each of its kind, the words that name the file, and its version.

    form: what the file's field 'format' says. kinds: for each version that is read, its fields, as `fields` takes them.
    Raises RecordError for another file."""
    where = f"{what} {str(path)!r}"
    content = read_json(path, what)
    if not isinstance(content, dict) or content.get("format") != form:
        raise RecordError(f"{where} is no {what}: its field 'format' is not {form!r}")
    version = content.get("version")
    if type(version) is not int or version not in kinds:
        raise RecordError(f"{where} has version {version!r:.80}; this release reads {' and '.join(map(str, kinds))}")
    content = {name: value for name, value in content.items() if name not in ("format", "version")}
    return fields(content, kinds[version], where), where, version


def fields(content, kinds: dict, where: str) -> dict:
    """Return the content, if it has exactly these fields, each of its kind, and no number below zero or beyond what
    tensors hold. kinds: a type or several for each name."""
    if not isinstance(content, dict):
        raise RecordError(f"{where} is {content!r:.80}; an object is accepted")
    for name, kind in kinds.items():
        value = content.get(name)
        wrong = name not in content or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (isinstance(value, (int, float)) and not 0 <= value < WHOLE):
            accepted = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(_NUMBER if each is int else each.__name__ for each in accepted)
            raise RecordError(f"{where}: {name!r} is {value!r:.80}; accepted: {names}")
    if unknown := sorted(set(content) - set(kinds)):
        raise RecordError(f"{where}: unknown field {unknown[0]!r}; accepted: {', '.join(kinds)}")
    return content


def counts(content: dict, name: str, length: int, most: int, where: str, limit: str = "") -> list[int]:
    """Return the field `name`, if it is a list of so many whole numbers from 0 to `most`; limit: what to call that."""
    values = content[name]
    if len(values) != length or not all(type(value) is int and 0 <= value <= most for value in values):
        raise RecordError(f"{where}: {name!r} is not a list of {length} whole numbers from 0 to {limit}{most}")
    if sum(values) >= WHOLE:
        raise RecordError(f"{where}: {name!r} sums to {sum(values)}; accepted: less than 2**63")
    return values


def widths(content: dict, where: str) -> None:
    """Raise RecordError for a layer without any width."""
    for name in ("d_model", "d_ff"):
        if not content[name]:
            raise RecordError(f"{where}: {name!r} is 0; accepted: a whole number from 1 up")
