"""Rules for all files, which nobody could check by eye. Each check is itself tested on something that breaks its rule."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
# Written so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.])/(wor[k]|roo[t]|tm[p]|opt/(wheel[s]|pyp[i]))\b/?")
INDEX_ADDRESS = re.compile(r"pypi\.or[g]|pythonhosted\.or[g]|-index-ur[l]|find-link[s]|download\.pytorch\.or[g]")
DRAWING_ROOMS = {"app", "course", "plots.py"}
DRAWING = {"plotly", "ipywidgets", "anywidget", "IPython", "matplotlib", "notebooks"}
# Names of torch's own that begin with an underscore, and that we cannot do without.
TORCHS = {*dir(torch.Tensor), *vars(torch.nn.Module()), "_fields", "_replace"}  # and what a NamedTuple offers


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


def imports(source: str) -> set[str]:
    """Names of the modules that a source imports, anywhere in it; those of the package with their dots."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


def drawn_in(source: str) -> set[str]:
    """What a room that computes must not import: what draws figures, widgets and notebooks."""
    return {name for name in imports(source) if name.split(".")[0] in DRAWING}


def foreign_to_formats(source: str) -> set[str]:
    """What `formats` must not import: all but the standard library, torch, errors, and its own files."""
    allowed = sys.stdlib_module_names | {"torch"}
    names = {name for name in imports(source) if name.split(".")[0] not in allowed}
    return {name for name in names if name != "..core" and not re.fullmatch(r"\.\w+", name)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(source: str) -> dict[str, set[str]]:
    """The private names of a module: those that it makes (functions, classes, variables, attributes), those that it
    imports from a folder above its own, and those that it reads as an attribute of something."""
    made, imported, read = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute):
            (made if isinstance(node.ctx, ast.Store) else read).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            imported |= {alias.name for alias in node.names}
    return {kind: set(filter(private, found)) for kind, found in dict(made=made, imported=imported, read=read).items()}


def names_across_rooms(package: Path) -> dict[str, set[str]]:
    """Room -> the private names that it imports from other folders, or reads where only another room makes them."""
    rooms: dict[str, dict[str, set[str]]] = {}
    for path in package.rglob("*.py"):
        room = rooms.setdefault(path.relative_to(package).parts[0], {"made": set(), "imported": set(), "read": set()})
        for kind, names in private_names(path.read_text(encoding="utf-8")).items():
            room[kind] |= names
    everywhere = set().union(*(room["made"] for room in rooms.values())) - TORCHS
    across = {name: each["imported"] | (each["read"] - each["made"]) & everywhere for name, each in rooms.items()}
    return {name: found for name, found in across.items() if found}


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


def test_no_fast_math():
    files = [path for path in tracked() if path.relative_to(ROOT).parts[0] in ("twell_lab", "kernels", "notebooks")]
    assert not [path.name for path in files if "use_fast_math" in (text_of(path) or "")]


def test_no_widget_state_in_notebooks():
    assert not [path.name for path in tracked() if path.suffix == ".ipynb" and widget_state(path.read_text("utf-8"))]


def test_only_rooms_that_draw_import_what_draws():
    files = [path for path in (ROOT / "twell_lab").rglob("*.py")]
    quiet = [path for path in files if path.relative_to(ROOT).parts[1] not in DRAWING_ROOMS]
    assert len(quiet) >= 50
    assert not {path.name: names for path in quiet if (names := drawn_in(path.read_text(encoding="utf-8")))}


def test_formats_import_torch_alone():
    files = list((ROOT / "twell_lab" / "formats").glob("*.py"))
    assert len(files) > 2
    assert not {path.name: names for path in files if (names := foreign_to_formats(path.read_text(encoding="utf-8")))}


def test_no_room_uses_a_private_name_of_another():
    found = names_across_rooms(ROOT / "twell_lab")
    assert not found


@pytest.mark.parametrize(
    "breach",
    [
        "see /{}/main/x.py".format("work"),
        "cd /{}/project".format("root"),
        "--extra-index-{} file".format("url"),
        "https://pypi.{}/simple".format("org"),
    ],
)
def test_private_words_are_found(breach):
    assert private_words(breach)


def test_ordinary_words_are_let_through():
    assert not private_words("paper/work/x, at work, root/, https://a.example/root-cause, twell_lab/roots.py")


def test_breaches_of_the_import_rules_are_found():
    assert drawn_in("def f():\n    import plotly.graph_objects as go") == {"plotly.graph_objects"}
    assert not drawn_in("import torch\nfrom ..ops import pack")
    assert foreign_to_formats("import numpy\nfrom ..ops import x\nfrom .. import ops") == {"numpy", "..ops", ".."}
    assert not foreign_to_formats("import math, torch.nn\nfrom ..core import InputError\nfrom .twell import TwELL")


def test_private_names_across_rooms_are_found(tmp_path):
    for name, text in {
        "low/a.py": "def _hidden(): ...\nclass A:\n    def __init__(self):\n        self._kept = 1\n",
        "low/b.py": "from .a import _hidden\n_hidden._kept\n",
        "high/c.py": "from ..low.a import _hidden\n",
        "high/e.py": "from .d import _own\nfrom ..low.a import _twice\n_twice = 1\n",
        "high/d.py": "def f(a, t):\n    _own = a._kept\n    return t._version, a._unknown, a.__dict__, _own\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert names_across_rooms(tmp_path) == {"high": {"_hidden", "_kept", "_twice"}}


def test_widget_state_is_found():
    assert widget_state('{"metadata": {"widgets": {}}, "cells": []}')
    assert not widget_state('{"metadata": {}, "cells": []}')
