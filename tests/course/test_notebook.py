"""The first cell of a notebook that runs kernels, with a C++ compiler and without."""

from types import SimpleNamespace

import pytest

from twell_lab import simulator
from twell_lab.course import notebook


def shell(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(input_transformers_cleanup=[])
    monkeypatch.setattr(notebook, "_shell", lambda: found)
    return found


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_with_a_compiler_every_cell_runs(monkeypatch, capsys):
    found = shell(monkeypatch)
    found.input_transformers_cleanup.append(notebook._left_out)  # from before the compiler was installed
    assert notebook.ready() and not found.input_transformers_cleanup
    assert not capsys.readouterr().out  # `setup` has said what runs in the simulator


def test_without_a_compiler_marked_cells_are_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    found = shell(monkeypatch)
    assert not notebook.ready() and not notebook.ready()
    assert "apt install g++" in capsys.readouterr().out
    (leave_out,) = found.input_transformers_cleanup
    assert leave_out([f"{notebook.NEEDS}\n", "launch()\n"]) == ["print('Not run: this cell needs a C++ compiler.')\n"]
    assert leave_out(["1 + 1\n"]) == ["1 + 1\n"]
    monkeypatch.setattr(notebook, "_shell", lambda: None)  # in a plain Python process
    assert not notebook.ready()


def test_without_ipywidgets_cells_that_move_a_widget_are_left_out(monkeypatch, capsys):
    found, there = shell(monkeypatch), notebook.importlib.util.find_spec
    missing = lambda name: None if name == "ipywidgets" else there(name)  # noqa: E731
    monkeypatch.setattr(notebook.importlib.util, "find_spec", missing)
    notebook.setup(), notebook.setup()
    leave_out, _ = found.input_transformers_cleanup  # and the one for guesses in dots
    move = "explorer.slider.value = 1\n"
    for cell in ([f"{notebook.MOVES}\n", move], [f"{notebook.MOVES}, as a drag would\n", move]):
        assert leave_out(cell) == ["print('Not run: this cell moves the widget, which needs ipywidgets.')\n"]
    assert leave_out(["1 + 1\n"]) == ["1 + 1\n"]
    monkeypatch.undo()
    found = shell(monkeypatch)
    notebook.setup()
    assert leave_out not in found.input_transformers_cleanup
    capsys.readouterr()
