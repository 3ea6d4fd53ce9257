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


def test_every_cell_runs_and_says_what_it_leaves_out(tmp_path, monkeypatch):
    code = run("08-first-kernels.ipynb", tmp_path, monkeypatch)
    assert "for want of a C++ compiler" in printed(code[0]) and "apt install g++" in printed(code[1])
    assert printed(code[2]).startswith("the reference; right: True\n")
    for cell in code:
        left_out = NEEDS in cell.source.splitlines()
        assert (printed(cell) == "Not run: this cell needs a C++ compiler.\n") == left_out, cell.source[:80]
    assert "apt install g++" in printed(next(cell for cell in code if '"tile_counts"' in cell.source))


def test_the_capstone_leaves_out_what_runs_kernels(tmp_path, monkeypatch):
    code = run("12-capstone.ipynb", tmp_path, monkeypatch)
    assert "for want of a C++ compiler" in printed(code[0]) and "apt install g++" in printed(code[1])
    assert "apt install g++" in printed(next(cell for cell in code if 'check("down"' in cell.source))
    for cell in code:
        left_out = NEEDS in cell.source.splitlines()
        assert (printed(cell) == "Not run: this cell needs a C++ compiler.\n") == left_out, cell.source[:80]


def test_the_hopper_notebook_leaves_out_the_simulated_cell_alone(tmp_path, monkeypatch):
    code = run("09-hopper-kernels.ipynb", tmp_path, monkeypatch)
    assert "for want of a C++ compiler" in printed(code[0]) and "apt install g++" in printed(code[1])
    left_out = [cell for cell in code if NEEDS in cell.source.splitlines()]
    assert (
        left_out == [cell for cell in code if printed(cell) == "Not run: this cell needs a C++ compiler.\n"]
        and len(left_out) == 1
    )


def test_the_puzzles_are_drawn_and_each_check_says_what_to_install(tmp_path, monkeypatch):
    code = run("06-cuda-puzzles.ipynb", tmp_path, monkeypatch)
    checks = [cell for cell in code if "exercises.check(" in cell.source]
    assert len(checks) == 12 and all("apt install g++" in printed(cell) for cell in checks)
    for cell in code:
        left_out = NEEDS in cell.source.splitlines()
        assert (printed(cell) == "Not run: this cell needs a C++ compiler.\n") == left_out, cell.source[:80]
