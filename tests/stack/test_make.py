"""The Makefile's decisions, with a Python that only writes down what it was asked for."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make on this machine")

PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
  *version_info*) exit ${TOO_OLD:-0} ;;
  *ensurepip*) exit ${NO_VENV:-0} ;;
  "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/twell-lab ;;
  "-m pip"*) echo "  Downloading torch-9.9-py3-none-any.whl (900.1 MB)"; echo "  Downloading six.whl (9.1 kB)"
             echo "WARNING: a word about an index" >&2; exit ${PIP_STATUS:-0} ;;
  "-m pytest"*) echo "3 passed in 0.1s"; exit ${PYTEST_STATUS:-0} ;;
  tour*) echo "the page is build/tour/index.html"; exit ${TOUR_STATUS:-0} ;;
  -V) echo "Python ${SAYS:-3.12.1}" ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Checkout:
    """A folder with the real Makefile and a stand-in for python3."""

    def __init__(self, folder: Path):
        self.folder = folder / "a checkout"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.folder / name)
        self.bin = folder / "bin"
        program(self.bin / "python3", PYTHON)
        self.gpu = program(self.bin / "nvidia-smi", "#!/bin/sh\nexit 9\n")
        self.calls = folder / "calls"
        self.output = ""

    def make(self, *arguments: str, **environment: str) -> int:
        """Run make; its exit status. `output` holds what it printed, `asked` what it asked of Python."""
        self.calls.write_text("")
        # Under `make test` the outer make's variables must not reach this one.
        outer = ("STACK", "PYTHON", "PYTEST_ARGS", "TOUR_ARGS")
        found = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS")) and k not in outer}
        found |= {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "CALLS": str(self.calls), **environment}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        done = subprocess.run(["make", *arguments], cwd=self.folder, timeout=300, env=found, **pipes)
        self.output = done.stdout
        return done.returncode

    def asked(self, what: str) -> list[str]:
        return [call for call in self.calls.read_text().splitlines() if what in call]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_setup_installs_once_and_is_reused_until_another_stack_is_asked_for(checkout):
    assert checkout.make("setup", PIP_STATUS="1") != 0
    assert "setup: pip could not install the cpu stack; build/setup.log says why" in checkout.output
    assert not (checkout.folder / ".venv/ready").exists()
    assert checkout.make("setup") == 0
    (pip,) = checkout.asked("-m pip")
    assert "-c constraints/cpu.txt" in pip and "-e .[course,test,compile]" in pip
    assert "torch-9.9" in checkout.output and "six.whl" not in checkout.output and "WARNING" not in checkout.output
    assert checkout.make("setup") == 0
    assert not checkout.asked("-m pip") and not checkout.asked("-m venv")

    assert checkout.make("setup", "STACK=cu13") == 0
    assert "--clear" in checkout.asked("-m venv")[0]
    (pip,) = checkout.asked("-m pip")
    assert "-c constraints/cu13.txt" in pip and "-e .[course,test,cu13]" in pip
    assert checkout.make("test") == 0
    assert not checkout.asked("-m pip") and "cu13 stack" in checkout.output


def test_a_gpu_picks_cuda_12_and_a_silent_driver_the_cpu(checkout):
    checkout.make("help")
    assert "(here: cpu)" in checkout.output
    program(checkout.gpu, "#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'\n")
    checkout.make("help")
    assert "(here: cu12)" in checkout.output
    assert checkout.make("setup") == 0 and "constraints/cu12.txt" in checkout.asked("-m pip")[0]


def test_an_environment_that_was_moved_or_broke_is_made_anew(checkout):
    checkout.make("setup")
    checkout.folder = checkout.folder.rename(checkout.folder.with_name("moved"))
    assert checkout.make("setup") == 0 and checkout.asked("-m venv")
    program(checkout.folder / ".venv/bin/python", "#!/bin/sh\nexit 127\n")
    assert checkout.make("setup") == 0 and checkout.asked("-m venv")


@pytest.mark.parametrize(
    "arguments, environment, says",
    [
        (["PYTHON=python3.99"], {}, "there is no python3.99 here"),
        ([], {"TOO_OLD": "1", "SAYS": "3.9.2"}, "python3 is Python 3.9.2, and 3.11 or newer is needed; try PYTHON="),
        ([], {"NO_VENV": "1"}, "python3 has no venv; install it"),
    ],
)
def test_an_unfit_python_is_named_in_one_line(checkout, arguments, environment, says):
    assert checkout.make("setup", *arguments, **environment) != 0
    lines = [line for line in checkout.output.splitlines() if line.startswith("setup:")]
    assert len(lines) == 1 and says in lines[0]
    assert not checkout.asked("-m pip")


def test_tests_end_in_one_clear_line_and_keep_pytests_status(checkout):
    (checkout.folder / "notebooks").mkdir()
    (checkout.folder / "notebooks" / "00-start-here.ipynb").write_text("{}")
    assert checkout.make("test") == 0
    assert checkout.output.splitlines()[-1].startswith("test: passed on the cpu stack in ")
    asked = checkout.asked("-m pytest")[0]
    assert "--nbval-lax" in asked and "tests notebooks/00-start-here.ipynb" in asked
    assert checkout.make("test", PYTEST_STATUS="1") != 0
    assert "test: FAILED" in checkout.output and "passed on" not in checkout.output


def test_a_tour_installs_what_it_needs_and_what_comes_later_adds_the_rest(checkout):
    assert checkout.make("tour", "TOUR_ARGS=--quick") == 0 and checkout.asked("tour --quick")
    assert checkout.output.splitlines()[-1] == "the page is build/tour/index.html"
    (pip,) = checkout.asked("-m pip")
    assert "-c constraints/cpu.txt" in pip and pip.endswith("-e .")
    assert checkout.make("tour", TOUR_STATUS="3") != 0 and not checkout.asked("-m pip")
    assert checkout.make("test") == 0
    (pip,) = checkout.asked("-m pip")
    assert "-e .[course,test,compile]" in pip and not checkout.asked("-m venv")  # into the same environment
    assert checkout.make("tour") == 0 and not checkout.asked("-m pip")  # which a tour leaves whole
    later = (checkout.folder / ".venv/ready").stat().st_mtime + 5
    os.utime(checkout.folder / "pyproject.toml", (later, later))
    assert checkout.make("tour") == 0 and "-e .[course,test,compile]" in checkout.asked("-m pip")[0]
    checkout.make("clean")
    assert checkout.make("tour", "STACK=cu12") == 0 and "-e .[cu12]" in checkout.asked("-m pip")[0]
    assert checkout.make("tour", "STACK=cu13") == 0 and "-e .[cu13]" in checkout.asked("-m pip")[0]
    assert "--clear" in checkout.asked("-m venv")[0]
