"""What tests of the command line share: running it, refusals, a text, small models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from twell_lab.app import cli
from twell_lab.models.tiny import LanguageModel, ModelConfig

ROOT = Path(__file__).parents[2]


def joined(text: str) -> str:
    """The lines of a text that was folded as one."""
    return " ".join(text.split())


@pytest.fixture
def ask(capsys):
    """Runs a command, checks its status, and returns what it wrote: `out` and `err`."""

    def run(*arguments, status=0):
        try:
            ended = cli.main([*map(str, arguments)])
        except SystemExit as stopped:
            ended = stopped.code
        said = capsys.readouterr()
        assert ended == status, (arguments, said)
        return said

    return run


@pytest.fixture
def value(ask):
    """Runs a command with --json and returns what it says, which is JSON without NaN and infinities."""

    def run(*arguments, status=0):
        def refuse(name):
            raise AssertionError(f"{name} is no JSON")

        return json.loads(ask(*arguments, "--json", status=status).out, parse_constant=refuse)

    return run


@pytest.fixture
def refused(ask):
    """Runs a command that is refused: status 2, nothing on stdout, and one line on stderr, which is returned."""

    def run(*arguments):
        said = ask(*arguments, status=2)
        lines = [line for line in said.err.splitlines() if line and not line.startswith("twell-lab: warning")]
        assert said.out == "" and len(lines) == 1 and lines[0].startswith("twell-lab: "), (arguments, said)
        return lines[0]

    return run


def spawn(*arguments, without="", **environment):
    """Run the command in a process of its own in which some modules cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({without.split()!r})); "
    code += "from twell_lab.app.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a small text that is long enough for a few windows\n" * 200)
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    """The folder of a small model of this project's, which reads bytes."""
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=64, context=32)).save(tmp_path / "model")
