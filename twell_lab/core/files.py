"""Files read and written as a whole: JSON that is what it says, and writes that appear whole or not at all.

Needs neither torch nor anything else that is installed.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from .errors import RecordError

try:
    import fcntl
except ImportError:  # Windows has no such locks, and keeps what a killed process left
    fcntl = None  # type: ignore[assignment]

LARGEST = 2**30  # bytes of a JSON file: one given by mistake would fill the memory
DEEPEST = 100  # lists and objects within each other: what takes a value apart step by step has to end
WHOLE = 2**63  # whole numbers below this one are what tensors hold


def read(path: str | os.PathLike, largest: int | None = None) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        largest: the most bytes that it may have.

    Raises:
        OSError: for whatever cannot be read: also a pipe, a device, a larger file, and a name that no file can have.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, and a device need not end
            raise OSError(
                None, f"it is {'a folder' if stat.S_ISDIR(found.st_mode) else 'a pipe or a device'}, not a file"
            )
        if largest is not None and found.st_size > largest:
            raise OSError(None, f"it has {found.st_size:,} bytes; accepted: at most {largest:,}")
        with open(path, "rb") as file:
            return file.read()
    except ValueError as error:  # a NUL in the name, or a character that no name has
        raise OSError(None, str(error)) from None


def read_json(path: str | os.PathLike, what: str):
    """What a JSON file holds.

    Args:
        path: of the file, of at most LARGEST bytes.
        what: what the file is ("record", "plan"), for the message of an error.

    Raises:
        RecordError: where it cannot be read, or is no JSON as `parse_json` takes it.
    """
    where = f"{what} {os.fspath(path)!r}"
    try:
        content = read(path, LARGEST)
    except OSError as error:
        raise RecordError(f"{where} cannot be read: {error.strerror or error}") from None
    try:
        return parse_json(content)
    except ValueError as error:
        raise RecordError(f"{where} cannot be read as JSON: {error}") from None


def parse_json(content: bytes):
    """What JSON text holds.

    Raises:
        ValueError: for what not every reader would understand alike: NaN, infinite numbers and those
            that float64 does not hold, names that come twice in an object, other encodings than UTF-8, and more than
            DEEPEST lists and objects within each other.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    _check_depth(value)
    return value


def _no_number(name: str):
    raise ValueError(f"{name} is no number there")


def _object(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} comes twice in an object")
    return made


def _check_depth(value) -> None:
    """ValueError for a value that is too deep, or has a number in it that float64 does not hold."""
    level = [value]
    for _ in range(DEEPEST + 1):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise ValueError("a number is too large for float64")
        within = [each for each in level if isinstance(each, (list, dict))]
        level = [each for some in within for each in (some.values() if isinstance(some, dict) else some)]
        if not level:
            return
    raise ValueError(f"it is more than {DEEPEST} lists and objects deep")


def strict_json(value, indent: int | None = None) -> str:
    """JSON text that any reader takes: NaN and infinite numbers, which JSON does not have, are null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value):
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: str | os.PathLike, content: str | bytes, *, make_folder: bool = True) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename.

    First it removes what a process that was killed left of an earlier write of the same file; a temporary file that
    another process is writing right now stays. A link is followed.

    Args:
        path: of the file.
        content: bytes, or text, which is written as UTF-8.
        make_folder: make its folder if need be.

    Raises:
        RecordError: naming the folder, where that cannot be written (read-only, full), and for a path that is a
            folder, a device or a pipe: a rename would put a file in its place.
    """
    path = Path(path)
    if isinstance(content, str):  # half characters, as in names that are no UTF-8, would be refused
        content = content.encode("utf-8", "backslashreplace")
    try:
        target = Path(os.path.realpath(path))
        if wrong := _why_no_file(target):
            raise OSError(None, f"{path.name!r} is {wrong}, not a file")
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        file = _temporary(target)
        try:
            with file:  # locked until it is closed
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
        finally:
            Path(file.name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RecordError(
            f"cannot write {path.name!r} in the folder {str(path.parent)!r}: {why}; "
            "name a folder with free space that you may write"
        ) from None


def _why_no_file(target: Path) -> str | None:
    """What stands where a file is to be written, if that is something else; None if a file can be written there."""
    if not target.exists():
        return "a link in a circle" if target.is_symlink() else None
    return None if target.is_file() else "a folder" if target.is_dir() else "a device or a pipe"


def _temporary(target: Path) -> IO[bytes]:
    """A new file beside the target, open and locked: one without a lock is a left-over, and may be removed."""
    while True:
        file = open(target.with_name(f".{target.name}.{secrets.token_hex(6)}"), "xb")
        _lock(file)
        if os.path.exists(file.name):  # else it was found before it had its lock
            return file
        file.close()


def _sweep(target: Path) -> None:
    """Remove the temporary files of this target that nobody is writing any more."""
    ours = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{12}")
    with suppress(OSError):  # a folder may be written without being listed
        for name in os.listdir(target.parent):
            if ours.fullmatch(name):
                with suppress(OSError), open(target.with_name(name), "rb+") as file:
                    if _lock(file, wait=False):
                        os.unlink(file.name)


def _lock(file: IO[bytes], wait: bool = True) -> bool:
    """Lock the file until it is closed or this process ends; False if another one has it, or none can be locked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def check_folder(folder: str | os.PathLike) -> None:
    """Make the folder if need be, and a file in it for a moment. RecordError naming it where that fails."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=Path(folder)):
            pass
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot write in the folder {os.fspath(folder)!r}: {getattr(error, 'strerror', None) or error}; "
            "name one that you may write"
        ) from None


def check_target(path: str | os.PathLike) -> None:
    """RecordError unless a file could be written there now; before work that would be lost otherwise."""
    path = Path(path)
    try:
        wrong = _why_no_file(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{str(path)!r} is no file that can be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    if wrong:
        raise RecordError(f"{str(path)!r} is {wrong}; accepted: the name of a file")
    check_folder(path.parent)
