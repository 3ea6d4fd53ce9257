"""Errors, files and folders, and what this machine is. Imports nothing of the package, and touches no GPU. An error
is also of the built-in class that one would expect, and names what was refused and what would have been accepted."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import platform
import re
import secrets
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import platformdirs

WHOLE = 2**63  # tensors hold whole numbers below this one
LOCK = ".twell-lab.lock"
_PACKAGE = Path(__file__).resolve().parent
INSTALLED = (_PACKAGE / "data").is_dir()  # from a wheel, in which the folders lie inside the package
_HOME = _PACKAGE if INSTALLED else _PACKAGE.parent
kernels_dir = partial(Path, _HOME, "kernels")
data_dir = partial(Path, _HOME, "data")  # with records, checkpoints and datasheet figures
records_dir = partial(Path, _HOME, "data", "records")
notebooks_dir = partial(Path, _HOME, "notebooks")  # in an installed package they have no outputs


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


def optional(module: str, what: str, package: str | None = None) -> Any:
    """Import a module of an optional package; StackError, saying that `what` needs it, where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise StackError(f"{what} needs the {package or module} library: pip install {package or module}") from None


def version(package: str) -> str | None:
    """Return the installed version of a package without importing it; None too for one that was removed in part."""
    return _guarded(lambda: metadata.version(package))


def read_file(path: str | os.PathLike, most: int) -> bytes:
    """Return the bytes of a file. OSError for more than `most` of them, and for what may have no end or never come: a
    folder, a pipe, a device. ValueError for a name that no file can have."""
    if os.stat(path).st_size > most or not os.path.isfile(path):
        raise OSError(None, f"it is no file of at most {most:,} bytes")
    return Path(path).read_bytes()


def read_json(path: str | os.PathLike, what: str) -> Any:
    """Return the value that a JSON file holds. RecordError, naming `what` it is ("plan"), for a file that is none."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a number in JSON")

    try:
        return json.loads(read_file(path, 2**30), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{what} {os.fspath(path)!r} cannot be read: {_reason(error)}; accepted: JSON") from None


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file whole or not at all, in a folder that is made where it is missing: a temporary file beside it, then
    a rename. Follows a symbolic link. RecordError as of `check_target`, and where the disk is full."""
    target = check_target(path)
    part = target.with_name(f".{secrets.token_hex(6)}.part")
    with _told(f"{target.name!r} in the folder {str(target.parent)!r}"):
        try:
            part.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace"))
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


def check_folder(folder: str | os.PathLike) -> None:
    """Make a folder where it is missing; RecordError, before work is lost, where no file can be written there."""
    with _told(f"in the folder {os.fspath(folder)!r}"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=Path(folder)).close()


def check_target(path: str | os.PathLike) -> Path:
    """Return the file, links followed, that could be written there now; RecordError as of `check_folder`, and in the
    place of a folder, a device or a pipe."""
    with _told(repr(str(path))):
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise OSError(None, "it is a folder, a device or a pipe, not a file")
    check_folder(target.parent)
    return target


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
    except OSError as error:
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


def new_records_dir() -> Path:
    """Return where new records are saved by default: in data/records of a checkout, else in the working folder."""
    return Path.cwd() if INSTALLED else records_dir()


def cache_dir() -> Path:
    """Return a folder for compiled kernels, which are run, so that this user alone may write there: `TWELL_LAB_CACHE`,
    or one in the user's cache folder. Where that is not so, it is `private_folder()`, and a warning says why."""
    folder = Path(os.environ.get("TWELL_LAB_CACHE") or platformdirs.user_cache_path("twell-lab", appauthor=False))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if hasattr(os, "geteuid") and (facts.st_uid != os.geteuid() or facts.st_mode & 0o022):
            raise OSError(None, f"it belongs to user {facts.st_uid}, with mode {facts.st_mode & 0o777:o}")
        tempfile.TemporaryFile(dir=folder).close()  # root may write where the mode says no
        return folder
    except OSError as error:
        warnings.warn(f"{folder} is not used as a cache: {_reason(error)}. Each process compiles anew", stacklevel=2)
        return private_folder()


