"""Kernels and calls: what a `.cu` file offers, and the launches that one call of an operation makes of it.

A `Call` is a short program. Operations write it once for tensors of certain layouts: which kernels, with which grids
and arguments, and which memory lies between them. Running it means to write the addresses of this call's tensors into
the arguments and to launch. So all that depends on shapes alone is worked out once, and a call costs the host a few
microseconds a launch. On CPU tensors the same program runs in twell_lab.simulator.

    def pack(call, gate, tile, words):                  # an operation: it gets buffers, and returns buffers
        packed = call.empty(len(gate), -(-gate.shape[1] // tile), words, dtype=torch.int32)
        call.launch(PACK.kernel("pack_v1", value(gate.dtype)), (blocks, 1), gate, packed, ...)
        return packed

    packed = run(pack, gate, 256, 32)                   # once, for these tensors

Launches run on torch's current stream, and nothing waits for the GPU."""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import core
from ..core import DeviceError, InputError, StackError
from . import compile as compiler
from .tma import Map, encoded

Macros = tuple[tuple[str, object], ...]
VALUE = {torch.bfloat16: "VALUE_BF16", torch.float16: "VALUE_FP16", torch.float32: "VALUE_FP32"}
SHARED_BY_DEFAULT = 48 * 1024  # bytes of dynamic shared memory that any kernel may ask for
SIMULATED_UNITS = 3  # multiprocessors that launches in the simulator are planned for

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: of a thread, such as autograd's, in which torch has not used CUDA yet
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_EARLY_DRIVER = 12_030  # CUDA 12.3: since then graphs can hold launches that may start before the previous one ends
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_BOUNDARY = 256  # bytes: each buffer of the workspace starts at a multiple of it
_NUMBERS = {"i": ctypes.c_int, "u": ctypes.c_uint, "q": ctypes.c_longlong, "f": ctypes.c_float}  # letters of an entry
current_device = getattr(torch._C, "_cuda_getDevice", None)  # not in torch built for CPUs alone
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


# ---- what a .cu file offers


class Kernel(NamedTuple):
    """One kernel of a source, compiled with these macros. threads: of a block. shared: bytes of dynamic shared memory.

    early: the GPU may start it before the previous kernel has ended ("programmatic stream serialization"); the kernel
    itself then waits for that one before it reads or writes memory."""

    source: Source
    name: str
    macros: Macros
    threads: int
    parameters: str
    shared: int = 0
    early: bool = False


@dataclass(frozen=True)
class Entry:
    """A kernel of a source. threads: of a block, or a function of the macros that gives them. parameters: a letter for
    each: p pointer, i int, u unsigned, q long long, f float, m tensor map, 2 a structure of two pointers. among:
    returns whether a build with these macros has it; None: every build."""

    threads: int | Callable[[dict[str, object]], int]
    parameters: str
    among: Callable[[dict[str, object]], bool] | None = None


Builds = Callable[[torch.dtype, Sequence[int], tuple[int, int]], Sequence[Macros]]


@dataclass(frozen=True, eq=False)
class Source:
    """One file of kernels/, declared once.

    name: the file's, without its ending. entries: its kernels. builds: (type of values, widths of rows, compute
    capability) -> each set of macros that launches ask for on such a GPU; so all can be compiled ahead of time.
    constants: numbers that Python and C++ share; they are passed as macros to every build. oldest: compute capability
    of the oldest GPU that runs it. alone: it runs on no other, because only that architecture has its instructions."""

    name: str
    entries: dict[str, Entry]
    builds: Builds
    constants: tuple[tuple[str, int], ...] = ()
    oldest: tuple[int, int] = (7, 5)
    alone: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.cu"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Return whether a GPU of this compute capability runs it, for some type of values."""
        return capability == self.oldest if self.alone else capability >= self.oldest

    def macros(self, macros: Macros) -> Macros:
        """Return these macros with the constants that they do not set."""
        given = {name for name, _ in macros}
        return (*macros, *(pair for pair in self.constants if pair[0] not in given))

    def entries_of(self, macros: Mapping[str, object]) -> list[str]:
        """List the kernels that a build with these macros has."""
        return [name for name, entry in self.entries.items() if entry.among is None or entry.among(dict(macros))]

    def kernel(self, name: str, macros: Macros, shared: int = 0, early: bool = False) -> Kernel:
        """Return the kernel `name`, compiled with these macros and the constants of the source."""
        entry, macros = self.entries[name], self.macros(macros)
        threads = entry.threads if isinstance(entry.threads, int) else entry.threads(dict(macros))
        return Kernel(self, name, macros, threads, entry.parameters, shared, early)


