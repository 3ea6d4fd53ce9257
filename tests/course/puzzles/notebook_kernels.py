"""What the notebook of puzzles hands out, and its folded answers."""

import json
import re
from pathlib import Path

import pytest

from twell_lab import simulator

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "06-cuda-puzzles.ipynb"
ANSWER = re.compile(r"```cuda\n(.*?)```", re.DOTALL)
needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


def in_the_notebook() -> dict[str, tuple[str, str]]:
    """name -> (what is handed out, the folded answer)."""
    cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
    found = {}
    for i, text in enumerate(cells):
        if call := re.search(r'exercises\.check\("(\w+)"', text):
            found[call[1]] = cells[i - 1].partition("\n")[2], ANSWER.search(cells[i + 1])[1]
    return found
