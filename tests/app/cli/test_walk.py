"""A walk runs every cell of every notebook, on copies, and names all that went wrong at once."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from twell_lab.app import walk

GOOD = ["x = 6", "from pathlib import Path; Path('left.txt').write_text('x'); print(x * 7)"]
BAD = {"b-raises": ["y = 1", "1 / 0"], "c-complains": ["import sys; print('careful', file=sys.stderr)"]}


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Writes notebooks of these cells into the folder of the course, and returns it."""
    monkeypatch.setattr(walk.core, "notebooks_dir", lambda: tmp_path)

    def write(**notebooks):
        for name, sources in notebooks.items():
            cells = [new_markdown_cell("# words"), *map(new_code_cell, sources)]
            nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
        return tmp_path

    return write


def test_a_walk_leaves_notebooks_and_folder_as_they_were(put):
    folder = put(a=GOOD, words=[])
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (row,) = walk.walk()
    assert row.pop("ms") > 0 and row == {"path": "a.ipynb", "cells": 2}
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_went_wrong_is_named_for_all_notebooks_at_once_and_in_order(put, at_once):
    put(a=GOOD, **BAD)
    with pytest.raises(walk.Stumbled) as found:
        walk.walk(at_once)
    said = str(found.value)
    assert said.startswith("2 of 3 notebooks stumbled") and "ZeroDivisionError" in said and "a.ipynb" not in said
    assert said.index("b-raises.ipynb: ") < said.index("c-complains.ipynb: a cell wrote to stderr: careful")


def test_a_cell_that_takes_too_long_is_interrupted_and_named(put, monkeypatch, capsys):
    put(a=["def waits():\n    import time; time.sleep(60)\nwaits()", "print(1)"])
    monkeypatch.setattr(walk, "SECONDS", 3)
    with pytest.raises(walk.Stumbled) as found:
        walk.walk()
    assert "KeyboardInterrupt" in str(found.value) and "waits()" in str(found.value)
    assert "a.ipynb: " in (told := capsys.readouterr().err) and "KeyboardInterrupt" in told
