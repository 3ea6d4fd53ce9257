"""A notebook is short enough to be read in one sitting: words written, words printed, code cells and their lines; and
takes as many minutes as it says, everywhere the same, which are more than its exercises say.

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
TASK = re.compile(r"[(*](?:easy|medium|hard), (?:(\d+) minutes|two hours)[)*]")
TO_READ = 10  # minutes, at least


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


def minutes(name: str) -> int:
    """What the first cell of a notebook says."""
    said = re.search(r"\*\*Time:\*\* (?:(\d+) minutes|an hour)", "".join(cells(name, "markdown")[0]["source"]))
    return int(said[1] or 60)


def table(text: str) -> dict[str, int]:
    """Minutes by the first two signs of a title, from the lines of a table."""
    return {number: int(found) for number, found in re.findall(r"^\| (?:\[|\*\*)(\d\d) · .*?\| (\d+) \|", text, re.M)}


def test_the_lists_call_notebooks_what_they_call_themselves():
    own = {name: re.search(r"^# ([^:\n]+)", "".join(cells(name, "markdown")[0]["source"]))[1] for name in NAMES}
    start = "".join("".join(cell["source"]) for cell in cells("00-start-here.ipynb", "markdown"))
    for text in ((FOLDER / "README.md").read_text(encoding="utf-8"), start):
        called = {name: title for title, name in re.findall(r"^\| \[([^\]]+)\]\((\S+)\) \|", text, re.M)}
        assert len(called) >= 12 and called == {name: own[name] for name in called}


@pytest.mark.parametrize("name", NAMES)
def test_exercises_are_titled_alike(name):
    text = "\n".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    titles = re.findall(r"^### Exercise \d+: (.)", text, re.M)
    assert titles and all(first.isupper() for first in titles), titles


@pytest.mark.parametrize("name", NAMES)
def test_the_minutes_are_enough_for_the_exercises(name):
    tasks = TASK.findall("\n".join("".join(cell["source"]) for cell in cells(name, "markdown")))
    assert len(tasks) >= 6 and minutes(name) >= sum(int(task or 120) for task in tasks) + TO_READ


def test_the_minutes_are_the_same_in_the_tables_and_their_sums_are_the_hours():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    start = "".join("".join(cell["source"]) for cell in cells("00-start-here.ipynb", "markdown"))
    numbered = {name[:2]: minutes(name) for name in NAMES if name[0].isdigit()}
    assert table(readme) == table(start) == numbered
    ways = re.findall(r"^\| [^|]+ \| (\d\d[^|]*) \| (\d+)([¼½¾]?) \|$", readme, re.M)
    assert len(ways) == 3
    for which, whole, part in ways:
        read = {
            f"{n:02}" for a, b in re.findall(r"(\d\d)(?: to (\d\d))?", which) for n in range(int(a), int(b or a) + 1)
        }
        hours = int(whole) + {"": 0, "¼": 0.25, "½": 0.5, "¾": 0.75}[part]
        assert abs(sum(numbered[number] for number in read) / 60 - hours) <= 0.25, which


def test_comments_in_kernels_to_write_fit_the_box_of_a_page():
    """The site cuts lines of code at some 90 characters, and what is asked stands in comments."""
    asked = [
        line
        for name in NAMES
        for cell in cells(name, "code")
        if "".join(cell["source"]).startswith("%%writefile")
        for line in "".join(cell["source"]).splitlines()
        if "//" in line
    ]
    assert len(asked) > 20 and not [line for line in asked if len(line) > 85]