def value(dtype: torch.dtype) -> Macros:
    """Return the macros of a kernel that needs only its type of values."""
    return ((VALUE[dtype], True),)


def each_type(dtype: torch.dtype, widths: Sequence[int] = (), capability: tuple[int, int] = (9, 0)) -> list[Macros]:
    """List one set of macros for each type of values (Source.builds)."""
    return [value(dtype)]


def sixteen_bits(dtype: torch.dtype, widths: Sequence[int] = (), capability: tuple[int, int] = (9, 0)) -> list[Macros]:
    """List one set of macros for each type of 16-bit values (Source.builds)."""
    return [value(dtype)] if dtype.itemsize == 2 else []


# ---- memory


class Layout(NamedTuple):
    """All that a call's launches depend on of a tensor: its address is not part of it, but for its alignment."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    low: int  # the address, modulo 16


def layout(t: Tensor | None) -> Layout | None:
    """Return the layout of a tensor; None for None."""
    return None if t is None else Layout(t.shape, t.stride(), t.dtype, t.data_ptr() & 15)


class Buffer:
    """Memory of a call: an input, an output or scratch, or some rows of one. It has no address before the call runs."""

    __slots__ = ("number", "offset", "shape", "strides", "dtype", "low")

    def __init__(self, number: int, offset: int, shape, strides, dtype: torch.dtype, low: int) -> None:
        self.number, self.offset, self.dtype, self.low = number, offset, dtype, low
        self.shape, self.strides = tuple(shape), tuple(strides)

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> Buffer:
        """Return some rows: a slice without a step."""
        first, last, _ = rows.indices(self.shape[0])
        more = first * self.strides[0] * self.dtype.itemsize
        shape = (max(last - first, 0), *self.shape[1:])
        return Buffer(self.number, self.offset + more, shape, self.strides, self.dtype, (self.low + more) & 15)

    def t(self) -> Buffer:
        """Return the transpose of a matrix, in the same memory."""
        shape, strides = self.shape[::-1], self.strides[::-1]
        return Buffer(self.number, self.offset, shape, strides, self.dtype, self.low)


def aligned(*buffers: Buffer | Layout | None) -> bool:
    """Return whether each of these, None aside, starts at a multiple of 16 bytes."""
    return all(b is None or b.low == 0 for b in buffers)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def lie(*sizes: int) -> list[int]:
    """Return where things of these sizes in bytes start that lie one behind another, each on a boundary of 256 bytes;
    and where the last one ends, rounded up."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _BOUNDARY) * _BOUNDARY)
    return starts


# ---- a call


class _Launch(NamedTuple):
    kernel: Kernel
    grid: tuple[int, int]
    arguments: tuple


