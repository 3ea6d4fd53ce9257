"""SHA-256 digests of saved files, so that a file that changed after it was written is refused.

A sealed JSON file holds the SHA-256 of its own other fields (its seal), and may list those of the files beside it.
Files of earlier releases have no seal, and are read without this check."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from .files import parse_json

SEAL = "own_sha256"


def seal(fields: dict) -> bytes:
    """The fields as JSON, with one more field that holds their SHA-256. ValueError for a number that is not finite."""
    return _json({**fields, SEAL: _own(fields)})


def unseal(content: bytes) -> dict:
    """The fields that `seal` was given, or those of a file without a seal. ValueError for text that is no JSON object,
    and for one that was altered."""
    fields = parse_json(content)
    if not isinstance(fields, dict):
        raise ValueError(f"it holds a {type(fields).__name__}; accepted: an object")
    held = fields.pop(SEAL, None)
    own = _own(fields)
    if held is not None and held != own:
        raise ValueError(f"it was altered after it was written: its SHA-256 is {own}, and {held} is noted in it")
    return fields


def sha256(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on the disk and would survive a power cut."""
    if not path.is_dir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        return
    with suppress(OSError):  # not every system can open a folder, nor every file system wait for one
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _own(fields: dict) -> str:
    return hashlib.sha256(_json(fields)).hexdigest()


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()
