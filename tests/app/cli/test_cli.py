"""The command line itself: help, exit statuses, one-line errors, hostile values, and output that cannot be written."""

import errno
import io
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import twell_lab as tl
from tests.app.conftest import ROOT, spawn
from twell_lab import records
from twell_lab.app import cli
from twell_lab.bench import forward
from twell_lab.models.tiny import LanguageModel, ModelConfig

ROW = {"kind": "ffn_forward", "device": "NVIDIA Example", "path": "twell", "ms": 0.5, "tokens": 4}
BENCH = "bench --tokens 1 --d-model 8 --d-ff 8 --nnz 1 --seconds 0.01 --device cpu".split()
SMALL = "--batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()


@pytest.mark.parametrize("command", [*cli.COMMANDS, None])
def test_every_command_has_help_that_fits_a_terminal(ask, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    out = ask(*(command or "").split(), "--help").out
    assert max(map(len, out.splitlines())) <= 80
    assert all(name in out for name in (["--json", f"twell-lab {command}"] if command else cli.COMMANDS))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_need_neither_torch_nor_plotly(argument):
    ran = spawn(argument, without="torch plotly cupy")
    assert ran.returncode == 0 and "twell-lab" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    "arguments", ["trian --json", "bench --tokens 0", "bench --tokens x", "bench --dtype int8", "train --steps many"]
)
def test_a_mistyped_command_line_is_one_line(refused, arguments):
    said = refused(*arguments.split())
    assert "'trian'" not in said or "bench model" in said  # which commands there are


def test_without_a_command_there_is_help(ask):
    assert "usage: twell-lab" in ask().out


def test_an_interruption_is_one_line_and_status_130(ask, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(forward, "ffn", stop)
    assert ask("bench", "--tokens", "1", "8", status=130).err == "\ntwell-lab: interrupted\n"


def test_what_does_not_fit_into_memory_is_one_line(refused):
    assert "memory" in refused(*BENCH, "--tokens", "99999999999", "--d-model", "64", "--d-ff", "64")


@pytest.mark.parametrize(
    "load, set_before, command, policy",
    [
        *((3.0, None, "train", "PASSIVE"), (3.0, "ACTIVE", "train", "ACTIVE"), (3.0, None, "bench", None)),
        *((0.5, None, "train", None), (0.5, None, "tour", "PASSIVE")),
    ],
)
def test_waiting_threads_sleep_where_a_busy_machine_trains(monkeypatch, load, set_before, command, policy):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["twell-lab", command, "--help"])
    monkeypatch.setenv("OMP_WAIT_POLICY", set_before or "")  # so that the value of before comes back
    if not set_before:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


def test_without_a_terminal_nothing_but_the_result_is_printed(text):
    done = spawn("train", "--text", text, "--steps", "3", *SMALL)
    assert done.returncode == 0 and "bits per byte" in done.stdout and done.stderr == ""


NUMBERS = ["0", "-1", "nan", "inf", "", "1e400", "9223372036854775808", "9" * 5000, "1.5", "x", "\0"]
FEWER = [number for number in NUMBERS if number != "9223372036854775808"]  # where only so many are taken as there are
PLACES = ["", "\0", "\ud800", "fifo", "loop", "text.txt/below", "x" * 300]  # neither to be read nor written
TRAIN = "train --text text.txt --steps 2 --batch 2 --context 16 --device cpu".split()
MODEL = "model --text text.txt --windows 2".split()


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


