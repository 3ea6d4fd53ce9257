"""What may import what: a widget its figures, figures their data, and nothing but notebooks the course."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "twell_lab"
COURSE = PACKAGE / "course"
DRAWING = ("plotly", "ipywidgets", "anywidget", "IPython")


def imports(path: Path, source: str | None = None) -> set[str]:
    """Full names of all that a file of the package imports, anywhere in it; names taken from a module count too."""
    package = path.relative_to(PACKAGE.parent).parent.parts
    found = set()
    for node in ast.walk(ast.parse(source or path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def upward(path: Path, source: str | None = None) -> set[str]:
    """What a file of one of the course's folders must not import: drawing where it computes, widgets where it draws."""
    names = imports(path, source)
    found = {name for name in names if name.startswith("twell_lab.course.") and name.endswith(".widget")}
    if path.stem in ("figures", "drawings"):
        return found | {name for name in names if name.split(".")[0] in DRAWING[1:]}
    if path.stem in ("widget", "__init__"):
        return found
    return found | {name for name in names if name.split(".")[0] in DRAWING or name.endswith((".figures", ".drawing"))}


def test_nothing_but_notebooks_and_the_judge_of_the_capstone_uses_the_course():
    others = [path for path in PACKAGE.rglob("*.py") if COURSE not in path.parents]
    assert len(others) > 30
    users = {path.name: {name for name in imports(path) if name.startswith("twell_lab.course")} for path in others}
    capstone = users.pop("submit_command.py")  # judges as the notebook does
    assert capstone and all(name.startswith("twell_lab.course.capstone") for name in capstone - {"twell_lab.course"})
    assert not [name for name, found in users.items() if found]


def test_widgets_use_figures_and_figures_use_data_never_the_other_way():
    files = sorted(COURSE.glob("*/*.py"))
    assert {"data", "figures", "widget", "__init__"} <= {path.stem for path in files}
    assert not {str(path): found for path in files if (found := upward(path))}


@pytest.mark.parametrize(
    "file, line",
    [
        ("packing/data.py", "from . import figures"),
        ("packing/data.py", "import plotly.graph_objects as go"),
        ("packing/data.py", "def f():\n    from ..sweep.figures import picked"),
        ("packing/data.py", "from ..drawing import nothing"),
        ("packing/figures.py", "from . import widget"),
        ("packing/__init__.py", "from .widget import TileExplorer"),
        ("work/figures.py", "import ipywidgets"),
    ],
)
def test_a_breach_is_found(file, line):
    assert upward(COURSE / file, line)


def test_what_is_allowed_is_let_through():
    assert not upward(COURSE / "packing" / "widget.py", "from . import data, figures\nfrom ..widgets import ipywidgets")
    assert not upward(COURSE / "packing" / "figures.py", "from .data import view\nimport plotly.graph_objects as go")
    assert imports(PACKAGE / "recordings.py", "from .course.measure import x") >= {"twell_lab.course.measure.x"}
