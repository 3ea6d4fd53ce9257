"""Loading compiled kernels and launching them: on a GPU through the driver, on CPU tensors in the simulator.

Launches run on torch's current stream, and nothing waits for the GPU. Each thread prepares a kernel once
(`Prepared`): it gets the driver's handle, and one piece of host memory from which the driver reads the grid and the
arguments. From then on a launch writes numbers into that memory and calls the driver. A kernel's parameters and the
number of threads of its blocks are read from its source.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from .. import core
from ..core import DeviceError, InputError, StackError
from . import cubins, macros, sources
from .sources import Entry

if TYPE_CHECKING:
    from ..simulator.source import Parameter

# CUDA_ERROR_INVALID_CONTEXT: of a thread, such as autograd's, in which torch has not used CUDA yet
NO_CONTEXT = 201
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_EARLY_DRIVER = 12_030  # CUDA 12.3: since then graphs can hold launches that may start before the previous one ends
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_MOST_KERNELS, _MOST_PREPARED = 4096, 1024  # kept at most; the least recently used is dropped
ALIGNED = 64  # bytes: the alignment of a tensor map
# CUlaunchConfig of cuda.h, for `struct`: grid, block, shared, stream, attributes, their number, padding to ALIGNED.
_CONFIG = "7I4xQQI12x"
STREAM = struct.calcsize("<7I4x")  # bytes before the stream
# Parameters that are numbers: the format for `struct`, the least value, and the greatest plus 1.
_NUMBERS = {
    "int": ("i4x", -(2**31), 2**31),
    "unsigned": ("I4x", 0, 2**32),
    "long long": ("q", -(2**63), 2**63),
    "float": ("f4x", -math.inf, math.inf),
}
current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch built for CPUs alone
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # whether the current stream is
_loaded: dict[tuple, int] = {}
_modules: list = []  # keeps the loaded modules alive
_lock = threading.Lock()


class Structure(NamedTuple):
    """An argument that a kernel takes by value and that holds the addresses of tensors.

    make: its bytes, from the addresses of `of`, in this order; it must hold no tensor. of: tensors, addresses, None."""

    make: Callable[..., bytes]
    of: tuple[Tensor | int | None, ...]

    def image(self) -> bytes:
        return self.make(*map(address, self.of))


class Kernel:
    """One kernel, as it is compiled and launched. `kernel` makes it, and returns the same one for the same
    arguments."""

    def __init__(self, file: str, name: str, defines: tuple, shared: int = 0, early: bool = False):
        self.file, self.name, self.defines, self.shared, self.early = file, name, defines, shared, early

    @cached_property
    def entry(self) -> Entry:
        """Its parameters and the number of threads of its blocks, read from its source."""
        return sources.entries(self.file, self.defines)[self.name]

    def launch(self, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
        """Launch it on `device`, in the simulator if that is the CPU.

        Args:
            device: where the tensors among the arguments lie.
            grid: the number of blocks along x and y.
            arguments: one for each parameter: for a pointer a tensor, None or (on a GPU) an address; for a number an
                int, or a float; for a structure a Structure or its bytes.

        Raises:
            InputError: for arguments that the source does not take (`check_arguments`). Only a thread's first launch
                of a kernel is checked; later ones must pass arguments of the same kinds.
            DeviceError: if the driver refuses the launch.
        """
        _launch(self, device, grid, arguments)


@lru_cache(maxsize=_MOST_KERNELS)
def kernel(file: str, name: str, defines: tuple, shared: int = 0, early: bool = False) -> Kernel:
    """The kernel `name` of kernels/`file`, compiled with the macros `defines`.

    shared: bytes of dynamic shared memory. early: the GPU may start it before the previous kernel has ended, where GPU
    and driver support that ("programmatic stream serialization"); the kernel itself then waits for that one before it
    reads or writes memory."""
    return Kernel(file, name, defines, shared, early)


def loaded_kernels() -> set[str]:
    """The source files, without ".cu", from which this process has loaded a kernel on a GPU."""
    return {file.removesuffix(".cu") for file, *_ in list(_loaded)}


def _launch(made: Kernel, device: torch.device, grid: tuple[int, int], arguments: Sequence) -> None:
    """Kernel.launch, as a function of the module: tests put their own in its place to watch launches."""
    if device.type == "cpu":
        from ..simulator import program

        return program.launch(made.file, made.name, made.defines, grid, (made.entry.threads, 1), arguments)
    with on(device.index):
        prepared = own.prepared(made, device.index)  # first: tensor maps, too, need the context that it makes current
        if own.recording is not None:
            own.recording.launched(made, grid, arguments)
        if prepared.write is None:
            prepared.lay_out(arguments)
        prepared.launch(grid, current_stream(device.index), [_value(given) for given in arguments])


_NOTHING: AbstractContextManager = nullcontext()


def on(index: int) -> AbstractContextManager:
    """A context in which CUDA device `index` is the current one. It mostly is already, and torch.cuda.device would cost
    more time than this comparison."""
    return _NOTHING if current_device() == index else torch.cuda.device(index)


def _value(given):
    """An argument as a launch passes it on: an address, a number or bytes."""
    if type(given) in (int, bytes, float):
        return given
    return given.image() if isinstance(given, Structure) else address(given)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class Prepared:
    """A kernel loaded on one device, and the memory from which the driver reads one thread's launches of it."""

    write: Callable | None = None  # made by lay_out, which needs the first arguments

    def __init__(self, made: Kernel, index: int):
        _make_context_current(index)
        self.made, self.device = made, torch.device("cuda", index)
        self.function = _kernel(made, self.device)
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        early = made.early and may_start_early(index)
        self.fixed = (1, made.entry.threads, 1, 1, made.shared)
        self.attributes = (ctypes.addressof(self.attribute), 1) if early else (0, 0)

    def lay_out(self, arguments: Sequence) -> None:
        """Make the memory for arguments of these kinds. Raises InputError for arguments that the kernel does not
        take."""
        check_arguments(self.made.entry, arguments)
        layout, offsets = layout_of(self.made.entry.parameters, arguments)
        room, start = room_for(layout.size)
        self.start = self.starter(ctypes.addressof(room) + start, offsets)
        self.write = partial(layout.pack_into, room, start)

    def starter(self, base: int, offsets: list[int]) -> Callable[[], int]:
        """A function that launches what is written at the address `base`, and returns the driver's error code.

        offsets: bytes from there to each argument. Sets `addresses`, the array of the arguments' addresses."""
        self.addresses = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        pointers = (base, self.function, ctypes.addressof(self.addresses))
        return partial(driver().cuLaunchKernelEx, *map(ctypes.c_void_p, pointers), None)

    def launch(self, grid: tuple[int, int], stream: int, values: list) -> None:
        self.write(*grid, *self.fixed, stream, *self.attributes, *values)
        if status := self.start():
            self.retry(status, self.start, grid)

    def retry(self, status: int, start: Callable[[], int], grid: tuple[int, int]) -> None:
        """Launch again where the thread had no context. Raises DeviceError for any other error code."""
        if status == NO_CONTEXT:
            enter(self.device)
            status = start()
        if status:
            made = self.made
            raise refused(
                f"a launch of {made.name} with grid {grid}, {self.fixed[1]} threads a block and {made.shared} bytes of "
                "shared memory",
                status,
            )


