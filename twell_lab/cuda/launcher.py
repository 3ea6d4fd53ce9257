"""Loading compiled kernels and launching them: on a GPU through the driver, on CPU tensors in the simulator.

Launches run on torch's current stream, and nothing waits for the GPU. Each thread prepares a kernel once
(`_Prepared`): the driver's handle, and one block of memory from which the driver reads the grid and the arguments. From
then on a launch writes numbers into that block and calls the driver. What a kernel's parameters are, and how many
threads its block has, is read from its source.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core import machine
from ..core.errors import DeviceError, InputError, StackError
from . import cubins, macros, sources
from .sources import Entry

if TYPE_CHECKING:
    from ..simulator.source import Parameter

DEFINE = macros.VALUE
# CUDA_ERROR_INVALID_CONTEXT: a thread, such as autograd's, in which torch has not had to ask for anything yet
_NO_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_EARLY_DRIVER = 12_030  # CUDA 12.3: since then graphs can hold launches that may start before the previous one ends
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_MOST_KERNELS, _MOST_PREPARED = 4096, 1024  # kept at most; the least recently used goes
_ALIGNED = 64  # bytes: what a tensor map asks for
_CONFIG = "7I4xQQI12x"  # CUlaunchConfig of cuda.h: grid, block, shared, stream, attributes, how many; up to _ALIGNED
# Parameters that are numbers: how `struct` has one, the least that it holds, and what is one too many.
_NUMBERS = {
    "int": ("i4x", -(2**31), 2**31),
    "unsigned": ("I4x", 0, 2**32),
    "long long": ("q", -(2**63), 2**63),
}
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch built for CPUs alone
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_loaded: dict[tuple, int] = {}
_modules: list = []  # keeps the loaded modules alive
_lock = threading.Lock()


class Structure(NamedTuple):
    """An argument of several words that says where tensors lie.

    make: its bytes, from their addresses, in order; it must hold no tensor. of: the tensors, or addresses."""

    make: Callable[..., bytes]
    of: tuple[Tensor | int | None, ...]

    def image(self) -> bytes:
        return self.make(*map(address, self.of))


class Kernel:
    """One kernel as it is launched. Made by `kernel`, which gives the same one for the same description."""

    def __init__(self, file: str, name: str, defines: tuple, shared: int = 0, early: bool = False):
        self.file, self.name, self.defines, self.shared, self.early = file, name, defines, shared, early

    @cached_property
    def entry(self) -> Entry:
        """Its parameters and the threads of its block, as the source has them."""
        return sources.entries(self.file, self.defines)[self.name]

    def launch(self, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
        """Run it on `device` for a grid of blocks.

        arguments: one for each parameter. For a pointer a tensor, None or (on a GPU) an address, for a number a whole
        number, for a structure a Structure. Those of a thread's first launch are held against the source, as
        `check_arguments` says; later ones are taken to be alike. Raises InputError there, and DeviceError if the driver
        refuses."""
        _launch(self, device, grid, arguments)


@lru_cache(maxsize=_MOST_KERNELS)
def kernel(file: str, name: str, defines: tuple, shared: int = 0, early: bool = False) -> Kernel:
    """The kernel `name` of kernels/`file`, compiled with the macros `defines`.

    shared: bytes of dynamic shared memory. early: it may start before the kernel in front of it has ended, and waits
    inside for what it reads; where GPU and driver can."""
    return Kernel(file, name, defines, shared, early)


def loaded_kernels() -> set[str]:
    """The names of the kernels' sources of which this process has launched something on a GPU, without their ending."""
    return {file.removesuffix(".cu") for file, *_ in list(_loaded)}


