"""`twell-lab submit`: a record and a medal for a right kernel, status 1 for a wrong one, and one line for no kernel."""

import json

import pytest

from tests.course.capstone.notebook_kernel import changed, in_the_notebook
from twell_lab import records, simulator
from twell_lab.app import cli

needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "down.cu"
    made.write_text(in_the_notebook()[1])
    return made


@needs_a_compiler
def test_a_right_kernel_gets_a_record_that_can_be_read(file, tmp_path, capsys):
    assert cli.main(["submit", str(file), "--out", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    (saved,) = (tmp_path / "mine").glob("capstone-*.json")
    assert "submit: predicted gold: right on every input" in said and str(saved) in said
    record = records.load(saved)
    assert (
        record.notes["medal"] in ("predicted gold", "silver", "gold")
        and record.rows[0]["sectors_read"] > record.rows[0]["floor"]
    )
    assert cli.main(["submit", "down.cu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"]["source"] == file.read_text()
    assert len([*tmp_path.glob("capstone-*.json")]) == 1  # in the working folder


@needs_a_compiler
def test_a_wrong_kernel_gets_a_reason_and_no_record(file, tmp_path, capsys):
    file.write_text(changed(("int i = 1; i <= count", "int i = 0; i < count")))
    assert cli.main(["submit", str(file)]) == 1
    assert "submit: Not yet: with 600 columns" in capsys.readouterr().out
    assert cli.main(["submit", str(file), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["medal"] is None and "count" in said["said"] and not [*tmp_path.glob("*.json")]


@pytest.mark.parametrize("given", ["", "nothing.cu", ".", "/dev/zero", "x" * 300, "no\nsuch", "\0", "\ud800"])
def test_what_is_no_file_is_one_line(file, capsys, given):
    try:
        status = cli.main(["submit", given])
    except SystemExit as stopped:
        status = stopped.code
    shown = capsys.readouterr()
    assert status == 2 and shown.out == "" and "accepted" in shown.err


def test_without_a_compiler_one_line_says_what_to_install(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    assert cli.main(["submit", str(file)]) == 2
    assert "apt install g++" in capsys.readouterr().err
