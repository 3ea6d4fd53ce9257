"""The notebook on kernels, run where there is no C++ compiler: every cell runs, and says what it leaves out."""

import os
import shutil
from pathlib import Path

import nbformat
import pytest

from twell_lab.course import kernels

nbclient = pytest.importorskip("nbclient")
FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_every_cell_runs_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    shutil.copy(FOLDER / "04-first-kernels.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / "04-first-kernels.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "apt install g++" in printed(code[0])
    assert "packed by the reference\nthe same words as the reference: True" in printed(code[1])
    for cell in code:
        left_out = kernels.NEEDS in cell.source.splitlines()
        assert (printed(cell) == "Not run: this cell needs a C++ compiler.\n") == left_out, cell.source[:80]
    assert "apt install g++" in printed(next(cell for cell in code if '"tile_counts"' in cell.source))
