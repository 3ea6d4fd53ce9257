"""Loading compiled kernels and launching them: on a GPU through the driver, on CPU tensors in the simulator.

On torch's current stream; nothing waits for the GPU. A launch is prepared once for each thread (`_Prepared`): the
driver's handle, and one block of memory that the driver reads the grid and the arguments from. From then on a launch
writes numbers into that block and calls the driver.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Sequence
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from ..core import machine
from ..core.errors import DeviceError, InputError, StackError
from . import cubins, macros, sources

DEFINE = macros.VALUE
_NO_CONTEXT = (
    201  # CUDA_ERROR_INVALID_CONTEXT: a thread, such as autograd's, in which torch has not had to ask for anything yet
)
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_EARLY_DRIVER = (
    12_030  # CUDA 12.3: from here on graphs can hold launches that may start before the one before has ended
)
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_MOST_KERNELS, _MOST_PREPARED = 4096, 1024  # kept at most; what was not used for longest goes
_ALIGNED = 64  # bytes: what a tensor map asks for
_CONFIG = "7I4xQQI12x"  # CUlaunchConfig of cuda.h: grid, block, shared, stream, attributes, how many; up to _ALIGNED
_SLOTS = {"P": "Q", "H": "QQ", "i": "i4x", "q": "q", "M": "128s"}  # kinds of arguments, as struct has them
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch built for CPUs alone
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_KINDS = {"int": "i", "unsigned": "i", "long long": "q", "TensorMap": "M"}  # of parameters that are no pointers
_loaded: dict[tuple, int] = {}
_modules: list = []  # keeps the loaded modules alive
_lock = threading.Lock()


class Kernel:
    """One kernel as it is launched. Made by `kernel`, which gives the same one for the same description."""

    __slots__ = ("defines", "early", "file", "kinds", "name", "shared", "threads")

    def __init__(
        self, file: str, name: str, defines: tuple, kinds: str, threads: int, shared: int = 0, early: bool = False
    ):
        if not set(kinds) <= set(_SLOTS):
            raise InputError(f"kinds of arguments are {kinds!r}; {''.join(_SLOTS)} are accepted")
        self.file, self.name, self.defines, self.kinds = file, name, defines, kinds
        self.threads, self.shared, self.early = threads, shared, early

    def launch(self, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
        """Run it on `device` for a grid of blocks.

        arguments: for each kind, P a tensor, None or (on a GPU) an address, H two of those; i and q a whole number; M
        the bytes of a tensor map. Raises DeviceError if the driver refuses."""
        _launch(self, device, grid, arguments)

    def check(self) -> None:
        """Raise InputError where its arguments or its block are not what the source says."""
        entry = sources.entries(self.file, self.defines)[self.name]
        kinds = "".join("P" if each.pointer else _KINDS.get(each.type, "H") for each in entry.parameters)
        if self.kinds != kinds or self.threads > entry.threads:
            told = ", ".join(f"{each.type}{'*' if each.pointer else ''} {each.name}" for each in entry.parameters)
            raise InputError(
                f"{self.name} of {self.file} is to be launched with arguments {self.kinds} and {self.threads} threads; "
                f"{kinds} ({told}) and at most {entry.threads} are accepted"
            )


@lru_cache(maxsize=_MOST_KERNELS)
def kernel(
    file: str, name: str, defines: tuple, kinds: str, threads: int, shared: int = 0, early: bool = False
) -> Kernel:
    """The kernel `name` of kernels/`file`, compiled with the macros `defines`.

    kinds: a letter for each parameter in order: P pointer, H structure of two pointers, i 32-bit and q 64-bit integer,
    M tensor map. threads: of a block. shared: bytes of dynamic shared memory. early: it may start before the kernel in
    front of it has ended, and waits inside for what it reads; where GPU and driver can."""
    return Kernel(file, name, defines, kinds, threads, shared, early)


def loaded_kernels() -> set[str]:
    """The names of the kernels' sources of which this process has launched something on a GPU, without their ending."""
    return {file.removesuffix(".cu") for file, *_ in list(_loaded)}


