"""The kernel that the capstone hands out, and its folded answers, as they stand in the notebook."""

import json
import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "12-capstone.ipynb"


def in_the_notebook() -> tuple[str, str, str]:
    """(what is handed out, the answer that earns silver, the one that earns gold)."""
    texts = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    (given,) = (text.partition("\n")[2] for text in texts if text.startswith("%%writefile my-kernels/down.cu"))
    answers = (found for text in texts for found in re.findall(r"```cuda\n(.*?)```", text, re.DOTALL))
    silver, gold = (text for text in answers if "\ndown(" in text)
    return given, silver, gold


def changed(*changes: tuple[str, str]) -> str:
    """The silver answer with these pieces of text replaced; each must occur once."""
    text = in_the_notebook()[1]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def with_body(body: str, before: str = "") -> str:
    """The kernel that is handed out, with another body."""
    given = in_the_notebook()[0]
    head, rest = given[: given.index('extern "C"')], given[given.index('extern "C"') :]
    return f"{head}{before}\n{rest[: rest.index('{') + 1]}\n{body}\n}}\n"
