"""What the options of the `twell-lab` command accept: each of these makes the value of one, or says what is accepted."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path

LARGEST = 2**63 - 1  # a number that torch takes as a size


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


def whole(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 20 else -1
    if not 0 <= value <= LARGEST:
        raise ArgumentTypeError(f"{text!r:.80} is not a whole number from 0 up to {LARGEST}")
    return value


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 20 else 0
    if not 1 <= value <= LARGEST:
        raise ArgumentTypeError(f"{text!r:.80} is not a whole number from 1 up to {LARGEST}")
    return value
