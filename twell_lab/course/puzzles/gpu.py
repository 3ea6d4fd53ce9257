"""A reader's kernel on this machine's GPU, by NVRTC and CuPy. Only what the simulator found sound is launched here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ... import core
from ...cuda import compile as compiler
from ..capstone.gpu import cubin, module_of
from .cases import Case


def results(text: str, name: str, cases: list[Case]) -> list[dict[str, Tensor]]:
    """The outputs of each launch of the kernel `name`, on the CPU.

    Raises StackError without CuPy or with one that does not match torch, DeviceError for a GPU that is too old,
    CompileError for a source that NVRTC refuses.
    """
    core.check_stack()
    image = cubin(text, name, compiler.architecture(torch.cuda.get_device_capability()))
    import cupy  # `cubin` has found it

    found = []
    with cupy.cuda.Device(torch.cuda.current_device()):
        function = module_of(image).get_function(name)
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
