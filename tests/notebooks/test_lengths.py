"""A notebook is short enough to be read in one sitting: words written, words printed, code cells and their lines.

Counted are all words that a reader sees without unfolding anything: headings and tasks too, but not folded answers,
code between fences, or the addresses of links. Printed words are those of every stored stream, exercises included.
"""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb") if path.name != "glossary.ipynb")
PROSE, PRINTED, CELLS, LINES = 800, 200, 25, 12
CODE_IS_THE_POINT = {"06-cuda-puzzles.ipynb", "12-capstone.ipynb"}  # free in the number and the length of code cells
FOLDED = re.compile(r"<details.*?</details>|```.*?```|<!--.*?-->", re.S)
LINK = re.compile(r"\]\([^)]*\)")


def cells(name: str, kind: str) -> list[dict]:
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def is_exercise(cell: dict) -> bool:
    return "exercises.check(" in "".join(cell["source"])


def prose(name: str) -> int:
    texts = [FOLDED.sub(" ", "".join(cell["source"])) for cell in cells(name, "markdown")]
    return sum(len(re.findall(r"\w[^\s|]*", LINK.sub("]", text))) for text in texts)


def printed(name: str) -> int:
    streams = [out for cell in cells(name, "code") for out in cell["outputs"] if out["output_type"] == "stream"]
    return sum(len("".join(out["text"]).split()) for out in streams)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short(name):
    assert (prose(name) <= PROSE, printed(name) <= PRINTED) == (True, True), (prose(name), printed(name))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CODE_IS_THE_POINT])
def test_code_cells_are_few_and_short(name):
    shown = ["".join(cell["source"]) for cell in cells(name, "code") if not is_exercise(cell)]
    lines = [sum(bool(line.strip()) for line in text.splitlines()) for text in shown]
    assert (len(shown) <= CELLS, max(lines) <= LINES) == (True, True), (len(shown), max(lines))
