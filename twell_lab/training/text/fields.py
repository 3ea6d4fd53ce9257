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
        if asks:
            raise TextError(f"{os.fspath(spec or '')!r:.200}: a field is picked from a .jsonl or .csv file alone")
        return None
    if not asks:
        if Path(path).is_file():
            warnings.warn(f"{name} is read as plain text; {name}?field=text reads its field `text`", stacklevel=2)
        return None
    pieces = []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = (line for line in file if line.strip())
            rows: Iterable = csv.DictReader(file) if path.lower().endswith(".csv") else map(json.loads, lines)
            for row in rows:
                value = row.get(field) if isinstance(row, dict) else None
                if not isinstance(value, str):
                    raise ValueError(f"row {len(pieces) + 1} has no text there")
                pieces.append(f"{value.strip()}\n\n".encode())
    except OSError as error:
        raise TextError(f"text {path!r:.200} cannot be read: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise TextError(f"{path!r:.200} with the field {field!r:.80}: {error}") from None
    if not pieces:
        raise TextError(f"{path!r} holds no rows")
    return of_pieces(f"{name}?field={field}", pieces)
