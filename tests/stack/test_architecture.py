"""The import graph against docs/architecture.md: rooms import only rooms below them, and there is no circle."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "twell_lab"


def rooms() -> list[str]:
    """The rooms in the order of the page, the upper ones first."""
    (table,) = re.findall(
        r"^\| room \|.*\n\|---.*\n((?:\|.*\n)+)", (ROOT / "docs" / "architecture.md").read_text(), re.M
    )
    return re.findall(r"^\| `(\w+)` \|", table, re.M)


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; a folder is named by its __init__."""
    named = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def graph(package: Path) -> dict[str, set[str]]:
    """Module -> the modules that it imports anywhere, inside functions too. The package's face ("") is left out."""
    named = modules(package)
    arrows: dict[str, set[str]] = {name: set() for name in named if name}
    for name in arrows:
        inside = name.split(".") if named[name].name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(ast.parse(named[name].read_text())):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                base = inside[: len(inside) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
            elif (node.module or "").split(".")[0] == "twell_lab":
                base = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                full = ".".join([*base, alias.name])
                target = full if full in named else ".".join(base)
                arrows[name] |= {target} & (named.keys() - {"", name})
    return arrows


def upwards(arrows: dict[str, set[str]], order: list[str]) -> list[str]:
    floor = {room: at for at, room in enumerate(order)}
    return [
        f"{name} imports {target}"
        for name, targets in sorted(arrows.items())
        for target in sorted(targets)
        if "." in name and floor[target.split(".")[0]] < floor[name.split(".")[0]]
    ]


def test_rooms_import_downwards_alone():
    assert upwards(graph(PACKAGE), rooms()) == []


def test_there_is_no_circle():
    try:
        TopologicalSorter(graph(PACKAGE)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_the_page_lists_every_room_and_each_says_what_it_is_for():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(rooms()) and len(folders) <= 16
    for folder in folders:
        said = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))
        assert said and len(said.partition("\n\n")[0].splitlines()) <= 3, folder
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_files_that_the_page_names_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:kernels/)?[\w/]+\.(?:py|cuh))`", page))
    assert len(named) > 15
    assert [name for name in sorted(named) if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []


def test_what_these_tests_would_find(tmp_path):
    """In a small package with an import upwards, which is inside a function, and a circle, both are found."""
    for name, text in {
        "low/a.py": "def f():\n    from ..high import b\n",
        "high/b.py": "from .c import x\n",
        "high/c.py": "from twell_lab.high.b import y\n",
        "low/__init__.py": "",
        "high/__init__.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    arrows = graph(tmp_path)
    assert upwards(arrows, ["high", "low"]) == ["low.a imports high.b"]
    with pytest.raises(CycleError):
        TopologicalSorter(arrows).prepare()
