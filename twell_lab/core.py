"""Errors, files and folders, and what this machine is. Imports nothing of the package, and touches no GPU.

Each error also derives from the built-in class that one would expect. A message names the value that was refused and
what would have been accepted."""

from __future__ import annotations

import atexit
import ctypes
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import platformdirs


class TwellError(Exception):
    """Base class: `except TwellError` catches everything the library raises on purpose."""


class InputError(TwellError, ValueError):
    """A tensor or argument of the wrong dtype, shape, layout, device or range."""


class DeviceError(TwellError, RuntimeError):
    """The device cannot run what was asked, or the driver refused a call."""


class CompileError(TwellError, RuntimeError):
    """A kernel did not compile. The message holds the compiler's log."""


class StackError(TwellError, RuntimeError):
    """A package is missing, or two installed packages do not belong together."""


class TextError(TwellError, ValueError):
    """A text that cannot be read, is empty, or is too short for what was asked of it."""


class RecordError(TwellError, ValueError):
    """A file of results that cannot be read or written, lacks a field, or does not belong to these kernels."""


# ---- packages ----


def optional(module: str, what: str, package: str | None = None) -> Any:
    """Import an optional package, called `package` on the index unless that is the module's name. StackError, saying
    `what` needs it, where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise StackError(f"{what} needs the {package or module} library: pip install {package or module}") from None


def version(package: str) -> str | None:
    """Return the installed version of a package without importing it; None too for one that was removed in part."""
    return _guarded(lambda: metadata.version(package))


# ---- files ----

WHOLE = 2**63  # tensors hold whole numbers below this one
LOCK = ".twell-lab.lock"


def read_file(path: str | os.PathLike, most: float = math.inf) -> bytes:
    """Return the bytes of a file. OSError for one of more than `most` bytes, and for what may have no end or never
    come: a folder, a pipe, a device. ValueError for a name that no file can have."""
    facts = os.stat(path)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size > most:
        raise OSError(None, f"it is no file of at most {most:,} bytes")
    return Path(path).read_bytes()


def read_json(path: str | os.PathLike, what: str) -> Any:
    """Return the value that a JSON file holds. RecordError, naming `what` it is ("plan"), for a file that is none."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        return json.loads(read_file(path, 2**30), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        as_json = "" if isinstance(error, OSError) else " as JSON"
        raise RecordError(f"{what} {os.fspath(path)!r} cannot be read{as_json}: {_reason(error)}") from None


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file whole or not at all, in a folder that is made where it is missing: a temporary file beside it, then
    a rename. Follows a symbolic link. RecordError as of `check_target`, and where the disk is full."""
    check_target(path)
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{secrets.token_hex(6)}.part")
    with _told(f"{target.name!r} in the folder {str(target.parent)!r}"):
        try:
            part.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def check_folder(folder: str | os.PathLike) -> None:
    """Raise RecordError unless files can be written in a folder, which is made where it is missing: before work whose
    result would be lost."""
    with _told(f"in the folder {os.fspath(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=Path(folder)).close()


def check_target(path: str | os.PathLike) -> None:
    """Raise RecordError unless a file could be written there now: in a folder as `check_folder` wants it, and not in
    the place of a folder, a device or a pipe."""
    with _told(repr(str(path))):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise OSError(None, "it is a folder, a device or a pipe, not a file")
    check_folder(target.parent)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn an error of the system's into one that says what cannot be written."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot write {what}: {_reason(error)}; name a place that you may write") from None


@contextmanager
def locked_folder(folder: str | os.PathLike, what: str) -> Iterator[None]:
    """A context in which this process alone uses a folder, which is made where it is missing. InputError where another
    `what` ("training") has it, and where the folder cannot be written."""
    from filelock import FileLock, Timeout

    lock = FileLock(Path(folder) / LOCK, timeout=0)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (Timeout, OSError) as error:
        why = f"is in use by another {what}" if isinstance(error, Timeout) else f"cannot be written: {_reason(error)}"
        raise InputError(f"{str(folder)!r} {why}; accepted: another folder, or this one once that has ended") from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            os.unlink(lock.lock_file)
        lock.release()


def _reason(error: Exception) -> str:
    """Return the system's words for an error, without number and path, where it has some."""
    return getattr(error, "strerror", None) or str(error)


