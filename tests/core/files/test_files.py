"""Whole files: what is no file, no JSON or cannot be written is refused by name, and what a killed write leaves is
removed by the next one."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twell_lab.core import files
from twell_lab.core.errors import RecordError

ROOT = Path(__file__).parents[3]


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- reading ----


@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff{}", "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"[1e999]", "too large"),
        (b'[{"x": [-1e400]}]', "too large"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' comes twice"),
        (b"9" * 5000, "digits"),
        (b"[" * 100_000, "recursion"),
        (b"[" * 300 + b"]" * 300, "100 lists"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "100 lists"),
    ],
)
def test_what_readers_would_take_differently_is_no_json(tmp_path, content, why):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(RecordError, match=f"plan '.*x.json' cannot be read as JSON.*{why}"):
        files.read_json(tmp_path / "x.json", "plan")


def test_json_is_read_as_it_is(tmp_path):
    value = {"a": [1, 2.5, None, True, "ž\ud800", {"b": [[]]}], "c": 10**30, "": -0.0}
    (tmp_path / "x.json").write_text(json.dumps(value))
    assert files.read_json(tmp_path / "x.json", "plan") == value


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "pipe", "pipe"),
        ("/dev/zero", "device"),
        (tmp_path, "folder"),
        (tmp_path / "gone", "No such file"),
        (tmp_path / ("x" * 300), "too long"),
        (f"{tmp_path}/a\0b", "null"),
        (f"{tmp_path}/\ud800", "surrogates"),
    ):
        with pytest.raises(RecordError, match=f"profile '.*cannot be read: .*{why}"):
            files.read_json(path, "profile")


def test_a_file_beyond_the_bound_is_not_read(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**40)  # takes no place on the disk
    with pytest.raises(RecordError, match="at most"):
        files.read_json(tmp_path / "large", "record")


def test_what_json_does_not_have_is_null():
    value = {"a": [math.nan, 1.5, (math.inf, {"b": -math.inf})], "c": 3}
    assert json.loads(files.strict_json(value)) == {"a": [None, 1.5, [None, {"b": None}]], "c": 3}


# ---- writing ----


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path):
    for content in ("first", b"second"):
        files.write_atomically(tmp_path / "new" / "x.json", content)
    assert (tmp_path / "new" / "x.json").read_bytes() == b"second" and left(tmp_path / "new") == {"x.json"}


def test_half_characters_are_written_as_escapes(tmp_path):
    files.write_atomically(tmp_path / "x", "na\udcffme ž")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "na\\udcffme ž"


_KILLED = """
import os, signal, sys
from twell_lab.core import files
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files.write_atomically(sys.argv[1], "half")
"""


def test_the_next_write_removes_what_a_killed_one_left(tmp_path):
    path = tmp_path / "tour.json"
    path.write_text("before")
    for _ in range(2):
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300
        )
        assert killed.returncode == -9 and path.read_text() == "before" and len(left(tmp_path)) == 2
    (tmp_path / ".tour.json.notes").write_text("somebody's own")
    files.write_atomically(path, "after")
    assert path.read_text() == "after" and left(tmp_path) == {"tour.json", ".tour.json.notes"}


def test_a_write_in_progress_is_left_alone(tmp_path):
    path = tmp_path / "x.json"
    with files._temporary(path) as other:
        files.write_atomically(path, "mine")
        assert left(tmp_path) == {"x.json", os.path.basename(other.name)}
    files.write_atomically(path, "again")
    assert left(tmp_path) == {"x.json"}


def test_only_files_are_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    for name, why in (
        ("pipe", "pipe"),
        ("folder", "folder"),
        ("circle", "circle"),
        ("x" * 300, "too long"),
        ("a\0b", "null"),
        ("\ud800", "surrogates"),
    ):
        before = left(tmp_path)
        with pytest.raises(RecordError, match=f"cannot write .*{why}"):
            files.write_atomically(tmp_path / name, "text")
        with pytest.raises(RecordError):
            files.check_target(tmp_path / name)
        assert left(tmp_path) == before
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "circle").is_symlink()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("real")
    files.write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "text"


def test_a_folder_without_the_room_that_is_needed_is_refused(tmp_path):
    resource = pytest.importorskip("resource")
    files.check_folder(tmp_path, free=2**20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(RecordError, match=f"{tmp_path}.*File too large; .*2 MiB free"):
            files.check_folder(tmp_path, free=2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not left(tmp_path)


def test_whether_something_can_be_written_is_said_before(tmp_path):
    files.check_target(tmp_path / "new" / "x.json")
    (tmp_path / "file").write_text("in the way")
    for check in (files.check_target, files.check_folder):
        with pytest.raises(RecordError, match="file"):
            check(tmp_path / "file" / "below")
    assert left(tmp_path) == {"new", "file"} and left(tmp_path / "new") == set()
