"""Launching the decode kernels: a whole sparse layer for 1 to 64 tokens in two launches, with little host time.

What `launch` works out for each call is worked out here once for a shape and kept, one set a thread: a call fills in
addresses and launches. CUDA only; torch's current stream, torch's allocator, no waiting.
"""

from __future__ import annotations

import ctypes
import threading

import torch
from torch import Tensor

from . import launch
from .errors import DeviceError, InputError

MOST_TOKENS = 64
_FILE = "sm80_decode.cu"
_TILE, _SLAB, _DOWN_THREADS = 16, 256, 512  # as in the source
# By tokens (rounded up): tiles a block, warps, stages, blocks on a multiprocessor. What measured best on an H100.
_SHAPES = {1: (1, 8, 4, 3), 8: (1, 8, 2, 3), 16: (1, 8, 2, 3), 32: (3, 8, 2, 1), 64: (3, 8, 1, 1)}
_own = threading.local()  # .prepared: {key: _Prepared} of this thread


def takes(x: Tensor, up: Tensor) -> bool:
    """Whether `decode` takes x [tokens, d_model] and up [d_ff, d_model]; the other weights are taken to be like up."""
    if x.dim() != 2 or not 1 <= x.shape[0] <= MOST_TOKENS or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if x.shape[1] % 8 or x.shape[1] != up.shape[1] or x.dtype != up.dtype or up.shape[0] >= 2**27:
        return False
    aligned = x.data_ptr() % 16 == 0 and up.data_ptr() % 16 == 0 and x.is_contiguous() and up.is_contiguous()
    return aligned and _capability(x.device.index) >= (8, 0)


_capabilities: dict[int, tuple[int, int]] = {}


def _capability(index: int) -> tuple[int, int]:
    found = _capabilities.get(index)
    if found is None:
        found = _capabilities[index] = torch.cuda.get_device_capability(index)
    return found


class _Dimensions(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
    _fields_ += [("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint)]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Kernel:
    """One kernel with its block, and the memory that its arguments are read from at a launch."""

    def __init__(self, name: str, defines: tuple, sizes: tuple, block: int, device: torch.device, early: bool, shared: int):
        """sizes: how many 8-byte slots each argument takes. early: it may be launched while the one before still runs."""
        self.name, self.function = name, launch._kernel(_FILE, name, defines, device, shared)
        self.slots = (ctypes.c_uint64 * sum(sizes))()
        base, starts = ctypes.addressof(self.slots), [8 * sum(sizes[:i]) for i in range(len(sizes))]
        self.addresses = (ctypes.c_void_p * len(sizes))(*(base + start for start in starts))
        self.attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        self.attribute.value[0] = 1
        self.config = _Dimensions(gx=1, gy=1, gz=1, bx=block, by=1, bz=1, shared=shared, stream=None)
        if early:
            self.config.attributes, self.config.count = ctypes.addressof(self.attribute), 1
        self.arguments = (ctypes.byref(self.config), ctypes.c_void_p(self.function), self.addresses, None)

    def launch(self, gx: int, gy: int, stream: int) -> None:
        config = self.config
        config.gx, config.gy, config.stream = gx, gy, stream
        if status := _driver().cuLaunchKernelEx(*self.arguments):
            raise DeviceError(f"the driver refused a launch of {self.name} with grid ({gx}, {gy}): CUDA error {status}")


_loaded_driver = None


def _driver():
    global _loaded_driver
    if _loaded_driver is None:
        import sys

        _loaded_driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        _loaded_driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return _loaded_driver


class _Prepared:
    """The two kernels for one shape, on one device, of one thread."""

    def __init__(self, device: torch.device, dtype: torch.dtype, d_model: int, d_ff: int, rows: int, version: int):
        tiles, warps, stages, resident = _SHAPES[rows]
        groups = -(-rows // 8)
        value = ("VALUE_BF16" if dtype == torch.bfloat16 else "VALUE_FP16", True)
        macros = (("GROUPS", groups), ("ROWS", rows), ("TILES", tiles), ("WARPS", warps), ("STAGES", stages), ("RESIDENT", resident))
        defines = (value, ("D_MODEL", d_model), *macros)
        neurons = _TILE * tiles if version > 1 else _TILE
        parts = warps * 8 * groups * (neurons + 4) * 4
        shared = max(warps * stages * (neurons + rows) * 128, parts) if version > 1 else 0
        threads = 512 if version == 1 else 32 * warps
        early = _capability(device.index) >= (9, 0) and EARLY
        self.gate = _Kernel(f"decode_gate_v{version}", defines, (1,) * 6 + (2, 1, 1, 1), threads, device, False, shared)
        self.down = _Kernel("decode_down", defines, (2, 1, 1, 1, 1), _DOWN_THREADS, device, early, 0)
        self.blocks, self.tiles, self.slabs = -(-d_ff // neurons), -(-d_ff // _TILE), -(-d_model // _SLAB)
        self.gate.slots[10] = d_ff
        self.down.slots[5] = self.tiles


EARLY = True


def decode(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down_t: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    stats: Tensor | None = None,
    version: int = 3,
) -> Tensor:
    """A sparse feed-forward layer for few tokens: x [tokens, d_model] -> y [tokens, d_model]; see `takes`.

    gate, up, down_t: [d_ff, d_model], contiguous; gate None: a plain layer, relu(x up^T + up_bias) down. stats: int64 [4],
    to which tokens and kept entries are added, or None.
    """
    tokens, d_model = x.shape
    rows = 1 if tokens == 1 else 8 if tokens <= 8 else 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    device, d_ff = x.device, up.shape[0]
    key = (device.index, x.dtype, d_model, d_ff, rows, version)
    try:
        found = _own.prepared[key]
    except (AttributeError, KeyError):
        found = _prepare(key, device, x)
    if torch._C._cuda_getDevice() != device.index:
        with torch.cuda.device(device):
            return decode(x, gate, up, down_t, gate_bias, up_bias, down_bias, stats, version)
    tiles = found.tiles
    work = torch.empty(tokens * tiles * (_TILE + 1), dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    values = work.data_ptr()
    masks = values + tokens * tiles * _TILE * 4
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


def _prepare(key: tuple, device: torch.device, x: Tensor) -> _Prepared:
    _, dtype, d_model, d_ff, rows, version = key
    if version not in (1, 3):
        raise InputError(f"version is {version}; 1 and 3 are accepted")
    if not hasattr(_own, "prepared"):
        _own.prepared = {}
    _own.prepared[key] = _Prepared(device, dtype, d_model, d_ff, rows, version)
    return _own.prepared[key]
