"""Loading compiled kernels and launching them: on a GPU through the driver, on CPU tensors in the simulator.

On torch's current stream; nothing waits for the GPU. The only state is the cache of loaded kernels.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch
from torch import Tensor

from ..core import machine
from ..core.errors import DeviceError, StackError
from . import cubins, macros

_DEFINE = macros.VALUE
_BY_VALUE = (ctypes._SimpleCData, ctypes.Array)
_NO_CONTEXT = (
    201  # CUDA_ERROR_INVALID_CONTEXT: a thread, such as autograd's, in which torch has not had to ask for anything yet
)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory that any kernel may ask for
_loaded: dict[tuple, int] = {}
_modules: list = []  # keeps the loaded modules alive
_lock = threading.Lock()


def _kernel(file: str, name: str, defines: tuple, device: torch.device, shared: int = 0) -> int:
    """Driver handle of one kernel on one device, compiled and loaded on first use.

    shared: dynamic shared memory in bytes that its launches ask for; above 48 KiB a kernel must be allowed it, once.
    """
    key = (file, name, defines, device.index, shared)
    if key not in _loaded:
        with _lock:
            if key not in _loaded:
                _loaded[key] = _load(file, name, defines, device, shared)
    return _loaded[key]


def loaded_kernels() -> set[str]:
    """The names of the kernels' sources of which this process has launched something on a GPU, without their ending."""
    return {file.removesuffix(".cu") for file, *_ in _loaded}


def _load(file: str, name: str, defines: tuple, device: torch.device, shared: int) -> int:
    from ..core.machine import check_stack

    check_stack()
    machine.let_cupy_start()
    try:
        from cupy.cuda import driver
        from cupy.cuda.function import Module
    except ImportError as error:
        raise StackError(f"running the CUDA kernels needs CuPy; {cubins.NEEDS_NVRTC}") from error
    arch = cubins.architecture(torch.cuda.get_device_capability(device), file)
    cubin = cubins.compile(file, arch, dict(defines))
    with torch.cuda.device(device):
        enter(device)
        module = Module()
        module.load(cubin.image)
        _modules.append(module)
        kernel = module.get_function(name).ptr
        if shared > _SHARED_BY_DEFAULT:
            driver.funcSetAttribute(kernel, _MAX_DYNAMIC_SHARED, shared)
        return kernel


def enter(device: torch.device) -> None:
    """Make the primary context of torch's current device, which this is, the calling thread's."""
    from cupy.cuda import runtime

    runtime.setDevice(device.index)


def _launch(
    file: str, name: str, defines: tuple, grid: tuple, block: tuple, device: torch.device, arguments, shared: int = 0
) -> None:
    """Launch kernel `name` of `file`.

    arguments: a tensor, None, a ctypes number, or a ctypes array that is passed by value (a tensor map) for each
    parameter, in order. shared: bytes of dynamic shared memory.
    """
    if device.type == "cpu":
        from ..simulator import program

        return program.launch(file, name, defines, grid, block, arguments)
    if torch._C._cuda_getDevice() != device.index:  # torch.cuda.device() costs more than the comparison
        with torch.cuda.device(device):
            return _launch(file, name, defines, grid, block, device, arguments, shared)
    kernel = _loaded.get((file, name, defines, device.index, shared)) or _kernel(file, name, defines, device, shared)
    from cupy.cuda import driver

    values = [a if isinstance(a, _BY_VALUE) else _pointer(a) for a in arguments]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    launch = (
        kernel,
        *grid,
        1,
        *block,
        1,
        shared,
        torch._C._cuda_getCurrentRawStream(device.index),
        ctypes.addressof(addresses),
        0,
    )
    try:
        try:
            driver.launchKernel(*launch)
        except driver.CUDADriverError as error:
            if error.status != _NO_CONTEXT:
                raise
            enter(device)
            driver.launchKernel(*launch)
    except driver.CUDADriverError as error:
        raise DeviceError(
            f"the driver refused a launch of {name} with grid {grid}, block {block}, {shared} bytes of shared memory: "
            f"{error}"
        ) from error


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


def _aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


@cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
