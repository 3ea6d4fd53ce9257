"""`twell-lab doctor`: what this machine has, what will run on it, and what would install the rest.

Each finding is made on its own: if looking at one thing fails, that finding says so, and the others are still made.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .. import core
from ..core import StackError
from ..cuda import compile as compiler

STATES = ("ok", "missing", "limited")
COURSE = ("jupyterlab", "ipywidgets", "anywidget", "plotly")
_INSTALL_TORCH = "pip install 'torch>=2.6'"
_CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finding:
    """What was found about one thing.

    Attributes:
        topic: what was looked at.
        state: "ok"; "missing", if something can be installed; "limited", if it works in part or not at all here.
        text: a sentence.
        command: what would mend it, or None.
    """

    topic: str
    state: str
    text: str
    command: str | None = None


def examine() -> list[Finding]:
    """Findings on what this machine has, then on what will run on it. Never raises."""
    try:
        facts = core.describe_machine()
        facts["usable"] = core.gpu() is not None
    except Exception as error:  # the doctor is run where things are broken, so any kind of error may come
        return [Finding("machine", "limited", _unexamined(error))]
    probes = {
        "Python": _python,
        "PyTorch": _torch,
        "GPU": _gpu,
        "CuPy": _cupy,
        "NVRTC": _nvrtc,
        "kernel cache": _cache,
        "CPU operators": _cpu_operators,
        "GPU kernels": _gpu_kernels,
        "kernel compilation": _compilation,
        "simulator": _simulator,
        "notebooks": _notebooks,
        "other packages": _others,
    }
    return [_examined(topic, probe, facts) for topic, probe in probes.items()]


def _examined(topic: str, probe: Callable[[dict], tuple], facts: dict) -> Finding:
    try:
        return Finding(topic, *probe(facts))
    except Exception as error:
        return Finding(topic, "limited", _unexamined(error))


def _unexamined(error: Exception) -> str:
    return f"could not be examined ({type(error).__name__}: {error})"


def install_command(extra: str) -> str:
    """Return the command that installs one of pyproject's extras: make in the checkout's own .venv, elsewhere pip, with
    the packages by name, because an index may have this package's name from somebody else."""
    if Path(sys.prefix).resolve() == _CHECKOUT / ".venv":
        return f"make setup STACK={extra}" if extra in ("cu12", "cu13") else "make setup"
    if not _version("twell-lab"):  # in a checkout that is not installed
        return f"pip install -e '.[{extra}]'"
    needed = [name.split(";") for name in metadata.requires("twell-lab") or ()]
    names = [name.strip() for name, *marker in needed if f"'{extra}'" in "".join(marker).replace('"', "'")]
    return f"pip install {shlex.join(names)}"


# ---- what the machine has ----


def _python(facts: dict) -> tuple:
    return "ok", f"{facts['python']} on {facts['os']}; {facts['cpu'] or 'unnamed CPU'}, {facts['cores']} cores"


def _torch(facts: dict) -> tuple:
    if facts["torch"] is None:
        return "missing", "torch is not installed, and everything needs it", _INSTALL_TORCH
    import torch  # if it is installed and does not load, the finding shows the error

    build = f"built for CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "a build without CUDA"
    return "ok", f"{torch.__version__}, {build}"


def _gpu(facts: dict) -> tuple:
    if not facts["gpus"]:
        return "limited", "no NVIDIA GPU found; all but running the CUDA kernels works without one"
    named = "; ".join(
        f"{gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {gpu['memory_gib']} GiB, driver {gpu['driver']}"
        for gpu in facts["gpus"]
    )
    if too_old := [gpu for gpu in facts["gpus"] if _capability(gpu) < compiler.OLDEST]:
        oldest = "sm_{}{}".format(*compiler.OLDEST)
        return "limited", f"{named}; the kernels need {oldest} or newer, which {too_old[0]['name']} is not"
    if facts["usable"]:
        return "ok", named
    return "limited", f"{named}; {_why_unusable(facts)}", _stack_command(facts)


def _capability(gpu: dict) -> tuple[int, ...]:
    return tuple(int(part) for part in gpu["capability"].split("."))


def _why_unusable(facts: dict) -> str:
    """Return why torch cannot use a GPU that the driver lists."""
    build = facts["torch_cuda"]
    if facts["torch"] is None:
        return "torch is not installed"
    if build is None:
        return f"torch {facts['torch']} is a build without CUDA"
    if _driver_too_old(facts):
        return f"its driver runs CUDA up to {facts['cuda_driver']}, and torch is built for CUDA {build}"
    return f"torch, built for CUDA {build}, cannot use it (is it hidden by CUDA_VISIBLE_DEVICES?)"


def _driver_too_old(facts: dict) -> bool:
    """Return whether torch was built for a newer major version of CUDA than the driver runs."""
    driver, build = core.major(facts["cuda_driver"]), core.major(facts["torch_cuda"])
    return driver is not None and build is not None and driver < build


def _stack_command(facts: dict) -> str | None:
    """The command that installs a stack for this machine's driver; None if another stack would not help."""
    if facts["torch_cuda"] and not _driver_too_old(facts):
        return None
    command = install_command("cu12")
    if command.startswith("make"):
        return command
    with_torch = command.replace("install ", "install 'torch>=2.8,<2.11' ")
    return f"pip uninstall -y torch && {with_torch}"