# ---- folders ----

_PACKAGE = Path(__file__).resolve().parent


def _beside_or_inside(name: str) -> Path:
    """Return a folder inside the package where it was installed from a wheel, else at the top of the checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def kernels_dir() -> Path:
    """Return the folder of the CUDA sources."""
    return _beside_or_inside("kernels")


def data_dir() -> Path:
    """Return the folder of records, checkpoints and datasheet figures."""
    return _beside_or_inside("data")


def records_dir() -> Path:
    """Return the folder of recorded measurements."""
    return data_dir() / "records"


def notebooks_dir() -> Path:
    """Return the folder of the course's notebooks. In an installed package they have no outputs."""
    return _beside_or_inside("notebooks")


def is_installed() -> bool:
    """Return whether the package was installed from a wheel; False in a checkout."""
    return data_dir().is_relative_to(_PACKAGE)


def new_records_dir() -> Path:
    """Return where new records are saved by default: in data/records of a checkout, else in the working folder."""
    return Path.cwd() if is_installed() else records_dir()


def cache_dir() -> Path:
    """Return a folder for compiled kernels that this user alone can write, since its files are run with his rights: the
    one that `TWELL_LAB_CACHE` names, or one in the user's cache folder. Where it cannot be written, or others can write
    there, it is `private_folder()`, and a warning says so."""
    named = os.environ.get("TWELL_LAB_CACHE")
    folder = Path(named) if named else platformdirs.user_cache_path("twell-lab", appauthor=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if not hasattr(os, "geteuid") or facts.st_uid == os.geteuid() and not facts.st_mode & 0o022:
            tempfile.TemporaryFile(dir=folder).close()  # root may write where the mode says no
            return folder
        why = f"it belongs to user {facts.st_uid}" if facts.st_uid != os.geteuid() else "others can write there"
    except OSError as error:
        why = _reason(error)
    warnings.warn(f"{folder} is not used as a cache: {why}. Each process compiles its own kernels", stacklevel=2)
    return private_folder()


@cache
def private_folder() -> Path:
    """Return a temporary folder of this process that only its user can use, removed when the process ends. StackError
    where none can be made."""
    try:
        folder = tempfile.mkdtemp(prefix="twell-lab-")
    except OSError as error:
        raise StackError(f"no folder can be written ({_reason(error)}); TWELL_LAB_CACHE or TMPDIR names one") from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


# ---- this machine: a probe that fails gives None, because a measurement must not be lost to a missing tool ----

CUPY_PACKAGES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")


def describe_machine() -> dict:
    """Return this machine and its packages as a dict for a record, without names of hosts and users and without paths;
    None stands where something is not to be had. cores: how many this process may use. gpus: a list of {name,
    capability ("9.0"), memory_gib, driver}. cuda_driver: the newest version of CUDA that the driver runs ("13.0")."""
    cupy = next(iter(cupy_packages()), None)
    system = _guarded(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]) or platform.system()
    named = _guarded(lambda: re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M))
    return {
        "os": f"{system}, {platform.machine()}",
        "cpu": named[0].strip() if named else platform.processor() or None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "torch_cuda": torch_cuda(),
        "numpy": version("numpy"),
        "cupy": cupy and version(cupy),
        "cupy_package": cupy,
        "nvrtc": _guarded(_nvrtc),
        "gpus": gpus(),
        "cuda_driver": _guarded(_cuda_driver),
    }


