"""Several processes of a training, of which torchrun is told to end, or of which one is killed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.training.train.interrupting import assert_saves_once, wait_for_rows
from tests.training.train.small_runs import ENVIRONMENT, SMALL
from tests.training.train.test_distributed import TORCHRUN
from twell_lab.training import checkpoint


def started(out, *program):
    """Two processes that train for a long time."""
    command = [*TORCHRUN, *(program or ("-m", "twell_lab")), "train", "--steps=100000", *SMALL, "--out", out]
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, **pipes, start_new_session=True, env=ENVIRONMENT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_that_are_told_to_end_agree_where_to_stop_and_save(tmp_path, number):
    with started(out := tmp_path / "out") as stopped:
        assert_saves_once(stopped, out, 100_000, number)
    assert not list(out.glob(".*"))  # nobody has it any more


def test_where_one_is_killed_the_others_end_and_what_was_saved_is_there(tmp_path):
    """torchrun tells the others to stop, and without the killed one they can't agree to."""
    often = "from twell_lab.training import loop\nloop.SAVE_EVERY = 0\nfrom twell_lab.app import cli\ncli.main()\n"
    (program := tmp_path / "often.py").write_text(often)
    with started(out := tmp_path / "out", program) as stopped:
        wait_for_rows(stopped, out)
        children = Path(f"/proc/{stopped.pid}/task/{stopped.pid}/children")
        if not children.exists():
            os.killpg(stopped.pid, signal.SIGKILL)
            pytest.skip("the kernel does not list the children of a process")
        of = {n: Path(f"/proc/{n}/environ").read_bytes().split(b"\0") for n in children.read_text().split()}
        (other,) = (int(number) for number, environment in of.items() if b"RANK=1" in environment)
        os.kill(other, signal.SIGKILL)
        stopped.communicate(timeout=600)
    assert stopped.returncode and checkpoint.load(out)["step"] >= 1
