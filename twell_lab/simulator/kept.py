"""The folder of built libraries: whose it is, whether what it holds is whole, and what takes its place."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from pathlib import Path

from ..core import folders
from ..core.errors import StackError

# What says that a disk is full; the last is what the linker ends with there.
FULL = re.compile("No space left on device|Disk quota exceeded|signal 7 .Bus error")


def writable(folder: Path | None) -> Path:
    """`folder`, or, with a warning, one that lasts as long as this process where nothing can be written there."""
    reason = "no cache folder can be written"
    try:
        if folder is not None:
            folders.make_folder(folder)
            if why := folders.refusal(folder):
                reason = f"not used as a cache, since others could put libraries there: {why}"
            else:
                with tempfile.TemporaryFile(dir=folder):
                    return folder.resolve()
    except OSError as error:
        reason = f"simulator cache not written ({error.strerror})"
    warnings.warn(f"{reason}: kernels are compiled anew in each process", stacklevel=3)
    return session()


def session() -> Path:
    """A folder for as long as this process runs."""
    folder = folders.private_folder()
    if folder is None:
        raise StackError("no folder can be written that others cannot write, too: TWELL_LAB_CACHE can name one")
    return folder.resolve()


def sha256(path: Path) -> str:
    return hashlib.sha256(folders.read_trusted(path)).hexdigest()


def text(path: Path) -> str:
    try:
        return folders.read_trusted(path).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def is_whole(path: Path, digest: str) -> bool:
    try:
        return bool(digest) and sha256(path) == digest
    except OSError:
        return False


def move(start: Path, folder: Path, *names: str) -> None:
    """Each file appears whole; a pair of two processes that does not belong together is seen by its digest."""
    for name in names:
        os.chmod(start / name, 0o600)  # whatever the umask: what others can write is not loaded
        os.replace(start / name, folder / name)
