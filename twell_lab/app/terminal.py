"""What a command prints, and streams to print it on: on terminals that lack characters, on full disks, to programs that
have ended, and with stdout or stderr closed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        said = value if json else self.text
        print(said, end="" if said.endswith("\n") else "\n")


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


class Stream:
    """A text stream that writes characters that its encoding lacks as escapes, and keeps the error of a failed write in
    `failed`.

    Args:
        stream: what to write to.
        forgiving: whether a failed write raises no error; what was to be written is lost then.
    """

    def __init__(self, stream, forgiving: bool = False) -> None:
        self.stream, self.forgiving = stream, forgiving
        self.failed: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            self._attempt("write", text)
        except UnicodeEncodeError as error:
            self._attempt("write", text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        self._attempt("flush")

    def _attempt(self, how: str, *arguments) -> None:
        try:
            getattr(self.stream, how)(*arguments)
        except OSError as error:
            self.failed = error
            if not self.forgiving:
                raise


@contextmanager
def ready() -> Iterator[Stream]:
    """Within this context, stdout and stderr are Streams; yields that of stdout. What cannot be written to stderr is
    lost, since reports on the work must not end it.

    Raises InputError where stdout is closed: the result would be lost, and a file that is opened later could get its
    file descriptor, so that C code that prints would write into that file."""
    before = sys.stdout, sys.stderr
    if before[1] is None:
        _fill()
    nowhere = open(os.devnull, "w", encoding="utf-8")
    out, sys.stderr = Stream(before[0]), Stream(before[1] or nowhere, forgiving=True)
    try:
        if before[0] is None:
            raise InputError("the standard output is closed; accepted: an open one, which may be " + os.devnull)
        sys.stdout = out
        yield out
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        sys.stdout, sys.stderr = before
        nowhere.close()
        for stream in before:
            _abandon(stream)


def _fill() -> None:
    """Open the descriptors of closed standard streams, so that no file that is opened later gets one of them."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _abandon(stream) -> None:
    """Discard the rest of a stream's output if it cannot be written: Python would try again, and fail, when it ends."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(text: str) -> None:
    """Print it on stderr, if that can be written."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        _abandon(sys.stderr)
