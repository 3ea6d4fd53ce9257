"""The kernel that the capstone hands out, and its folded answers, as they stand in the notebook."""

import json
import re

from tests.course.handed_out import FOLDER, edited, handed_out

NOTEBOOK = FOLDER / "12-capstone.ipynb"


def in_the_notebook() -> tuple[str, str, str]:
    """(what is handed out, the answer that earns silver, the one that earns gold)."""
    given, silver, _ = handed_out(kernels=True)["down"]
    (gold,) = (text for text in folded("cuda") if "\ndown(" in text and text != silver)
    return given, silver, gold


def folded(language: str) -> list[str]:
    """The pieces of code in this language in the notebook's texts."""
    texts = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    return [found for text in texts for found in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)]


def changed(*changes: tuple[str, str]) -> str:
    """The silver answer with these pieces of text replaced; each must occur once."""
    return edited(in_the_notebook()[1], *changes)
