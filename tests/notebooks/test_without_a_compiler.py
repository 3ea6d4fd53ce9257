"""The notebooks on kernels, run where there is no C++ compiler: every cell runs, and says what it leaves out."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest

from twell_lab.course.notebook import NEEDS

nbclient = pytest.importorskip("nbclient")
FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def run(name: str, folder: Path, monkeypatch) -> list:
    """The code cells of a notebook after a run without a compiler; a cell that fails raises."""
    monkeypatch.setenv("TWELL_LAB_CXX", str(folder / "no-compiler"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    shutil.copy(FOLDER / name, folder)
    notebook = nbformat.read(folder / name, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", ["08-first-kernels.ipynb"])  # the others: tests/nightly/test_without_a_compiler.py
def test_every_cell_runs_and_says_what_it_leaves_out(name, tmp_path, monkeypatch):
    code = run(name, tmp_path, monkeypatch)
    assert "for want of a C++ compiler" in printed(code[0])
    left_out = [cell for cell in code if NEEDS in cell.source.splitlines()]
    assert left_out == [cell for cell in code if printed(cell) == "Not run: this cell needs a C++ compiler.\n"]
    checks = [
        cell for cell in code if "exercises.check(" in cell.source and ".cu" in cell.source and cell not in left_out
    ]
    assert (left_out or checks) and all("apt install g++" in printed(cell) for cell in checks)
