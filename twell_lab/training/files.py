"""Reading and writing whole files: strict JSON, writes that appear whole or not at all, and locks on open files.

Uses the standard library alone.
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

from ..core import RecordError

try:
    import fcntl
except ImportError:  # Windows has no such locks, so the temporary files of killed processes stay there
    fcntl = None

LARGEST = 2**30  # bytes of a JSON file; a larger one, given by mistake, would fill the memory
DEEPEST = 100  # how many lists and objects may be nested: code that walks through a value must come to an end
WHOLE = 2**63  # tensors hold whole numbers below this one


def reason(error: Exception) -> str:
    """Why an error was raised: the system's words, without number and path, where it has some."""
    return getattr(error, "strerror", None) or str(error)


def read(path: str | os.PathLike, largest: int | None = None) -> bytes:
    """The bytes of a regular file.

    Args:
        path: of the file.
        largest: how many bytes the file may have at most.

    Raises:
        OSError: for whatever cannot be read, which includes a folder, a pipe, a device, a file that is too large, and
            a name that no file can have.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # reading a pipe could wait for ever, and a device may have no end
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
    """The value that a JSON file holds.

    Args:
        path: of the file, which may have LARGEST bytes.
        what: what the file is ("record", "plan"), for error messages.

    Raises:
        RecordError: for a file that cannot be read, or that `parse_json` refuses.
    """
    where = f"{what} {os.fspath(path)!r}"
    try:
        content = read(path, LARGEST)
    except OSError as error:
        raise RecordError(f"{where} cannot be read: {reason(error)}") from None
    try:
        return parse_json(content)
    except ValueError as error:
        raise RecordError(f"{where} cannot be read as JSON: {error}") from None


def parse_json(content: bytes):
    """The value that a JSON text holds.

    Raises:
        ValueError: for text that is no JSON, and for JSON that not all programs read alike: NaN, infinite numbers and
            numbers too large for float64, a name that comes twice in one object, another encoding than UTF-8, and
            more than DEEPEST nested lists and objects.
    """
    try:
        value = json.loads(content.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    _check_depth(value)
    return value


def _no_number(name: str):
    raise ValueError(f"{name} is not a number in JSON")


def _object(pairs: list[tuple[str, object]]) -> dict:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} comes twice in an object")
    return made


def _check_depth(value) -> None:
    """Raises ValueError for a value with too many nested lists and objects, or with an infinite number."""
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
    """The value as JSON text. NaN and infinite numbers, which JSON does not have, become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value):
    """The same lists, objects and numbers with None in place of NaN and infinite ones."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: str | os.PathLike, content: str | bytes, *, make_folder: bool = True) -> None:
    """Write a file whole or not at all: a temporary file beside it, then a rename.

    Before that it removes temporary files of the same target that killed processes left behind; one that another
    process is writing right now stays. Where the path is a symbolic link, the file that it points to is written.

    Args:
        path: of the file.
        content: bytes, or text, which is written as UTF-8.
        make_folder: whether to make the folder of the file where it is missing.

    Raises:
        RecordError: naming the folder, where that cannot be written (read-only, full), and for a path that is a
            folder, a device or a pipe, which the rename would replace by a file.
    """
    path = Path(path)
    if isinstance(content, str):  # lone surrogates, as in file names that are not UTF-8, are written as escapes
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
            with file:  # it is locked until it is closed
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, target)
        finally:
            Path(file.name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot write {path.name!r} in the folder {str(path.parent)!r}: {reason(error)}; "
            "name a folder with free space that you may write"
        ) from None


def _why_no_file(target: Path) -> str | None:
    """What the target is, if it is there and not a file; None if a file can be written there."""
    if not target.exists():
        return "a link in a circle" if target.is_symlink() else None
    return None if target.is_file() else "a folder" if target.is_dir() else "a device or a pipe"


def _temporary(target: Path) -> IO[bytes]:
    """A new file beside the target, open and locked. `_sweep` removes such files that nobody has locked."""
    while True:
        file = open(target.with_name(f".{target.name}.{secrets.token_hex(6)}"), "xb")
        lock_file(file)
        if os.path.exists(file.name):  # else another process removed it before it was locked
            return file
        file.close()


def _sweep(target: Path) -> None:
    """Remove the temporary files of this target that no process is writing any more."""
    ours = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{12}")
    with suppress(OSError):  # some folders can be written but not listed
        for name in os.listdir(target.parent):
            if ours.fullmatch(name):
                with suppress(OSError), open(target.with_name(name), "rb+") as file:
                    if lock_file(file, wait=False):
                        os.unlink(file.name)


def lock_file(file: int | IO[bytes], *, wait: bool = True) -> bool | None:
    """Lock an open file until it is closed or this process ends.

    Args:
        file: an open file or its descriptor.
        wait: whether to wait while another process holds the lock.

    Returns:
        True if the file is locked now, False if another process holds the lock, None where files cannot be locked
        (Windows, some file systems).
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def check_folder(folder: str | os.PathLike, free: int = 0) -> None:
    """Check that files can be written in a folder, before work whose result would be lost otherwise.

    Makes the folder where it is missing, and writes a temporary file in it.

    Args:
        folder: to look at.
        free: bytes that must fit in it.

    Raises:
        RecordError: naming the folder, where it cannot be made or written, or is too full.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=Path(folder)) as file:
            file.write(bytes(free))
    except (OSError, ValueError) as error:
        wanted = f" and that has {free >> 20} MiB free" if free else ""
        raise RecordError(
            f"cannot write in the folder {os.fspath(folder)!r}: {reason(error)}; name one that you may write{wanted}"
        ) from None


def check_target(path: str | os.PathLike) -> None:
    """Raises RecordError unless a file could be written there now. For use before work that would be lost otherwise."""
    path = Path(path)
    try:
        wrong = _why_no_file(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise RecordError(f"{str(path)!r} is not a file that can be written: {reason(error)}") from None
    if wrong:
        raise RecordError(f"{str(path)!r} is {wrong}; accepted: the name of a file")
    check_folder(path.parent)
