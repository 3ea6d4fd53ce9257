"""The student's edition of the notebooks, made with json alone: no outputs, guesses to fill in, and answers in files of
their own. `twell-lab course FOLDER` writes it."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

from .. import core
from ..core import InputError

BRANCH = "student"  # of the repository: holds this edition, for Colab, which opens notebooks one by one
DOTS = "..."  # what stands for a guess
_HEADING = re.compile(r"(?m)^(#{1,3}) ")
_CHECK = re.compile(r'exercises\.check\("(\w+)"')
_ANSWER = re.compile(r"<details><summary>(Answer[^<]*)</summary>\n(.*?)</details>", re.DOTALL)
_GUESS = re.compile(r'(?m)^(guess(?:, \w+)? = )("[^"]*"|\[[^\]]*\]|[^\s,#]+)(.*?)(?:  # (.*))?$')
_GUESSES = re.compile(r"(?m)^guesses = \{.*?\}")
_STORED = re.compile(r"(?m)^- \*\*Stored figures:\*\*.*\n?")
_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*|[\w-]+\.ipynb[^)]*)\)")


def student(notebook: dict, name: str, address: str = "", alone: bool = False) -> tuple[dict, str]:
    """Return the student's edition of a notebook, as JSON, and its answers as Markdown, "" if it has none.

    name: of its file. address: of the repository; links out of the folder of the notebooks lead there. alone: links to
    other notebooks and to the answers lead there too, as a notebook needs that is opened without the others."""
    file, cells, answers, exercise = f"solutions/{Path(name).stem}.md", [], [], ""
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            exercise = (_CHECK.findall(text) or [exercise])[-1]
            text = _GUESSES.sub(lambda guesses: re.sub(r": [^,}]+", f": {DOTS}", guesses[0]), _GUESS.sub(_asked, text))
            cell = {**cell, "outputs": [], "execution_count": None}
        else:
            for what, answer in _ANSWER.findall(text):
                heading = exercise if what == "Answer" else f"{exercise}: {what}"
                answers.append(f"## {heading}\n\n{_lead(answer.strip(), address, alone, '../')}\n")
            place = f"{address}/blob/{BRANCH}/{file}" if alone else file
            told = f'**Stuck?** Run `exercises.hint("{exercise}")` in a new cell, twice for a second hint.'
            told = "**Still stuck?**" if "<summary>Hint" in text else told
            text = _ANSWER.sub(lambda answer: f"{told} [{answer[1]}]({place}).", text)
            text = _lead(_STORED.sub("", text).rstrip("\n"), address, alone)
            if heading := _HEADING.search(text):  # Jupyter makes slides of what begins there
                kind = "subslide" if heading[1] == "###" else "slide"
                cell = {**cell, "metadata": {**cell.get("metadata", {}), "slideshow": {"slide_type": kind}}}
        cells.append({**cell, "source": text.splitlines(keepends=True)})
    title = "".join(notebook["cells"][0]["source"]).partition("\n")[0].lstrip("# ")
    return {**notebook, "cells": cells}, "\n".join([f"# Answers to {title}\n", *answers]) if answers else ""


def write(folder: Path, alone: bool = False) -> tuple[list[str], list[str]]:
    """Write the student's edition of all notebooks, and the answers, into a folder that is there.

    A file that is there already stays as it is. Returns the names of the files that are new, and of those that stayed
    and differ from what would have been written. InputError for `alone` where the package names no repository."""
    address, new, stayed = repository(), [], []
    if alone and not address:
        raise InputError("the package names no repository for the links; accepted: once pyproject.toml names one")
    for path in sorted(core.notebooks_dir().glob("*.ipynb")):
        notebook, answers = student(json.loads(path.read_text(encoding="utf-8")), path.name, address, alone)
        texts = {path.name: json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"}
        texts |= {f"solutions/{path.stem}.md": answers} if answers else {}
        for name, text in texts.items():
            file = folder / name
            if not file.exists():
                core.write_atomically(file, text)
                new.append(name)
            elif file.is_dir() or file.read_bytes() != text.encode():
                stayed.append(name)
    return new, stayed


def repository() -> str:
    """Return the address of the repository that the installed package names, without a slash at its end, or ""."""
    try:
        named = metadata.metadata("twell-lab").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # imported from a folder
        return ""
    urls = dict(line.split(", ", 1) for line in named)
    return urls.get("Repository", "").removesuffix("/")


def _asked(guess: re.Match) -> str:
    """Return the line of a guess with dots in its place, and what to write there as a comment."""
    begin, value, rest, comment = guess.groups()
    if comment and comment.startswith("or "):  # the other words that are accepted
        accepted = f"{value} {comment}"
    else:
        kind = {'"': "a word, in quotes", "[": "a list of numbers"}.get(value[0], "a number")
        accepted = f"{kind}: {comment}" if comment else kind
    return f"{begin}{DOTS}{rest}  # {accepted}"


def _lead(text: str, address: str, alone: bool, up: str = "") -> str:
    """Return Markdown whose links lead somewhere. up: the way to the folder of the notebooks."""

    def link(found: re.Match) -> str:
        words, target = found.groups()
        if target.startswith("../"):
            target = target.removeprefix("../")
            return f"[{words}]({address}/blob/main/{target})" if address else f"{words} (`{target}`)"
        return f"[{words}]({address}/blob/{BRANCH}/{target})" if alone else f"[{words}]({up}{target})"

    return _LINK.sub(link, text)
