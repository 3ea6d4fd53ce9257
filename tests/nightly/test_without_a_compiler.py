"""The other notebooks on kernels where there is no C++ compiler."""

import pytest

from tests.notebooks import test_without_a_compiler as ordinary

NAMES = "06-cuda-puzzles 09-hopper-kernels 11-train-with-the-kernels 12-capstone 13-your-speedup".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_runs_and_says_what_it_leaves_out(name, tmp_path, monkeypatch):
    ordinary.test_every_cell_runs_and_says_what_it_leaves_out(f"{name}.ipynb", tmp_path, monkeypatch)
