"""Hostile values of every option are refused in one line with status 2, and output that cannot be written gives no
traceback."""

import errno
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.app import cli
from twell_lab.bench import forward
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training import loop

ROOT = Path(__file__).parents[3]
NUMBERS = ["0", "-1", "nan", "inf", "", "1e400", "9223372036854775808", "9" * 5000, "1.5", "x", "\0"]
PLACES = ["", "\0", "\ud800", "fifo", "loop", "text.txt/below", "x" * 300]  # neither to be read nor written
ROW = {"kind": "ffn_forward", "device": "NVIDIA Example", "path": "twell", "ms": 0.5, "tokens": 4}
BENCH = "bench --tokens 1 --d-model 8 --d-ff 8 --nnz 1 --seconds 0.01 --device cpu".split()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a text, a model, and things that are no files."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "text.txt").write_text("a small text that is long enough for a few windows\n" * 200)
    LanguageModel(ModelConfig(d_model=16, layers=1, heads=2, d_ff=32, context=16)).save(folder / "model")
    os.mkfifo(folder / "fifo")
    (folder / "empty").write_bytes(b"")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture
def tried(here, monkeypatch, capsys):
    """Runs the command in that folder, checks how it refuses if it should, and returns what it wrote to stderr."""
    monkeypatch.chdir(here)

    def run(*arguments: str, refused: bool = True) -> str:
        try:
            status = cli.main(list(arguments))
        except SystemExit as stopped:
            status = stopped.code
        shown = capsys.readouterr()
        assert status == (2 if refused else 0), (arguments, shown)
        lines = [
            line
            for line in shown.err.splitlines()
            if line.startswith("twell-lab") and not line.startswith("twell-lab: warning")
        ]
        assert (
            not refused
            or shown.out == ""
            and (
                "usage: " in shown.err
                and "accepted" in shown.err.replace("invalid", "accepted").replace("is not", "accepted")
                or len(lines) == 1
            )
        ), (arguments, shown)
        return shown.err

    return run


TRAIN = "train --text text.txt --steps 2 --batch 2 --context 16 --device cpu".split()
MODEL = "model --text text.txt --windows 2".split()


@pytest.mark.parametrize(
    "command, options, values",
    [
        (BENCH, "--tokens --d-model --d-ff", [*NUMBERS, "4611686018427387904"]),
        (BENCH, "--nnz", ["-1", "nan", "inf", "", "x", "1e400", "5"]),
        (BENCH, "--seconds", ["0", "-1", "nan", "inf", "", "x", "1e400"]),
        (BENCH, "--device", ["", "\0", "x\ny", "\ud800", "cuda:99999999999999999999", "meta", "cpu:-1"]),
        (BENCH, "--out", [*PLACES, "empty"]),
        (TRAIN, "--d-model --layers --heads --d-ff --batch --context", [*NUMBERS, "4611686018427387904"]),
        (TRAIN, "--steps --warmup --eval-windows", ["-1", "1" + "0" * 30, "9223372036854775808"]),
        (TRAIN, "--device", ["nonsense"]),
        (TRAIN, "--tokenizer", ["bpe:", "bpe:-1", "bpe:" + "9" * 5000, "", "fifo", "folder", "/dev/zero", "\0"]),
        (TRAIN, "--text", [*PLACES, "empty", "/dev/zero", "no\nsuch"]),
        (["profile", *MODEL], "--windows", NUMBERS),
        (["profile", *MODEL], "--text --against", ["", "\0", "fifo", "empty", "loop", "folder", "no\nsuch"]),
        (["profile", *MODEL, "--out", "empty.json"], "--html", ["empty.json", "./empty.json"]),
        (["plan", *MODEL, "--predict-only", "--device", "cpu"], "--windows --tokens", NUMBERS),
        (["thresholds", *MODEL], "--windows", NUMBERS),
        (["thresholds", *MODEL], "--out", ["", "\0", "fifo", "loop", "folder", "text.txt/below", "x" * 300]),
        (["tour"], "--render", [*PLACES, "empty", "folder"]),
        (["tour", "--quick", "--text", "text.txt", "--record-only"], "--out", PLACES),
        (["prepare", "text.txt", "--out", "prepared"], "--tokenizer", [*PLACES, "empty", "folder"]),
        (["record", "cpu"], "--out", PLACES),
        (["records"], "--folder", [*PLACES, "empty"]),
        (["compile", "cubins"], "--d-model", NUMBERS),
    ],
)
def test_hostile_values_are_refused_in_a_line(tried, monkeypatch, command, options, values):
    monkeypatch.setattr(loop, "train", loop.train if command == TRAIN else None)  # refused before it is called
    for option in options.split():
        for value in values:
            tried(*command, option, value)


