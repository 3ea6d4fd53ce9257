"""The pages that `make site` makes: strictly, so that every link leads somewhere, and without asking the network."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Read(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.places = {"", "__skip"}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.places.update(filter(None, (attrs.get("id"), attrs.get("name"))))
        self.links += [link for link in (attrs.get("href"), attrs.get("src")) if link and ":" not in link]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_every_notebook_worklog_and_page_is_there(site):
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("docs/kernels/*.md"), *ROOT.glob("docs/*.md")]:
        under = path.relative_to(ROOT / "docs" if path.suffix == ".md" else ROOT).with_suffix(".html")
        assert (site / (under.with_name("index.html") if path.stem == "README" else under)).is_file(), under


def test_the_reference_has_the_face_of_the_library(site):
    page = (site / "reference.html").read_text(encoding="utf-8")
    for name in ("sparsify", "profile", "plan", "SparseFFN", "TrainConfig", "pack"):
        assert re.search(rf'id="twell_lab\.[\w.]*\.{name}"', page), name
    listed = page[page.index("<table") : page.index("</table>")]
    assert re.search(r'href="#[\w.]+\.sparsify"><code>tl\.sparsify</code></a></td>\s*<td>Swap the ReLU', listed)
    assert listed.count("href=") == len(re.findall(r'<h2 id="twell_lab\.', page))


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(
            r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]*"|<link[^>]+href="https?://[^"]*\.css"', text
        )


def test_every_link_leads_to_a_file_of_the_site_and_to_a_place_in_it(site):
    pages = {page: Read(page) for page in site.rglob("*.html")}
    for page, read in pages.items():
        for link in read.links:
            name, _, place = unquote(link).partition("#")
            assert not name.startswith("/"), f"{page.name}: {link} needs a server"
            there = (page.parent / name).resolve() if name else page
            assert there.is_file() and there.suffix not in (".ipynb", ".md"), f"{page.name}: {link}"
            assert there not in pages or place in pages[there].places, f"{page.name}: {link}"
