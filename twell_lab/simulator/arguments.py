"""The arguments of a kernel, arrays and numbers, checked against its parameters."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core import InputError

ALIGNED = 512  # where a GPU's allocator begins an array: which sectors and lines an access touches depends on it
TYPES = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "short": "int16",
    "unsigned short": "uint16",
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "long": "int64",
    "unsigned long": "uint64",
    "long long": "int64",
    "unsigned long long": "uint64",
    "__half": "float16",
    "half": "float16",
    "__nv_bfloat16": "bfloat16",  # numpy lacks it
}
_VECTOR = re.compile(r"(u?)(char|short|int|long|longlong|float|double|__half|__nv_bfloat16)([1-4])")


def lanes(kind: str) -> tuple[str, int]:
    """The type of a vector's values, and their number: "float4" -> ("float", 4). Of every other type itself, and 1."""
    if not (m := _VECTOR.fullmatch(kind)):
        return kind, 1
    return ("unsigned " if m[1] else "") + m[2].replace("longlong", "long long"), int(m[3])


def itemsize(dtype: Any) -> int:
    """The bytes of one value of an np.dtype, or of "bfloat16"."""
    return 2 if str(dtype) == "bfloat16" else np.dtype(dtype).itemsize


@dataclass(eq=False)
class Array:
    """An array that a launch uses: an argument, or a variable of the program (space "global"), or a "shared" one.

    begin: its address, of a shared one from the start of the thread-local block. dtype: np.dtype, or "bfloat16".
    element: bytes of what an index counts. words: what messages call it. phase: how far past an aligned address it
    begins. before: its bytes (uint8) when the launch began, where steps are kept."""

    name: str
    space: str
    begin: int
    nbytes: int
    dtype: Any
    shape: tuple[int, ...]
    element: int
    words: str = ""
    phase: int = 0
    before: np.ndarray | None = None

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)


def fits(pointee: str, dtype: Any) -> bool:
    """Return whether an array of `dtype` holds what a pointer to `pointee` reads: integers of either sign, also for the
    bits of 16-bit floats; floats for a float4. Structs, void and vectors of integers take anything."""
    base, n = lanes(pointee)
    want, name = TYPES.get(base, ""), str(dtype)
    if not want or (n > 1 and "int" in want):
        return True
    whole = name != "bfloat16" and np.dtype(dtype).kind in "iub" and itemsize(dtype) == itemsize(want)
    return name == want or (whole and want not in ("float32", "float64"))


def array(kernel: str, parameter, given) -> Array:
    """The memory of a tensor or NumPy array for a pointer parameter."""
    what = f"{parameter.name} of {kernel} is"
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu" or given.layout != torch.strided or not given.is_contiguous():
            kind = given.device if given.device.type != "cpu" else "not contiguous"
            raise InputError(f"{what} {kind}; a contiguous tensor on the CPU is accepted")
        dtype = "bfloat16" if given.dtype == torch.bfloat16 else np.dtype(str(given.dtype).removeprefix("torch."))
        address = given.data_ptr()
        phase = (address - given.untyped_storage().data_ptr()) % ALIGNED
    elif isinstance(given, np.ndarray):
        if not given.flags.c_contiguous:
            raise InputError(f"{what} a NumPy array with strides {given.strides}; a contiguous one is accepted")
        dtype, address = given.dtype, given.ctypes.data
        phase = address % 16
    else:
        kind = type(given).__name__
        raise InputError(f"{what} of type {kind}; a torch tensor, a NumPy array or None is accepted")
    if not fits(parameter.type, dtype):
        raise InputError(f"{what} {dtype}; the kernel takes {parameter.type}*")
    shape = tuple(given.shape)
    words = f"{dtype} {list(shape)}"
    return Array(parameter.name, "global", address, given.nbytes, dtype, shape, given.itemsize, words, phase)


def value(kernel: str, parameter, given, size: int) -> ctypes.Array:
    """The bytes of a number for a parameter of `size` bytes that is no pointer, or of a struct: from a ctypes
    structure, a NumPy scalar or record, or bytes, of exactly its size."""
    what = f"{parameter.name} of {kernel} is {given!r:.80};"
    if "int" not in (kind := TYPES.get(parameter.type, "")) and kind not in ("bool", "float32", "float64"):
        whole = isinstance(given, (bytes, bytearray, ctypes.Structure, ctypes._SimpleCData, np.generic))
        data = (given.tobytes() if isinstance(given, np.generic) else bytes(given)) if whole else b""
        if len(data) != size or not whole:
            accepted = f"{size} bytes: a ctypes.Structure, a NumPy record or bytes of that size"
            raise InputError(f"{what} {parameter.type} takes {accepted}")
        return (ctypes.c_char * size).from_buffer_copy(data)
    dtype = np.dtype(kind)
    given = getattr(given, "value", given)  # ctypes
    if isinstance(given, np.generic) or (isinstance(given, torch.Tensor) and given.numel() == 1):
        given = given.item()
    if not isinstance(given, (int, float) if dtype.kind == "f" else int):
        raise InputError(f"{what} a {'' if dtype.kind == 'f' else 'whole '}number is accepted ({parameter.type})")
    if dtype.kind != "f":
        low, high = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if not low <= given <= high:
            raise InputError(f"{what} {low} to {high} is accepted ({parameter.type})")
    with np.errstate(over="ignore"):
        return (ctypes.c_char * size).from_buffer_copy(np.array(given, dtype).tobytes())


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """The bytes at an address, as an array over the memory itself."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8) if nbytes else np.empty(0, np.uint8)
