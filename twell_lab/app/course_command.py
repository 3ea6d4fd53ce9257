"""`twell-lab course`: copies the notebooks into a folder of the reader's choice, and opens JupyterLab there."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from .. import core
from ..core import InputError, StackError, check_folder
from . import terminal
from .options import path
from .terminal import Answer

FOLDER = Path("twell-lab-course")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        metavar="FOLDER",
        type=path,
        default=FOLDER,
        help="where the notebooks go; none of them may be there yet [%(default)s]",
    )
    parser.add_argument("--no-open", dest="open", action="store_false", help="only copy them")


def copy(folder: Path) -> list[Path]:
    """Copy the course's notebooks into a folder, which is made where it is missing. Returns the copies, sorted.

    Raises InputError where one of them is there already: a reader's work is never overwritten."""
    notebooks = sorted(core.notebooks_dir().glob("*.ipynb"))
    if not notebooks:
        raise StackError(
            f"there is no notebook in {str(core.notebooks_dir())!r}; accepted: a checkout, or a complete wheel"
        )
    if there := [each.name for each in notebooks if (folder / each.name).exists()]:
        raise InputError(
            f"{str(folder)!r} holds {there[0]} already; accepted: another folder, or to go on in this one: "
            f"jupyter lab {shlex.quote(str(folder))}"
        )
    check_folder(folder)
    return [Path(shutil.copyfile(each, folder / each.name)) for each in notebooks]


def run(options: argparse.Namespace) -> Answer:
    """Copy the notebooks and run JupyterLab there. The command's exit status is then that of JupyterLab."""
    if options.open and find_spec("jupyterlab") is None:
        from . import doctor

        raise StackError(
            f"JupyterLab is not installed; accepted: --no-open, or first {doctor.install_command('course')}"
        )
    copies = copy(options.folder)
    said = f"course: {len(copies)} notebooks are in {options.folder}"
    if options.open:
        terminal.tell(f"{said}; opening JupyterLab there; Ctrl-C ends it")
    status = _open(options.folder) if options.open else 0
    return Answer({"folder": str(options.folder), "notebooks": [each.name for each in copies]}, said, status)


def _open(folder: Path) -> int:
    """Run JupyterLab and return its exit status. This process ignores Ctrl-C, after which JupyterLab asks whether it
    should end."""
    lab = subprocess.Popen([sys.executable, "-m", "jupyterlab", str(folder)])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return lab.wait()
    finally:
        signal.signal(signal.SIGINT, before)