@pytest.mark.parametrize(
    "command, options, values",
    [
        (BENCH, "--tokens --d-model --d-ff", [*NUMBERS, "4611686018427387904"]),
        (BENCH, "--nnz --seconds", ["-1", "nan", "inf", "", "x", "1e400"]),
        (BENCH, "--device", ["", "\0", "x\ny", "\ud800", "cuda:99999999999999999999", "meta", "cpu:-1"]),
        (BENCH, "--out", [*PLACES, "empty"]),
        (TRAIN, "--d-model --layers --heads --d-ff --batch --context", [*NUMBERS, "4611686018427387904"]),
        (TRAIN, "--steps --warmup --eval-windows", ["-1", "1" + "0" * 30, "9223372036854775808"]),
        (TRAIN, "--device", ["nonsense"]),
        (TRAIN, "--tokenizer", ["bpe:", "bpe:-1", "bpe:" + "9" * 5000, "", "fifo", "folder", "/dev/zero", "\0"]),
        (TRAIN, "--text", [*PLACES, "empty", "/dev/zero", "no\nsuch"]),
        (["profile", *MODEL], "--windows", FEWER),
        (["profile", *MODEL], "--text --against", ["", "\0", "fifo", "empty", "loop", "folder", "no\nsuch"]),
        (["sparsify", *MODEL, "--predict-only", "--device", "cpu"], "--windows", FEWER),
        (["sparsify", *MODEL, "--predict-only", "--device", "cpu"], "--tokens", NUMBERS),
        (["profile", *MODEL], "--out", ["", "\0", "fifo", "folder", "text.txt/below", "x" * 300]),
        (["tour", "--quick", "--text", "text.txt"], "--out", PLACES),
        (["prepare", "text.txt", "--out", "prepared"], "--tokenizer", [*PLACES, "empty", "folder"]),
        (["record", "cpu"], "--out", PLACES),
        (["records"], "--folder", [*PLACES, "empty"]),
        (["sample", "model"], "--temperature --device", ["nan", "nonsense"]),
        (["sample", "model"], "--prompt --top-k", ["", "0"]),
        (["sample", "model"], "--tokens", ["3000000000"]),
        (["submit"], "", ["", "nothing.cu", ".", "/dev/zero", "x" * 300, "no\nsuch", "\0", "\ud800"]),
        *((["profile"], "", PLACES), (["sparsify"], "", PLACES)),
        (["prepare", "--out", "prepared"], "", PLACES),
    ],
)
def test_hostile_values_are_refused_in_a_line(refused, here, monkeypatch, command, options, values):
    monkeypatch.chdir(here)
    monkeypatch.setattr(tl, "train", tl.train if command == TRAIN else None)  # refused before it is called
    for option in options.split() or [None]:
        for wrong in values:
            if not (option == "--prompt" and wrong):
                refused(*command, *([option] if option else []), wrong)


@pytest.mark.parametrize("size", [1, 2, 16, 17, 32, 33, 36])
def test_a_text_shorter_than_a_batch_is_one_line(refused, text, size):
    text.write_bytes(b"a\n" * (size // 2) + b"a" * (size % 2))
    said = refused("train", "--text", text, "--steps", "1", *SMALL)
    assert "text.txt" in said and re.search("needs? at least", said)


@pytest.fixture
def folder(tmp_path):
    """A folder with one record of a device of a name that some terminals cannot show."""
    rows = [{**ROW, "device": "žluť \x1b[31m"}]
    record = records.Record("example", "a test's own", rows, "2026-01-02T03:04:05Z", None, None, {})
    record.save(tmp_path / "žluť")
    return tmp_path / "žluť"


class Full(io.RawIOBase):
    """A disk without space."""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("arguments", ["records --folder", "records --json --folder", "--help", "doctor"])
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_one_line(monkeypatch, capsys, folder, arguments, buffered):
    arguments = [*arguments.split(), *[str(folder)] * arguments.startswith("records")]
    raw = io.BufferedWriter(Full()) if buffered else Full()
    stdout = io.TextIOWrapper(raw, encoding="utf-8", write_through=not buffered)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(arguments) == 2
    monkeypatch.setattr(Full, "write", lambda _, data: len(data))
    stdout.close()
    assert capsys.readouterr().err == "twell-lab: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("encoding, name", [("ascii", "\\u017elu\\u0165"), ("utf-8", "žluť")])
def test_an_encoding_without_the_characters_shows_escapes(monkeypatch, folder, encoding, name):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert cli.main(["records", "--folder", str(folder)]) == 0
    shown = raw.getvalue().decode(encoding)
    assert name in shown and "\\x1b[31m" in shown and "\x1b" not in shown


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
@pytest.mark.parametrize("shell, status, said", [("| true", 0, ""), (">/dev/full", 2, "No space left")])
def test_streams_of_a_shell(folder, shell, status, said):
    """The same in processes of their own, where Python itself may complain when it ends."""
    command = f"{sys.executable} -m twell_lab records --folder '{folder}' {shell}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300, env=environment)
    assert (ran.returncode, ran.stdout) == (status, "") and said in ran.stderr, ran.stderr
    assert ran.stderr.count("\n") == bool(said)


def test_what_is_not_finite_is_null_in_json(monkeypatch, value):
    record = records.Record.new("ffn", "a test's own", [{**ROW, "nnz": 2.0}])
    record.rows[0] |= {"nnz": math.nan, "x_dense": math.inf}
    monkeypatch.setattr(forward, "ffn", lambda *_, **__: record)
    (row,) = value(*BENCH)
    assert row["nnz"] is None and row["x_dense"] is None and row["ms"] == 0.5