class Call:
    """The launches of one call of an operation, for inputs of certain layouts on one device. Any thread may run it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[Buffer | None] = [None]  # by number; 0 is no memory
        self._inputs: list[int] = []
        self._several = False
        self._result: tuple[int, ...] = ()
        self._like: dict[int, int] = {}  # of an output, the input that has its shape, by their numbers
        self._inside: dict[int, tuple[int, int]] = {}  # of what lies in other memory: its number, and bytes before
        self._launches: list[_Launch] = []
        self._bound: Bound | None = None

    @property
    def units(self) -> int:
        """The multiprocessors of the device; a few in the simulator."""
        return multiprocessors(self.device.index) if self.device.type == "cuda" else SIMULATED_UNITS

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the device; that of a Hopper GPU in the simulator."""
        return capability(self.device.index) if self.device.type == "cuda" else (9, 0)

    # -- writing it

    def input(self, like: Tensor | Layout | None) -> Buffer | None:
        """Add a tensor that each run is given; None for None, which is then given each time."""
        known = layout(like) if isinstance(like, Tensor) else like
        if known is None:
            self._inputs.append(0)
            return None
        made = self._new(known.shape, known.strides, known.dtype, known.low)
        self._inputs.append(made.number)
        return made

    def empty(self, *shape: int, dtype: torch.dtype) -> Buffer:
        """Add memory that the call allocates: scratch, unless the operation returns it."""
        return self._new(shape, _contiguous(shape), dtype, 0)

    def _new(self, shape, strides, dtype, low) -> Buffer:
        made = Buffer(len(self._buffers), 0, shape, strides, dtype, low)
        self._buffers.append(made)
        return made

    def launch(self, kernel: Kernel, grid: tuple[int, int], *arguments) -> None:
        """Add a launch. grid: blocks along x and y. arguments: a Buffer or None for a pointer, a number, a Map, or a
        pair of buffers, as the entry's letters say. Raises InputError for others: a mistake in an operation."""
        if len(arguments) != len(kernel.parameters):
            raise InputError(f"{kernel.name} takes {len(kernel.parameters)} arguments; {len(arguments)} were given")
        for letter, given in zip(kernel.parameters, arguments):
            if not _takes(letter, given):
                raise InputError(f"{kernel.name} got {given!r:.80}; what the letter {letter!r} stands for is accepted")
        self._launches.append(_Launch(kernel, grid, arguments))

    def together(self, *buffers: Buffer | None, memory: Buffer | None = None) -> Buffer:
        """Have these buffers lie in one piece of memory, where `lie` says; None takes none. memory: int32, that of an
        input; None: it is allocated. Returns it."""
        *starts, size = lie(*(0 if b is None else b.nbytes for b in buffers))
        memory = memory or self.empty(size // torch.int32.itemsize, dtype=torch.int32)
        self._inside |= {b.number: (memory.number, start) for b, start in zip(buffers, starts) if b is not None}
        return memory

    def returns(self, result: Buffer | tuple | None, like: Sequence[Buffer | None] | None = None) -> None:
        """Say what a run returns: buffers that the call allocates become tensors of their own; inputs are handed on.

        like: for each result, a contiguous input of its shape and type, or None: it gets as many dimensions as the
        tensor that is given for that. By default that is the first input, where that fits."""
        self._several = isinstance(result, tuple)
        results = result if isinstance(result, tuple) else (result,)
        first = self._buffers[self._inputs[0]]
        for b, model in zip(results, like or [first] * len(results)):
            if b is not None and model is not None:
                if (model.shape, model.strides, model.dtype) == (b.shape, b.strides, b.dtype):
                    self._like[b.number] = model.number
        self._result = tuple(0 if b is None else b.number for b in results)

    # -- running it

    def __call__(self, *tensors: Tensor | None) -> Any:
        """Run it on tensors of the layouts that it was written for; returns what `returns` said, as tensors."""
        if self.device.type == "cpu":
            return self._simulate(tensors)
        if self._bound is None:
            self._bound = self.bind()
        return self._bound(*tensors)

    def bind(self, *fixed: Tensor | None) -> Bound:
        """Return the call with these tensors for its last inputs, which cost the host nothing from then on. The caller
        sees to it that they stay where they are."""
        return Bound(self, fixed)

    def _simulate(self, tensors: Sequence[Tensor | None]) -> Any:
        from ..simulator import program

        made: dict[int, Tensor] = {n: t for n, t in zip(self._inputs, tensors) if t is not None}
        for number, buffer in enumerate(self._buffers):
            if buffer is not None and number not in self._inputs and number not in self._inside:
                like = made.get(self._like.get(number, 0))
                shape = buffer.shape if like is None else like.shape
                made[number] = torch.empty(shape, dtype=buffer.dtype, device="cpu")

        def tensor(b: Buffer) -> Tensor:
            number, more = self._inside.get(b.number, (b.number, 0))
            whole = made[number] if made[number].dtype == b.dtype else made[number].view(b.dtype)
            offset = whole.storage_offset() + (more + b.offset) // b.dtype.itemsize
            return whole.as_strided(b.shape, b.strides, offset)

        def pair(buffers: tuple[Buffer, Buffer]) -> bytes:
            return struct.pack("<QQ", *(tensor(b).data_ptr() for b in buffers))

        for kernel, grid, arguments in self._launches:
            given = [tensor(a) if isinstance(a, Buffer) else pair(a) if isinstance(a, tuple) else a for a in arguments]
            program.launch(
                kernel.source.file, kernel.name, kernel.macros, grid, (kernel.threads, 1), given, kernel.shared
            )
        result = tuple(made[n] if n else None for n in self._result)
        return result if self._several else result[0]


def _takes(letter: str, given) -> bool:
    if letter == "p":
        return given is None or isinstance(given, Buffer)
    if letter == "m":
        return isinstance(given, Map)
    if letter == "2":
        return type(given) is tuple and len(given) == 2 and all(isinstance(b, Buffer) for b in given)
    if letter == "f":
        return type(given) is float
    least, most = {"i": (-(2**31), 2**31 - 1), "u": (0, 2**32 - 1), "q": (-(2**63), 2**63 - 1)}[letter]
    return type(given) is int and least <= given <= most


def run(operation: Callable, *arguments, **how) -> Any:
    """Run an operation once: operation(call, *arguments, **how), where each tensor among the arguments, also inside of
    named tuples, comes as a Buffer. Returns its result as tensors; buffers inside named tuples come back as such.

    The call is kept for further runs on tensors of the same layouts. All other arguments have to be hashable."""
    tensors: list[Tensor] = []

    def layouts(given):
        if isinstance(given, Tensor):
            tensors.append(given)
            return layout(given)
        return _mapped(given, layouts) if isinstance(given, tuple) else given

    given = tuple([layouts(one) for one in arguments])
    named = tuple([(name, layouts(one)) for name, one in how.items()])
    if not tensors:
        raise InputError("an operation was given no tensor; at least one is accepted")
    call, kind = _written(operation, tensors[0].device, given, named)
    found = call(*tensors)
    return found[0] if kind is None else kind(found)


@lru_cache(maxsize=256)
def _written(operation: Callable, device: torch.device, arguments: tuple, how: tuple) -> tuple[Call, Callable | None]:
    """The call of an operation for tensors of these layouts, and what its results are put into; None: it has one."""
    call = Call(device)

    def buffers(given):
        if isinstance(given, Layout):
            return call.input(given)
        return _mapped(given, buffers) if isinstance(given, tuple) else given

    made = operation(call, *map(buffers, arguments), **{name: buffers(one) for name, one in how})
    several = isinstance(made, tuple)
    call.returns(made if several else (made,))
    return call, None if not several else type(made)._make if hasattr(made, "_fields") else tuple


def _mapped(parts: tuple, change: Callable) -> tuple:
    made = [change(one) for one in parts]
    return type(parts)(*made) if hasattr(parts, "_fields") else tuple(made)


# ---- on a GPU


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h: grid, block, bytes of shared memory, stream, attributes and their number."""

    _fields_ = [
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("many", ctypes.c_uint)),
    ]


class Bound:
    """A call's launches, ready for the driver but for the addresses of tensors. Any thread may run it.

    Each address stands in one word of memory, and every launch that wants it reads it there."""

    def __init__(self, call: Call, fixed: Sequence[Tensor | None]) -> None:
        index = call.device.index
        _make_context_current(index)
        self._device, self._index, self._several = call.device, index, call._several
        free = len(call._inputs) - len(fixed)
        # Where each buffer's address comes from: an entry of `starts`, of which the first is 0, and bytes behind it.
        places = {n: (0, t.data_ptr()) for n, t in zip(call._inputs[free:], fixed) if t is not None}
        for at, number in enumerate(call._inputs[:free], 1):
            places.setdefault(number, (at, 0))
        outputs = [n for n in dict.fromkeys(call._result) if n and n not in places]
        # What a run allocates: the place among its tensors of one that is like it, None for none; its shape and type.
        self._outputs: list[tuple[int | None, tuple, torch.dtype]] = []
        for at, number in enumerate(outputs, 1 + free):
            b, (like, _) = call._buffers[number], places.get(call._like.get(number, -1), (0, 0))
            self._outputs.append((like - 1 if like else None, b.shape, b.dtype))
            places[number] = at, 0
        self._result = [places[n][0] - 1 if n else -1 for n in call._result]  # places among inputs, outputs and None
        inside = {n: (places[number][0], offset) for n, (number, offset) in call._inside.items()}
        scratch = {n: b.nbytes for n, b in enumerate(call._buffers) if b is not None and n not in places | inside}
        offsets, self._scratch = _packed_scratch(scratch, call._launches)
        workspace = 1 + free + len(outputs)
        places |= inside | {number: (workspace, offset) for number, offset in offsets.items()}
        self._lay(call, places)
        self._lock = threading.Lock()

    def _lay(self, call: Call, places: dict[int, tuple[int, int]]) -> None:
        """Write all that does not change into memory, and note what does."""
        words = (ctypes.c_uint64 * sum(2 * len(launch.arguments) for launch in call._launches))()
        slots: dict[tuple, int] = {}  # where the address of a buffer, or those of a pair, stand in it
        self._slots: list[tuple[int, int]] = []  # of each word: an entry of `starts`, and bytes behind it
        self._maps: list[list] = []  # [address of the map, entry of `starts`, bytes behind it, address it has now]
        self._starts: list[tuple[Callable[[], int], str]] = []
        self._configs: list[_Config] = []
        self._stream: int | None = None  # that of the configs
        self._keep: list[Any] = []

        def place(b: Buffer | None) -> tuple[int, int]:
            at, more = (0, 0) if b is None else places[b.number]
            return at, more if b is None else more + b.offset

        def address(letter: str, given) -> int:
            if letter in _NUMBERS:
                self._keep.append(_NUMBERS[letter](given))
                return ctypes.addressof(self._keep[-1])
            if letter == "m":
                at, more = place(given.of)
                self._keep.append(encoded(given, _BOUNDARY if at else more))
                self._maps += [[self._keep[-1][1], at, more, 0]] if at else []
                return self._keep[-1][1]
            key = tuple(map(place, given if letter == "2" else (given,)))
            if key not in slots:
                slots[key] = ctypes.addressof(words) + ctypes.sizeof(ctypes.c_uint64) * len(self._slots)
                self._slots += key
            return slots[key]

        for kernel, grid, arguments in call._launches:
            function, (attributes, many) = _function(kernel, self._index)
            config = _Config((*grid, 1), (kernel.threads, 1, 1), kernel.shared, None, attributes, many)
            parameters = (ctypes.c_void_p * len(arguments))(*map(address, kernel.parameters, arguments))
            self._keep.append(parameters)
            self._configs.append(config)
            pointers = map(ctypes.c_void_p, (ctypes.addressof(config), function, ctypes.addressof(parameters)))
            start = partial(driver().cuLaunchKernelEx, *pointers, None)
            self._starts.append((start, f"{kernel.name} with grid {grid}, {kernel.threads} threads a block"))
        self._fill = partial(struct.Struct(f"{len(self._slots)}Q").pack_into, words, 0)

    def __call__(self, *tensors: Tensor | None) -> Any:
        """Run it on tensors for the inputs that are not fixed."""
        index = self._index
        if current_device() != index:
            with torch.cuda.device(index):
                return self(*tensors)
        every, starts = [*tensors], [0]
        for t in tensors:
            starts.append(0 if t is None else t.data_ptr())
        for like, shape, dtype in self._outputs:
            t = torch.empty(shape, dtype=dtype, device=self._device) if like is None else torch.empty_like(every[like])
            every.append(t)
            starts.append(t.data_ptr())
        if self._scratch:
            workspace = torch.empty(self._scratch, dtype=torch.uint8, device=self._device)
            starts.append(workspace.data_ptr())
        with self._lock:  # the driver reads the arguments while it launches
            self._launch(starts)
        if not self._several:
            return every[self._result[0]]
        every.append(None)
        return tuple([every[at] for at in self._result])

    def _launch(self, starts: list[int]) -> None:
        """Write the addresses and launch. starts: 0, then the inputs, the outputs and the workspace."""
        stream = current_stream(self._index)
        if stream != self._stream:
            for config in self._configs:
                config.stream = stream
            self._stream = stream
        self._fill(*[starts[at] + more for at, more in self._slots])
        for one in self._maps:
            where, at, more, last = one
            if (now := starts[at] + more) != last:
                if status := driver().cuTensorMapReplaceAddress(ctypes.c_void_p(where), ctypes.c_void_p(now)):
                    raise _refused(f"a tensor map at {now:#x}", status)
                one[3] = now
        for start, told in self._starts:
            if status := start():
                if status == _NO_CONTEXT:
                    _enter(self._device)
                    status = start()
                if status:
                    raise _refused(f"a launch of {told}", status)


def _packed_scratch(sizes: dict[int, int], launches: list[_Launch]) -> tuple[dict[int, int], int]:
    """Where each buffer of these sizes starts in one workspace, in bytes, by its number; and the workspace's size.

    Two buffers overlap only where one is free before the other is used: the largest is placed first, each as far in
    front as it fits. A kernel that may start early may start while the kernels before it still read."""
    uses: dict[int, list[int]] = {number: [] for number in sizes}
    for at, launch in enumerate(launches):
        for given in launch.arguments:
            one = given.of if isinstance(given, Map) else given
            for b in one if isinstance(one, tuple) else (one,):
                if isinstance(b, Buffer) and b.number in uses:
                    uses[b.number].append(at)
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # (begin, end, first launch, launch that finds it free)
    for number in sorted(sizes, key=lambda number: -sizes[number]):
        size, at = -(-sizes[number] // _BOUNDARY) * _BOUNDARY, 0
        first, free = (uses[number][0], uses[number][-1] + 1) if uses[number] else (0, 0)
        while free < len(launches) and launches[free].kernel.early:
            free += 1
        for begin, end in sorted((begin, end) for begin, end, used, until in placed if used < free and first < until):
            if begin >= at + size:
                break
            at = max(at, end)
        offsets[number] = at
        placed.append((at, at + size, first, free))
    return offsets, max((end for _, end, *_ in placed), default=0)


def _refused(what: str, status: int) -> DeviceError:
    return DeviceError(f"the driver refused {what}: CUDA error {status}")


@cache
def driver():
    """Return the library of NVIDIA's driver. Raises StackError without one."""
    try:
        found = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    except (OSError, AttributeError) as error:
        raise StackError(f"launching kernels needs an NVIDIA driver of CUDA 12 or newer ({error})") from error
    return found


def _make_context_current(index: int) -> None:
    """Make torch's context of this device the thread's, if the thread has none: torch sets it only when it first uses
    CUDA in a thread."""
    context, library = ctypes.c_void_p(), driver()
    library.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        status = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) or library.cuCtxSetCurrent(context)
        if status:
            raise _refused(f"a context for CUDA device {index}", status)


