"""A walk runs every cell of every notebook, on copies, and names all that went wrong at once."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from twell_lab.app import walk
from twell_lab.core import InputError

CELLS = {
    "a-good.ipynb": ["x = 6", "from pathlib import Path; Path('left.txt').write_text('x'); print(x * 7)"],
    "b-raises.ipynb": ["y = 1", "1 / 0", "z = 2"],
    "c-complains.ipynb": ["import sys; print('careful', file=sys.stderr)"],
    "d-words.ipynb": [],
}


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(walk.core, "notebooks_dir", lambda: tmp_path)
    for name, sources in CELLS.items():
        cells = [new_markdown_cell("# words"), *map(new_code_cell, sources)]
        nbformat.write(new_notebook(cells=cells), tmp_path / name)
    return tmp_path


def test_a_walk_leaves_notebooks_and_folder_as_they_were(notebooks):
    before = {path: path.read_bytes() for path in notebooks.iterdir()}
    (row,) = walk.walk(["a-good.ipynb"])
    assert row.pop("ms") > 0
    assert row == {"path": "a-good.ipynb", "cells": 2, "code": walk.code_hash(notebooks / "a-good.ipynb")}
    assert {path: path.read_bytes() for path in notebooks.iterdir()} == before


def test_what_went_wrong_is_named_for_all_notebooks_at_once(notebooks):
    with pytest.raises(walk.Stumbled) as found:
        walk.walk()
    said = str(found.value)
    assert "2 of 3 notebooks stumbled" in said and "ZeroDivisionError" in said and "careful" in said
    assert "b-raises.ipynb: " in said and "c-complains.ipynb: a cell wrote to stderr" in said and "a-good" not in said


def test_several_at_once_are_the_same_rows_and_complaints_in_order(notebooks):
    with pytest.raises(walk.Stumbled) as found:
        walk.walk(at_once=3)
    said = str(found.value)
    assert said.startswith("2 of 3 notebooks stumbled") and said.index("b-raises.ipynb") < said.index(
        "c-complains.ipynb"
    )
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1")]), notebooks / "b-raises.ipynb")
    rows = walk.walk(["b-raises.ipynb", "a-good.ipynb"], at_once=2)
    assert [(row["path"], row["cells"]) for row in rows] == [("b-raises.ipynb", 1), ("a-good.ipynb", 2)]


def test_a_cell_that_takes_too_long_is_interrupted_and_named(notebooks, monkeypatch, capsys):
    cells = [new_code_cell("def waits():\n    import time; time.sleep(60)\nwaits()"), new_code_cell("print(1)")]
    nbformat.write(new_notebook(cells=cells), notebooks / "a-good.ipynb")
    monkeypatch.setattr(walk, "SECONDS", 3)
    with pytest.raises(walk.Stumbled) as found:
        walk.walk(["a-good.ipynb"])
    said = str(found.value)
    assert "KeyboardInterrupt" in said and "waits()" in said
    assert "a-good.ipynb: " in (told := capsys.readouterr().err) and "KeyboardInterrupt" in told


def test_other_names_are_refused_before_anything_runs(notebooks):
    with pytest.raises(InputError, match="no notebook with code named 'd-words.ipynb'; accepted: a-good.ipynb, b-"):
        walk.walk(["a-good.ipynb", "d-words.ipynb"])


def test_the_hash_changes_with_code_alone(notebooks):
    path = notebooks / "a-good.ipynb"
    first = walk.code_hash(path)
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source, notebook.cells[1].outputs = "# other words", [nbformat.v4.new_output("stream", text="x")]
    nbformat.write(notebook, path)
    assert walk.code_hash(path) == first
    notebook.cells[1].source = "x = 7"
    nbformat.write(notebook, path)
    assert walk.code_hash(path) != first
