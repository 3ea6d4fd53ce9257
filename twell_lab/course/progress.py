"""Which exercises a reader has solved: remembered in a small file in my-kernels, beside the notebook, so that it
outlives a kernel's restart. One that cannot be read counts as empty, and one that cannot be written is left alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from .. import core
from ..core import InputError
from . import notebook

FILE = notebook.MY_KERNELS / "solved.json"
_CALL = re.compile(r'exercises\.check\(\\"(\w+)\\"')  # as it stands in a notebook's JSON
_TITLE = re.compile(r"# (?:(\d\d) · )?(.+?)(?:\\n)?\"")


def remember(name: str) -> None:
    """Note that this exercise is solved; only where a notebook runs, so that nothing else writes into its folder."""
    if not notebook.is_running():
        return
    with suppress(OSError):  # a read-only folder
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(sorted(solved() | {name})) + "\n", encoding="utf-8")


def solved(folder: Path = Path()) -> set[str]:
    """Return the names of the exercises that were solved in a folder with notebooks. None while outputs are stored."""
    if os.environ.get(notebook.STORING):
        return set()
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def exercises() -> dict[str, list[str]]:
    """Notebook, by its number and title, such as "07 Pack it" -> the exercises in it, in their order, from the
    notebooks themselves; those without any are left out."""
    found = {}
    for path in sorted(core.notebooks_dir().glob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        title, names = _TITLE.search(text), list(dict.fromkeys(_CALL.findall(text)))
        if title and names:
            found[" ".join(filter(None, title.groups()))] = names
    return found


def grades(folders: Sequence[Path]) -> list[dict]:
    """Return a row for each reader's folder, and before them one of how many exercises there are: how many are solved
    of each notebook, by its number or as "own", and of all, as the folders say. InputError for what is no folder."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"{str(folder)!r} is no folder; accepted: folders in which a reader worked on the notebooks"
            )
    every = {re.match(r"\d\d|", title)[0] or "own": {*names} for title, names in exercises().items()}
    readers = [("exercises", {*chain(*every.values())}), *((folder.name, solved(folder)) for folder in folders)]
    rows = [{"reader": name, **{key: len(done & names) for key, names in every.items()}} for name, done in readers]
    return [row | {"all": sum(row[key] for key in every)} for row in rows]


def lines() -> str:
    """A line for each notebook of which an exercise is solved, and one for all."""
    done, every = solved(), exercises()
    counts = {title: (len(done & {*names}), len(names)) for title, names in every.items()}
    begun = [f"{title}: {some} of {whole}" for title, (some, whole) in counts.items() if some]
    total = [sum(each) for each in zip(*counts.values())] or [0, 0]
    return "\n".join([*begun, f"Solved: {total[0]} of {total[1]} exercises."])