def _enter(device: torch.device) -> None:
    from cupy.cuda import runtime

    runtime.setDevice(device.index)


_loading = threading.Lock()
_modules: dict[tuple, Any] = {}  # the loaded modules, by file, macros and device


def loaded() -> set[str]:
    """Return the names of the sources from which this process has loaded a kernel on a GPU."""
    return {key[0] for key in list(_modules)}


@lru_cache(maxsize=4096)
def _function(kernel: Kernel, index: int) -> tuple[int, tuple[int, int]]:
    """The driver's handle of a kernel on a device, compiled and loaded on first use; and its launch attributes."""
    core.check_stack()
    core.let_cupy_start()
    try:
        from cupy.cuda import driver as cupy_driver
        from cupy.cuda.function import Module
    except ImportError as error:
        raise StackError(f"running the CUDA kernels needs CuPy; {compiler.NEEDS_NVRTC}") from error
    key = (kernel.source.name, kernel.macros, index)
    with _loading, torch.cuda.device(index):
        if key not in _modules:
            found = capability(index)
            target = compiler.architecture(found, kernel.source.alone and kernel.source.runs_on(found))
            cubin = compiler.compile(kernel.source.file, target, dict(kernel.macros))
            _enter(torch.device("cuda", index))
            module = Module()
            module.load(cubin.image)
            _modules[key] = module
        function = _modules[key].get_function(kernel.name).ptr
        if kernel.shared > SHARED_BY_DEFAULT:  # more than that needs permission
            cupy_driver.funcSetAttribute(function, _MAX_DYNAMIC_SHARED, kernel.shared)
    return function, (ctypes.addressof(_EARLY), 1) if kernel.early and may_start_early(index) else (0, 0)


_EARLY = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
_EARLY.value[0] = 1


@cache
def may_start_early(index: int) -> bool:
    """Return whether GPU and driver let a kernel start before the previous one has ended."""
    version = ctypes.c_int(0)
    driver().cuDriverGetVersion(ctypes.byref(version))
    return capability(index) >= (9, 0) and version.value >= _EARLY_DRIVER


@cache
def multiprocessors(index: int) -> int:
    """Return how many multiprocessors CUDA device `index` has."""
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of CUDA device `index`, for example (9, 0)."""
    return torch.cuda.get_device_capability(index)
