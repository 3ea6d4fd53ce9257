"""What a command says, and what it writes to: a terminal without the characters it needs, a full disk, a reader who
left, nothing at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ..core.errors import InputError
from ..core.files import strict_json


class Answer(NamedTuple):
    """What a command found: `value` for --json (text is JSON already), `text` for people; and the exit status."""

    value: object
    text: str
    status: int = 0

    def say(self, json: bool) -> None:
        """Print the one or the other, each line ended."""
        said = (self.value if isinstance(self.value, str) else strict_json(self.value, indent=1)) if json else self.text
        print(said, end="" if said.endswith("\n") else "\n")


class Stream:
    """A text stream that shows what its encoding lacks as escapes, and remembers in `failed` why it could not be
    written.

    forgiving: that is no error then; what is written is lost.
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
    """Within this context stdout and stderr are Streams; gives stdout's. What stderr cannot take is lost: it reports on
    the work, which goes on.

    A closed stdout raises InputError: what was asked for would be lost, and a file opened later could get its number,
    and be written into by whatever prints below Python."""
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
    """Let no file that is opened later get the number of a standard stream that is closed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _abandon(stream) -> None:
    """If what still waits to be written has nowhere to go, let it go nowhere: Python would try, and fail, at its
    end."""
    try:
        if stream is not None:
            stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def tell(text: str) -> None:
    """Say it on stderr, if anybody listens."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        _abandon(sys.stderr)
