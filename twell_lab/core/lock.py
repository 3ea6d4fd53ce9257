"""One process at a time writes into a folder: a file in it is locked, and says by whom.

The system releases the lock of a process that ends, however it ends, so a killed process leaves no folder locked. Some
network file systems keep locks within one machine, and no machine can see whether a process of another one lives: a
folder that a process of another machine has locked is refused until somebody removes the file. Where there are no locks
at all (Windows, some file systems) the owner's process number and start time are looked up; two processes that begin in
the same instant may miss each other there."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from .errors import InputError
from .files import parse_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".twell-lab.lock"


class Lock:
    """A folder's lock, to `take` and to `release`; calling either twice does no harm.

    folder: what to lock. what: what its owner does there ("training"), for the message of a refusal.
    """

    def __init__(self, folder: str | os.PathLike, what: str) -> None:
        self.path, self.what = Path(folder) / NAME, what
        self.handle: int | None = None

    def take(self) -> None:
        """Lock the folder, which must be there. InputError names the owner where there is another one, and says why
        where the file can't be written."""
        try:
            while self.handle is None:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    locked, owner = _lock(handle), _read(handle)
                    if locked is False or _elsewhere(owner) or locked is None and _runs(owner):
                        raise InputError(self._refusal(owner, locked))
                    if self._is(handle):  # or its owner removed it just before it was locked here
                        self.handle = handle
                finally:
                    if self.handle is None:
                        os.close(handle)
            _write(self.handle)
        except OSError as error:
            self.release()
            raise InputError(f"cannot save in {str(self.path.parent)!r}: {error}") from None

    def release(self) -> None:
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        with suppress(OSError):  # the folder may be gone
            if fcntl is None:  # no open file can be removed
                os.close(handle)
                self.path.unlink()
                return
            if self._is(handle):
                self.path.unlink()
        os.close(handle)

    def _is(self, handle: int) -> bool:
        """Whether the open file is the one of this name."""
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


def _lock(handle: int) -> bool | None:
    """Whether the file could be locked; None where nothing can."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write(handle: int) -> None:
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
    """Who wrote the file; {} where nobody did, or it can't be read."""
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
    """Whether that process of this machine still runs, and its number was not given to another one since."""
    if not owner:
        return False
    if os.name == "nt":  # there is no asking without a signal
        return True
    try:
        os.kill(owner["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # somebody else's
        pass
    return owner.get("started") in (None, _started(owner["pid"]))


def _started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks; None where it doesn't tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None
