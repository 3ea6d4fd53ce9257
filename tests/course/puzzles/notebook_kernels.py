"""What the notebooks hand out for the puzzles, and the folded answers."""

import json
import re
from pathlib import Path

import pytest

from twell_lab import simulator
from twell_lab.course.puzzles import PUZZLES

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
ANSWER = re.compile(r"```cuda\n(.*?)```", re.DOTALL)
needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


def in_the_notebook() -> dict[str, tuple[str, str]]:
    """name -> (what is handed out, the folded answer)."""
    found = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        for i, text in enumerate(cells):
            call = re.search(r'exercises\.check\("(\w+)"', text)
            if call and call[1] in PUZZLES and path.name.startswith(PUZZLES[call[1]].notebook):
                found[call[1]] = cells[i - 1].partition("\n")[2], ANSWER.search(cells[i + 1])[1]
    return found
