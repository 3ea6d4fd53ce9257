"""A process that is killed, or finds the disk full, at its n-th change to the disk."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from twell_lab.core import InputError


def killed_at(change: int, act: Callable[[], object]) -> bool:
    """Call `act` in a child process that is ended just before its change number `change` (from 1) to the disk: a file or
    folder that is made, written, renamed, removed or synced. Returns whether it came so far; if not, `act` has run to
    its end. Needs a POSIX system. The child has a copy of this process's memory, but none of its threads: `act` must not
    need them."""

    def end() -> None:
        os._exit(HARMED)

    return _in_child(act, change, end)


def full_at(change: int, act: Callable[[], object]) -> bool:
    """As killed_at, but that one change fails as on a full disk. Then `act` must raise InputError, or go on without
    it."""

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    return _in_child(act, change, refuse)


HARMED = 9


def _in_child(act: Callable[[], object], change: int, harm: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        status = 3
        try:
            torch.set_num_threads(1)
            left = _count_down(change, harm)
            try:
                act()
            except InputError as error:
                assert "No space left" in str(error)
            status = HARMED if left() < 1 else 0
        finally:
            if status == 3:
                traceback.print_exc()
            os._exit(status)
    deadline, ended = time.monotonic() + 60, (0, 0)
    while not ended[0]:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline += 60
    status = os.waitstatus_to_exitcode(ended[1])
    assert status in (0, HARMED), f"the act failed in the child: {status}"
    return status == HARMED


def _count_down(left: int, harm: Callable[[], None]) -> Callable[[], int]:
    def pass_one() -> None:
        nonlocal left
        left -= 1
        if not left:
            harm()

    def seen(event: str, details: tuple) -> None:
        if event in (
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.mkdir",
            "os.truncate",
            "shutil.rmtree",
            "shutil.copyfile",
        ):
            pass_one()
        elif event == "open" and isinstance(details[2], int) and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            pass_one()

    sync = os.fsync
    os.fsync = lambda handle: (pass_one(), sync(handle))[1]
    sys.addaudithook(seen)
    return lambda: left
