"""The pages of the checkout: links lead somewhere, and what is generated from records is what the newest ones give."""

import contextlib
import functools
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest

from twell_lab import records

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {".": "*.md", "docs": "**/*.md", "notebooks": "*.*", "data/checkpoints": "*.md"}
PAGES = [
    path
    for folder, pattern in FOLDERS.items()
    for path in sorted((ROOT / folder).glob(pattern))
    if path.suffix in (".md", ".ipynb")
]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
MARK = re.compile(r'<!-- python -c "(.*?)" prints this table -->\n((?:\|.*\n?)+)')


def text_of(page: Path) -> str:
    """The words of a page; those of a notebook without its code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def places(page: Path) -> set[str]:
    """The anchors of a page's headings: as JupyterLab makes them for a notebook, as GitHub does for a page."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    if page.suffix == ".ipynb":
        return {heading.replace(" ", "-") for heading in headings}
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def astray(page: Path, text: str) -> list[str]:
    """The links of a text that lead to no file, or to no heading of the page that they name."""
    found = []
    for file, place in LINK.findall(text):
        target = page.parent / file if file else page
        known = target.suffix in (".md", ".ipynb") and target.is_file()
        if not target.exists() or place and known and place not in places(target):
            found.append(f"{file}#{place}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert not astray(page, text_of(page))


THEIRS = {"__dp4a", "_load_model"}  # names of CUDA's and of transformers'


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.suffix == ".md" and page.stem != "CHANGELOG"], ids=lambda page: page.stem
)
def test_names_of_code_and_files_are_there(page):
    text = text_of(page)
    named = {name for name in re.findall(r"`(\w+)`", text) if "_" in name} - THEIRS
    assert not [name for name in named if not re.search(rf"\b{name.rstrip('_')}", code())]
    files = re.findall(r"`((?:twell_lab|kernels|tests|docs)/[a-z0-9_/]+\.\w+)`", text)
    assert not [file for file in files if not (ROOT / file).exists()]


@functools.cache
def code() -> str:
    """The sources of the package, the kernels and the notebooks, and the names of their files."""
    files = [*ROOT.glob("twell_lab/**/*.py"), *ROOT.glob("kernels/*.cu*"), *ROOT.glob("notebooks/*.ipynb")]
    return "\n".join([file.stem + "\n" + file.read_text(encoding="utf-8") for file in files])


def generated() -> list:
    """(command, table) of every table that a page says how to print."""
    found = [
        pytest.param(command, table, id=f"{page.stem}: {command.rpartition('tables.')[2].partition('(')[0]}")
        for page in PAGES
        for command, table in MARK.findall(page.read_text(encoding="utf-8"))
    ]
    assert found, "no page has a table of records"
    return found


@pytest.mark.parametrize(("command", "table"), generated())
def test_a_table_of_records_is_that_of_the_newest(command, table):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(command, {})
    assert printed.getvalue().strip() == table.strip()


def test_the_picture_is_drawn_from_the_newest_record():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert json.loads(picture.text_in(picture.PICTURE.read_bytes())) == picture.points(records.load_all())
