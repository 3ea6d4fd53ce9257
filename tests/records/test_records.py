"""Records: what they hold, how they are read back, and what is refused."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab import core, records
from twell_lab.core import RecordError

ROW = {
    **{"kind": "ffn_forward", "device": "NVIDIA Example", "dtype": "bfloat16", "workload": "lognormal"},
    **{"path": "twell"},
    **{"tokens": 4, "d_model": 8, "d_ff": 16, "nnz": 2.5, "ms": 0.5, "dense_ms": 1.0, "x_dense": 2.0, "spread": 0.01},
    **{"samples": [0.5, 0.51], "peak_bytes": 1024},
}


def make(**changes) -> records.Record:
    origin = {"date": "2026-01-02T03:04:05Z", "commit": "c" * 40, "dirty": False, "kernels": {}}
    values = {"name": "example", "purpose": "a test's own", "rows": [dict(ROW)], "machine": {"os": "Linux"}}
    return records.Record(**{**values, **origin, "notes": {"why": "none"}, **changes})


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text() | st.floats(-1e308, 1e308)
plain = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
free_rows = st.dictionaries(st.text().filter(lambda key: key != "kind"), plain, max_size=4)


@settings(max_examples=40, deadline=None)
@given(notes=st.dictionaries(st.text(), plain, max_size=4), rows=st.lists(free_rows, max_size=3))
def test_what_is_saved_is_what_is_loaded(tmp_path_factory, notes, rows):
    record = make(notes=notes, rows=[*rows, ROW])
    path = record.save(tmp_path_factory.mktemp("records"))
    assert records.load(path) == record


def test_records_are_listed_oldest_first_and_none_is_overwritten(tmp_path):
    paths = [make(date=f"2026-0{month}-01T00:00:00Z").save(tmp_path) for month in (2, 1, 1)]
    (tmp_path / records.UNVERIFIED).write_text("{}")
    assert len(set(paths)) == 3
    assert [record.date[:7] for record in records.load_all(tmp_path)] == ["2026-01", "2026-01", "2026-02"]
    assert records.load_all(tmp_path / "missing") == []


WRONG = [
    *(("schema", value) for value in (3, True)),
    *(("name", value) for value in ("", "Two Words", "../up")),
    *(("date", value) for value in ("yesterday", None)),
    *(("kernels", None), ("machine", None), ("notes", []), ("rows", {}), ("rows", [1]), ("purpose", 3)),
]
WRONG_ROW = [
    *(("ms", value) for value in (0, None, True, "fast", 10**400, float("nan"))),
    *(("device", ""), ("path", None), ("kind", 3), ("tokens", "4"), ("d_ff", [8]), ("nnz", float("inf"))),
    *(("x_dense", 2**63), ("spread", True), ("dtype", 16)),
]


@pytest.mark.parametrize("field, value", WRONG)
def test_a_wrong_field_is_named(tmp_path, field, value):
    with pytest.raises(RecordError, match=field):
        make(**{field: value})
    path = make().save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(RecordError, match=f"{path.name}.*{field}"):
        records.load(path)


@pytest.mark.parametrize("key, value", WRONG_ROW)
def test_a_wrong_row_is_named(key, value):
    with pytest.raises(RecordError, match=rf"rows\[1\].{key}"):
        make(rows=[ROW, {**ROW, key: value}])


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "whole, and a colour", "without kernels"])
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    whole = json.loads(make().to_json())
    changed = {
        "whole, and a colour": {**whole, "colour": 1},
        "without kernels": {key: whole[key] for key in whole if key != "kernels"},
    }
    (tmp_path / "x.json").write_text(json.dumps(changed[text]) if text in changed else text)
    with pytest.raises(RecordError, match="x.json"):
        records.load_all(tmp_path)


def test_what_json_has_no_form_for_is_refused(tmp_path):
    for value in (float("nan"), {1, 2}):
        with pytest.raises(RecordError, match="finite numbers"):
            make(notes={"x": value}).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_counts_are_evidence(tmp_path):
    good = {"passed": 3, "failed": 0}
    wrong = [{"passed": "many", "failed": 0}, {"passed": 3}, {"passed": 3, "failed": 1}, {"passed": 0, "failed": 0}]
    for number, tests in enumerate([good, *wrong, [3, 0], None]):
        folder = tmp_path / str(number)
        make(kernels=records.kernel_hashes(), notes={"gpu_tests": tests}).save(folder)
        if tests == good:
            assert "were tested" in records.verify(folder)
        else:
            with pytest.raises(RecordError, match="is no evidence"):
                records.verify(folder)


def test_flat_rows_have_exactly_the_listed_keys():
    short = {"kind": "decode", "device": "NVIDIA Example", "path": "dense eager", "ms": 1.0}
    flat = records.flat_rows([make(rows=[ROW, short, {"test": "not a measurement"}])])
    assert [tuple(row) for row in flat] == [records.FLAT_KEYS] * 2
    assert (flat[0]["ms"], flat[0]["record"], flat[0]["date"]) == (0.5, "example", "2026-01-02T03:04:05Z")
    assert flat[1]["tokens"] is None and flat[1]["path"] == "dense eager"


def test_only_gpu_rows_of_other_kernels_are_stale():
    rows = [ROW, {**ROW, "device": "cpu"}]
    for kernels, stale in (({"smxx_pack": "0" * 64}, True), (records.kernel_hashes(), False)):
        assert [row["stale"] for row in records.flat_rows([make(rows=rows, kernels=kernels)])] == [stale, False]


def test_the_commit_can_be_told_to_a_tree_without_git(monkeypatch):
    monkeypatch.setenv("TWELL_LAB_COMMIT", "a" * 40 + "-dirty\n")
    assert records.source_commit() == ("a" * 40, True)
    monkeypatch.setenv("TWELL_LAB_COMMIT", "b" * 40)
    assert records.source_commit() == ("b" * 40, False)


def test_the_commit_of_a_surrounding_project_is_not_ours(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_LAB_COMMIT", raising=False)
    monkeypatch.setattr(records, "__file__", str(tmp_path / "venv" / "twell_lab" / "records.py"))
    (tmp_path / "venv" / "twell_lab").mkdir(parents=True)
    try:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git here")
    assert records.source_commit() == (None, None)


def test_datasheet_figures_are_sourced_and_dated():
    sheet = json.loads((core.data_dir() / "gpus.json").read_text())
    for gpu in sheet["gpus"]:
        assert " ".join(sorted(gpu)) == (
            "bandwidth_gb_s capability driver_names l2_mb memory_gb name source source_date tensor_dtype tensor_tflops"
        ), gpu["name"]
        assert gpu["source"] and re.fullmatch(r"20\d\d", gpu["source_date"]), gpu["name"]
        assert gpu["bandwidth_gb_s"] > 0 and gpu["tensor_tflops"] > 0 and gpu["memory_gb"] > 0, gpu["name"]
        assert gpu["tensor_dtype"] == ("float16" if gpu["capability"] == "7.5" else "bfloat16"), gpu["name"]
    names = [name for gpu in sheet["gpus"] for name in gpu["driver_names"]]
    assert len(names) == len(set(names))


@pytest.fixture
def hash_of(tmp_path, monkeypatch):
    """Returns the hash of smxx_pack after texts of its source, a header or its file of ops/ were replaced."""
    copied, operations = tmp_path / "kernels", tmp_path / "ops"
    shutil.copytree(core.kernels_dir(), copied)
    shutil.copytree(Path(records.__file__).with_name("ops"), operations)
    monkeypatch.setattr(core, "kernels_dir", lambda: copied)
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))

    def changed(file="smxx_pack.cu", old="", new="") -> str:
        path = (operations if file == "pack.py" else copied) / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        records.kernel_hashes.cache_clear()
        return records.kernel_hashes()["smxx_pack"]

    yield changed
    monkeypatch.undo()
    records.kernel_hashes.cache_clear()


@pytest.mark.parametrize(
    ("file", "old", "new", "changes"),
    [
        ("smxx_pack.cu", "", "// a comment\n/* another\n */\n\n", False),
        ("smxx_pack.cu", "", "constexpr int MORE = 1;\n", True),
        ("twell.cuh", "", "// a comment\n", False),
        ("twell.cuh", "", "constexpr int MORE = 1;\n", True),
        ("smxx_down.cu", "", "constexpr int MORE = 1;\n", False),  # another kernel
        ("pack.py", "", "# a comment\n", False),
        ("pack.py", "TOLERANCE = ", "TOLERANCE =   ", False),
        ("pack.py", '"""', '"""Other words. ', False),  # the docstring
        ("pack.py", "TOLERANCE = ", "TOLERANCE = 2 * ", True),
    ],
)
def test_a_hash_follows_code_and_no_comments(hash_of, file, old, new, changes):
    assert (hash_of() != hash_of(file, old, new)) == changes


def test_a_hash_is_the_same_in_every_version_of_python(hash_of):
    """Each version has other fields, writes empty lists or not, and cuts f-strings otherwise."""
    expected = (
        "Module(body=[Expr(value=JoinedStr(values=[FormattedValue(value=Name(id='a', ctx=Load()), conversion=-1)]))])"
    )
    cut = ast.parse('f"{a}"')
    cut.body[0].value.values.append(ast.Constant(""))
    cut.type_params = []
    for tree in (ast.parse('"""What."""\nf"{a}"'), cut):
        assert records._without_docstrings(tree) == expected


def test_a_kernel_that_no_operation_declares_is_named(hash_of):
    (core.kernels_dir() / "smxx_new.cu").write_text("")
    with pytest.raises(RecordError, match="smxx_new.cu"):
        hash_of()


def test_verify_wants_a_gpu_test_or_a_reason_for_every_kernel(tmp_path):
    now = records.kernel_hashes()
    name = sorted(now)[0]
    tested = {kernel: value for kernel, value in now.items() if kernel != name}
    make(kernels=tested, notes={"gpu_tests": {"passed": 3, "failed": 0}}).save(tmp_path)
    unverified = tmp_path / records.UNVERIFIED
    for kernels, why in [(None, ""), ({name: now[name]}, " "), ({name: "0" * 64}, "no GPU here"), ({}, "no GPU here")]:
        if kernels is not None:
            unverified.write_text(json.dumps({"kernels": kernels, "why": why}))
        with pytest.raises(RecordError, match=name):
            records.verify(tmp_path)
    unverified.write_text(json.dumps({"kernels": {name: now[name]}, "why": "no GPU here"}))
    assert f"1 of {len(now)} kernels" in (said := records.verify(tmp_path)) and said.endswith("no GPU here")


def test_pages_take_the_newest_record_of_their_gpu():
    gpu, other = [{**ROW, "device": "NVIDIA H100"}], [{**ROW, "device": "NVIDIA L4"}]
    first, second, third = make(rows=gpu), make(rows=gpu, purpose="later"), make(rows=other)
    assert records.newest([first, second, third], "example") is second
    assert records.newest([third], "example") is third and records.newest([first], "another") is None


def test_a_table_shows_what_a_terminal_would_obey():
    shown = records.table([{"a": "plain ž", "b": "two\nlines\x1b[31m \ud800"}], {"a": "a", "b": "b"})
    assert shown.count("\n") == 1 and "plain ž" in shown and "two\\nlines\\x1b[31m \\ud800" in shown
