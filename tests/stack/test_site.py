"""The pages that `make site` makes: strictly, so that every link leads somewhere, and without asking the network."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    made = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_every_notebook_worklog_and_page_is_there(site):
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("docs/kernels/*.md"), *ROOT.glob("docs/*.md")]:
        under = path.relative_to(ROOT / "docs" if path.suffix == ".md" else ROOT).with_suffix(".html")
        assert (site / (under.with_name("index.html") if path.stem == "README" else under)).is_file(), under
    assert "What runs where" in (site / "index.html").read_text(encoding="utf-8")


def test_a_notebooks_page_is_called_what_its_first_heading_says(site):
    page = (site / "notebooks" / "01-why-gpus-ignore-zeros.html").read_text(encoding="utf-8")
    assert "<title>01 · Why GPUs ignore zeros - " in page and "01 why gpus" not in page


def test_the_reference_has_the_face_of_the_library(site):
    page = (site / "reference.html").read_text(encoding="utf-8")
    for name in ("sparsify", "profile", "plan", "SparseFFN", "TrainConfig", "pack"):
        assert re.search(rf'id="twell_lab\.[\w.]*\.{name}"', page), name


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]*"|<link[^>]+href="https?://[^"]*\.css"', text
        )


def test_pictures_have_words_and_the_search_knows_the_notebooks(site):
    page = (site / "notebooks" / "09-hopper-kernels.html").read_text(encoding="utf-8")
    assert page.count("<img") > 5 and "No description has been provided" not in page
    assert "notebooks/09-hopper-kernels.html" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
