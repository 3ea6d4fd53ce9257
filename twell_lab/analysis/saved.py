"""Files of profiles, plans and thresholds: JSON with a format and a version, read field by field. What is missing or
wrong is a RecordError that names both the file and the field."""

from __future__ import annotations

import json
import os
from dataclasses import fields as fields_of
from pathlib import Path
from types import NoneType

import torch
from torch import Tensor

from ..core import WHOLE, RecordError, read_json, write_atomically

_KINDS = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float), "dict": (dict,), "None": (NoneType,)}
_KINDS |= dict.fromkeys(("list", "tuple", "Tensor"), (list,))


def kinds(dataclass: type) -> dict[str, tuple[type, ...]]:
    """Return the types that a dataclass's fields have in a file, by their annotations."""
    parts = {field.name: str(field.type).split(" | ") for field in fields_of(dataclass)}
    return {name: sum((_KINDS[part.partition("[")[0]] for part in several), ()) for name, several in parts.items()}


def save(path: str | os.PathLike, form: str, version: int, content: dict) -> Path:
    """Write these fields as JSON, the file whole or not at all. RecordError where it cannot be written, and for NaN."""
    try:
        text = json.dumps({"format": form, "version": version, **content}, default=Tensor.tolist, allow_nan=False)
    except ValueError as error:
        raise RecordError(f"{os.fspath(path)!r} cannot be written: {error}; finite numbers are accepted") from None
    write_atomically(path, text + "\n")
    return Path(path)


def load(path: str | os.PathLike, what: str, form: str, version: int, kinds: dict) -> tuple[dict, str]:
    """Return the fields of a saved `what`, and the words that name the file. RecordError unless its field 'format' is
    `form`, it has this version, and its other fields are of these kinds."""
    where = f"{what} {os.fspath(path)!r}"
    content = read_json(path, what)
    if not isinstance(content, dict) or content.pop("format", None) != form:
        raise RecordError(f"{where} is no {what}: its field 'format' is not {form!r}")
    if (found := content.pop("version", None)) != version:
        raise RecordError(f"{where} has version {found!r:.80}; this release reads {version}")
    return fields(content, kinds, where), where


def fields(content, kinds: dict, where: str) -> dict:
    """Return the content, if it has exactly these fields, each of its types, no number is below zero (widths: one) or
    beyond what tensors hold. kinds: the types of each name."""
    if not isinstance(content, dict):
        raise RecordError(f"{where} is {content!r:.80}; an object is accepted")
    for name, kind in kinds.items():
        value, least = content.get(name), int(name in ("d_model", "d_ff"))
        wrong = name not in content or not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind)
        if wrong or (isinstance(value, (int, float)) and not least <= value < WHOLE):
            accepted = " or ".join(each.__name__ for each in kind)
            raise RecordError(f"{where}: {name!r} is {value!r:.80}; accepted: {accepted}, numbers from {least} up")
    if unknown := sorted({*content} - {*kinds}):
        raise RecordError(f"{where}: unknown field {unknown[0]!r}; accepted: {', '.join(kinds)}")
    return content


def counts(content: dict, name: str, length: int, where: str) -> Tensor:
    """Return the field `name` as int64 [length], if it is a list of so many whole numbers from 0 up."""
    values = content[name]
    if len(values) != length or not all(type(value) is int and value >= 0 for value in values) or sum(values) >= WHOLE:
        raise RecordError(f"{where}: {name!r} is not a list of {length} whole numbers from 0 up whose sum fits 63 bits")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