@pytest.mark.parametrize("command", ["profile", "plan", "thresholds", "compile", "prepare"])
def test_places_that_hold_nothing(tried, command):
    for value in PLACES:
        tried(command, value, *(["--out", "prepared"] if command == "prepare" else []))


# ---- what is written to -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder with one record of a device of a name that some terminals cannot show."""
    record = records.Record(
        name="example",
        purpose="a test's own",
        rows=[{**ROW, "device": "žluť \x1b[31m"}],
        date="2026-01-02T03:04:05Z",
        commit=None,
        dirty=None,
        kernels={},
        machine={},
    )
    record.save(tmp_path / "žluť")
    return tmp_path / "žluť"


class Full(io.RawIOBase):
    """A disk without space."""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "arguments", [["records", "--folder"], ["records", "--json", "--folder"], ["--help"], ["doctor"]]
)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_one_line(monkeypatch, capsys, folder, arguments, buffered):
    arguments = [*arguments, str(folder)] if arguments[0] == "records" else arguments
    raw = io.BufferedWriter(Full()) if buffered else Full()
    stdout = io.TextIOWrapper(raw, encoding="utf-8", write_through=not buffered)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(arguments) == 2
    monkeypatch.setattr(Full, "write", lambda _, data: len(data))
    stdout.close()
    assert capsys.readouterr().err == "twell-lab: the output cannot be written: No space left on device\n"


def test_an_encoding_without_the_characters_shows_escapes(monkeypatch, capsys, folder):
    for encoding in ("ascii", "utf-8"):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        assert cli.main(["records", "--folder", str(folder)]) == 0
        shown = raw.getvalue().decode(encoding)
        assert (
            "\x1b" not in shown
            and "\\x1b[31m" in shown
            and ("žluť" if encoding == "utf-8" else "\\u017elu\\u0165") in shown
        )
    (folder / "na\udcffme").mkdir()
    assert cli.main(["tour", "--render", str(folder / "na\udcffme")]) == 2
    assert "na" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_streams_of_a_shell(folder):
    """The same in processes of their own, where Python itself may complain when it ends."""
    for shell, status, told in (
        ("| true", 0, ""),  # a reader who leaves
        (">/dev/full", 2, "No space left"),
    ):
        command = f"{sys.executable} -m twell_lab records --folder '{folder}' {shell}"
        ran = subprocess.run(
            ["sh", "-c", command],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        )
        assert (
            (ran.returncode, ran.stdout) == (status, "") and told in ran.stderr and ran.stderr.count("\n") == bool(told)
        ), ran.stderr


# ---- strict JSON ----------------------------------------------------------------------------------------------------------


def strict(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_number_that_json_does_not_have_is_refused_in_a_record(folder, capsys):
    (path,) = folder.glob("*.json")
    text = path.read_text()
    for number in ("NaN", "Infinity", "1e999"):
        path.write_text(text.replace('"tokens": 4', f'"tokens": {number}'))
        assert path.read_text() != text and cli.main(["records", "--json", "--folder", str(folder)]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and path.name in shown.err
    path.write_text(text)
    assert cli.main(["records", "example", "--json", "--folder", str(folder)]) == 0
    assert strict(capsys.readouterr().out)[0]["tokens"] == 4


def test_what_is_not_finite_is_null_in_json(monkeypatch, capsys):
    record = records.Record.new("ffn", "a test's own", [{**ROW, "nnz": 2.0}])
    record.rows[0] |= {"nnz": math.nan, "x_dense": math.inf}
    monkeypatch.setattr(forward, "ffn", lambda *_, **__: record)
    assert cli.main([*BENCH, "--json"]) == 0
    (row,) = strict(capsys.readouterr().out)
    assert row["nnz"] is None and row["x_dense"] is None and row["ms"] == 0.5
