"""Files of profiles, plans and thresholds: JSON with a format and a version, read as the dataclass that was written.
What is missing or wrong is a RecordError that names both the file and the field."""

from __future__ import annotations

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..core import WHOLE, InputError, RecordError, read_json, write_atomically


def save(path: str | os.PathLike, form: str, version: int, content: dict) -> Path:
    """Write these fields as JSON, the file whole or not at all. RecordError where it cannot be written, and for NaN."""
    try:
        text = json.dumps({"format": form, "version": version, **content}, default=Tensor.tolist, allow_nan=False)
    except ValueError as error:
        raise RecordError(f"{os.fspath(path)!r} cannot be written: {error}; finite numbers are accepted") from None
    write_atomically(path, text + "\n")
    return Path(path)


def load(path: str | os.PathLike, what: str, form: str, version: int, kind: type) -> Any:
    """Return the dataclass that a file holds the fields of. RecordError, which calls it `what`, unless its field
    'format' is `form`, and it has this version."""
    where, content = f"{what} {os.fspath(path)!r}", read_json(path, what)
    if not isinstance(content, dict) or content.pop("format", None) != form:
        raise RecordError(f"{where} is no {what}: its field 'format' is not {form!r}")
    if (written := content.pop("version", None)) != version:
        raise RecordError(f"{where} has version {written!r:.80}; this release reads {version}")
    return read(kind, content, where)


def read(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as one of this annotation: a dataclass of such, list, tuple, dict, Tensor (int64), int,
    float, bool, str or None. RecordError, which begins with `where`, for another value, for numbers below 0 or beyond
    what tensors hold, and with what a dataclass refuses."""
    options = get_args(kind) if NoneType in get_args(kind) else (kind,)
    if value is None and NoneType in options:
        return None
    kind = options[0]
    inner, kind = get_args(kind), get_origin(kind) or kind
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind is Tensor or inner[:1] == (int,):
        whole = isinstance(value, list) and all(type(count) is int and count >= 0 for count in value)
        if not whole or sum(value) >= WHOLE:
            raise RecordError(f"{where} is no list of whole numbers from 0 up whose sum fits 63 bits")
        return torch.tensor(value, dtype=torch.int64, device="cpu") if kind is Tensor else kind(value)
    accepted = {float: (int, float), tuple: (list,)}.get(kind, (kind,))
    wrong = not isinstance(value, accepted) or isinstance(value, bool) and kind is not bool
    if wrong or isinstance(value, (int, float)) and not 0 <= value < WHOLE:
        raise RecordError(f"{where} is {value!r:.80}; accepted: {accepted[-1].__name__}, numbers from 0 up")
    if kind in (list, tuple):
        return kind(read(inner[0], part, f"{where} {at}") for at, part in enumerate(value))
    if kind is dict and inner:
        return {name: read(inner[1], part, f"{where}, {name!r}") for name, part in value.items()}
    return value


def _dataclass(kind: type, content: Any, where: str) -> Any:
    hints, names = get_type_hints(kind), {field.name for field in fields(kind)}
    if not isinstance(content, dict):
        raise RecordError(f"{where} is {content!r:.80}; an object is accepted")
    if wrong := sorted(names ^ content.keys()):
        what = "lacks" if wrong[0] in names else "has the unknown field"
        raise RecordError(f"{where} {what} {wrong[0]!r}; accepted: {', '.join(sorted(names))}")
    try:
        return kind(**{name: read(hints[name], content[name], f"{where}, {name!r}") for name in names})
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
