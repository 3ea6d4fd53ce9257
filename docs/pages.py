"""What `make site` adds to the pages of this folder: the README as the first page, the course, and the library's face.

mkdocs calls the functions called on_...; nothing is written beside what stands in the checkout."""

from __future__ import annotations

import ast
import json
import posixpath
import re
from html import escape, unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from mkdocs.utils import get_relative_url
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer

from twell_lab.course.sentence import web

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md")  # of docs/: pages of their own
ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
WORDLESS = re.compile('alt="No description has been provided for this image"')
BADGE = re.compile(r"<img[^>]*/colab-badge\.svg[^>]*>")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
# In the pages of notebooks, as nbconvert writes them.
ANCHOR = re.compile(r'<a href="(?!\w+:|#)([^"#]+)(#[^"]*)?">(.*?)</a>', re.DOTALL)
CELL = re.compile(r'(<div class="highlight-ipynb hl-python"><pre>)(.*?)(</pre>)', re.DOTALL)
HEADING = re.compile(r'<h([1-6]) id="([^"]+)">(.*?)<a class="headerlink"', re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`]+`", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"(\$\$?)([^$]+)\1")
# A button's word, code once more, and marks for tests.
UNSOUGHT = re.compile(r'(<span class="notice"|<div class="clipboard-copy-txt"|<div class="celltoolbar")')
# Links of the page of what is not there, which the theme writes for the root of a server.
ROOTED = re.compile(r'((?:href|src)="|"search": "|new URL\(")/')
STILL = re.compile(r"<p><em>In JupyterLab there is something to move here[^<]*</em></p>")  # notebooks/store.py's words
ASTRAY = (
    '<p>There is no such page. <a href="index.html">The first page</a> leads to the others, as does the search.</p>'
)
SERVED = '<script>if (location.protocol.startsWith("http")) document.write(\'<base href="/">\')</script>'


def on_config(config):
    """The order of the pages; of kernels, that in which their index lists them, by the names of their files."""
    index = (ROOT / "docs" / "kernels" / "README.md").read_text(encoding="utf-8")
    kernels = [{name: f"kernels/{name}.md"} for name in re.findall(r"^\| \[(\w+)\]\(\1\.md\)", index, re.MULTILINE)]
    config["nav"] = [
        {"Start": "README.md"},
        {"Course": ["notebooks/README.md", *({_title(name): name} for name in _notebooks()), "teach.md"]},
        {"Library": ["library.md", "serve.md", "reference.md", "measured.md", "calls.md", "status.md"]},
        {"Kernels": ["kernels/README.md", *kernels]},
        {"Changing it": ["architecture.md", *BESIDE]},
    ]
    return config


@event_priority(100)  # before the plugin that turns notebooks into pages looks for them
def on_files(files, config):
    """The README, what stands beside it, its pictures, and the notebooks as the checkout has them."""
    pictures = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "data" / "pictures").glob("*.png"))]
    for name in ["README.md", *BESIDE, "notebooks/README.md", *_notebooks(), *pictures]:
        files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_content(html, page, config, files):
    """Notebooks: pictures get the words that are stored with them, Colab's badge becomes its words, links lead to
    pages instead of notebooks, formulas are MathML, which needs no script, a kernel that a cell writes to a file has
    the colours of CUDA, the first widget of notebook 00 moves, and search and the table of contents know the headings
    as the page has them."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def instead(found: re.Match) -> str:
        file = _page(found[1], posixpath.dirname(page.file.src_uri), files)
        part = (found[2] or "").lower()  # JupyterLab keeps capitals in a heading's address, these pages do not
        return f'<a href="{get_relative_url(file.url, page.url)}{part}">{found[3]}</a>' if file else found[3]

    html = CELL.sub(_coloured, html)
    html = ANCHOR.sub(instead, html).replace('class="anchor-link"', 'class="headerlink"')
    page.toc = get_toc(_contents(HEADING.findall(html)))
    html = UNSOUGHT.sub(r"\1 data-search-exclude", html)
    html = BADGE.sub("Open in Colab", html)  # a page loads no picture from elsewhere
    cells = json.loads((ROOT / page.file.src_uri).read_text(encoding="utf-8"))["cells"]
    texts = [CODE.sub("", "".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown"]
    for signs, formula in dict.fromkeys(FORMULA.findall("\n".join(texts))):
        display = "block" if signs == "$$" else "inline"
        html = html.replace(escape(signs + formula + signs, quote=False), convert(formula, display=display))
    if page.file.src_uri.endswith("/00-start-here.ipynb"):  # the page's own copy of the widget moves without a kernel
        html = STILL.sub(lambda _: web.fragment(), html, count=1)
    outputs = [output for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    words = iter([output["metadata"].get("image/png", {}).get("alt", "") for output in outputs])
    return WORDLESS.sub(lambda _: f'alt="{escape(next(words))}"', html)


def on_post_page(output, page, config):
    """Search works in pages that are opened as files, without asking anybody for a script."""
    return output.replace(ELSEWHERE, get_relative_url("search-from-file.js", page.url))


def on_post_template(output_content, template_name, config):
    """The same for the page of what is not there, which also finds its style when it is opened as a file."""
    if template_name == "404.html":
        output_content = ROOTED.sub(r"\1", output_content).replace('"base": "/"', '"base": "."')
        output_content = output_content.replace('<meta charset="utf-8">', '<meta charset="utf-8">' + SERVED)
        output_content = output_content.replace("<title>", "<title>Not found - ")
        output_content = output_content.replace("404 - Not found</h1>", f"Not found</h1>{ASTRAY}")
    return output_content.replace(ELSEWHERE, "search-from-file.js")


def on_page_markdown(markdown, page, config, files):
    """Links between the checkout's folders lead to pages where there are some; elsewhere their words alone stay."""
    here = posixpath.dirname(page.file.src_uri)
    if here == "kernels":  # the menu says the file's name, the window what the page is about
        page.meta["title"] = re.match("# (.+)", markdown)[1]

    def instead(found: re.Match) -> str:
        file = _page(found[2], here, files)
        return f"[{found[1]}]({posixpath.relpath(file.src_uri, here or '.')}{found[3] or ''})" if file else found[1]

    return LINK.sub(instead, markdown)


