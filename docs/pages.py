"""What `make site` adds to the pages of this folder: the README as the first page, the course, and the library's face.

mkdocs calls the functions called on_...; nothing is written beside what stands in the checkout."""

from __future__ import annotations

import json
import posixpath
import re
from html import escape
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md")  # of docs/: pages of their own
ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
WORDLESS = re.compile('alt="No description has been provided for this image"')
BADGE = re.compile(r"<img[^>]*/colab-badge\.svg[^>]*>")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_config(config):
    """The order of the pages."""
    kernels = sorted(f"kernels/{path.name}" for path in (ROOT / "docs" / "kernels").glob("*.md"))
    config["nav"] = [
        {"twell-lab": "README.md"},
        {"Course": ["notebooks/README.md", *({_title(name): name} for name in _notebooks())]},
        {"Library": ["library.md", "reference.md", "measured.md", "calls.md", "status.md"]},
        {"Kernels": kernels},
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
    """Pictures of notebooks get the words that are stored with them, and Colab's badge becomes its words."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = BADGE.sub("Open in Colab", html)  # a page loads no picture from elsewhere
    cells = json.loads((ROOT / page.file.src_uri).read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
    words = iter([output["metadata"].get("image/png", {}).get("alt", "") for output in outputs])
    return WORDLESS.sub(lambda _: f'alt="{escape(next(words))}"', html)


def on_post_page(output, page, config):
    """Search works in pages that are opened as files, without asking anybody for a script."""
    return output.replace(ELSEWHERE, get_relative_url("search-from-file.js", page.url))


def on_post_template(output_content, template_name, config):
    """The same for the page of what is not there."""
    return output_content.replace(ELSEWHERE, "search-from-file.js")


def on_page_markdown(markdown, page, config, files):
    """Links between the checkout's folders lead to pages where there are some; elsewhere their words alone stay."""
    here = posixpath.dirname(page.file.src_uri)

    def instead(found: re.Match) -> str:
        # Pages of docs/ lie beside the README here.
        target = posixpath.normpath(posixpath.join(here, found[2])).removeprefix("../").removeprefix("docs/")
        for name in (target, posixpath.join(target, "README.md")):
            if files.get_file_from_path(name):
                return f"[{found[1]}]({posixpath.relpath(name, here or '.')}{found[3] or ''})"
        return found[1]

    return LINK.sub(instead, markdown)


def _notebooks() -> list[str]:
    """Numbered ones first."""
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    return [f"notebooks/{name}" for name in sorted(names, key=lambda name: not name[0].isdigit())]


def _title(name: str) -> str:
    """A notebook's own first heading, which its menu entry and its window are called."""
    cells = json.loads((ROOT / name).read_text(encoding="utf-8"))["cells"]
    lines = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "markdown")
    return re.search(r"^# (.+)$", lines, re.MULTILINE)[1].replace("`", "")


def _reference() -> str:
    """A page of the names that `import twell_lab as tl` gives, from the stub beside its lazy loader."""
    stub = (ROOT / "twell_lab" / "__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"from \.([\w.]+) import (\w+) as \w+", stub)
    blocks = [f"::: twell_lab.{module}.{name}" for module, name in names]
    return "# Reference\n\nWhat `import twell_lab as tl` gives; `tl.NAME` for each.\n\n" + "\n\n".join(blocks) + "\n"
