"""What a command prints, and where: on terminals that lack characters, on full disks, to programs that have ended."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import NamedTuple

from ..core import InputError, finite
from ..records import WIDTH

_PACKAGE, _format_of_others = Path(__file__).resolve().parents[1], warnings.formatwarning


class Answer(NamedTuple):
    """The result of a command: `value` for --json (a str is JSON text already), `text` for people, the exit status, and
    what stands before the text as it is."""

    value: object
    text: str
    status: int = 0
    quoted: str = ""

    def say(self, json: bool) -> None:
        """Print the value as JSON; or the text, its long lines folded but those that begin with a space, which may be
        code. A line break ends it."""
        value = self.value if isinstance(self.value, str) else dumps(finite(self.value), indent=1)
        text = "\n".join(line if line[:1].isspace() else folded(line) for line in self.text.split("\n"))
        write((value if json else self.quoted + text).removesuffix("\n") + "\n")


def folded(line: str, indent: str = "  ") -> str:
    """Return a line in lines of at most WIDTH columns, broken at spaces; all but the first begin with the indent."""
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def set_up() -> None:
    """Have stdout and stderr write characters that their encodings lack as escapes, and warnings of this package look
    as its errors do, without the line of source code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _in_one_line


def _in_one_line(message, category, filename, lineno, line=None) -> str:
    if not Path(filename).is_relative_to(_PACKAGE):
        return _format_of_others(message, category, filename, lineno, line)
    return f"\ntwell-lab: warning: {message}\n"  # on a new line, since a progress bar may stand in this one


def write(text: str) -> None:
    """Write it to stdout, with all that was printed before. A reader that has ended, such as `head`, is no error.

    Raises InputError where the output cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # what is left is lost: Python would write it when it ends, and fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"the output cannot be written: {error.strerror}") from None
