"""Put the course's first code cell, and the badge of Colab, into notebooks.

    python notebooks/first_cell.py 00-start-here.ipynb ...      (without names: all of them)

CELL is the same in every notebook: run this again when it changes, or a notebook is new. The repository's address
stands in pyproject.toml, as `Repository` under [project.urls]. While it is missing no badge is drawn, and the cell asks
for a wheel. With it the cell installs from there, and, if it is on GitHub, a badge stands below each title. The badge
opens the student's edition in the branch `student`, which `twell-lab course FOLDER --no-open --alone` writes.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

from twell_lab.course.edition import BRANCH

FOLDER = Path(__file__).resolve().parent
ID = "first-cell"
WHEEL = "twell_lab-*.whl"
UPLOAD = "first upload a wheel beside this notebook"  # in a clone: pip wheel --no-deps .
CELL = """\
try:
    from twell_lab.course import notebook
except ModuleNotFoundError:  # opened alone, as on Colab: {where}
    %pip install -q {what} plotly ipywidgets
    from twell_lab.course import notebook

device = notebook.setup()"""
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
BADGE_LINE = re.compile(rf"\n\n{re.escape(BADGE)}[^\n]*")  # with what stands beside it


def address() -> str:
    """The repository's address in pyproject.toml, such as https://github.com/OWNER/NAME; "" while it has none."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"].get("Repository", "").removesuffix("/")


def cell(address: str) -> str:
    """The source of the first code cell."""
    if address:
        return CELL.format(where="installs what is missing", what=f"git+{address}")
    return CELL.format(where=UPLOAD, what=WHEEL)


def badge(address: str, name: str) -> str:
    """The line below a notebook's title; "" where Colab cannot open the repository."""
    place = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", address)
    if not place:
        return ""
    opens = f"https://colab.research.google.com/github/{place[1]}/blob/{BRANCH}/{name}"
    return f"{BADGE}({opens}) · [all notebooks]({address}/tree/{BRANCH})"


def put(notebook: dict, name: str, address: str) -> None:
    """Give a notebook, as JSON, the cell and the badge. Doing it twice changes nothing more. Cells are numbered
    anew when the notebook is stored."""
    title = notebook["cells"][0]
    text = BADGE_LINE.sub("", _text(title))
    if line := badge(address, name):
        head, _, rest = text.partition("\n")
        text = f"{head}\n\n{line}\n{rest}"
    _set(title, text)
    code = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    if not code:  # the glossary
        return
    if code[0]["id"] != ID:
        first = {"cell_type": "code", "execution_count": 1, "id": ID, "metadata": {}, "outputs": [], "source": []}
        notebook["cells"].insert(notebook["cells"].index(code[0]), first)
        code.insert(0, first)
    _set(code[0], cell(address))


def _text(each: dict) -> str:
    return "".join(each["source"])


def _set(each: dict, text: str) -> None:
    each["source"] = text.splitlines(keepends=True)


def main(names: list[str]) -> None:
    where = address()
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        put(notebook, path.name, where)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: has the first cell{' and its badge' if badge(where, path.name) else ''}")


if __name__ == "__main__":
    main(sys.argv[1:])
