"""Read the files of profiles and thresholds field by field: what is missing or wrong is a RecordError that names both
the file and the field."""

from __future__ import annotations

import os
from dataclasses import fields as fields_of

import torch
from torch import Tensor

from ..core import WHOLE, RecordError, read_json

_KINDS = {"str": str, "bool": bool, "int": int, "float": (int, float), "dict": dict, "list": list, "Tensor": list}


def kinds(dataclass: type) -> dict:
    """Return the kinds of a dataclass's fields in a file, by their annotations."""
    return {each.name: _KINDS[str(each.type).partition("[")[0]] for each in fields_of(dataclass)}


def load(path: str | os.PathLike, what: str, form: str, version: int, kinds: dict) -> tuple[dict, str]:
    """Return the fields of a saved `what`, and the words that name the file. RecordError unless its field 'format' is
    `form`, it has this version, and its other fields are of these kinds."""
    where = f"{what} {str(path)!r}"
    content = read_json(path, what)
    if not isinstance(content, dict) or content.pop("format", None) != form:
        raise RecordError(f"{where} is no {what}: its field 'format' is not {form!r}")
    found = content.pop("version", None)
    if type(found) is not int or found != version:
        raise RecordError(f"{where} has version {found!r:.80}; this release reads {version}")
    return fields(content, kinds, where), where


def fields(content, kinds: dict, where: str) -> dict:
    """Return the content, if it has exactly these fields, each of its kind, no number is below zero (widths: one) or
    beyond what tensors hold. kinds: a type or several for each name."""
    if not isinstance(content, dict):
        raise RecordError(f"{where} is {content!r:.80}; an object is accepted")
    for name, kind in kinds.items():
        value, least = content.get(name), int(name in ("d_model", "d_ff"))
        wrong = name not in content or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        if wrong or (isinstance(value, (int, float)) and not least <= value < WHOLE):
            accepted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise RecordError(f"{where}: {name!r} is {value!r:.80}; accepted: {accepted}, numbers from {least} up")
    if unknown := sorted(set(content) - set(kinds)):
        raise RecordError(f"{where}: unknown field {unknown[0]!r}; accepted: {', '.join(kinds)}")
    return content


def counts(content: dict, name: str, length: int, where: str) -> Tensor:
    """Return the field `name` as int64 [length], if it is a list of so many whole numbers from 0 up."""
    values = content[name]
    if len(values) != length or not all(type(value) is int and value >= 0 for value in values) or sum(values) >= WHOLE:
        raise RecordError(f"{where}: {name!r} is not a list of {length} whole numbers from 0 up whose sum fits 63 bits")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
