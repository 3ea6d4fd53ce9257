"""The rooms of the package: each imports those below it alone, without a circle, and only some of them draw."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "twell_lab"
ROOMS = (  # the upper ones first
    *("app", "course", "bench", "sparsities", "training", "models", "analysis", "layers", "records", "ops", "cuda"),
    *("simulator", "plots", "formats", "core"),
)
DRAWING = {"plotly", "ipywidgets", "anywidget", "IPython"}


def name_of(path: Path) -> str:
    """A file's name as a module below the package; a folder is named by its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path): path for path in PACKAGE.rglob("*.py") if name_of(path) not in ("", "__main__")}


def runs(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from runs(node)


def imports(name: str, source: str, nodes=ast.walk) -> set[str]:
    """What a module of the package imports, anywhere in it: the package's own by their names below it, and others'."""
    inside = name.split(".") if NAMES[name].name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*inside[: len(inside) - node.level + 1], *filter(None, [node.module])]
            full = {".".join([*base, alias.name]) for alias in node.names}
            found |= {target if target in NAMES else ".".join(base) for target in full}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {target.removeprefix("twell_lab.") for target in found} - {name, ""}


def breaches(name: str, source: str) -> set[str]:
    """The imports that a module of this name must not have."""
    room, floor = name.split(".")[0], {room: at for at, room in enumerate(ROOMS)}
    found = set()
    for target in imports(name, source):
        first = target.split(".")[0]
        upwards = target in NAMES and floor[first] < floor[room]
        draws = first in DRAWING and room not in ("app", "course", "plots")
        if upwards or draws:
            found.add(target)
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_downwards_alone(room):
    inside = {name: path for name, path in NAMES.items() if name.split(".")[0] == room}
    assert inside
    assert not {name: bad for name, path in inside.items() if (bad := breaches(name, path.read_text("utf-8")))}


def test_there_is_no_circle():
    graph = {name: imports(name, path.read_text("utf-8"), runs) & NAMES.keys() for name, path in NAMES.items()}
    TopologicalSorter(graph).prepare()
