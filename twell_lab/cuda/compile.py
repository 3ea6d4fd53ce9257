"""Compiles the CUDA sources with NVRTC into cubins, for the GPU at hand or, on a machine without one, for any.

A cubin is cached under the kernel's name, the architecture, a digest of everything that went into it (the source, every
header it includes, the flags) and the compiler's version. `TWELL_LAB_CUBINS` names a folder of cubins that were
compiled elsewhere (`ops.kernels.prebuild` fills one): they are used first, and need no compiler here."""

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
from ..core import CompileError, DeviceError, RecordError, StackError

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
OLDEST = (7, 5)  # compute capability of the oldest GPU that runs any kernel
NEEDS_NVRTC = (
    "compiling CUDA kernels needs CuPy 14 and NVRTC; on a GPU machine `pip install 'cupy-cuda12x[ctk]'` (or 13x, to "
    "match torch), elsewhere `pip install cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12 "
    "nvidia-cuda-nvcc-cu12`"
)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel file. image: the ELF bytes; log: what ptxas reported (registers, spills)."""

    name: str
    image: bytes
    log: str


def with_headers(file: str) -> dict[str, str]:
    """Return the text of kernels/`file` and, recursively, of every header there that it includes: name -> text.

    Raises CompileError for a file that is not there."""
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = core.kernels_dir() / name
        if not path.is_file():
            raise CompileError(f"no kernel source {name} in {core.kernels_dir()}")
        found[name] = path.read_text(encoding="utf-8")
        waiting += re.findall(r'^\s*#\s*include\s+"([^"]+)"', found[name], re.M)[::-1]
    return found


def _nvrtc():
    core.let_cupy_start()
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        return nvrtc
    except (ImportError, RuntimeError, OSError) as error:
        raise StackError(f"{NEEDS_NVRTC} ({type(error).__name__}: {error})") from error


@cache
def compiler() -> tuple[int, int]:
    """Return NVRTC's version, for example (12, 9). Raises StackError, with the command that helps, without one."""
    return tuple(_nvrtc().getVersion())


@cache
def _cuda_include() -> str:
    """The folder of the headers cuda_bf16.h and cuda_fp16.h that belong to this NVRTC."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if not found or not Path(found, "cuda_fp16.h").is_file():
        raise StackError(f"cuda_fp16.h was not found beside NVRTC {compiler()}; {NEEDS_NVRTC}")
    return str(found)


def architecture(capability: tuple[int, int], alone: bool = False) -> str:
    """Return the target for a GPU of this capability: (9, 0) -> "sm_90", or "sm_90a" for a source that runs `alone`.

    A GPU newer than the compiler gets the newest target of its own major version, whose cubins it runs. Raises
    DeviceError for a GPU older than sm_75 or one that this compiler knows no target for."""
    number = capability[0] * 10 + capability[1]
    if capability < OLDEST:
        raise DeviceError(f"this GPU is sm_{number}; the kernels run on sm_75 (Turing, 2018) and newer")
    if alone:
        return f"sm_{number}a"
    if prebuilt := _prebuilt():
        known = {int(m[1]) for f in prebuilt.glob("*.cubin") if (m := re.search(r"-sm_(\d+)-", f.name))}
    else:
        known = set(_nvrtc().getSupportedArchs())
    usable = [k for k in known if k // 10 == capability[0] and k <= number]
    if not usable:
        raise DeviceError(f"no target for this GPU (sm_{number}): NVRTC or the cubin folder offers {sorted(known)}")
    return f"sm_{max(usable)}"


def _prebuilt() -> Path | None:
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
    for part in (*_flags(arch, defines), *(t for kv in sorted(with_headers(file).items()) for t in kv)):
        digest.update(part.encode() + b"\0")
    return f"{Path(file).stem}-{arch}-{digest.hexdigest()[:20]}"


def compile(file: str, arch: str, defines: Mapping[str, object] = {}, *, cache_in: Path | None = None) -> Cubin:
    """Return the cubin of kernels/`file` for `arch`, with `defines` as macros (True: defined without a value).

    Looks in TWELL_LAB_CUBINS, then in the cache (`cache_in`, or the user's), then compiles. Where the cache cannot be
    written it warns, and compiles in each process. Raises CompileError for a source that NVRTC refuses."""
    stem = _stem(file, arch, defines)
    if prebuilt := _prebuilt():
        for path in sorted(prebuilt.glob(f"{stem}-nvrtc*.cubin")):
            return Cubin(path.stem, path.read_bytes(), "")
    name = f"{stem}-nvrtc{'.'.join(map(str, compiler()))}"
    folder = cache_in or core.cache_dir()
    log = folder / f"{name}.log"
    if log.is_file():  # written last
        return Cubin(name, log.with_suffix(".cubin").read_bytes(), log.read_text(encoding="utf-8"))
    cubin = Cubin(name, *_run_nvrtc(file, arch, defines))
    try:
        for ending, content in (("cubin", cubin.image), ("log", cubin.log)):
            core.write_atomically(folder / f"{name}.{ending}", content)
    except RecordError as error:
        warnings.warn(f"kernel cache not written ({error}): it will be compiled again", stacklevel=2)
    return cubin


def _run_nvrtc(file: str, arch: str, defines: Mapping[str, object]) -> tuple[bytes, str]:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(with_headers(file)[file], file, (), ())
    includes = (f"-I{core.kernels_dir()}", f"-I{_cuda_include()}")
    try:
        nvrtc.compileProgram(program, (*_flags(arch, defines), *includes))
        # CuPy's getCUBIN has been seen to drop the last byte; an ELF image ignores one too many.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{file} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