def _launch(made: Kernel, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
    """What every launch goes through; see Kernel.launch."""
    if device.type == "cpu":
        from ..simulator import program

        return program.launch(made.file, made.name, made.defines, grid, (made.entry.threads, 1), arguments)
    if own.recording is not None:
        own.recording.launched(made, grid, arguments)
    with on(device.index):
        prepared = own.prepared(made, device.index)
        if prepared.write is None:
            prepared.lay_out(arguments)
        prepared.launch(grid, current_stream(device.index), [_value(given) for given in arguments])


def start(made: Kernel, index: int, grid: tuple[int, int], stream: int, values: list) -> None:
    """Launch on CUDA device `index`, which is the current one, with arguments that are addresses, numbers and bytes."""
    prepared = own.prepared(made, index)
    if prepared.write is None:
        prepared.lay_out(values)
    prepared.launch(grid, stream, values)


_NOTHING: AbstractContextManager = nullcontext()


def on(index: int) -> AbstractContextManager:
    """A context in which CUDA device `index` is the current one. torch.cuda.device costs more than the comparison."""
    return _NOTHING if _current_device() == index else torch.cuda.device(index)


def _value(given):
    """An argument as it is written into the memory of a launch."""
    if type(given) in (int, bytes):
        return given
    return given.image() if isinstance(given, Structure) else address(given)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Prepared:
    """A kernel loaded on one device, and the memory that one thread's launches of it are read from."""

    def __init__(self, made: Kernel, index: int):
        _make_context_current(index)
        self.made, self.device = made, torch.device("cuda", index)
        _make_context_current(index)
        self.function = _kernel(made, self.device)
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        early = made.early and _may_start_early(index)
        self.fixed = (1, made.entry.threads, 1, 1, made.shared)
        self.attributes = (ctypes.addressof(self.attribute), 1) if early else (0, 0)
        self.write: Callable | None = None  # known with the first arguments

    def lay_out(self, arguments: Sequence) -> None:
        """Make the memory, for arguments such as these."""
        check_arguments(self.made.entry, arguments)
        layout, offsets = _layout(self.made.entry.parameters, arguments)
        room = (ctypes.c_char * (layout.size + _ALIGNED))()
        start = -ctypes.addressof(room) % _ALIGNED
        base = ctypes.addressof(room) + start
        self.addresses = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        pointers = (base, self.function, ctypes.addressof(self.addresses))
        self.start = partial(_driver().cuLaunchKernelEx, *map(ctypes.c_void_p, pointers), None)
        self.write = partial(layout.pack_into, room, start)

    def launch(self, grid: tuple[int, int], stream: int, values: list) -> None:
        self.write(*grid, *self.fixed, stream, *self.attributes, *values)
        status = self.start()
        if status == _NO_CONTEXT:
            enter(self.device)
            status = self.start()
        if status:
            made = self.made
            raise DeviceError(
                f"the driver refused a launch of {made.name} with grid {grid}, {self.fixed[1]} threads a block and "
                f"{made.shared} bytes of shared memory: CUDA error {status}"
            )


class _Own(threading.local):
    """What each thread has for itself: two threads never write into the same memory. recording: who is told of each
    launch on a GPU (twell_lab.cuda.tape), or None."""

    def __init__(self):
        self.recording = None
        self.prepared = lru_cache(maxsize=_MOST_PREPARED)(_Prepared)


own = _Own()


def _layout(parameters: Sequence[Parameter], arguments: Sequence) -> tuple[struct.Struct, list[int]]:
    """How a launch lies in memory: the configuration, then the arguments; and where each argument starts."""
    form, offsets = "<" + _CONFIG, []
    for parameter, given in zip(parameters, arguments):
        number = _NUMBERS.get(parameter.type)
        given = given.image() if isinstance(given, Structure) else given
        slot = "Q" if parameter.pointer else number[0] if number else f"{len(given)}s"
        at = struct.calcsize(form)
        gap = -at % (_ALIGNED if slot.endswith("s") else 8)
        offsets.append(at + gap)
        form += (f"{gap}x" if gap else "") + slot
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


def address(given: Tensor | int | None) -> int:
    """Where a tensor starts; 0 for None. What is an address already stays so."""
    return 0 if given is None else given if type(given) is int else given.data_ptr()


def aligned(*tensors: Tensor | None) -> bool:
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- what a kernel may be given


def check_arguments(entry: Entry, arguments: Sequence) -> None:
    """Raise InputError unless these are what the entry takes: as many, and each of its kind.

    A pointer takes a tensor whose values are what it points to (of uint8, memory to be cut up, any pointer), None, or
    an address; a number a whole one that its bits hold; a structure a Structure or its bytes."""
    if len(arguments) != len(entry.parameters):
        names = ", ".join(parameter.name for parameter in entry.parameters)
        raise InputError(f"{entry.name} takes {len(entry.parameters)} arguments ({names}); {len(arguments)} were given")
    for parameter, given in zip(entry.parameters, arguments):
        taken = _pointer_takes if parameter.pointer else _value_takes
        if accepted := taken(parameter.type, given):
            told = (
                f"a tensor of {given.dtype}" if isinstance(given, Tensor) else f"{type(given).__name__} {given!r:.60}"
            )
            raise InputError(f"{parameter.name} of {entry.name} is {told}; {accepted} is accepted")


def _pointer_takes(pointee: str, given) -> str:
    """What would be accepted, "" for what is."""
    if given is None or type(given) is int or isinstance(given, Tensor) and given.dtype == torch.uint8:
        return ""
    if isinstance(given, Tensor):
        from ..simulator.arguments import fits

        if fits(pointee, str(given.dtype).removeprefix("torch.")):
            return ""
    return f"a tensor for {pointee}*, None or an address"


def _value_takes(kind: str, given) -> str:
    """What would be accepted, "" for what is."""
    if kind not in _NUMBERS:
        return "" if type(given) in (bytes, Structure) else f"the bytes of one {kind}"
    _, least, end = _NUMBERS[kind]
    return "" if type(given) is int and least <= given < end else f"a whole number from {least} to {end - 1} ({kind})"