def refused(what: str, status: int) -> DeviceError:
    """The error for what the driver refused with this error code."""
    return DeviceError(f"the driver refused {what}: CUDA error {status}")


def room_for(size: int) -> tuple[ctypes.Array, int]:
    """Memory of the host for `size` bytes, and where in it these begin, aligned for a tensor map."""
    room = (ctypes.c_char * (size + ALIGNED))()
    return room, -ctypes.addressof(room) % ALIGNED


class _Own(threading.local):
    """What each thread has for itself, so that no two threads write into the same memory.

    recording: the recording in progress (twell_lab.cuda.tape), which is told of each launch on a GPU, or None.
    prepared: the thread's Prepared for a Kernel and a device's index. graphs: its CUDA graphs (twell_lab.cuda.batch).
    shared: memory between the kernels of its calls, by the device's index (twell_lab.cuda.tape).
    """

    def __init__(self):
        self.recording, self.graphs, self.shared = None, WeakSet(), {}
        self.prepared = lru_cache(maxsize=_MOST_PREPARED)(Prepared)


own = _Own()


def layout_of(parameters: Sequence[Parameter], arguments: Sequence) -> tuple[struct.Struct, list[int]]:
    """The format of a launch in memory: the configuration, then the arguments; and the offset of each argument."""
    form, offsets = "<" + _CONFIG, []
    for parameter, given in zip(parameters, arguments):
        number = _NUMBERS.get(parameter.type)
        given = given.image() if isinstance(given, Structure) else given
        slot = "Q" if parameter.pointer else number[0] if number else f"{len(given)}s"
        at = struct.calcsize(form)
        gap = -at % (ALIGNED if slot.endswith("s") else 8)
        offsets.append(at + gap)
        form += (f"{gap}x" if gap else "") + slot
    return struct.Struct(form), offsets


@cache
def driver():
    """The library of NVIDIA's driver."""
    try:
        found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise StackError(f"launching kernels needs an NVIDIA driver of CUDA 12 or newer ({error})") from error
    return found


