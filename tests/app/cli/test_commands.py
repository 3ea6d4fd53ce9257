"""doctor, records, record, course, submit, and the texts that train reads."""

import json

import pytest

from tests.app.conftest import ROOT, joined
from tests.course.capstone.notebook_kernel import changed, in_the_notebook
from twell_lab import records, simulator
from twell_lab.app import recordings
from twell_lab.core import TextError
from twell_lab.training.text.source import load

ROW = {"kind": "ffn_forward", "device": "NVIDIA Example", "path": "twell", "ms": 0.5, "tokens": 4}
SMALL = "--steps 2 --batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()
needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


def test_doctor_speaks_to_people_and_to_programs(ask, value):
    findings = value("doctor")
    assert findings and all({*finding} == {"topic", "state", "text", "command"} for finding in findings)
    shown = joined(ask("doctor").out)
    assert all(finding["text"] in shown for finding in findings)


@pytest.fixture
def folder(tmp_path):
    """A folder with one synthetic record."""
    date, kernels = "2026-01-02T03:04:05Z", {"gone": "0" * 64}
    records.Record("example", "a test's own", [ROW], date, None, None, {}, kernels=kernels).save(tmp_path / "records")
    return tmp_path / "records"


def test_records_are_a_table_and_those_of_a_kind_flat_rows(ask, value, refused, folder):
    (what,) = value("records", "--folder", folder)
    assert what == {"kind": "example", "device": "NVIDIA Example", "date": "2026-01-02", "rows": 1, "state": "stale"}
    (row,) = value("records", "example", "--folder", folder)
    assert [*row] == list(records.FLAT_KEYS) and row["stale"] is True and row["ms"] == 0.5 and row["wall_ms"] is None
    assert "NVIDIA Example" in ask("records", "example", "--folder", folder).out
    assert "accepted: example" in refused("records", "other", "--folder", folder)
    shown = ask("records").out.splitlines()
    assert max(map(len, shown)) <= 80 and len(shown) == len(records.load_all()) + 2


def test_verify_answers_by_its_status(ask, value, folder):
    answer = value("records", "--verify", "--folder", folder, status=1)
    assert answer["holds"] is False and answer["kernels"] == records.kernel_hashes()
    entry = {"kernels": records.kernel_hashes(), "why": "a test", "date": "2026-01-02"}
    (folder / records.UNVERIFIED).write_text(json.dumps(entry))
    assert "a test" in ask("records", "--verify", "--folder", folder).out


def test_a_named_recording_is_made_and_kept(ask, value, refused, tmp_path, monkeypatch):
    made = lambda: records.Record.new("example", "a test's own", [ROW])  # noqa: E731
    monkeypatch.setattr(recordings, "RECORDINGS", {"example": made})
    assert ask("record").out.split() == value("record") == ["example"]
    assert "saved" in ask("record", "example", "--out", tmp_path).out
    assert value("record", "example", "--out", tmp_path)["name"] == "example"
    assert len(records.load_all(tmp_path)) == 2
    assert "accepted: example" in refused("record", "other")


def test_the_course_is_written_and_never_overwrites(ask, value, refused, tmp_path):
    folder = tmp_path / "a new" / "folder"
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert value("course", folder, "--no-open")["notebooks"] == names == sorted(p.name for p in folder.glob("*.ipynb"))
    (folder / names[3]).write_text("mine")
    (folder / names[0]).unlink()
    assert names[3] in joined(ask("course", folder, "--no-open").out)
    assert (folder / names[3]).read_text() == "mine" and (folder / names[0]).exists()
    assert "accepted: once pyproject.toml names one" in refused("course", folder, "--no-open", "--alone")


