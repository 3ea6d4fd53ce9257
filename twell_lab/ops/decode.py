"""Launching the decode kernels: a whole sparse layer for 1 to 64 tokens in two launches, with little host time.

What `launch` works out for each call is worked out here once for a shape and kept, one set a thread: a call fills in
addresses and launches. CUDA only; torch's current stream, torch's allocator, no waiting for the GPU.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import cache

import torch
from torch import Tensor

from ..core.errors import DeviceError, InputError
from ..cuda import launcher, sources
from ..cuda.macros import decode as specialisation
from ..cuda.macros import decode_shape as shape_for
from ..cuda.macros import decode_tokens as rounded_up

MOST_TOKENS = 64
VERSIONS = (1, 2)
FILE = "sm80_decode.cu"
_TILE, _SLAB, _DOWN_THREADS = (sources.number(FILE, name) for name in ("BAND", "SLAB", "DOWN_THREADS"))
_EARLY_DRIVER = (
    12_030  # CUDA 12.3: from here on graphs can hold launches that may start before the one before has ended
)
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID of cuda.h
_own = threading.local()  # .prepared: {key: _Prepared} of this thread


def takes(x: Tensor, up: Tensor) -> bool:
    """Whether `decode` takes x [tokens, d_model] and up [d_ff, d_model]; gate is taken to be like up."""
    if (
        x.dim() != 2
        or not 1 <= x.shape[0] <= MOST_TOKENS
        or not x.is_cuda
        or x.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    if x.shape[1] % 8 or x.shape[1] != up.shape[1] or x.dtype != up.dtype or not 1 <= up.shape[0] < 2**27:
        return False
    aligned = x.data_ptr() % 16 == 0 and up.data_ptr() % 16 == 0 and x.is_contiguous() and up.is_contiguous()
    return aligned and _capability(x.device.index) >= (8, 0)


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
    _fields_ += [("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


@cache
def _driver():
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


@cache
def _may_start_early(index: int) -> bool:
    version = ctypes.c_int(0)
    _driver().cuDriverGetVersion(ctypes.byref(version))
    return _capability(index) >= (9, 0) and version.value >= _EARLY_DRIVER


class _Kernel:
    """One kernel with its block, and the memory that its arguments are read from at a launch."""

    def __init__(self, name: str, defines: tuple, sizes: tuple, block: int, shared: int, device: torch.device):
        """sizes: how many 8-byte slots each argument takes."""
        self.name, function = name, launcher._kernel(FILE, name, defines, device, shared)
        self.slots = (ctypes.c_uint64 * sum(sizes))()
        base = ctypes.addressof(self.slots)
        self.addresses = (ctypes.c_void_p * len(sizes))(*(base + 8 * sum(sizes[:i]) for i in range(len(sizes))))
        self.config = _Config(gx=1, gy=1, gz=1, bx=block, by=1, bz=1, shared=shared)
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        if _may_start_early(device.index):
            self.config.attributes, self.config.count = ctypes.addressof(self.attribute), 1
        self.arguments = (ctypes.byref(self.config), ctypes.c_void_p(function), self.addresses, None)

    def launch(self, gx: int, gy: int, stream: int) -> None:
        config = self.config
        config.gx, config.gy, config.stream = gx, gy, stream
        if status := _driver().cuLaunchKernelEx(*self.arguments):
            raise DeviceError(
                f"the driver refused a launch of {self.name} with grid ({gx}, {gy}), {config.bx} threads a block and "
                f"{config.shared} bytes of shared memory: CUDA error {status}"
            )


class _Prepared:
    """The two kernels for one shape, on one device, of one thread."""

    def __init__(self, device: torch.device, dtype: torch.dtype, d_model: int, d_ff: int, rows: int, version: int):
        with torch.cuda.device(device):
            launcher.enter(device)
        sizes = torch.cuda.get_device_properties(device)
        shape = shape_for(rows, d_ff, _capability(device.index), sizes.multi_processor_count)
        defines, shared = specialisation(dtype, d_model, rows, shape)
        found = dict(defines)
        neurons, threads = (_TILE * found["BANDS"], 32 * found["BLOCK_WARPS"]) if version > 1 else (_TILE, 32 * _TILE)
        self.gate = _Kernel(
            f"decode_gate_v{version}", defines, (1,) * 6 + (2, 1, 1, 1), threads, shared if version > 1 else 0, device
        )
        self.down = _Kernel("decode_down", defines, (2, 1, 1, 1, 1), _DOWN_THREADS, 0, device)
        self.blocks, self.tiles, self.slabs = -(-d_ff // neurons), -(-d_ff // _TILE), -(-d_model // _SLAB)
        self.gate.slots[10] = d_ff
        self.down.slots[5] = self.tiles


def _make_context_current(index: int) -> None:
    """Give this thread torch's context if it has none: the driver launches into it, and torch sets it only when it
    must."""
    context, driver = ctypes.c_void_p(), _driver()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        status = driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index) or driver.cuCtxSetCurrent(context)
        if status:
            raise DeviceError(f"the driver gave no context for CUDA device {index}: CUDA error {status}")


def _prepare(key: tuple, device: torch.device) -> _Prepared:
    if key[-1] not in VERSIONS:
        raise InputError(f"version is {key[-1]}; {VERSIONS[0]} to {VERSIONS[-1]} are accepted")
    if not hasattr(_own, "prepared"):
        _make_context_current(device.index)
        _own.prepared = {}
    return _own.prepared.setdefault(key, _Prepared(device, *key[1:]))


def _fit(t: Tensor | None) -> bool:
    return t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0)


def decode(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    stats: Tensor | None = None,
    version: int = VERSIONS[-1],
) -> Tensor:
    """A sparse feed-forward layer for few tokens: x [tokens, d_model] -> y [tokens, d_model]; see `takes`.

    gate, up, down_t: [d_ff, d_model]; gate None: a plain layer, relu(x up^T + up_bias) down^T + down_bias. stats: int64
    [4], to which the tokens and the kept entries are added, or None.
    """
    device, (tokens, d_model), d_ff = x.device, x.shape, up.shape[0]
    if torch._C._cuda_getDevice() != device.index:  # torch.cuda.device() costs more than the comparison
        with torch.cuda.device(device):
            return decode(x, gate, up, down_t, gate_bias, up_bias, down_bias, stats, version)
    if not (_fit(gate) and _fit(down_t)):  # rare: copies are contiguous and aligned
        gate, down_t = (t if _fit(t) else t.clone(memory_format=torch.contiguous_format) for t in (gate, down_t))
    gate_bias, up_bias, down_bias = (
        b if b is None or b.is_contiguous() else b.contiguous() for b in (gate_bias, up_bias, down_bias)
    )
    key = (device.index, x.dtype, d_model, d_ff, rounded_up(tokens), version)
    try:
        found = _own.prepared[key]
    except (AttributeError, KeyError):
        found = _prepare(key, device)
    # Of every token and neuron a float, of every token and tile a 16-bit mask.
    work = torch.empty(tokens * found.tiles * (_TILE + 1), dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    values = work.data_ptr()
    masks = values + tokens * found.tiles * _TILE * 4
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    first, first_bias = (up, up_bias) if gate is None else (gate, gate_bias)
    slots = found.gate.slots
    slots[0], slots[1] = x.data_ptr(), first.data_ptr()
    slots[2] = 0 if first_bias is None else first_bias.data_ptr()
    slots[3] = 0 if gate is None else up.data_ptr()
    slots[4] = 0 if up_bias is None else up_bias.data_ptr()
    slots[5], slots[6], slots[7] = down_t.data_ptr(), masks, values
    slots[8] = 0 if stats is None else stats.data_ptr()
    slots[9] = tokens
    found.gate.launch(found.blocks, 1, stream)
    slots = found.down.slots
    slots[0], slots[1], slots[2] = masks, values, down_t.data_ptr()
    slots[3] = 0 if down_bias is None else down_bias.data_ptr()
    slots[4] = y.data_ptr()
    found.down.launch(found.slabs, tokens, stream)
    return y
