"""The pages that `make site` makes: strictly, so that every link leads somewhere, and without asking the network."""

import json
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
    listed = page[page.index("<table") : page.index("</table>")]
    assert re.search(r'href="#[\w.]+\.sparsify"><code>tl\.sparsify</code></a></td>\s*<td>Swap every ReLU', listed)
    assert listed.count("href=") == len(re.findall(r'<h2 id="twell_lab\.', page))


def test_the_menu_lists_the_kernels_as_their_index_does_and_windows_say_what_they_are_about(site):
    page = (site / "kernels" / "smxx_pack.html").read_text(encoding="utf-8")
    assert "<title>pack: a dense gate to TwELL words - " in page
    menu = page[page.index("md-nav--primary") : page.index("md-content")]
    index = (ROOT / "docs" / "kernels" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r'href="(\w+)\.html" class="md-nav__link', menu)
    own = list(dict.fromkeys(each for each in named if re.match("smxx_|sm80_|sm90_", each)))
    assert own == re.findall(r"\]\((\w+)\.md\)", index.partition("## The pages")[2])


def test_the_page_of_what_is_not_there_leads_on(site):
    page = (site / "404.html").read_text(encoding="utf-8")
    article = page[page.index("<article") : page.index("</article>")]
    assert "There is no such page" in article and 'href="index.html"' in article


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


def test_every_link_leads_to_a_file_of_the_site_and_to_a_place_in_it(site):
    pages = {page: Read(page) for page in site.rglob("*.html")}
    for page, read in pages.items():
        for link in read.links:
            name, _, place = unquote(link).partition("#")
            assert not name.startswith("/"), f"{page.name}: {link} needs a server"
            there = (page.parent / name).resolve() if name else page
            assert there.is_file() and there.suffix not in (".ipynb", ".md"), f"{page.name}: {link}"
            assert there not in pages or place in pages[there].places, f"{page.name}: {link}"


def test_there_is_no_page_of_a_script(site):
    assert not (site / "picture.html").exists() and not (site / "pages.html").exists()


def test_the_search_knows_words_and_no_signs_of_the_page(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(index[index.index("{") :].rstrip().removesuffix(";"))["docs"]
    assert any(entry["location"] == "notebooks/glossary.html#twell" for entry in entries)
    between = json.loads(index[index.index("{") :].rstrip().removesuffix(";"))["config"]["separator"]
    assert "smxx_pack" in re.split(between, "kernels/smxx_pack.cu") and "2.5" in re.split(between, "by 2.5 times")
    for entry in entries:
        assert "notebooks/index" in entry["location"] or "nbval" not in entry["text"] or ".ipynb" in entry["text"]
        assert not re.search("\u00b6|Copied!|In \\[", entry["title"] + entry["text"]), entry["location"]


def test_formulas_are_drawn_without_a_script(site):
    page = (site / "notebooks" / "11-train-with-the-kernels.html").read_text(encoding="utf-8")
    assert page.count("<math") >= 3 and "$$d" not in page and "\\top" not in page


def test_a_kernel_that_a_cell_writes_has_the_colours_of_cuda(site):
    page = (site / "notebooks" / "06-cuda-puzzles.html").read_text(encoding="utf-8")
    cells = re.findall(r'hl-python"><pre>(.*?)</pre>', page, re.DOTALL)
    (hello,) = [cell for cell in cells if cell.startswith("%%writefile my-kernels/hello.cu\n")]
    assert '<span class="kr">__global__</span>' in hello
    words = re.sub("<[^>]+>", "", hello)
    assert "out[i] = 100 * blockIdx.x + threadIdx.x;\n}" in words and "%%writefile" not in words[1:].partition("%%")[2]


def test_the_contents_of_a_notebook_hold_its_headings_one_under_the_other(site):
    page = (site / "notebooks" / "08-first-kernels.html").read_text(encoding="utf-8")
    contents = page[page.index('aria-label="Table of contents"') :]
    contents = contents[: contents.index("</nav>", contents.index("The versions of"))]
    assert 'href="#the-versions-of-gated"' in contents and 'aria-label="Version 1: a thread a tile"' in contents
