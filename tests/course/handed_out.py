"""What the notebooks hand out, the folded answers, and answers that are edited."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from twell_lab import simulator

needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CALL = re.compile(r'exercises\.check\("(\w+)", (?:(\w+)|"([\w./-]+\.cu)")\)')
ANSWER = re.compile(r"<details>.*?```(?:python|cuda)\n(.*?)```.*?</details>", re.DOTALL)
WRITEFILE = "%%writefile "


@cache
def handed_out(kernels: bool = False) -> dict[str, tuple[str, str, str]]:
    """name -> (what is handed out, the folded answer right after it, the function's name or the kernel file's path).

    kernels: only the exercises whose answer is a kernel file, which the cell before the check writes; else the others.
    """
    found = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells]
        for i, (cell, text) in enumerate(zip(cells, texts, strict=True)):
            call = CALL.search(text) if cell["cell_type"] == "code" else None
            if call and bool(call[3]) == kernels:
                answer = ANSWER.search(texts[i + 1])
                assert answer, f"{path.name}: no folded answer right after the exercise {call[1]}"
                if kernels:
                    first, _, text = texts[i - 1].partition("\n")
                    assert first == WRITEFILE + call[3], f"{path.name}: the cell before the check writes no {call[3]}"
                found[call[1]] = text, answer[1], call[2] or call[3]
    return found


def edited(text: str, *changes: tuple[str, str]) -> str:
    """Return the text with pieces of it replaced; each must occur once."""
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def with_body(given: str, body: str, before: str = "") -> str:
    """Return the kernel that is handed out with another body, and something before it."""
    head, start, rest = given.partition('extern "C"')
    return f"{head}{before}\n{start}{rest[: rest.index('{') + 1]}\n{body}\n}}\n"