def test_grades_are_a_row_for_each_reader(ask, value, refused, tmp_path):
    ada, ben = tmp_path / "ada", tmp_path / "ben"
    (ada / "my-kernels").mkdir(parents=True)
    (ada / "my-kernels" / "solved.json").write_text('["weights_read", "one_token", "map", "of another course"]')
    ben.mkdir()
    every, first, second = value("grade", ada, ben)
    assert [row["reader"] for row in (every, first, second)] == ["exercises", "ada", "ben"]
    assert (first["00"], first["06"], first["all"], second["all"]) == (2, 1, 3, 0) and every["all"] > 90
    shown = ask("grade", ada, ben).out.splitlines()
    assert max(map(len, shown)) <= 80 and [line.split()[0] for line in shown[-3:]] == ["exercises", "ada", "ben"]
    assert "is no folder" in refused("grade", tmp_path / "nobody")


def test_the_course_is_opened_in_jupyterlab_whose_status_it_gives_back(ask, tmp_path, monkeypatch):
    (tmp_path / "jupyterlab.py").write_text("import sys; print(sys.argv[1:], flush=True); sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "opening JupyterLab" in ask("course", tmp_path / "mine", status=3).err and (tmp_path / "mine").is_dir()


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "down.cu").write_text(in_the_notebook()[1])
    return tmp_path / "down.cu"


@needs_a_compiler
def test_a_right_kernel_gets_a_record_that_can_be_read(ask, value, kernel, tmp_path):
    said = ask("submit", kernel, "--out", tmp_path / "mine").out
    (saved,) = (tmp_path / "mine").glob("capstone-*.json")
    assert "submit: predicted gold: right on every input" in said and str(saved) in said
    record = records.load(saved)
    assert record.notes["medal"] in ("predicted gold", "silver", "gold")
    assert record.rows[0]["sectors_read"] > record.rows[0]["floor"]
    assert value("submit", "down.cu")["notes"]["source"] == kernel.read_text()
    assert len([*tmp_path.glob("capstone-*.json")]) == 1  # in the working folder


@needs_a_compiler
def test_a_wrong_kernel_gets_a_reason_and_no_record(ask, value, kernel, tmp_path):
    kernel.write_text(changed(("int i = 1; i <= count", "int i = 0; i < count")))
    assert "submit: Not yet: with 600 columns" in ask("submit", kernel, status=1).out
    said = value("submit", kernel, status=1)
    assert said["medal"] is None and "count" in said["said"] and not [*tmp_path.glob("*.json")]


def test_without_a_compiler_one_line_says_what_to_install(refused, kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_LAB_CXX", str(tmp_path / "none"))
    assert "apt install g++" in refused("submit", kernel)


@pytest.mark.parametrize("name, wrong", [("a.jsonl", ["other", "number"]), ("a.csv", ["other", ""])])
def test_one_field_of_a_file_of_records_is_read_where_it_is_named(ask, refused, tmp_path, name, wrong):
    rows = [{"said": f"words, {i}", "number": 3} for i in range(200)]
    csv = ["said,number", *(f'"{row["said"]}",{row["number"]}' for row in rows)]
    lines = [json.dumps(row) for row in rows] if name == "a.jsonl" else csv
    path = tmp_path / name
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match=f"{name} is read as plain text"):
        ask("train", "--text", path, *SMALL)
    assert ask("train", "--text", f"{path}?field=said", *SMALL).err == ""
    assert load(f"{path}?field=said").tokens.numpy().tobytes().startswith(b"words, 0\n\nwords, 1\n\n")
    for field in wrong:
        assert f"has no text in {field!r}; accepted" in refused("train", "--text", f"{path}?field={field}", *SMALL)


@pytest.mark.parametrize("wrong", ["none.jsonl", "text.txt"])
def test_a_field_of_no_file_of_records_is_refused(tmp_path, wrong):
    with pytest.raises(TextError, match="none.jsonl' .*No such file|a .jsonl or .csv file alone"):
        load(f"{tmp_path / wrong}?field=said")


def test_what_is_no_text_is_one_line(refused, tmp_path):
    (tmp_path / "utf16.txt").write_text("words\n" * 500, encoding="utf-16")
    refused("train", "--text", tmp_path / "utf16.txt", *SMALL)
