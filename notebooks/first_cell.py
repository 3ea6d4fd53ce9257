"""Put the course's first code cell, and the badge of Colab, into notebooks.

    python notebooks/first_cell.py 00-start-here.ipynb ...      (without names: all of them)

CELL is the same in every notebook: run this again when it changes, or a notebook is new. The repository's address
stands in pyproject.toml, as `Repository` under [project.urls]. While it is missing no badge is drawn, and the cell asks
for a wheel. With it the cell installs from there, a badge stands below each title if it is on GitHub, and links out of
the folder of the notebooks, which lead nowhere where a notebook is opened alone, lead to the repository.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ID = "first-cell"
WHEEL = "twell_lab-*.whl"
CELL = f"""\
from importlib.util import find_spec

SOURCE = "{WHEEL}"  # a wheel uploaded beside this notebook, a name on an index, or "git+https://..."
if not find_spec("twell_lab"):  # installs what is missing, and upgrades nothing
    needs = "torch numpy safetensors tqdm jinja2 plotly ipywidgets".split()
    for what in [f"--no-deps {{SOURCE}}", *(name for name in needs if not find_spec(name))]:
        %pip install -q {{what}}
    if not find_spec("twell_lab"):
        raise ModuleNotFoundError("Upload a wheel (in a clone: pip wheel --no-deps .) beside this, and run it again")
from twell_lab.course import notebook

device = notebook.setup()"""
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
# What the first cells did before there was one for all, and a badge with what stands beside it:
GUARD = re.compile(r"try:\n    import twell_lab as tl\nexcept ModuleNotFoundError:\n    raise [^\n]*\n+")
SETUP = re.compile(r"(?m)^(device = )?notebook\.setup\(\)\n?")
BADGE_LINE = re.compile(rf"\n\n{re.escape(BADGE)}[^\n]*")


def address() -> str:
    """The repository's address in pyproject.toml, such as https://github.com/OWNER/NAME; "" while it has none."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["urls"].get("Repository", "").removesuffix("/")


def cell(address: str) -> str:
    """The source of the first code cell."""
    return CELL.replace(WHEEL, f"git+{address}", 1) if address else CELL


def badge(address: str, name: str) -> str:
    """The line below a notebook's title; "" where Colab cannot open the repository."""
    place = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+)", address)
    if not place:
        return ""
    opens = f"https://colab.research.google.com/github/{place[1]}/blob/main/notebooks/{name}"
    return f"{BADGE}({opens}) · [all notebooks]({address}/tree/main/notebooks)"


def put(notebook: dict, name: str, address: str) -> None:
    """Give a notebook, as JSON, the cell and the badge. Doing it twice changes nothing more. Cells are numbered
    anew when the notebook is stored."""
    title = notebook["cells"][0]
    text = BADGE_LINE.sub("", _text(title))
    if line := badge(address, name):
        head, _, rest = text.partition("\n")
        text = f"{head}\n\n{line}\n{rest}"
    _set(title, text)
    if address:
        for each in notebook["cells"]:
            if each["cell_type"] == "markdown":
                _set(each, re.sub(r"\]\(\.\./", f"]({address}/blob/main/", _text(each)))
    code = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    if not code:  # the glossary
        return
    if code[0]["id"] != ID:
        first = {"cell_type": "code", "execution_count": 1, "id": ID, "metadata": {}, "outputs": [], "source": []}
        notebook["cells"].insert(notebook["cells"].index(code[0]), first)
        _shorten(code[0], first)
        code.insert(0, first)
    _set(code[0], cell(address))


def _shorten(old: dict, first: dict) -> None:
    """Take out of a notebook's own first cell what the shared one does, and give that what this printed."""
    text, guarded = GUARD.subn("", SETUP.sub("", _text(old)))
    if guarded:
        text = re.sub(r"(?m)^(?=from twell_lab)|\Z", "import twell_lab as tl\n", text, count=1)
    _set(old, re.sub(r"\n{3,}", "\n\n", text).strip("\n"))
    for output in old["outputs"]:
        printed = "".join(output.get("text", ""))
        if machine := re.match("This machine: .*\n", printed):
            first["outputs"].append({**output, "text": [machine[0]]})
            output["text"] = printed[machine.end() :].splitlines(keepends=True)
    old["outputs"] = [each for each in old["outputs"] if each.get("text") != []]


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
