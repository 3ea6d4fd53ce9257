"""A reader's kernel on this machine's GPU, by NVRTC and CuPy. Only what the simulator found sound is launched here."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from ... import core
from ...core import CompileError
from ...cuda import compile as compiler
from .cases import Case


def compiled(text: str, name: str, arch: str, flags: Iterable[str] = ()) -> bytes:
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


def results(text: str, name: str, cases: list[Case]) -> list[dict[str, Tensor]]:
    """The outputs of each launch of the kernel `name`, on the CPU.

    Raises StackError without CuPy or with one that does not match torch, DeviceError for a GPU that is too old,
    CompileError for a source that NVRTC refuses.
    """
    core.check_stack()
    image = compiled(text, name, compiler.architecture(torch.cuda.get_device_capability()))
    import cupy  # `compiled` has found it

    path = core.private_folder() / f"puzzle-{name}.cubin"
    path.write_bytes(image)
    found = []
    with cupy.cuda.Device(torch.cuda.current_device()):
        function = cupy.RawModule(path=str(path)).get_function(name)
        for case in cases:
            there = {key: given.cuda() for key, given in case.arguments.items() if isinstance(given, Tensor)}
            values = [
                np.uint64(there[key].data_ptr()) if key in there else np.int32(given)
                for key, given in case.arguments.items()
            ]
            torch.cuda.synchronize()  # CuPy launches on a stream of its own
            function(case.grid, case.block, tuple(values))
            cupy.cuda.Device().synchronize()
            found.append({key: there[key].cpu() for key in case.wanted})
    return found
