"""What a command prints, and where: on terminals that lack characters, on full disks, to programs that have ended; and
sentences that several commands say."""

from __future__ import annotations

import os
import sys
import textwrap
import warnings
from contextlib import suppress
from io import TextIOWrapper
from json import dumps, loads
from typing import NamedTuple

from ..core import InputError
from ..records import WIDTH


class Answer(NamedTuple):
    """The result of a command: `value` for --json (a str is JSON text already), `text` for people, the exit status."""

    value: object
    text: str
    status: int = 0

    def say(self, json: bool) -> None:
        """Print the value as JSON; or the text, its long lines folded but those with two spaces in a row, which are of
        a table, or code. A line break ends it."""
        value = self.value
        if not isinstance(value, str):  # JSON has no NaN and no infinities
            value = dumps(loads(dumps(value), parse_constant=lambda _: None), indent=1)
        text = "\n".join(line if "  " in line else folded(line) for line in self.text.split("\n"))
        write((value if json else text).removesuffix("\n") + "\n")


def folded(line: str, indent: str = "  ") -> str:
    """Return a line in lines of at most WIDTH columns, broken at spaces; all but the first begin with the indent."""
    if len(line) <= WIDTH:
        return line
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def set_up() -> None:
    """Have stdout and stderr write what their encodings lack as escapes, and warnings look as errors do."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # On a new line, since a progress bar may stand in this one.
    warnings.formatwarning = lambda message, *_, **__: f"\ntwell-lab: warning: {message}\n"


def write(text: str) -> None:
    """Write it to stdout, with all that was printed before. InputError where that cannot be done, but for a reader that
    has ended, such as `head`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError, ValueError):  # what is left is lost: Python would write it when it ends, and fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"the output cannot be written: {error.strerror}") from None


# ---- sentences ----


def verdict(ratios: list[tuple[float, float, float, str]]) -> str:
    """Return at how many of these the sparse way is faster, and at how many slower, with the best and the worst of
    them. ratios: how many times as fast as dense, between which bounds the samples lie, and what it is; where the
    bounds lie on both sides of 1 it is neither."""
    faster = [ratio for ratio in ratios if min(ratio[0], ratio[1]) > 1]
    slower = [ratio for ratio in ratios if max(ratio[0], ratio[2]) < 1]
    said = []
    for word, which, some, pick in (("faster", "best", faster, max), ("slower", "worst", slower, min)):
        if some:
            times, _, _, what = pick(some)
            said.append(f"{word} at {len(some)} (at {which} {times:.2f} times as fast: {what})")
    if rest := len(ratios) - len(faster) - len(slower):
        said.append(f"neither at {rest}, where the difference lies within the spread of the samples")
    return ", ".join(said)


def said_fast(texts: dict) -> str:
    """Return how fast a model spoke on its planned layers and, where one of them is not dense, beside dense ones.
    texts: what `in_turn` returns, and layers: rows of a report."""
    speed = f"{texts['tokens_per_s']:,.0f} tokens a second"
    if all(layer["choice"] == "dense" for layer in texts["layers"]):
        return f"{speed}; the plan left all layers dense, so there is nothing to compare"
    same = "the same text" if texts["same"] else "not the same text, since sums differ in their last bits"
    turns = f"{min(texts['ratios']):.2f} to {max(texts['ratios']):.2f} times as fast from turn to turn"
    return f"{speed}, {texts['dense_tokens_per_s']:,.0f} with dense layers ({turns}), {same}"
