"""What a command prints, and where: on terminals that lack characters, on full disks, to programs that have ended, and
with stdout or stderr closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from json import dumps
from typing import NamedTuple

from ..core import InputError, finite


class Answer(NamedTuple):
    """The result of a command: `value` for --json (a str is JSON text already), `text` for people, the exit status."""

    value: object
    text: str
    status: int = 0

    def say(self, json: bool) -> None:
        """Print the value as JSON, or the text, with a line break at the end."""
        value = self.value if isinstance(self.value, str) else dumps(finite(self.value), indent=1)
        write((value if json else self.text).removesuffix("\n") + "\n")


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, where nobody handles it otherwise."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def set_up() -> None:
    """Have stdout and stderr write characters that their encodings lack as escapes; a closed stderr becomes os.devnull.

    Raises InputError where stdout is closed, because the result would be lost."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        raise InputError(f"the standard output is closed; accepted: an open one, which may be {os.devnull}")


def write(text: str) -> None:
    """Write it to stdout, with all that was printed before. A reader that has ended, such as `head`, is no error.

    Raises InputError where the output cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"the output cannot be written: {error.strerror}") from None


def tell(text: str) -> None:
    """Print it on stderr, if that can be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream) -> None:
    """Lose what a stream holds: Python would try to write it when it ends, and fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
