"""Ctrl-C as a terminal sends it, to a training in processes of its own; on CPUs and on GPUs."""

import os
import signal
import subprocess
import time
from pathlib import Path

from twell_lab.training import checkpoint


def assert_saves_once(started: subprocess.Popen, out: Path, steps: int, number: int = signal.SIGINT) -> None:
    """Send a signal once there are some rows, and check that the processes agree where to stop, save once, and that one
    of them says how to go on. torchrun sends each process a signal of its own, too. SIGINT is sent to all processes of
    a new session, as a terminal does, SIGTERM to torchrun alone."""
    wait_for_rows(started, out)
    (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
    said = started.communicate(timeout=600)[1]
    state = checkpoint.load(out)
    assert state["history"][-1]["step"] == state["step"]
    assert said.count(f"twell-lab: stopped after step {state['step']} of {steps}") == 1
    assert f"with --resume {out}" in said


def wait_for_rows(started: subprocess.Popen, out: Path, rows: int = 4) -> None:
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 600
    while not (metrics.is_file() and metrics.read_text().count("\n") >= rows):
        assert started.poll() is None and time.monotonic() < deadline, started.stderr.read()
        time.sleep(0.02)