@cache
def may_start_early(index: int) -> bool:
    version = ctypes.c_int(0)
    driver().cuDriverGetVersion(ctypes.byref(version))
    return capability(index) >= (9, 0) and version.value >= _EARLY_DRIVER


def _make_context_current(index: int) -> None:
    """Make torch's context of this device the thread's, if the thread has none: a launch needs one, and torch sets it
    only when it first uses CUDA in a thread."""
    context, made = ctypes.c_void_p(), driver()
    made.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        status = made.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) or made.cuCtxSetCurrent(context)
        if status:
            raise DeviceError(f"the driver gave no context for CUDA device {index}: CUDA error {status}")


def _kernel(made: Kernel, device: torch.device) -> int:
    """Driver handle of one kernel on one device, compiled and loaded on first use."""
    key = (made.file, made.name, made.defines, device.index, made.shared)
    if key not in _loaded:
        with _lock:
            if key not in _loaded:
                _loaded[key] = _load(made, device)
    return _loaded[key]


def _load(made: Kernel, device: torch.device) -> int:
    from ..core import check_stack

    check_stack()
    core.let_cupy_start()
    try:
        from cupy.cuda import driver as cupy_driver
        from cupy.cuda.function import Module
    except ImportError as error:
        raise StackError(f"running the CUDA kernels needs CuPy; {cubins.NEEDS_NVRTC}") from error
    arch = cubins.architecture(capability(device.index), made.file)
    cubin = cubins.compile(made.file, arch, dict(made.defines))
    with torch.cuda.device(device):
        enter(device)
        module = Module()
        module.load(cubin.image)
        _modules.append(module)
        function = module.get_function(made.name).ptr
        if made.shared > macros.SHARED_BY_DEFAULT:  # more than that needs permission
            cupy_driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, made.shared)
        return function


def enter(device: torch.device) -> None:
    """Make the primary context of `device`, which must be torch's current device, the calling thread's context."""
    from cupy.cuda import runtime

    runtime.setDevice(device.index)


def address(given: Tensor | int | None) -> int:
    """The address of a tensor's first value; 0 for None; an address itself."""
    return 0 if given is None else given if type(given) is int else given.data_ptr()


def aligned(*tensors: Tensor | None) -> bool:
    """Whether each of these tensors, None aside, starts at a multiple of 16 bytes."""
    return all(t is None or t.data_ptr() % 16 == 0 for t in tensors)


@cache
def multiprocessors(index: int) -> int:
    """How many multiprocessors CUDA device `index` has."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def capability(index: int) -> tuple[int, int]:
    """The compute capability of CUDA device `index`, for example (9, 0)."""
    return torch.cuda.get_device_capability(index)


# ---- what a kernel may be given


def check_arguments(entry: Entry, arguments: Sequence) -> None:
    """Raise InputError unless the entry takes these arguments: as many as it has parameters, each of the right kind.

    For a pointer: a tensor of the type that it points to, a tensor of uint8 (memory for any use), None, or an address.
    For a number: an int in its range, or a float. For a structure: a Structure, or its bytes."""
    if len(arguments) != len(entry.parameters):
        names = ", ".join(parameter.name for parameter in entry.parameters)
        raise InputError(f"{entry.name} takes {len(entry.parameters)} arguments ({names}); {len(arguments)} were given")
    for parameter, given in zip(entry.parameters, arguments):
        taken = _pointer_takes if parameter.pointer else _value_takes
        if accepted := taken(parameter.type, given):
            what = (
                f"a tensor of {given.dtype}" if isinstance(given, Tensor) else f"{type(given).__name__} {given!r:.60}"
            )
            raise InputError(f"{parameter.name} of {entry.name} is {what}; {accepted} is accepted")


def _pointer_takes(pointee: str, given) -> str:
    """ "" where a pointer to `pointee` takes `given`; otherwise what it takes, in words."""
    if given is None or type(given) is int or isinstance(given, Tensor) and given.dtype == torch.uint8:
        return ""
    if isinstance(given, Tensor):
        from ..simulator.arguments import fits

        if fits(pointee, str(given.dtype).removeprefix("torch.")):
            return ""
    return f"a tensor for {pointee}*, None or an address"


def _value_takes(kind: str, given) -> str:
    """ "" where a parameter of the type `kind` takes `given`; otherwise what it takes, in words."""
    if kind not in _NUMBERS:
        return "" if type(given) in (bytes, Structure) else f"the bytes of one {kind}"
    _, least, end = _NUMBERS[kind]
    if kind == "float":
        return "" if type(given) is float else "a float"
    return "" if type(given) is int and least <= given < end else f"a whole number from {least} to {end - 1} ({kind})"