def _launch(made: Kernel, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
    """What every launch goes through; see Kernel.launch."""
    if device.type == "cpu":
        from ..simulator import program

        return program.launch(made.file, made.name, made.defines, grid, (made.threads, 1), arguments)
    index = device.index
    if _current_device() != index:  # torch.cuda.device() costs more than the comparison
        with torch.cuda.device(device):
            return _launch(made, device, grid, arguments)
    values = [a if type(a) is int or type(a) is bytes else 0 if a is None else a.data_ptr() for a in arguments]
    _own.prepared(made, index).launch(grid, _current_stream(index), values)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Prepared:
    """A kernel loaded on one device, and the memory that one thread's launches of it are read from."""

    def __init__(self, made: Kernel, index: int):
        device = torch.device("cuda", index)
        _make_context_current(index)
        self.made, self.device, function = made, device, _kernel(made, device)
        layout, offsets = _layout(made.kinds)
        room = (ctypes.c_char * (layout.size + _ALIGNED))()
        start = -ctypes.addressof(room) % _ALIGNED
        base = ctypes.addressof(room) + start
        self.addresses = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        early = made.early and _may_start_early(index)
        self.fixed = (1, made.threads, 1, 1, made.shared)
        self.attributes = (ctypes.addressof(self.attribute), 1) if early else (0, 0)
        self.write = partial(layout.pack_into, room, start)
        start_it, pointer = _driver().cuLaunchKernelEx, ctypes.c_void_p
        self.start = partial(
            start_it, pointer(base), pointer(function), pointer(ctypes.addressof(self.addresses)), None
        )

    def launch(self, grid: tuple[int, int], stream: int, values: list) -> None:
        self.write(*grid, *self.fixed, stream, *self.attributes, *values)
        status = self.start()
        if status == _NO_CONTEXT:
            enter(self.device)
            status = self.start()
        if status:
            made = self.made
            raise DeviceError(
                f"the driver refused a launch of {made.name} with grid {grid}, {made.threads} threads a block and "
                f"{made.shared} bytes of shared memory: CUDA error {status}"
            )


class _Own(threading.local):
    """What each thread has for itself: two threads never write into the same memory."""

    def __init__(self):
        self.prepared = lru_cache(maxsize=_MOST_PREPARED)(_Prepared)


_own = _Own()


@cache
def _layout(kinds: str) -> tuple[struct.Struct, list[int]]:
    """How a launch lies in memory: the configuration, then the arguments; and where each argument starts."""
    form, offsets = "<" + _CONFIG, []
    for kind in kinds:
        at = struct.calcsize(form)
        gap = -at % (_ALIGNED if kind == "M" else 8)
        offsets.append(at + gap)
        form += (f"{gap}x" if gap else "") + _SLOTS[kind]
    return struct.Struct(form), offsets


@cache
def _driver():
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise StackError(f"launching kernels needs an NVIDIA driver of CUDA 12 or newer ({error})") from error
    return driver


@cache
def _may_start_early(index: int) -> bool:
    version = ctypes.c_int(0)
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return torch.cuda.get_device_capability(index) >= (9, 0) and version.value >= _EARLY_DRIVER


def _make_context_current(index: int) -> None:
    """Give this thread torch's context if it has none: the driver launches into it, and torch sets it only when it
    must."""
    context, driver = ctypes.c_void_p(), _driver()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) or driver.cuCtxSetCurrent(context)
        if status:
            raise DeviceError(f"the driver gave no context for CUDA device {index}: CUDA error {status}")


def _kernel(made: Kernel, device: torch.device) -> int:
    """Driver handle of one kernel on one device, compiled and loaded on first use.

    Dynamic shared memory above 48 KiB a kernel must be allowed, once.
    """
    key = (made.file, made.name, made.defines, device.index, made.shared)
    if key not in _loaded:
        with _lock:
            if key not in _loaded:
                _loaded[key] = _load(made, device)
    return _loaded[key]


def _load(made: Kernel, device: torch.device) -> int:
    from ..core.machine import check_stack

    check_stack()
    made.check()
    machine.let_cupy_start()
    try:
        from cupy.cuda import driver
        from cupy.cuda.function import Module
    except ImportError as error:
        raise StackError(f"running the CUDA kernels needs CuPy; {cubins.NEEDS_NVRTC}") from error
    arch = cubins.architecture(torch.cuda.get_device_capability(device), made.file)
    cubin = cubins.compile(made.file, arch, dict(made.defines))
    with torch.cuda.device(device):
        enter(device)
        module = Module()
        module.load(cubin.image)
        _modules.append(module)
        function = module.get_function(made.name).ptr
        if made.shared > macros.SHARED_BY_DEFAULT:
            driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, made.shared)
        return function


def enter(device: torch.device) -> None:
    """Make the primary context of torch's current device, which this is, the calling thread's."""
    from cupy.cuda import runtime

    runtime.setDevice(device.index)


def address(tensor: Tensor | None) -> int:
    """Where a tensor starts; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
