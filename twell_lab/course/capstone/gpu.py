"""A reader's `down` on this machine's GPU: compiled by NVRTC, launched by CuPy, held against float64, and timed cold
beside the library's versions. Only what the simulator found sound is launched here."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ... import core
from ...core import CompileError, StackError
from ...cuda import compile as compiler
from ...cuda.launch import VALUE, run
from ...formats.twell import TILE, WORDS
from ...ops import clock as clocks
from ...ops.down import down
from ...ops.pack import pack
from . import cases
from .cases import D_FF, D_MODEL, NNZ, SLOTS, TIMED

VERSIONS = (1, 2, 3)  # of the library's down
YOURS = "yours"
KIND = "capstone"
CHECKED = 64  # rows of the timed launch that are compared with float64
_KEPT: list = []  # modules must outlive the launches


def dtype_here() -> torch.dtype:
    """bfloat16, or float16 on a GPU that is older than it."""
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def cubin(text: str, name: str, arch: str, flags: Iterable[str] = ()) -> bytes:
    """The cubin of a source, for an architecture such as "sm_75". flags: such as where its headers are.

    Raises StackError without NVRTC, CompileError with NVRTC's messages for a source that it refuses.
    """
    compiler.compiler()
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, f"{name}.cu", [], [])
    try:
        nvrtc.compileProgram(program, ("--std=c++17", f"--gpu-architecture={arch}", *flags))
        return nvrtc.getCUBIN(program) + b"\0"  # the length that CuPy asks for leaves out the last byte
    except nvrtc.NVRTCError as error:
        raise CompileError(nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)


def module_of(image: bytes):
    """Return CuPy's module of a cubin. CuPy keeps one for each path that it was given, whatever stands there later, so
    the file is named by what it holds."""
    import cupy

    path = core.private_folder() / f"{sha256(image).hexdigest()}.cubin"
    path.write_bytes(image)
    return cupy.RawModule(path=str(path))


def compiled(text: str, arch: str, dtype: torch.dtype = torch.bfloat16) -> bytes:
    """The cubin of a source that includes twell.cuh alone, for an architecture such as "sm_75".

    Raises StackError without NVRTC or CUDA's headers, CompileError with NVRTC's messages for a source that it refuses.
    """
    compiler.compiler()
    from cuda.pathfinder import find_nvidia_header_directory

    headers = find_nvidia_header_directory("cudart")
    if not headers:
        raise StackError(f"CUDA's headers were not found beside NVRTC; {compiler.NEEDS_NVRTC}")
    flags = (f"-D{VALUE[dtype]}", f"-I{core.kernels_dir()}", f"-I{headers}")
    return cubin(text, "down", arch, flags)


class Mine:
    """A reader's kernel, ready to be launched on the current GPU.

    Raises StackError without CuPy or with one that does not match torch, DeviceError for a GPU that is too old,
    CompileError as `compiled` does."""

    def __init__(self, text: str, threads: int, dtype: torch.dtype) -> None:
        core.check_stack()
        core.let_cupy_start()
        image = compiled(text, compiler.architecture(torch.cuda.get_device_capability()), dtype)
        import cupy  # `compiled` has found it

        self.cupy, self.threads = cupy, threads
        with cupy.cuda.Device(torch.cuda.current_device()):
            module = module_of(image)
            self.function = module.get_function("down")
        _KEPT.append(module)

    def __call__(self, packed: Tensor, gate: Tensor, down_t: Tensor, y: Tensor) -> Tensor:
        """Launch it on torch's current stream; returns y."""
        pointers = [np.uint64(t.data_ptr()) for t in (packed, gate, down_t, y)]
        sizes = [np.int32(n) for n in (down_t.shape[1], gate.shape[1], TILE, WORDS)]
        stream = self.cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with self.cupy.cuda.Device(torch.cuda.current_device()), stream:
            self.function((len(packed),), (self.threads,), (*pointers, *sizes))
        return y


def wrong(mine: Mine, threads: int) -> str | None:
    """Return what is wrong with it on the inputs of `cases.small`, in words; None if nothing is."""
    for of in cases.small(threads, dtype_here()):
        y = mine(*(t.cuda() for t in (of.packed, of.gate, of.down_t, of.y())))
        if found := cases.wrong(of, y.cpu()):
            return f"with {of.said}: {found}"
    return None


def timed(mine: Mine, tokens: int = TIMED, rounds: int = 30) -> list[dict]:
    """Rows of kind "capstone": the reader's kernel and each version of the library's, cold, in turn.

    Raises clocks.WrongResult, before any clock starts, for one whose rows are not as in float64."""
    dtype = dtype_here()
    dense, inputs = clocks.workload(tokens, D_MODEL, D_FF, NNZ, "lognormal", dtype, "cuda")
    down_t = dense.down_proj.weight.detach().t().contiguous()
    gates = [linear(x, dense.gate_proj.weight) for x in inputs]
    packs = [run(pack, gate, TILE, WORDS) for gate in gates]
    y, none = torch.empty(tokens, D_MODEL, dtype=dtype, device="cuda"), (None, None, None)

    def yours(turn: int) -> Tensor:
        i = turn % len(packs)
        return mine(packs[i], gates[i], down_t, y)

    def library(version: int):
        def call(turn: int) -> Tensor:
            i = turn % len(packs)
            return run(down, packs[i], gates[i], none, down_t, None, D_FF, TILE, version)

        return call

    calls = {YOURS: yours} | {f"down_v{version}": library(version) for version in VERSIONS}
    crowded = (packs[0][..., 0] > SLOTS).any(1).nonzero()[:, 0]
    rows = torch.cat([crowded[: CHECKED // 2], torch.linspace(0, tokens - 1, CHECKED, device="cuda").long()])
    hidden = gates[0][rows].double().relu()
    exact, size = hidden @ down_t.double(), hidden @ down_t.double().abs()
    for name, call in calls.items():
        y.fill_(torch.nan)
        if not cases.agrees(call(0)[rows], exact, size).all():
            raise clocks.WrongResult(f"{name} is not as in float64 on {tokens:,} tokens: nothing was timed")
    shared = {
        "kind": KIND,
        "device": torch.cuda.get_device_name(),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "d_model": D_MODEL,
        "d_ff": D_FF,
        "nnz": sum(float(packed[..., 0].sum()) for packed in packs) / (tokens * len(packs)),
        "workload": "independent, lognormal",
    }
    found = []
    for name, samples in clocks.time_cuda(calls, rounds).items():
        ms, spread = clocks.quartiles(samples)
        found.append({**shared, "path": name, "ms": ms, "spread": spread})
    return found