@cache
def private_folder() -> Path:
    """Return a temporary folder of this user's that ends with the process; StackError where none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="twell-lab-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StackError(f"no folder can be written ({_reason(error)}); TWELL_LAB_CACHE or TMPDIR names one") from error
    atexit.register(folder.cleanup)
    return Path(folder.name)


def describe_machine() -> dict:
    """Return this machine and its packages for a record, without names of hosts and users and without paths, and None
    for what is not to be had. cores: that this process may use. gpus: {name, capability ("9.0"), memory_gib, driver} of
    those that torch can use, else that nvidia-smi lists. cuda_driver: the newest CUDA that the driver runs ("13.0")."""
    cupy = next(iter(cupy_packages()), None)
    system = _guarded(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]) or platform.system()
    cpu = _guarded(lambda: re.findall(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.M)[0])
    _guarded(let_cupy_start)
    nvrtc = _guarded(lambda: import_module("cupy.cuda").nvrtc.getVersion())  # in CuPy 14 that is no module
    torch, listed = _guarded(lambda: import_module("torch")), _guarded(_nvidia_smi) or []
    found = _guarded(lambda: [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())])
    facts = lambda gpu: (gpu.name, f"{gpu.major}.{gpu.minor}", round(gpu.total_memory / 2**30, 1))
    usable = [(*facts(gpu), listed[0][-1] if listed else None) for gpu in found or []]
    return {
        "os": f"{system}, {platform.machine()}",
        "cpu": cpu or platform.processor() or None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "torch_cuda": _guarded(lambda: torch.version.cuda),
        "numpy": version("numpy"),
        "cupy": cupy and version(cupy),
        "cupy_package": cupy,
        "nvrtc": nvrtc and ".".join(map(str, nvrtc)),
        "gpus": [dict(zip(("name", "capability", "memory_gib", "driver"), gpu)) for gpu in usable or listed],
        "cuda_driver": _guarded(_cuda_driver),
    }


def memory() -> int | None:
    """Return the bytes of memory, free or not, of the machine, or of its container; None where neither says."""
    groups = map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    bounds = [_guarded(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    bounds += [_guarded(lambda: int(group.read_text())) for group in groups]  # "max": no limit, no number
    return min((bound for bound in bounds if bound), default=None)


def gpu() -> str | None:
    """Return the name of the GPU that torch uses by default, without the vendor's ("H100 80GB HBM3"); None without."""
    name = _guarded(lambda: import_module("torch").cuda.get_device_name())
    return re.sub(r"^(NVIDIA\s+)?((Tesla|GeForce)\s+)?", "", name) if name else None


def cupy_packages() -> list[str]:
    """Return the installed builds of CuPy, as pip names them. More than one is a fault."""
    return [name for name in ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy") if version(name) is not None]


def let_cupy_start() -> None:
    """Give CuPy another cache folder where it cannot make its own: importing it would fail then."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            Path("~/.cupy/kernel_cache").expanduser().mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            os.environ["CUPY_CACHE_DIR"] = str(cache_dir())


def check_stack() -> None:
    if fault := stack_fault():
        raise StackError(f"{fault[0]}; to mend it: {fault[1]}")


def stack_fault() -> tuple[str, str] | None:
    """Return a fault of this installation that would later give errors that do not name it, and the command that mends
    it: torch and CuPy were built for different major versions of CUDA, or two builds of CuPy are installed."""
    builds, built = cupy_packages(), _guarded(lambda: import_module("torch").version.cuda)
    theirs = major(built)
    mend = f"pip uninstall -y {' '.join(builds)} && pip install 'cupy-cuda{theirs or 12}x[ctk]>=14.0.1,<15'"
    if len(builds) > 1:
        return f"{' and '.join(builds)} are installed together and overwrite each other's files", mend
    ours = re.findall(r"cuda(\d+)x", "".join(builds))
    if theirs is None or ours in ([], [str(theirs)]):  # a CPU build of torch; no CuPy, or one built from its source
        return None
    what = f"{builds[0]} {version(builds[0])} for CUDA {ours[0]}, and both need the same major version"
    return f"torch {version('torch')} is built for CUDA {built} and {what}", mend


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


def _nvidia_smi() -> list[tuple]:
    """Return the name, capability, memory and driver of each GPU that the driver's program lists."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)  # while it is loaded, ten
    rows = re.findall(r"^([^,\n]+), (\d+\.\d+), ([^,]+), (.+)$", ran.stdout, re.M)
    size = lambda mib: round(int(mib) / 1024, 1) if mib.isdigit() else None  # some share the CPU's
    return [(name, capability, size(memory), driver) for name, capability, memory, driver in rows]
