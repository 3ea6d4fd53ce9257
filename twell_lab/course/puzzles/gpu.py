"""A reader's kernel on this machine's GPU, by CuPy. Only what the simulator found sound is launched here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...core import machine
from ...core.errors import CompileError, StackError
from .cases import Case


def results(text: str, kernel: str, cases: list[Case]) -> list[dict[str, Tensor]]:
    """The outputs of each launch, on the CPU. text: the source, which includes no header of this library.

    Raises StackError without CuPy or with one that does not match torch, CompileError for a source that NVRTC refuses.
    """
    machine.check_stack()
    machine.let_cupy_start()
    try:
        import cupy
    except ImportError as error:
        raise StackError("it needs CuPy, which is not installed") from error
    device = torch.cuda.current_device()
    found = []
    with cupy.cuda.Device(device):
        try:
            function = cupy.RawModule(code=text, options=("--std=c++17",)).get_function(kernel)
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(str(error)) from error
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        for case in cases:
            there = {name: _moved(given, device) for name, given in case.arguments.items()}
            values = [
                np.uint64(given.data_ptr()) if isinstance(given, Tensor) else np.int32(given)
                for given in there.values()
            ]
            function(case.grid, case.block, tuple(values), stream=stream)
            torch.cuda.synchronize()
            found.append({name: there[name].cpu() for name in case.wanted})
    return found


def _moved(given: Tensor | int, device: int) -> Tensor | int:
    return given.to(f"cuda:{device}", copy=True) if isinstance(given, Tensor) else given