def _page(link: str, here: str, files) -> File | None:
    """What a link from the folder `here` of the checkout leads to, where that is a part of the site."""
    # Pages of docs/ lie beside the README here.
    target = posixpath.normpath(posixpath.join(here, link)).removeprefix("../").removeprefix("docs/")
    return files.get_file_from_path(target) or files.get_file_from_path(posixpath.join(target, "README.md"))


def _coloured(cell: re.Match) -> str:
    """A code cell, as it is or, where it writes a kernel, in the colours of CUDA instead of Python's."""
    magic, _, kernel = unescape(re.sub("<[^>]+>", "", cell[2])).partition("\n")
    if not re.fullmatch(r"%%writefile \S+\.cu", magic):
        return cell[0]
    return f"{cell[1]}{escape(magic)}\n{highlight(kernel, CudaLexer(), HtmlFormatter(nowrap=True))}{cell[3]}"


def _contents(headings: list[tuple[str, str, str]]) -> list[dict]:
    """Levels, names and HTML of a page's headings in their order, as mkdocs takes them: each under its parent."""
    top: list[dict] = []
    open_ones = [{"level": 0, "children": top}]
    for level, anchor, html in headings:
        words = unescape(re.sub("<[^>]+>", "", html))
        token = {"level": int(level), "id": anchor, "name": escape(words), "html": escape(words), "children": []}
        while open_ones[-1]["level"] >= token["level"]:
            open_ones.pop()
        open_ones[-1]["children"].append(token)
        open_ones.append(token)
    return top


def _notebooks() -> list[str]:
    """Numbered ones first, the glossary last."""
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    return [
        f"notebooks/{name}"
        for name in sorted(names, key=lambda name: (not name[0].isdigit(), name == "glossary.ipynb"))
    ]


def _title(name: str) -> str:
    """A notebook's own first heading, which its menu entry and its window are called."""
    cells = json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]
    lines = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown")
    return re.search(r"^# (.+)$", lines, re.MULTILINE)[1].replace("`", "")


def _reference() -> str:
    """A page of the names that `import twell_lab as tl` gives, from the stub beside its lazy loader."""
    stub = (ROOT / "twell_lab" / "__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"from \.([\w.]+) import (\w+) as \w+", stub)
    lines = [
        f"| [`tl.{name}`][twell_lab.{module}.{name}] | {_first_sentence(module, name)} |"
        for module, name in sorted(names, key=lambda found: found[1].lower())
    ]
    blocks = [f"::: twell_lab.{module}.{name}" for module, name in names]
    table = "\n".join(["| | |", "| --- | --- |", *lines])
    return "\n\n".join(["# Reference", "What `import twell_lab as tl` gives:", table, *blocks, ""])


def _first_sentence(module: str, name: str) -> str:
    """The first line of what a function or class of the library says about itself."""
    path = (ROOT / "twell_lab").joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    return ast.get_docstring(defined[name]).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