def _cupy(facts: dict) -> tuple:
    if fault := core.stack_fault():
        if facts["gpus"]:
            return "limited", fault[0], fault[1]
        return "ok", f"{fault[0]}; without a GPU CuPy only compiles, so this does no harm here"
    if facts["cupy"] is None:
        return "missing", "not installed; it loads and launches the CUDA kernels", _cupy_command(facts)
    return "ok", f"{facts['cupy']} ({facts['cupy_package']})"


def _cupy_command(facts: dict) -> str | None:
    if facts["gpus"]:
        return install_command("cu13" if core.major(facts["torch_cuda"]) == 13 else "cu12")
    return install_command("compile") if sys.platform == "linux" else None


def _nvrtc(facts: dict) -> tuple:
    if facts["nvrtc"]:
        return "ok", f"the CUDA compiler library, {facts['nvrtc']}"
    return "missing", f"the CUDA compiler library does not load{_why_no_compiler()}", _cupy_command(facts)


def _why_no_compiler() -> str:
    """The error of loading the compiler, in brackets and cut to one line, because that of CuPy fills a screen."""
    try:
        compiler.compiler()
    except StackError as error:
        cause = error.__cause__ or error
        lines = [line.strip(" =") for line in str(cause).splitlines()]
        return f" ({type(cause).__name__}: {next(filter(None, lines), '')})"
    return ""


def _cache(facts: dict) -> tuple:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = core.cache_dir()
    if caught:
        return "limited", str(caught[0].message), "export TWELL_LAB_CACHE=/a/folder/of/your/own"
    return "ok", f"compiled kernels are kept in {folder}"


# ---- what will run ----


def _cpu_operators(facts: dict) -> tuple:
    if facts["torch"] is None:
        return "missing", "need torch", _INSTALL_TORCH
    from ..ops import functional  # noqa: F401  this registers the operators, which can fail

    return "ok", "pack, ffn and SparseFFN run on CPU tensors, in torch operations that skip zeros"


def _gpu_kernels(facts: dict) -> tuple:
    if not facts["gpus"]:
        return "limited", "no GPU to run them; plots show recorded runs instead"
    needs = {"GPU": _gpu(facts), "CuPy": _cupy(facts)}
    if not os.environ.get("TWELL_LAB_CUBINS"):  # cubins that were compiled elsewhere need no compiler here
        needs["NVRTC"] = _nvrtc(facts)
    reasons = [f"{topic}: {text}" for topic, (state, text, *_) in needs.items() if state != "ok"]
    if reasons:
        return "limited", f"will not run yet ({'; '.join(reasons)})"
    return "ok", "run on CUDA tensors, compiled on first use"


def _compilation(facts: dict) -> tuple:
    if facts["nvrtc"]:
        return "ok", f"for {', '.join(compiler.ARCHITECTURES)}, with or without a GPU"
    if sys.platform not in ("linux", "win32"):
        return "limited", f"NVRTC is not made for {sys.platform}"
    return "missing", "needs NVRTC", _cupy_command(facts)


def _simulator(facts: dict) -> tuple:
    if facts["torch"] is None:
        return "missing", "needs torch", _INSTALL_TORCH
    from ..simulator import toolchain

    try:
        found = toolchain.compiler()
    except StackError as error:
        return "missing" if sys.platform == "linux" else "limited", str(error)
    return "ok", f"runs the CUDA kernels on the CPU, compiled with {found.path}: {found.version}"


def _notebooks(facts: dict) -> tuple:
    # In a running notebook kernel (Colab, an editor) JupyterLab is not needed: something else shows the notebook.
    needed = [name for name in COURSE if name != "jupyterlab" or "ipykernel" not in sys.modules]
    if absent := [name for name in needed if not _version(name)]:
        return "missing", f"not installed: {', '.join(absent)}", install_command("course")
    if not _writable(Path(os.environ.get("JUPYTER_RUNTIME_DIR") or Path.home())):
        return (
            "limited",
            "Jupyter keeps its runtime files in the home folder, which cannot be written",
            "export JUPYTER_RUNTIME_DIR=$(mktemp -d)",
        )
    opens = "twell-lab course" if core.is_installed() else "make lab"
    return "ok", f"{', '.join(needed)} are installed; `{opens}` opens the course"


def _others(facts: dict) -> tuple:
    packages = {
        "transformers": "models of the Hub",
        "tokenizers": "BPE",
        "datasets": "texts of the Hub",
        "nvidia-ml-py": "energy of a GPU",
    }
    versions = {name: _version(name) for name in packages}
    said = [f"{name} {versions[name] or 'is not installed'} ({use})" for name, use in packages.items()]
    absent = [name for name in packages if not versions[name] and (facts["gpus"] or name != "nvidia-ml-py")]
    if absent:
        return "missing", ", ".join(said), f"pip install {shlex.join(absent)}"
    return "ok", ", ".join(said)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _writable(folder: Path) -> bool:
    """Return whether a file can be made in the folder or, if it does not exist, in the nearest folder above it that
    does.

    This is tried, because permission bits do not bind root and say nothing about a read-only mount.
    """
    folder = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
