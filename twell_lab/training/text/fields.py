"""One field of a .jsonl or .csv file as a text: "chats.jsonl?field=text"."""

from __future__ import annotations

import csv
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from ...core import TextError
from .source import Text, of_pieces


def read(spec: str | os.PathLike | None) -> Text | None:
    """Return the values of the field that "FILE?field=NAME" names, an empty line between them; None for another spec,
    with a warning for such a file without a field. TextError for a file without that field, or with other values."""
    path, asks, field = os.fspath(spec or "").partition("?field=")
    name = Path(path).name
    if not path.lower().endswith((".jsonl", ".csv")):
        return None
    if not asks:
        if Path(path).is_file():
            warnings.warn(f"{name} is read as plain text; {name}?field=text reads its field `text`", stacklevel=2)
        return None
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = (line for line in file if line.strip())
            rows: Iterable = csv.DictReader(file) if path.lower().endswith(".csv") else map(json.loads, lines)
            pieces = [f"{row[field].strip()}\n\n".encode() for row in rows]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise TextError(f"{path!r} has no text in a field {field!r:.80}: {type(error).__name__}: {error}") from None
    if not pieces:
        raise TextError(f"{path!r} holds no rows")
    return of_pieces(f"{name}?field={field}", pieces)
