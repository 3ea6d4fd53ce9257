"""What this machine is, as every record says it, and whether the installed packages fit each other.

A probe that fails gives None, because a measurement must not be lost to a missing tool. No host name, user name or path
is reported. Importing this file touches no GPU.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from . import folders
from .errors import StackError

CUPY_PACKAGES = ("cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy")
CUPY_BOUNDS = ">=14.0.1,<15"
_SMI_SECONDS = 20  # a driver that is being loaded can take ten


def describe() -> dict:
    """This machine and its packages as a dict that JSON can hold, for a record.

    Returns:
        os, cpu: names. cores: how many this process may use. python, torch, numpy, cupy, nvrtc: versions, None for
        what is missing. cupy_package: the installed build of CuPy. torch_cuda: the CUDA version torch was built for,
        None for a CPU build. gpus: a list of {name, capability ("9.0"), memory_gib, driver}. cuda_driver: the newest
        CUDA version that the driver runs, for example "13.0".
    """
    return {
        "os": _guarded(_os),
        "cpu": _guarded(_cpu),
        "cores": _guarded(_cores),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torch_cuda": _guarded(torch_cuda),
        "numpy": _version("numpy"),
        "cupy": _guarded(lambda: _version(cupy_packages()[0])),
        "cupy_package": _guarded(lambda: cupy_packages()[0]),
        "nvrtc": _guarded(_nvrtc),
        "gpus": _guarded(gpus) or [],
        "cuda_driver": _guarded(cuda_driver),
    }


def memory() -> int | None:
    """Bytes of memory that this process may use: those of the machine, or fewer where its container or `ulimit -v` sets
    a lower limit. None where the system does not say. How much is free right now does not count."""
    bounds = [_guarded(lambda: os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")), _guarded(_address_space)]
    for bound in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        bounds.append(_guarded(lambda file=bound: _number_in(file)))
    return min((bound for bound in bounds if bound is not None and bound > 0), default=None)


def _address_space() -> int | None:
    import resource

    bound = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if bound == resource.RLIM_INFINITY else bound


def _number_in(file: str) -> int:
    with open(file, encoding="ascii") as opened:
        return int(opened.read())  # ValueError for "max", which is no limit


def gpu() -> str | None:
    """The name of the GPU that torch uses by default, without the vendor's ("H100 80GB HBM3"). None without a GPU."""

    def current() -> str | None:
        import torch

        return torch.cuda.get_device_name() if _torch_sees_gpu() else None

    name = _guarded(current)
    return re.sub(r"^(NVIDIA\s+)?((Tesla|GeForce)\s+)?", "", name) if name else None


def gpus() -> list[dict]:
    """The GPUs that torch can use or, where it can use none, those that nvidia-smi lists. As in `describe`."""
    listed = _guarded(_nvidia_smi) or []
    usable = _guarded(_torch_gpus) or []
    for found in usable:
        found["driver"] = listed[0]["driver"] if listed else None
    return usable or listed


def let_cupy_start() -> None:
    """Make sure that CuPy can be imported: it makes a cache folder and fails where it cannot, so that this process then
    gives it another one."""
    if "CUPY_CACHE_DIR" in os.environ:
        return
    try:
        folders.make_folder(Path("~/.cupy/kernel_cache").expanduser())
    except (OSError, RuntimeError):
        if folder := folders.cache_dir() or folders.private_folder():
            os.environ["CUPY_CACHE_DIR"] = str(folder)


def check_stack() -> None:
    """Raise StackError where torch and CuPy were built for different major versions of CUDA, or two builds of CuPy are
    installed.

    Both packages would load, each with its own runtime and compiler, and fail later with errors that name neither. A
    CPU build of torch, or no CuPy, is accepted.
    """
    if fault := stack_fault():
        raise StackError(f"{fault[0]}; to mend it: {fault[1]}")


def stack_fault() -> tuple[str, str] | None:
    """What `check_stack` objects to, and the command that mends it. None where the packages fit."""
    builds, theirs = cupy_packages(), _guarded(torch_cuda)
    if not builds:
        return None
    mend = f"pip uninstall -y {' '.join(builds)} && pip install 'cupy-cuda{major(theirs) or 12}x[ctk]{CUPY_BOUNDS}'"
    if len(builds) > 1:
        return f"{' and '.join(builds)} are installed together and overwrite each other's files", mend
    ours = _guarded(_cupy_major)
    if theirs is None or ours is None or major(theirs) == ours:
        return None
    return (
        f"torch {_version('torch')} is built for CUDA {theirs} and {builds[0]} {_version(builds[0])} for CUDA {ours}, "
        "and both need the same major version",
        mend,
    )


def major(cuda: str | None) -> int | None:
    """ "12.8" -> 12"""
    return int(cuda.split(".")[0]) if cuda else None


def torch_cuda() -> str | None:
    """The CUDA version torch was built for, for example "12.8"; None for a CPU build. Raises ImportError without
    torch."""
    import torch

    return torch.version.cuda


def cupy_packages() -> list[str]:
    """The installed builds of CuPy, as pip names them. More than one is a fault."""
    return [name for name in CUPY_PACKAGES if _version(name) is not None]


def cuda_driver() -> str | None:
    """The newest CUDA version the installed driver runs, for example "12.8"; None without a driver."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            driver = ctypes.CDLL(library)
        except OSError:
            continue
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) == 0:  # works without cuInit, so no GPU is touched
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return None


def _guarded(probe: Callable):
    """What the probe returns; None if it raises, which broken installations do with errors of any kind."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about an old driver: `twell-lab doctor` says it better
            return probe()
    except Exception:
        return None


def _version(package: str) -> str | None:
    """The installed version of a package, without importing it."""
    try:
        return metadata.version(package)
    except Exception:  # not only PackageNotFoundError: a package that was removed in part has broken metadata
        return None


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = f"{platform.system()} {platform.mac_ver()[0] or platform.release()}"
    return f"{name}, {platform.machine()}"


def _cpu() -> str | None:
    if platform.system() == "Darwin":
        asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout.strip()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as f:
            if named := re.search(r"^model name\s*:\s*(.+)$", f.read(), re.M):
                return named[1].strip()
    return platform.processor() or None


def _cores() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def _nvrtc() -> str:
    let_cupy_start()
    from cupy.cuda import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def _cupy_major() -> int:
    """The CUDA major version that the installed CuPy was built for: the name of a wheel says it, a source build is
    asked."""
    if numbered := re.search(r"cuda(\d+)x", cupy_packages()[0]):
        return int(numbered[1])
    from cupy.cuda import driver

    return driver.get_build_version() // 1000


def _torch_sees_gpu() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def _torch_gpus() -> list[dict]:
    import torch

    if not _torch_sees_gpu():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_gib": round(p.total_memory / 2**30, 1)}
        for p in found
    ]


def _nvidia_smi() -> list[dict]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
    lines = ([field.strip() for field in line.split(",")] for line in answer.stdout.splitlines())
    return [
        {
            "name": fields[0],
            "capability": fields[1],
            "memory_gib": round(int(fields[2]) / 1024, 1) if fields[2].isdigit() else None,
            "driver": fields[3],
        }
        for fields in lines
        if len(fields) == 4 and re.fullmatch(r"\d+\.\d+", fields[1])
    ]
