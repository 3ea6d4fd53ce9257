"""A reader's `down` on this machine's GPU: compiled by NVRTC, launched by CuPy, held against float64, and timed cold
beside the library's versions. Only what the simulator found sound is launched here."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
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
from ..recorded import LOGNORMAL
from . import cases
from .cases import D_FF, D_MODEL, NNZ, SLOTS, TIMED

VERSIONS = (1, 2, 3)  # of the library's down
YOURS = "yours"
KIND = "capstone"
CHECKED = 64  # rows of the timed launch that are compared with float64
_KEPT: list = []  # modules must outlive the launches


def cubin(text: str, name: str, arch: str, flags: Iterable[str] = ()) -> bytes:
    """The cubin of a source, for an architecture such as "sm_75". Raises StackError without NVRTC, CompileError with
    NVRTC's messages for a source that it refuses."""
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


def headers(dtype: torch.dtype) -> tuple[str, ...]:
    """NVRTC's flags for a source that includes twell.cuh. Raises StackError without NVRTC or CUDA's headers."""
    compiler.compiler()
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    if not found:
        raise StackError(f"CUDA's headers were not found beside NVRTC; {compiler.NEEDS_NVRTC}")
    return f"-D{VALUE[dtype]}", f"-I{core.kernels_dir()}", f"-I{found}"


class Kernel:
    """A kernel of a reader's, ready to be launched on the current GPU. flags: as of `cubin`, whose errors it raises.
    StackError without a CuPy that matches torch, DeviceError for a GPU that is too old."""

    def __init__(self, text: str, name: str, flags: Iterable[str] = ()) -> None:
        core.check_stack()
        core.let_cupy_start()
        image = cubin(text, name, compiler.architecture(torch.cuda.get_device_capability()), flags)
        import cupy  # `cubin` has found it

        # CuPy keeps a module for each path that it was given, whatever stands there later: the name says what it holds.
        path = core.private_folder() / f"{sha256(image).hexdigest()}.cubin"
        path.write_bytes(image)
        self.cupy = cupy
        with cupy.cuda.Device(torch.cuda.current_device()):
            module = cupy.RawModule(path=str(path))
            self.function = module.get_function(name)
        _KEPT.append(module)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], given: Iterable[Tensor | int]) -> None:
        """Launch it on torch's current stream."""
        values = [np.uint64(each.data_ptr()) if isinstance(each, Tensor) else np.int32(each) for each in given]
        stream = self.cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with self.cupy.cuda.Device(torch.cuda.current_device()), stream:
            self.function(grid, block, tuple(values))


class Mine(Kernel):
    """A reader's `down`."""

    def __init__(self, text: str, threads: int, dtype: torch.dtype) -> None:
        super().__init__(text, "down", headers(dtype))
        self.threads = threads

    def launch(self, packed: Tensor, gate: Tensor, down_t: Tensor, y: Tensor) -> Tensor:
        """Launch it, and return y."""
        given = packed, gate, down_t, y, down_t.shape[1], gate.shape[1], TILE, WORDS
        self((len(packed),), (self.threads,), given)
        return y


def wrong(mine: Mine) -> str | None:
    """Return what is wrong with it on the inputs of `cases.small`, in words; None if nothing is."""
    for of in cases.small(mine.threads, clocks.dtype_for("cuda")):
        y = mine.launch(*(t.cuda() for t in (of.packed, of.gate, of.down_t, of.y())))
        if found := cases.wrong(of, y.cpu()):
            return f"with {of.said}: {found}"
    return None


def timed(mine: Mine, tokens: int = TIMED, rounds: int = 30) -> list[dict]:
    """Rows of kind "capstone": the reader's kernel and the library's versions, cold, in turn. WrongResult, before any
    clock starts, for one whose rows are not as in float64."""
    dtype = clocks.dtype_for("cuda")
    dense, inputs = clocks.workload(tokens, D_MODEL, D_FF, NNZ, "lognormal", dtype, "cuda")
    down_t = dense.down_proj.weight.detach().t().contiguous()
    gates = [linear(x, dense.gate_proj.weight) for x in inputs]
    packs = [run(pack, gate, TILE, WORDS) for gate in gates]
    y, none = torch.empty(tokens, D_MODEL, dtype=dtype, device="cuda"), (None, None, None)

    given = lambda turn: (packs[turn % len(packs)], gates[turn % len(gates)])
    ours = lambda turn, version: run(down, *given(turn), none, down_t, None, D_FF, TILE, version)
    calls = {YOURS: lambda turn: mine.launch(*given(turn), down_t, y)}
    calls |= {f"down_v{version}": partial(ours, version=version) for version in VERSIONS}
    crowded = (packs[0][..., 0] > SLOTS).any(1).nonzero()[:, 0]
    rows = torch.cat([crowded[: CHECKED // 2], torch.linspace(0, tokens - 1, CHECKED, device="cuda").long()])
    hidden = gates[0][rows].double().relu()
    exact, size = hidden @ down_t.double(), hidden @ down_t.double().abs()
    for name, call in calls.items():
        y.fill_(torch.nan)
        if not cases.agrees(call(0)[rows], exact, size).all():
            raise clocks.WrongResult(f"{name} is not as in float64 on {tokens:,} tokens: nothing was timed")
    shared = {"kind": KIND, "device": torch.cuda.get_device_name(), "dtype": str(dtype).removeprefix("torch.")}
    shared |= {"tokens": tokens, "d_model": D_MODEL, "d_ff": D_FF, "workload": LOGNORMAL}
    shared["nnz"] = sum(float(packed[..., 0].sum()) for packed in packs) / (tokens * len(packs))
    took = {name: clocks.quartiles(samples) for name, samples in clocks.time_cuda(calls, rounds).items()}
    return [shared | {"path": name, "ms": ms, "spread": spread} for name, (ms, spread) in took.items()]
