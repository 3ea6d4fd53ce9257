"""Recordings in sections: what a limit of time leaves out, what an error of torch does, and the command's options."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from twell_lab import records
from twell_lab.app import cli, recordings
from twell_lab.core import DeviceError, RecordError, StackError
from twell_lab.ops import clock as clocks


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to: tick(seconds)."""
    now = [0.0]
    monkeypatch.setattr(recordings.time, "perf_counter", lambda: now[0])

    def tick(seconds, rows=1):
        now[0] += seconds
        return [{"row": each} for each in range(rows)]

    return tick


def test_a_step_that_would_take_too_long_is_left_out_and_named(clock, capsys):
    sections = {"one": [lambda: clock(4.0)] * 4, "two": [lambda: clock(1.5)] * 2, "three": [lambda: clock(1.0)]}
    rows, notes = recordings.run(sections, 9.4)
    # Of "one" two steps fit; two sections have their first step each, as nothing tells how long it takes.
    assert len(rows) == 3 and notes["seconds"] == {"one": 8.0, "two": 1.5, "three": 0.0}
    assert notes["left_out"] == {
        "one": "2 of 4 steps: too little is left of 9.4 s",
        "two": "1 of 2 steps: too little is left of 9.4 s",
        "three": "1 of 1 steps: too little is left of 9.4 s",
    }
    assert "one: left out 2 of 4 steps" in capsys.readouterr().err


def test_an_error_of_torch_ends_its_section_and_one_of_ours_ends_all(clock):
    def fail(error):
        raise error

    out_of_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    sections = {"one": [lambda: clock(1.0), lambda: fail(out_of_memory), lambda: clock(1.0)], "two": [lambda: clock(1)]}
    rows, notes = recordings.run(sections, 100)
    assert len(rows) == 2
    assert notes["left_out"] == {"one": f"2 of 3 steps: OutOfMemoryError: {out_of_memory}"}
    for error in (clocks.WrongResult("row 3 is off"), DeviceError("gone"), ValueError("a mistake")):
        with pytest.raises(type(error)):
            recordings.run({"one": [lambda error=error: fail(error)]}, 100)


def test_an_interruption_leaves_out_the_rest_and_loses_nothing(clock):
    def interrupt():
        raise KeyboardInterrupt

    sections = {"one": [lambda: clock(1.0), interrupt, lambda: clock(1.0)], "two": [lambda: clock(1.0)]}
    rows, notes = recordings.run(sections, 100)
    assert len(rows) == 1
    assert notes["left_out"] == {"one": "2 of 3 steps: interrupted", "two": "1 of 1 steps: interrupted"}
    with pytest.raises(KeyboardInterrupt):
        recordings.run({"one": [interrupt]}, 100)


ROW = {"kind": "x", "device": "a machine", "dtype": "float32", "path": "dense", "ms": 1.0, "spread": 0.0}


@pytest.fixture
def record_slow(tmp_path):
    """`twell-lab record slow` in a process of its own: it runs this recording's steps, lines of Python each of which is
    the body of a function that returns rows."""

    def record(*steps):
        functions = "".join(f"def step_{number}():\n    {step}\n" for number, step in enumerate(steps))
        code = (
            "import ctypes, os, signal, sys\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & starts processes that ignore it
            f"sys.argv = ['twell-lab', 'record', 'slow', '--out', {str(tmp_path)!r}]\n"
            "from twell_lab.app import cli, recordings\n"
            f"ROW = {ROW!r}\n{functions}"
            f"STEPS = [{', '.join(f'step_{number}' for number in range(len(steps)))}]\n"
            "sections = lambda refused: {'one': STEPS, 'two': [list]}\n"
            "recordings.RECORDINGS['slow'] = recordings.Recording('slow', 'a test', sections, 100, False)\n"
            "sys.exit(cli.main())\n"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    return record


def test_a_recording_that_is_told_to_stop_is_saved(tmp_path, record_slow):
    done = record_slow("return [ROW]", "os.kill(os.getpid(), signal.SIGTERM); return []")
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.iterdir()
    assert saved.match("slow-*.json")
    notes = json.loads(saved.read_text())["notes"]
    assert notes["left_out"] == {"one": "1 of 2 steps: interrupted", "two": "1 of 1 steps: interrupted"}
    assert "unfinished" not in notes


def test_a_recording_that_is_killed_leaves_what_it_has(tmp_path, record_slow, capsys):
    killed = record_slow("return [ROW]", "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    made = records.load(left)
    assert made.rows == [ROW] and "cut off" in made.notes["unfinished"]
    assert made.notes["left_out"] == {"one": "1 of 2 steps: cut off", "two": "1 of 1 steps: cut off"}
    assert cli.main(["records", "--folder", str(tmp_path)]) == 0
    assert "current, cut off" in capsys.readouterr().out


def test_a_recording_that_fails_says_where_the_rows_before_are(tmp_path, record_slow):
    """A pipe to another process that broke, too, is a failure, and not the end of who reads the output."""
    done = record_slow("return [ROW]", "raise BrokenPipeError(32, 'a worker of a compiler')")
    assert done.returncode not in (0, 130) and "a worker of a compiler" in done.stderr
    (left,) = tmp_path.iterdir()
    assert f"record: what it has so far is in {left}" in done.stderr and records.load(left).rows == [ROW]


@pytest.fixture
def slow(clock, monkeypatch):
    """Puts a recording of these steps among the others."""

    def put(*steps):
        made = recordings.Recording("slow", "a test", lambda refused: {"one": [*steps]}, gpu=False)
        monkeypatch.setitem(recordings.RECORDINGS, "slow", made)

    return put


def test_what_cannot_be_kept_before_the_end_costs_nothing(clock, slow, tmp_path, monkeypatch, capsys):
    def full(path, content):
        if "unfinished" in content:
            raise RecordError("the disk is full")
        path.write_text(content)

    monkeypatch.setattr(recordings.core, "write_atomically", full)
    slow(lambda: clock(1.0), lambda: clock(1.0))
    record, path = recordings.make("slow", tmp_path)
    assert len(record.rows) == 2 and records.load(path) == record
    assert capsys.readouterr().err.count("not kept: the disk is full") == 2


def test_a_recording_without_a_row_is_an_error(clock, slow, tmp_path):
    slow(lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(StackError, match="nothing was measured.*out of memory"):
        recordings.make("slow", tmp_path)


def test_each_recording_names_its_options(monkeypatch, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs an NVIDIA GPU" in refused("record", "training")
    assert "accepted: with arena" in refused("record", "training", "--rivals", ".")


def test_every_recording_has_steps(monkeypatch):
    """Those of a size are made by tests/bench/test_bench_sizes.py; listing them makes nothing."""
    monkeypatch.setattr(clocks, "dtype_for", lambda device: torch.bfloat16)
    for name, recording in recordings.RECORDINGS.items():
        if isinstance(recording, recordings.Recording):
            sections = recording.sections({})
            assert sections and all(map(callable, sum(sections.values(), []))), name
        else:
            assert callable(recording), name
