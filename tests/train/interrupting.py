"""Ctrl-C as a terminal sends it, to a training in processes of its own; on CPUs and on GPUs."""

import os
import signal
import subprocess
import time
from pathlib import Path

from twell_lab import checkpoint


def assert_saves_once(started: subprocess.Popen, out: Path, steps: int) -> None:
    """SIGINT to all of a new session's processes once some rows are there, and torchrun sends them a second one: they agree
    where to stop, and one of them says how to go on."""
    deadline = time.monotonic() + 120
    while not ((out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").read_text().count("\n") > 3):
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=120)[1]
    state = checkpoint.load(out)
    assert state.history[-1]["step"] == state.step
    assert said.count(f"twell-lab: stopped after step {state.step} of {steps}") == 1 and f"with --resume {out}" in said
