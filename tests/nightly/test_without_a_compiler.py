"""The other notebooks on kernels where there is no C++ compiler."""

import pytest

from tests.notebooks import test_without_a_compiler as ordinary


@pytest.mark.parametrize(
    "name",
    [
        "06-cuda-puzzles.ipynb",
        "09-hopper-kernels.ipynb",
        "11-train-with-the-kernels.ipynb",
        "12-capstone.ipynb",
        "13-your-speedup.ipynb",
    ],
)
def test_every_cell_runs_and_says_what_it_leaves_out(name, tmp_path, monkeypatch):
    ordinary.test_every_cell_runs_and_says_what_it_leaves_out(name, tmp_path, monkeypatch)
