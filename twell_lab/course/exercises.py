"""Checks of the course's exercises: `check(name, answer)` says at once whether an answer is right. Each calls the
reader's function on fresh random input and compares with the library, so an answer that fits only one example fails;
where zeros are to be skipped, operations are counted too. The tests run the notebooks' folded answers against them."""

from __future__ import annotations

import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

from . import progress
from .checks import kernels, models, speed  # noqa: F401
from .verdicts import CHECKS, THEIRS, NotYet  # noqa: F401

RIGHT = "Right"
_refusals: Counter[str] = Counter()  # in this session, by exercise
_shown: Counter[str] = Counter()  # hints


def check(name: str, answer: object) -> None:
    """Print whether an answer is right and, if not, an input for which it is wrong. A wrong answer never raises.

    answer: the reader's function or prediction, or the path of their kernel file. A right one is remembered
    (`progress`). From the second refusal on, a line names the hints. KeyError for an unknown name."""
    _must_exist(name)
    try:
        if str(answer).endswith(".cu") and not Path(answer).is_file():
            raise NotYet(f"there is no file {answer} in {Path.cwd()}; the cell that writes it comes first")
        said = CHECKS[name](answer)
    except NotYet as reason:
        print(f"Not yet: {reason}")
    except Exception as error:  # whatever the reader's function raises is part of the answer
        print(f"Not yet: your function raised {type(error).__name__}: {error}")
    else:
        print(f"{RIGHT}: {said}")
        progress.remember(name)
        return
    if _refusals[name]:  # the first one came before the reader wrote anything, or says enough
        print(f'For a hint: exercises.hint("{name}")')
    _refusals[name] += 1


def hint(name: str) -> None:
    """Print the first hint of an exercise; called once more, the second, which says more. KeyError for an unknown
    name."""
    _must_exist(name)
    number = min(_shown[name] + 1, 2)
    print(f"Hint {number} of 2: {hints()[name][number - 1]}")
    _shown[name] = number


@cache
def hints() -> dict[str, list[str]]:
    """Return the two hints of each exercise, from hints.toml."""
    return tomllib.loads(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))


def _must_exist(name: str) -> None:
    if name not in CHECKS:
        raise KeyError(f"no exercise is called {name!r}; there are {', '.join(CHECKS)}")
