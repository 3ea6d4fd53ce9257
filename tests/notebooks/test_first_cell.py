"""The first code cell, one text for all notebooks: what it installs, and the badge that an address draws."""

import importlib.util
import json
from pathlib import Path

import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb") if path.name != "glossary.ipynb")  # it has no code
GITHUB = "https://github.com/somebody/twell-lab"
PIP = """
import sys
with open("calls", "a") as calls:
    print(*sys.argv[1:], file=calls)
"""


@pytest.fixture(scope="module")
def first_cell():
    spec = importlib.util.spec_from_file_location("first_cell", FOLDER / "first_cell.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def code(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_has_the_cell_and_the_badge_as_the_script_writes_them(name, first_cell):
    notebook = read(name)
    first_cell.put(notebook, name, first_cell.address())
    assert notebook == read(name), f"python notebooks/first_cell.py {name} mends it"
    first, *others = map(first_cell._text, code(notebook))
    assert first == first_cell.cell(first_cell.address())
    assert not [text for text in others if "notebook.setup(" in text or "%pip" in text]


def test_an_address_draws_the_badge_and_is_installed_from(first_cell):
    notebook = read("00-start-here.ipynb")
    first_cell.put(notebook, "00-start-here.ipynb", GITHUB)
    lines = first_cell._text(notebook["cells"][0]).splitlines()
    opens = "https://colab.research.google.com/github/somebody/twell-lab/blob/student/00-start-here.ipynb"
    assert lines[0].startswith("# 00") and opens in lines[2] and f"({GITHUB}/tree/student)" in lines[2]
    assert lines[1] == lines[3] == "" and lines[4]
    assert f"-q git+{GITHUB} " in first_cell._text(code(notebook)[0])
    again = json.loads(json.dumps(notebook))
    first_cell.put(again, "00-start-here.ipynb", GITHUB)
    assert again == notebook
    first_cell.put(again, "00-start-here.ipynb", "")
    assert again == read("00-start-here.ipynb")


def run(first_cell, folder: Path, before: str) -> str:
    """What the cell prints in a folder where `pip` only writes down what it was asked for."""
    (folder / "pip").mkdir()
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(PIP)
    cells = [nbformat.v4.new_code_cell(text) for text in (before, first_cell.cell(""))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    assert not [each for each in cells[0].outputs if each.output_type == "error"]
    return "".join(each.get("text", "") + each.get("evalue", "") for each in cells[1].outputs)


def test_where_the_package_is_there_nothing_is_installed(first_cell, tmp_path):
    said = run(first_cell, tmp_path, f"import sys; sys.path.append({str(ROOT)!r})")
    assert said.startswith("This machine: ") and "\nNatively: " in said
    assert not (tmp_path / "calls").exists()


def test_where_the_package_is_missing_its_wheel_is_installed(first_cell, tmp_path):
    (tmp_path / "twell_lab-0.1-py3-none-any.whl").touch()
    said = run(first_cell, tmp_path, "import sys; sys.modules['twell_lab'] = None")
    assert "'twell_lab' is not a package" in said
    assert (tmp_path / "calls").read_text() == "install -q twell_lab-0.1-py3-none-any.whl plotly ipywidgets\n"