def memory() -> int | None:
    """Return how many bytes of memory this process may use, free or not: the machine's, or fewer where its container
    says so; None where the system does not say."""
    groups = map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    bounds = [_guarded(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    bounds += [_guarded(lambda: int(group.read_text())) for group in groups]  # "max": no limit, no number
    return min((bound for bound in bounds if bound), default=None)


def gpu() -> str | None:
    """Return the name of the GPU that torch uses by default, without the vendor's ("H100 80GB HBM3"); None without."""
    name = _guarded(lambda: import_module("torch").cuda.get_device_name())
    return re.sub(r"^(NVIDIA\s+)?((Tesla|GeForce)\s+)?", "", name) if name else None


def gpus() -> list[dict]:
    """Return the GPUs that torch can use, as in `describe_machine`, or else those that nvidia-smi lists."""
    listed, usable = _guarded(_nvidia_smi) or [], _guarded(_torch_gpus) or []
    return [facts | {"driver": listed[0]["driver"] if listed else None} for facts in usable] or listed


def torch_cuda() -> str | None:
    """Return the CUDA version torch was built for, for example "12.8"; None for a CPU build and without torch."""
    return _guarded(lambda: import_module("torch").version.cuda)


def cupy_packages() -> list[str]:
    """Return the installed builds of CuPy, as pip names them. More than one is a fault."""
    return [name for name in CUPY_PACKAGES if version(name) is not None]


def let_cupy_start() -> None:
    """Give CuPy another cache folder where it cannot make its own: importing it would fail then."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            Path("~/.cupy/kernel_cache").expanduser().mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            os.environ["CUPY_CACHE_DIR"] = str(cache_dir())


def check_stack() -> None:
    """Raise StackError for a `stack_fault`."""
    if fault := stack_fault():
        raise StackError(f"{fault[0]}; to mend it: {fault[1]}")


def stack_fault() -> tuple[str, str] | None:
    """Return a fault of this installation that would later give errors that do not name it, and the command that mends
    it: torch and CuPy were built for different major versions of CUDA, or two builds of CuPy are installed."""
    builds, theirs = cupy_packages(), major(torch_cuda())
    mend = f"pip uninstall -y {' '.join(builds)} && pip install 'cupy-cuda{theirs or 12}x[ctk]>=14.0.1,<15'"
    if len(builds) > 1:
        return f"{' and '.join(builds)} are installed together and overwrite each other's files", mend
    ours = [int(number) for name in builds for number in re.findall(r"cuda(\d+)x", name)]
    if theirs is None or not ours or ours[0] == theirs:  # a CPU build of torch; no CuPy, or one built from its source
        return None
    what = f"{builds[0]} {version(builds[0])} for CUDA {ours[0]}, and both need the same major version"
    return f"torch {version('torch')} is built for CUDA {torch_cuda()} and {what}", mend


def major(cuda: str | None) -> int | None:
    """Return the major version of CUDA: "12.8" -> 12."""
    return int(cuda.split(".")[0]) if cuda else None


def _guarded(probe: Callable[[], Any]) -> Any:
    """Return what the probe does, or None if it raises, which broken installations do with errors of any kind."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about an old driver: `twell-lab doctor` says it better
            return probe()
    except Exception:
        return None


def _cuda_driver() -> str | None:
    number = ctypes.c_int()
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    failed = driver.cuDriverGetVersion(ctypes.byref(number))  # works without cuInit, so no GPU is touched
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def _nvrtc() -> str:
    let_cupy_start()
    return ".".join(map(str, import_module("cupy.cuda").nvrtc.getVersion()))  # in CuPy 14 that is no module


def _torch_gpus() -> list[dict]:
    cuda = import_module("torch").cuda
    found = [cuda.get_device_properties(index) for index in range(cuda.device_count())] if torch_cuda() else []
    return [
        {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_gib": round(gpu.total_memory / 2**30, 1)}
        for gpu in found
    ]


def _nvidia_smi() -> list[dict]:
    """Return the GPUs that the driver's program lists, within 20 seconds: one that is being loaded can take ten."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    listed = []
    for name, sm, mib, driver in re.findall(r"^([^,\n]+), (\d+\.\d+), ([^,]+), (.+)$", lines, re.M):
        size = round(int(mib) / 1024, 1) if mib.isdigit() else None  # some share the CPU's
        listed.append({"name": name, "capability": sm, "memory_gib": size, "driver": driver})
    return listed
