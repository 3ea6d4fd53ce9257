"""What the first cell of a notebook calls: name the machine, look for a compiler, choose how figures are drawn."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from .. import core
from ..core import StackError
from ..ops.clock import dtype_for
from ..ops.kernels import sources

NEEDS = "# needs a compiler"  # a cell with this line is left out where there is none
MOVES = "# moves the widget"  # one with a line that begins so is left out where there are no widgets
_LEFT_OUT = "Not run: this cell needs a C++ compiler."
_UNMOVED = "Not run: this cell moves the widget, which needs ipywidgets."
STORING = "TWELL_LAB_STORE"  # set by notebooks/store.py: figures are stored as pictures too
MY_KERNELS = Path("my-kernels")  # in the working folder, which is the notebook's: what a reader writes and has solved
DRIVE = Path("/content/drive/MyDrive")  # where Colab shows a reader's Google Drive, once it is mounted
_GUESS = re.compile(r"guess(es|, \w+)? = [^#]*\.\.\.")  # of the student's edition (edition.py), still with its dots
_UNGUESSED = f"_guess = __import__({__name__!r}, fromlist=['_']).Unguessed(); "
_PREDICT = "Predict first: write your guess in place of the dots, and run this cell again. Then it shows what came out."


def setup(seed: int = 0) -> str:
    """Prepare a notebook; prints a line about the machine and one about what runs on it, and returns the device, "cuda"
    or "cpu".

    Seeds torch, silences the warnings that would bury results, picks plotly's renderer, has cells marked MOVES left
    out where ipywidgets is missing, and keeps what the reader writes in Drive where that is mounted.
    """
    torch.manual_seed(seed)
    _transform(_unmoved, importlib.util.find_spec("ipywidgets") is None)
    _transform(_dots, True)
    warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
    warnings.filterwarnings("ignore", message=".*Sparse invariant checks are implicitly disabled.*")
    warnings.filterwarnings("ignore", message=".*IProgress not found.*")
    use_renderer()
    print(f"This machine: {provenance()}")
    print(what_runs())
    if kept := keep_in_drive():
        print(kept)
    return "cuda" if torch.cuda.is_available() else "cpu"


def keep_in_drive() -> str:
    """Make MY_KERNELS a link to a folder in DRIVE, which outlives the session, and return a line about it; "" where no
    Drive is mounted. A folder with files in it stays where it is."""
    if not DRIVE.is_dir():
        return ""
    there = DRIVE / "twell-lab" / MY_KERNELS.name
    try:
        there.mkdir(parents=True, exist_ok=True)
        if MY_KERNELS.is_dir() and not MY_KERNELS.is_symlink():
            MY_KERNELS.rmdir()  # an empty one alone
        if not MY_KERNELS.is_symlink():
            MY_KERNELS.symlink_to(there, target_is_directory=True)
    except OSError as error:
        return f"{MY_KERNELS} is not kept in Drive ({error.strerror}): copy what you need from it to {there}."
    return f"What you write is kept in {there}."


def what_runs() -> str:
    """Return what runs natively here, what in the simulator and what is recorded, as one line."""
    from ..simulator import available  # it looks for a compiler, half a second the first time

    simulated = "portable kernels, at small sizes" if available() else "nothing, for want of a C++ compiler on Linux"
    native, recorded = "torch, on the CPU", "what GPUs take"
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        every = {kernel.oldest for kernel in sources().values()}
        runs = {kernel.oldest for kernel in sources().values() if kernel.runs_on(capability)}
        why_not = next(iter(core.stack_fault() or []), "" if core.cupy_packages() else "CuPy is not installed")
        native = f"torch and, on the {core.gpu()}, kernels for {_named(runs)}"
        if why_not or not runs:
            native, runs = f"torch, no kernel ({why_not or 'the GPU is too old'})", set()
        recorded = (
            f"kernels for {_named(every - runs)}, and what other GPUs take" if every - runs else "other GPUs' times"
        )
    return f"Natively: {native}. In the simulator: {simulated}. Recorded: {recorded}."


def _named(capabilities: set[tuple[int, int]]) -> str:
    return ", ".join(f"sm_{major}{minor}" for major, minor in sorted(capabilities))


def provenance() -> str:
    """Return what figures are made on, as one line: processor and GPU, versions, the day."""
    here = core.describe_machine()
    gpu = core.gpu()
    threads = torch.get_num_threads()
    used = "" if threads == here["cores"] else f" ({threads} used)"
    what = f"{here['cpu'] or 'an unnamed CPU'}, {here['cores']} cores{used}, {gpu or 'no GPU'}"
    packages = ", ".join(f"{name} {version}" for name in ("torch", "plotly") if (version := core.version(name)))
    return f"{what}; Python {here['python']}, {packages}; {datetime.now(UTC):%Y-%m-%d}"


def ready() -> bool:
    """Return whether kernels can run in the simulator here. If not, why is printed, and cells marked NEEDS do not
    run."""
    from ..simulator import compiler  # most notebooks run no kernel

    _transform(_left_out, False)  # undo an earlier run of this cell, when there may have been no compiler
    try:
        compiler()
    except StackError as missing:
        print(
            f"No kernel can run here, because {missing}. Until then cells that say '{NEEDS.strip('# ')}' are left out."
        )
        _transform(_left_out, True)
        return False
    return True


def _left_out(lines: list[str]) -> list[str]:
    """For IPython: the lines of a cell, or, if it needs a compiler, a line that prints that it does not run."""
    return [f"print({_LEFT_OUT!r})\n"] if any(line.strip() == NEEDS for line in lines) else lines


def _unmoved(lines: list[str]) -> list[str]:
    """The same for cells that move a widget."""
    return [f"print({_UNMOVED!r})\n"] if any(line.strip().startswith(MOVES) for line in lines) else lines


def _dots(lines: list[str]) -> list[str]:
    """The same for cells that wait for a guess: it stands for itself."""
    return [_UNGUESSED + line.replace("...", "_guess") if _GUESS.match(line) else line for line in lines]


class Unguessed:
    """A guess that nobody has written yet. The cell that makes one runs to its end, since later cells need what it
    computes, but shows nothing except a line that asks for the guess."""

    def __init__(self) -> None:
        from IPython.utils.capture import capture_output

        events, hidden = _shell().events, capture_output()

        def shown_again(*_) -> None:
            events.unregister("post_run_cell", shown_again)
            hidden.__exit__(None, None, None)
            print(_PREDICT)

        hidden.__enter__()
        events.register("post_run_cell", shown_again)

    def __format__(self, spec: str) -> str:
        return "..."


def _transform(each: Callable[[list[str]], list[str]], wanted: bool) -> None:
    """Have IPython pass the cells through this, or not."""
    shell = _shell()
    if shell is not None:
        others = [known for known in shell.input_transformers_cleanup if known is not each]
        shell.input_transformers_cleanup[:] = [*others, each] if wanted else others


def is_running() -> bool:
    """Return whether this code runs in a notebook, or in IPython."""
    return bool(_shell())


def _shell():
    interactive = sys.modules.get("IPython")  # loaded wherever a notebook runs
    return interactive and interactive.get_ipython()


def sixteen_bits(device: str) -> torch.dtype:
    """The 16-bit dtype that kernels take here: float16 on a GPU older than bfloat16, else bfloat16, also on a CPU."""
    return torch.bfloat16 if device != "cuda" else dtype_for(device)


def use_renderer() -> str | None:
    """Choose how plotly shows figures, and return the choice; None where plotly is not installed.

    A host that plotly knows (Colab, Kaggle, VS Code) keeps plotly's own choice, as does PLOTLY_RENDERER.
    In Jupyter it is the figure as data, which JupyterLab draws: plotly 5 would also write its whole script,
    4 MB, into the notebook. While notebooks are being stored, a picture comes with it, for code hosts.
    """
    try:
        import plotly.io as pio
    except ImportError:
        return None
    if os.environ.get(STORING):
        picture = pio.renderers["png"]
        picture.width, picture.scale = 860, 1.25
        # The package that draws the pictures logs whole tracebacks for harmless messages of its browser.
        logging.getLogger("choreographer").setLevel(logging.CRITICAL)
        pio.renderers.default = "plotly_mimetype+png"
    elif not os.environ.get("PLOTLY_RENDERER") and "+notebook" in (pio.renderers.default or ""):
        pio.renderers.default = "plotly_mimetype"
    return pio.renderers.default


def on_colab() -> bool:
    """Return whether this notebook runs on Colab, whose widgets need another way of drawing."""
    return "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ
