"""House rules that a reader could not check by eye in every file. Each check is itself tested on a breach."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
MOST_LINES = 450
# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(wor[k]|roo[t]|tm[p]|opt/(wheel[s]|pyp[i]))\b/?")
INDEX_ADDRESS = re.compile(r"pypi\.or[g]|pythonhosted\.or[g]|-index-ur[l]|find-link[s]|download\.pytorch\.or[g]")
OUTER_ROOMS = {"__init__", "__main__", "plots", "page", "tour", "cli"}
OUTER_ROOMS |= {"widgets", "widget", "figures", "drawing", "notebook"}  # in course/
OUTER_MODULES = {
    f"twell_lab.{place}{room}" for room in OUTER_ROOMS - {"__init__", "__main__"} for place in ("", "course.")
}
DRAWING = {"plotly", "ipywidgets", "anywidget", "IPython", "matplotlib", "notebooks"}


def tracked() -> list[Path]:
    """Every file git knows, as paths below ROOT."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def private_words(text: str) -> list[str]:
    """Paths of one machine, and addresses of package indexes."""
    return [match[0] for pattern in (MACHINE_PATH, INDEX_ADDRESS) for match in pattern.finditer(text)]


def most_bytes(path: Path) -> int:
    return 12 * MB if path.is_relative_to(ROOT / "data" / "checkpoints") else 3 * MB


def imports(source: str, package: str = "twell_lab") -> set[str]:
    """Absolute names of the modules that a module of `package` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, (package if node.level else "", node.module)))
            # `from . import plots` imports a module; `from .plots import x` imports from one
            found |= {f"{package}.{alias.name}" for alias in node.names} if module == package else {module}
    return found


def drawn_in(source: str) -> set[str]:
    """What a core room must not import: plots, pages, notebooks and what draws them."""
    return {name for name in imports(source) if name in OUTER_MODULES or name.split(".")[0] in DRAWING}


def foreign_to_formats(source: str) -> set[str]:
    """What `formats` and `reference` must not import: all but the standard library, torch and errors."""
    allowed = sys.stdlib_module_names | {"torch"}
    return {name for name in imports(source) if name.split(".")[0] not in allowed and name != "twell_lab.core.errors"}


def widget_state(notebook: str) -> bool:
    return "widgets" in json.loads(notebook)["metadata"] or "jupyter.widget-state" in notebook


def test_no_path_of_a_machine_and_no_index_address_in_any_file():
    found = {
        path.relative_to(ROOT).as_posix(): words
        for path in tracked()
        if (text := text_of(path)) is not None and (words := private_words(text))
    }
    assert not found


def test_no_large_files():
    assert not [path.relative_to(ROOT).as_posix() for path in tracked() if path.stat().st_size > most_bytes(path)]


def test_no_library_or_kernel_file_is_long():
    files = [
        path
        for path in tracked()
        if path.suffix in (".py", ".cu", ".cuh") and path.relative_to(ROOT).parts[0] in ("twell_lab", "kernels")
    ]
    assert files
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


def test_no_fast_math():
    files = [path for path in tracked() if path.relative_to(ROOT).parts[0] in ("twell_lab", "kernels", "notebooks")]
    assert not [path.name for path in files if "use_fast_math" in (text_of(path) or "")]


def test_no_widget_state_in_notebooks():
    assert not [path.name for path in tracked() if path.suffix == ".ipynb" and widget_state(path.read_text("utf-8"))]


def test_the_core_rooms_import_no_plot_page_or_notebook():
    rooms = [path for path in (ROOT / "twell_lab").rglob("*.py") if path.stem not in OUTER_ROOMS]
    assert len(rooms) >= 10
    assert not {path.name: names for path in rooms if (names := drawn_in(path.read_text(encoding="utf-8")))}


@pytest.mark.parametrize("room", ["formats", "reference"])
def test_formats_and_reference_import_torch_alone(room):
    assert not foreign_to_formats((ROOT / "twell_lab" / f"{room}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "breach",
    [
        "see /work/main/x.py",
        "cd /root/project",
        "--extra-index-url file",
        "https://pypi.org/simple",
    ],
)
def test_private_words_are_found(breach):
    assert private_words(breach)


def test_ordinary_words_are_let_through():
    assert not private_words("paper/work/x, at work, root/, https://a.example/root-cause, twell_lab/roots.py")


def test_breaches_of_the_import_rules_are_found():
    assert drawn_in("def f():\n    from . import plots") == {"twell_lab.plots"}
    assert drawn_in("from .page import render\nimport plotly.graph_objects as go") == {
        "twell_lab.app.page",
        "plotly.graph_objects",
    }
    assert not drawn_in("import torch\nfrom . import ops\nfrom .profile import profile")
    assert foreign_to_formats("import numpy\nfrom . import ops\nfrom .ffn import x") == {
        "numpy",
        "twell_lab.ops",
        "twell_lab.layers.sparse_ffn",
    }
    assert not foreign_to_formats(
        "import math, torch.nn\nfrom .errors import InputError\nfrom dataclasses import field"
    )


def test_widget_state_is_found():
    assert widget_state('{"metadata": {"widgets": {}}, "cells": []}')
    assert not widget_state('{"metadata": {}, "cells": []}')
