"""Compiles the CUDA sources with NVRTC into cubins, for the GPU at hand or, on a machine without one, for any.

A cubin is cached under the kernel's name, the architecture, a digest of everything that went into it (the
source, every header it includes, the flags) and the compiler's version. `TWELL_LAB_CUBINS` names a folder of
cubins compiled elsewhere (`twell-lab compile` fills one): they are used first, and need no compiler here.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .. import core
from ..core import CompileError, DeviceError, StackError, let_cupy_start
from . import registry, sources

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
NEEDS_NVRTC = (
    "compiling CUDA kernels needs CuPy 14 and NVRTC; on a GPU machine `pip install 'twell-lab[cu12]'` "
    "(or [cu13], to match torch), elsewhere `pip install 'twell-lab[compile]'`"
)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel file. image: the ELF bytes; log: what ptxas reported (registers, spills)."""

    name: str
    image: bytes
    log: str


def _nvrtc():
    let_cupy_start()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        return nvrtc
    except (ImportError, RuntimeError, OSError) as error:
        raise StackError(f"{NEEDS_NVRTC} ({type(error).__name__}: {error})") from error


@cache
def compiler() -> tuple[int, int]:
    """NVRTC's version, for example (12, 9). Raises StackError, with the command that helps, without one."""
    return tuple(_nvrtc().getVersion())


@cache
def _cuda_include() -> str:
    """The folder of the headers cuda_bf16.h and cuda_fp16.h that belong to this NVRTC."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if not found or not Path(found, "cuda_fp16.h").is_file():
        raise StackError(f"cuda_fp16.h was not found beside NVRTC {compiler()}; {NEEDS_NVRTC}")
    return str(found)


def architecture(capability: tuple[int, int], file: str) -> str:
    """The NVRTC target of `file` for a GPU of `capability`, for example (9, 0) -> "sm_90".

    A GPU newer than the compiler gets the newest target of its own major version, whose cubins it runs.
    Raises DeviceError for a GPU older than sm_75 or one that this compiler knows no target for.
    """
    if capability < registry.OLDEST:
        raise DeviceError(
            f"this GPU is sm_{capability[0]}{capability[1]}; the kernels run on sm_75 (Turing, 2018) and newer"
        )
    kernel = registry.KERNELS.get(Path(file).stem)
    if kernel is not None and kernel.alone and kernel.runs_on(capability):
        return kernel.target("sm_{}{}".format(*capability))
    number = capability[0] * 10 + capability[1]
    if prebuilt := _prebuilt():
        known = {int(m[1]) for f in prebuilt.glob("*.cubin") if (m := re.search(r"-sm_(\d+)-", f.name))}
    else:
        known = set(_nvrtc().getSupportedArchs())
    usable = [k for k in known if k // 10 == capability[0] and k <= number]
    if not usable:
        raise DeviceError(f"no target for this GPU (sm_{number}): NVRTC or the cubin folder offers {sorted(known)}")
    return f"sm_{max(usable)}"


def _prebuilt() -> Path | None:
    """The folder that TWELL_LAB_CUBINS names, or None."""
    named = os.environ.get("TWELL_LAB_CUBINS")
    return Path(named) if named else None


def _flags(arch: str, defines: Mapping[str, object]) -> list[str]:
    values = [f"-D{k}" if v is True else f"-D{k}={v}" for k, v in sorted(defines.items())]
    # --fmad=false: the compiler must not fuse products and sums by itself. The kernels write fma where they mean it, so
    # that they compute the same bits on every GPU and in the simulator.
    fixed = ["--std=c++17", "--fmad=false", "--generate-line-info", "--ptxas-options=-v"]
    return [*fixed, f"--gpu-architecture={arch}", *values]


def _stem(file: str, arch: str, defines: Mapping[str, object]) -> str:
    digest = hashlib.sha256()
    for part in (*_flags(arch, defines), *(t for kv in sorted(sources.with_headers(file).items()) for t in kv)):
        digest.update(part.encode() + b"\0")
    return f"{Path(file).stem}-{arch}-{digest.hexdigest()[:20]}"


def compile(file: str, arch: str, defines: Mapping[str, object] = {}, *, cache_in: Path | None = None) -> Cubin:
    """The cubin of kernels/`file` for `arch`, with `defines` as macros (True: defined without a value).

    Looks in TWELL_LAB_CUBINS, then in the cache (`cache_in`, or the user's), then compiles.
    """
    stem = _stem(file, arch, defines)
    if prebuilt := _prebuilt():
        for path in sorted(prebuilt.glob(f"{stem}-nvrtc*.cubin")):
            return Cubin(path.stem, path.read_bytes(), "")
    name = f"{stem}-nvrtc{'.'.join(map(str, compiler()))}"
    folder = cache_in or core.cache_dir()
    if hit := _read_cached(folder, name):
        return hit
    image, log = _run_nvrtc(file, arch, defines)
    cubin = Cubin(name, image, log)
    _write_cached(folder, cubin)
    return cubin


def _run_nvrtc(file: str, arch: str, defines: Mapping[str, object]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(sources.with_headers(file)[file], file, (), ())
    includes = (f"-I{core.kernels_dir()}", f"-I{_cuda_include()}")
    try:
        nvrtc.compileProgram(program, (*_flags(arch, defines), *includes))
        # CuPy's getCUBIN has been seen to drop the last byte; an ELF image ignores one too many.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{file} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _read_cached(folder: Path, name: str) -> Cubin | None:
    """A cached cubin; None where there is none or it is incomplete: its log begins with its SHA-256."""
    try:
        image = (folder / f"{name}.cubin").read_bytes()
        digest, _, log = (folder / f"{name}.log").read_text().partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return Cubin(name, image, log) if digest == hashlib.sha256(image).hexdigest() else None


def _write_cached(folder: Path, cubin: Cubin) -> None:
    digest = hashlib.sha256(cubin.image).hexdigest()
    try:
        core.write_atomically(folder / f"{cubin.name}.cubin", cubin.image)
        core.write_atomically(folder / f"{cubin.name}.log", f"{digest}\n{cubin.log}")
    except core.RecordError as error:
        warnings.warn(f"kernel cache not written: it will be compiled again ({error})", stacklevel=3)


def resources(log: str) -> dict[str, dict[str, int]]:
    """What ptxas said of each kernel: {"registers", "spill_bytes", "stack_bytes", "shared_bytes"} by name."""
    found = {}
    for block in re.split(r"Compiling entry function '", log)[1:]:
        number = lambda pattern: int(m[1]) if (m := re.search(pattern, block)) else 0  # noqa: E731
        found[block[: block.index("'")]] = {
            "registers": number(r"Used (\d+) registers"),
            "spill_bytes": number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            "stack_bytes": number(r"(\d+) bytes stack frame"),
            "shared_bytes": number(r"(\d+) bytes smem"),
        }
    return found
