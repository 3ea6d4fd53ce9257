"""Which exercises were solved is remembered beside the notebook, and no state of that file can break a check."""

import json

import pytest

from twell_lab.course import exercises, notebook, progress


def right(nnz, d_model):
    return 2 * nnz * d_model


@pytest.fixture
def in_a_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(notebook.STORING, raising=False)
    monkeypatch.setattr(notebook, "is_running", lambda: True)
    return tmp_path


def test_what_was_solved_is_known_afterwards(in_a_notebook, capsys):
    exercises.check("weights_read", lambda nnz, d_model: nnz)
    assert progress.solved() == set() and not progress.FILE.exists()
    exercises.check("weights_read", right)
    exercises.check("amdahl", lambda share, times: 1 / (1 - share + share / times))
    exercises.check("weights_read", lambda nnz, d_model: nnz)  # once solved stays solved
    assert capsys.readouterr().out.count(exercises.RIGHT) == 2
    assert progress.solved() == {"weights_read", "amdahl"}
    assert json.loads(progress.FILE.read_text()) == ["amdahl", "weights_read"]
    first, *others, last = progress.lines().splitlines()
    assert first == "00 Start here: 1 of 6" and len(others) == 1  # those begun alone
    assert last == f"Solved: 2 of {len(exercises.CHECKS)} exercises."


@pytest.mark.parametrize("text", ["", "{", "3", '{"weights_read": 1}', '["weights_read", 3', "[3, null]", b"\xff\xfe"])
def test_a_damaged_file_counts_as_empty_and_is_written_anew(text, in_a_notebook, capsys):
    progress.FILE.parent.mkdir()
    progress.FILE.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert progress.solved() == set()
    exercises.check("weights_read", right)
    assert capsys.readouterr().out.startswith(exercises.RIGHT) and progress.solved() == {"weights_read"}


@pytest.mark.parametrize("in_the_way", [progress.FILE, progress.FILE.parent])
def test_what_cannot_be_written_breaks_no_check(in_the_way, in_a_notebook, capsys):
    if in_the_way == progress.FILE:
        progress.FILE.mkdir(parents=True)
    else:
        in_the_way.write_text("a file where the folder should be")
    exercises.check("weights_read", right)
    assert capsys.readouterr().out.startswith(exercises.RIGHT) and progress.solved() == set()


def test_nothing_is_written_outside_of_a_notebook_or_shown_while_outputs_are_stored(in_a_notebook, monkeypatch, capsys):
    exercises.check("weights_read", right)
    monkeypatch.setenv(notebook.STORING, "1")
    assert progress.solved() == set()
    monkeypatch.delenv(notebook.STORING)
    progress.FILE.unlink()
    monkeypatch.setattr(notebook, "is_running", lambda: False)
    exercises.check("weights_read", right)
    assert not progress.FILE.exists()
