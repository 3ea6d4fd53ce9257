"""Write and read profiles, plans and thresholds: as JSON with a format and a version, field by field. Their classes say
what they hold: FiringProfile (profile.py), Plan (planner.py), Thresholds (models/thresholds.py)."""

from __future__ import annotations

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..core import WHOLE, InputError, RecordError, read_json, write_atomically


class Saved:
    """A dataclass of plain values, int64 tensors and further dataclasses that a file holds.

    FORMAT: what the file says that it is; its last word is what errors call it. VERSION: raised when an older reader
    would misread it."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]

    def save(self, path: str | os.PathLike) -> Path:
        """Write it as JSON, the file whole or not at all. RecordError where it cannot be written, and for NaN."""
        content = {"format": self.FORMAT, "version": self.VERSION, **vars(self)}
        plain = lambda value: value.tolist() if isinstance(value, Tensor) else vars(value)
        try:
            text = json.dumps(content, default=plain, allow_nan=False)
        except ValueError as error:
            raise RecordError(f"{os.fspath(path)!r} cannot be written: {error}; finite numbers are accepted") from None
        write_atomically(path, text + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read what `save` wrote. RecordError names the file and the field that is missing or wrong."""
        what = cls.FORMAT.split()[-1]
        where, content = f"{what} {os.fspath(path)!r}", read_json(path, what)
        if not isinstance(content, dict) or content.pop("format", None) != cls.FORMAT:
            raise RecordError(f"{where} is no {what}: its field 'format' is not {cls.FORMAT!r}")
        if (written := content.pop("version", None)) != cls.VERSION:
            raise RecordError(f"{where} has version {written!r:.80}; this release reads {cls.VERSION}")
        return read(cls, content, where)


def read(kind: Any, value: Any, where: str) -> Any:
    """Return a value of JSON as one of this annotation: a dataclass of such, list, tuple, dict, Tensor (int64), int,
    float, bool, str or None. RecordError, which begins with `where`, for another value, for a number below 0 or from
    2**63 up, and with what a dataclass refuses."""
    if NoneType in get_args(kind):
        return None if value is None else read(get_args(kind)[0], value, where)
    inner, kind = get_args(kind), get_origin(kind) or kind
    accepted = dict if is_dataclass(kind) else {float: (int, float), tuple: list, Tensor: list}.get(kind, kind)
    wrong = not isinstance(value, accepted) or isinstance(value, bool) and kind is not bool
    if wrong or isinstance(value, (int, float)) and not 0 <= value < WHOLE:
        raise RecordError(f"{where} is {value!r:.80}; accepted: a {kind.__name__}, and numbers from 0 up")
    if kind is Tensor:
        return torch.tensor(read(list[int], value, where), dtype=torch.int64, device="cpu")
    if kind in (list, tuple):
        return kind(read(inner[0], part, f"{where} {at}") for at, part in enumerate(value))
    if kind is dict and inner:
        return {name: read(inner[1], part, f"{where}, {name!r}") for name, part in value.items()}
    if not is_dataclass(kind):
        return value
    hints, names = get_type_hints(kind), {field.name for field in fields(kind)}
    if differ := sorted(names ^ value.keys()):
        what = "lacks" if differ[0] in names else "has the unknown field"
        raise RecordError(f"{where} {what} {differ[0]!r}; accepted: {', '.join(sorted(names))}")
    try:
        return kind(**{name: read(hints[name], value[name], f"{where}, {name!r}") for name in names})
    except InputError as error:
        raise RecordError(f"{where}: {error}") from None
