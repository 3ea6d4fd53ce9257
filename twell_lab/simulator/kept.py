"""The cache folder of built libraries: whether it can be trusted, whether a file in it is whole, and the folder that
replaces it where it cannot be used."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from pathlib import Path

from .. import core

# Messages of a full disk; the last one is how the linker ends there.
FULL = re.compile("No space left on device|Disk quota exceeded|signal 7 .Bus error")


def writable(folder: Path | None) -> Path:
    """`folder` if it can be written; otherwise, with a warning, a folder that lasts as long as this process."""
    reason = "no cache folder can be written"
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder.resolve()
    except OSError as error:
        reason = f"simulator cache not written ({error.strerror})"
    warnings.warn(f"{reason}: kernels are compiled anew in each process", stacklevel=3)
    return session()


def session() -> Path:
    """A folder for as long as this process runs."""
    return core.private_folder().resolve()


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file; OSError where it cannot be read."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def text(path: Path) -> str:
    """The text of a file; "" where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def is_whole(path: Path, digest: str) -> bool:
    """Return whether the file is there and has this SHA-256."""
    try:
        return bool(digest) and sha256(path) == digest
    except OSError:
        return False


def move(start: Path, folder: Path, *names: str) -> None:
    """Moves files from `start` to `folder`, each in one step.

    Two processes that do so at once may leave a library of the one beside the digest of the other: is_whole tells.
    """
    for name in names:
        os.replace(start / name, folder / name)
