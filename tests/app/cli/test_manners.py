"""How the command behaves around its work: the bar on a terminal, commands mistyped, busy machines, short texts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from twell_lab.app import cli

ROOT = Path(__file__).parents[3]
SMALL = "--batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a small text that is long enough for a few windows\n" * 200)
    return str(path)


def spawn(*arguments, **streams):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "twell_lab", *arguments], env=environment, **streams)


# ---- the bar of a training ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="has no such terminals")
def test_the_bar_fits_80_columns_and_shows_bits_per_byte(text):
    import termios

    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    steps = "100000"
    work = spawn(
        "train", "--text", text, "--steps", steps, "--l1", "0.0001234", "--log-every", "1", *SMALL, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    while shown.count(b"per byte") < 20:
        shown += os.read(ours, 4096)
    work.terminate()
    work.wait(timeout=300)
    os.close(ours)
    lines = re.split("[\r\n]", re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", shown.decode("utf-8", "ignore")))[:-1]
    bars = [line for line in lines if "per byte" in line and "l1 0.0001234" in line]
    assert bars and max(len(line) for line in lines if "|" in line) <= 80
    assert re.search(rf"\d/{steps} \|.+\| [\d:?]+ left, \d+\.\d{{3}} bits per byte, nnz \d+$", bars[-1].rstrip())


def test_without_a_terminal_nothing_but_the_result_is_printed(text):
    done = spawn("train", "--text", text, "--steps", "3", *SMALL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0 and b"bits per byte" in out and err == b""


# ---- commands ----------------------------------------------------------------------------------------------------------


def test_a_mistyped_command_is_told_which_there_are(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["trian", "--json"])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "'trian'" in told and "train" in told and "bench model" in told


@pytest.mark.parametrize(
    "load, set_before, command, policy",
    [
        (3.0, None, "train", "PASSIVE"),
        (3.0, None, "tour", "PASSIVE"),
        (3.0, "ACTIVE", "train", "ACTIVE"),
        (3.0, None, "bench", None),
        (0.5, None, "train", None),
        (0.5, None, "tour", "PASSIVE"),
    ],
)
def test_waiting_threads_sleep_where_a_busy_machine_trains(monkeypatch, load, set_before, command, policy):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(sys, "argv", ["twell-lab", command, "--help"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that the value of before comes back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    if set_before:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_before)
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ.get("OMP_WAIT_POLICY") == policy


# ---- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 17, 32, 33, 36])
def test_a_text_shorter_than_a_batch_is_one_line(tmp_path, capsys, size):
    (tmp_path / "text.txt").write_bytes(b"a\n" * (size // 2) + b"a" * (size % 2))
    assert cli.main(["train", "--text", str(tmp_path / "text.txt"), "--steps", "1", *SMALL]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "text.txt" in told and re.search("needs? at least", told)
