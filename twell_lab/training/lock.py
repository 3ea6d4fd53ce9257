"""A lock on a folder, so that one process at a time writes into it: a locked file in the folder, which names its owner.

The system releases a lock when its process ends, even if it was killed. On some network file systems a lock holds only
within one machine, and no machine can tell whether a process of another one still runs: a folder that a process of
another machine has locked is therefore refused until somebody removes the file. Where files cannot be locked (Windows,
some file systems), the process id and start time in the file say whether the owner still runs; two processes that start
at the same instant may then both get the folder."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ..core import InputError
from .files import lock_file, parse_json

NAME = ".twell-lab.lock"


class Lock:
    """The lock of one folder. Calling `take` or `release` twice does no harm.

    Args:
        folder: the folder to lock.
        what: what its owner does there ("training"), for error messages.
    """

    def __init__(self, folder: str | os.PathLike, what: str) -> None:
        self.path, self.what = Path(folder) / NAME, what
        self.handle: int | None = None

    def take(self) -> None:
        """Lock the folder, which must exist.

        Raises:
            InputError: naming the owner, where another process has it; saying why, where the file cannot be written.
        """
        try:
            while self.handle is None:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    locked, owner = lock_file(handle, wait=False), _read(handle)
                    if locked is False or _elsewhere(owner) or locked is None and _runs(owner):
                        raise InputError(self._refusal(owner, locked))
                    if self._is(handle):  # else its owner removed it just before it was locked here
                        self.handle = handle
                finally:
                    if self.handle is None:
                        os.close(handle)
            _write(self.handle)
        except OSError as error:
            self.release()
            raise InputError(f"cannot save in {str(self.path.parent)!r}: {error}") from None

    def release(self) -> None:
        """Unlock the folder and remove the file, if this lock was taken."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        with suppress(OSError):  # the folder may be gone
            if os.name == "nt":  # Windows removes no open file
                os.close(handle)
                self.path.unlink()
                return
            if self._is(handle):
                self.path.unlink()
        os.close(handle)

    def _is(self, handle: int) -> bool:
        """Whether the open file still is the one at `self.path`."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        return False

    def _refusal(self, owner: dict, locked: bool | None) -> str:
        who = f", process {owner['pid']} on {owner['host']!r}, since {owner['since']}" if owner else ""
        remove = "" if locked is False else f"; if it was killed, remove {str(self.path)!r} and try again"
        return (
            f"{str(self.path.parent)!r} is in use by another {self.what}{who}; accepted: another folder, or this one "
            f"once that has ended{remove}"
        )


def _write(handle: int) -> None:
    """Note this process in the file as the owner."""
    owner = {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
        "since": datetime.now().isoformat(" ", "seconds"),
    }
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, json.dumps(owner).encode())


def _read(handle: int) -> dict:
    """The owner that the file names; {} where it is empty or something else stands in it."""
    os.lseek(handle, 0, os.SEEK_SET)
    content = os.read(handle, 4096)
    with suppress(ValueError):
        owner = parse_json(content)
        if isinstance(owner, dict) and [type(owner.get(name)) for name in ("pid", "host", "since")] == [int, str, str]:
            return owner
    return {}


def _elsewhere(owner: dict) -> bool:
    return bool(owner) and owner["host"] != socket.gethostname()


def _runs(owner: dict) -> bool:
    """Whether that process of this machine still runs, and its id does not belong to a newer process."""
    return bool(owner) and _started(owner["pid"]) is not None and owner.get("started") in (None, _started(owner["pid"]))


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since this machine did; None where the system does not say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None
