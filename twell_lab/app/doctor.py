"""`twell-lab doctor`: what this machine has, what will run on it, and what would install the rest. If looking at one
thing fails, its finding says so, and the others are still made."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .. import core
from ..core import StackError
from ..cuda import compile as compiler
from .terminal import Answer, folded

USES = {"transformers": "models of the Hub", "tokenizers": "BPE", "datasets": "texts of the Hub"}
USES |= dict.fromkeys(("jupyterlab", "ipywidgets", "anywidget", "plotly"), "the course")
USES |= {"nvidia-ml-py": "a GPU's energy"}  # packages that are used where they are there


class Finding(NamedTuple):
    """What was found: "ok", "missing" if something can be installed, or "limited" if it works in part or not at all
    here; a sentence; and what would mend it, or None."""

    state: str
    text: str
    command: str | None = None


def doctor() -> Answer:
    """Say what this machine has, what will run where, and what is missing."""
    findings, lines = examine(), []
    for topic, finding in findings.items():
        lines.append(folded(f"{finding.state:<8} {topic:<10} {finding.text}", " " * 20))
        lines += [f"{'':<17} -> {finding.command}"] if finding.command else []
    return Answer([{"topic": topic, **finding._asdict()} for topic, finding in findings.items()], "\n".join(lines))


def examine() -> dict[str, Finding]:
    """Return findings on what this machine has and will run, by topic. Never raises."""
    facts: dict = {}
    findings = {}
    for topic, probe in _PROBES.items():
        try:
            facts = facts or core.describe_machine() | {"usable": core.gpu() is not None}
            findings[topic] = Finding(*probe(facts))
        except StackError as error:
            findings[topic] = Finding("missing", str(error))
        except Exception as error:  # the doctor is run where things are broken, so any kind of error may come
            findings[topic] = Finding("limited", f"could not be examined ({type(error).__name__}: {error})")
    return findings


def install_command(extra: str) -> str:
    """Return the command that installs one of pyproject's extras: make in the checkout's own .venv, elsewhere pip, with
    the packages by name, because an index may have this package's name from somebody else."""
    if core.INSTALLED:
        needed = [name.split(";") for name in metadata.requires("twell-lab") or ()]
        names = [name.strip() for name, *marker in needed if f"'{extra}'" in "".join(marker).replace('"', "'")]
        return f"pip install {shlex.join(names)}"
    if Path(sys.prefix).resolve() == core.data_dir().parent / ".venv":
        return f"make setup STACK={extra}" if extra in ("cu12", "cu13") else "make setup"
    return f"pip install -e '.[{extra}]'"


def _torch(facts: dict) -> tuple:
    if facts["torch"] is None:
        return "missing", "torch is not installed, and everything needs it", "pip install 'torch>=2.7'"
    import torch  # if it is installed and does not load, or the operators do not, the finding shows the error

    from ..ops import functional  # noqa: F401

    build = f"built for CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "a build without CUDA"
    return "ok", f"{torch.__version__}, {build}; pack, ffn and SparseFFN run on CPU tensors, and skip zeros"


def _gpu(facts: dict) -> tuple:
    """Name the GPUs that the driver lists, and say why torch or the kernels cannot use them."""
    if not facts["gpus"]:
        return "limited", "no NVIDIA GPU found; all but running the CUDA kernels works, and plots show recorded runs"
    shown = "{name}, sm_{sm}, {memory_gib} GiB, driver {driver}"
    named = "; ".join(shown.format(**gpu, sm=gpu["capability"].replace(".", "")) for gpu in facts["gpus"])
    if old := [gpu for gpu in facts["gpus"] if tuple(map(int, gpu["capability"].split("."))) < compiler.OLDEST]:
        oldest = "{}{}".format(*compiler.OLDEST)
        return "limited", f"{named}; the kernels need sm_{oldest} or newer, which {old[0]['name']} is not"
    if facts["usable"]:
        return "ok", f"{named}; with CuPy the kernels run on CUDA tensors, compiled on first use"
    driver, build = core.major(facts["cuda_driver"]), core.major(facts["torch_cuda"])
    torch = f"torch {facts['torch']}, built for CUDA {facts['torch_cuda']},"
    if build is not None and (driver is None or driver >= build):  # another stack would not help
        return "limited", f"{named}; {torch} cannot use it (is it hidden by CUDA_VISIBLE_DEVICES?)"
    needs = f"{torch} needs a newer driver than this one, which runs CUDA up to {facts['cuda_driver']}"
    why = "torch is not installed, or is a build without CUDA" if build is None else needs
    return "limited", f"{named}; {why}", install_command("cu12")


def _cupy(facts: dict) -> tuple:
    if fault := core.stack_fault():
        harmless = f"{fault[0]}; without a GPU CuPy only compiles, so this does no harm here"
        return ("limited", *fault) if facts["gpus"] else ("ok", harmless)
    extra = ("cu13" if core.major(facts["torch_cuda"]) == 13 else "cu12") if facts["gpus"] else "compile"
    command = install_command(extra) if facts["gpus"] or sys.platform == "linux" else None
    if facts["cupy"] is None:
        return "missing", "not installed; it loads and launches the CUDA kernels", command
    if facts["nvrtc"] is None and not os.environ.get("TWELL_LAB_CUBINS"):  # cubins that were compiled elsewhere do
        return "missing", f"{facts['cupy']} ({facts['cupy_package']}), whose compiler, NVRTC, does not load", command
    archs = ", ".join(compiler.ARCHITECTURES)
    return "ok", f"{facts['cupy']} ({facts['cupy_package']}); compiles for {archs}, with or without a GPU"


def _simulator(facts: dict) -> tuple:
    from ..simulator import toolchain

    found = toolchain.compiler()
    return "ok", f"runs the CUDA kernels on the CPU, compiled with {found.path}: {found.version}"


def _packages(facts: dict) -> tuple:
    versions = {name: core.version(name) for name in USES}
    said = ", ".join(f"{name} {version or f'is not installed ({USES[name]})'}" for name, version in versions.items())
    absent = [name for name in versions if not versions[name] and (facts["gpus"] or name != "nvidia-ml-py")]
    return ("missing", said, f"pip install {shlex.join(absent)}") if absent else ("ok", said)


_PROBES: dict[str, Callable[[dict], tuple]] = {
    "Python": lambda facts: ("ok", "{python} on {os}; {cpu}, {cores} cores".format(**facts)),
    "PyTorch": _torch,
    "GPU": _gpu,
    "CuPy": _cupy,
    "simulator": _simulator,
    "packages": _packages,
}
