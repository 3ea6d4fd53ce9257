"""A process that is killed, or finds the disk full, at its n-th change to the disk."""

import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch

from twell_lab.core import InputError

HARMED = 9
CHANGES = "os.rename os.remove os.rmdir os.mkdir os.truncate shutil.rmtree shutil.copyfile".split()


def killed_at(change: int, act: Callable[[], object]) -> bool:
    """Call `act` in a child process that is ended just before its change number `change` (from 1) to the disk: a file or
    folder that is made, written, renamed or removed. Returns whether it came so far; if not, `act` has run to its end.
    Needs a POSIX system. The child has a copy of this process's memory, but none of its threads: `act` must not need
    them."""
    return _in_child(act, change, lambda: os._exit(HARMED))


def full_at(change: int, act: Callable[[], object]) -> bool:
    """As killed_at, but that one change fails as on a full disk. Then `act` must raise InputError, or go on without
    it."""

    def refuse() -> None:
        raise OSError(28, "No space left on device")

    return _in_child(act, change, refuse)


def before_change(change: int, harm: Callable[[], object]) -> Callable[[], int]:
    """Have `harm` called just before this process's change number `change` (from 1) to the disk. Returns a function that
    says how many changes are left until then."""
    left = change

    def watch(event: str, details: tuple) -> None:
        nonlocal left
        flags = details[2] if event == "open" else 0
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CHANGES or writes:
            left -= 1
            if not left:
                harm()

    sys.addaudithook(watch)
    return lambda: left


def _in_child(act: Callable[[], object], change: int, harm: Callable[[], None]) -> bool:
    if not (child := os.fork()):
        status = 3
        try:
            signal.alarm(60)
            torch.set_num_threads(1)
            left = before_change(change, harm)
            try:
                act()
            except InputError as error:
                assert "No space left" in str(error)
            status = HARMED if left() < 1 else 0
        finally:
            if status == 3:
                traceback.print_exc()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, HARMED), f"the act failed in the child: {status}"
    return status == HARMED
