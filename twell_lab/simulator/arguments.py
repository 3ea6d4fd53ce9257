"""The arguments of a kernel, arrays and numbers, checked against its parameters."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from ..core import InputError

ALIGNED = 512  # where a GPU's allocator begins an array: which sectors and lines an access touches depends on it
TYPES = {
    "float": np.float32,
    "double": np.float64,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "short": np.int16,
    "unsigned short": np.uint16,
    "char": np.int8,
    "unsigned char": np.uint8,
    "bool": np.bool_,
    "long": np.int64,
    "unsigned long": np.uint64,
    "long long": np.int64,
    "unsigned long long": np.uint64,
    "__half": np.float16,
    "half": np.float16,
}


def fits(pointee: str, dtype: object) -> bool:
    """Return whether an array of `dtype` (np.dtype or "bfloat16") holds what a pointer to `pointee` reads.

    Integers of either sign, also for the bits of 16-bit floats; a float2 or float4 reads floats. What is not listed
    (structs, void, integer vectors as carriers of 16 bytes) takes anything.
    """
    name = str(dtype)
    sixteen = {
        "__half": "float16",
        "half": "float16",
        "__half2": "float16",
        "__nv_bfloat16": "bfloat16",
        "__nv_bfloat162": "bfloat16",
    }
    if pointee in sixteen:
        return name in (sixteen[pointee], "int16", "uint16")
    base = pointee.rstrip("1234") if pointee.startswith(("float", "double")) else pointee
    if base not in TYPES:
        return True
    want = np.dtype(TYPES[base])
    if want.kind == "f":
        return name == want.name
    return name != "bfloat16" and np.dtype(dtype).kind in "iub" and np.dtype(dtype).itemsize == want.itemsize


@dataclass
class Array:
    """One array argument: its memory, and what to call it."""

    name: str
    address: int
    nbytes: int
    dtype: object  # np.dtype or "bfloat16"
    itemsize: int
    shape: tuple[int, ...]
    owner: object
    past_aligned: int  # how far past an aligned address it begins: bytes
    moved: int = 0  # where a watched launch has its copy

    @property
    def words(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def array(kernel: str, parameter, given) -> Array:
    """The memory of a tensor or NumPy array for a pointer parameter.

    A kernel gets a copy of a read-only array, which thus stays as it is.
    """
    name = parameter.name
    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu" or given.layout != torch.strided or not given.is_contiguous():
            kind = given.device if given.device.type != "cpu" else "not contiguous"
            raise InputError(f"{name} of {kernel} is {kind}; a contiguous tensor on the CPU is accepted")
        dtype = "bfloat16" if given.dtype == torch.bfloat16 else np.dtype(str(given.dtype).removeprefix("torch."))
        inside = (given.data_ptr() - given.untyped_storage().data_ptr()) % ALIGNED
        found = Array(
            name, given.data_ptr(), given.nbytes, dtype, given.element_size(), tuple(given.shape), given, inside
        )
    elif isinstance(given, np.ndarray):
        if not given.flags.c_contiguous:
            raise InputError(
                f"{name} of {kernel} is a NumPy array with strides {given.strides}; a contiguous one is accepted"
            )
        given = given if given.flags.writeable else given.copy()
        inside = given.ctypes.data % 16
        found = Array(name, given.ctypes.data, given.nbytes, given.dtype, given.itemsize, given.shape, given, inside)
    else:
        kind = type(given).__name__
        raise InputError(f"{name} of {kernel} is of type {kind}; a torch tensor, a NumPy array or None is accepted")
    if not fits(parameter.type, found.dtype):
        raise InputError(f"{name} of {kernel} is {found.dtype}; the kernel takes {parameter.type}*")
    return found


def number(kernel: str, parameter, given, size: int):
    """A number as ctypes has it, or the bytes of a struct, for a parameter of `size` bytes that is no pointer."""
    if parameter.type not in TYPES or parameter.type in ("__half", "half"):
        return _struct(kernel, parameter, given, size)
    given = getattr(given, "value", given)  # ctypes
    given = (
        given.item()
        if isinstance(given, np.generic) or (isinstance(given, torch.Tensor) and given.numel() == 1)
        else given
    )
    floating = parameter.type in ("float", "double")
    if not isinstance(given, (int, float) if floating else (int, bool)):
        kind = "a number" if floating else "a whole number"
        raise InputError(f"{parameter.name} of {kernel} is {given!r:.80}; {kind} is accepted ({parameter.type})")
    if floating:
        return (ctypes.c_float if size == 4 else ctypes.c_double)(given)
    unsigned = "unsigned" in parameter.type or parameter.type == "bool"
    low, high = (0, 2 ** (8 * size)) if unsigned else (-(2 ** (8 * size - 1)), 2 ** (8 * size - 1))
    if not low <= given < high:
        raise InputError(f"{parameter.name} of {kernel} is {given}; {low} to {high - 1} is accepted ({parameter.type})")
    return {1: ctypes.c_int8, 2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}[size](int(given))


def _struct(kernel: str, parameter, given, size: int):
    """The bytes of a struct: from a ctypes structure, a NumPy scalar or record, or bytes, of exactly its size."""
    holds_bytes = isinstance(given, (bytes, bytearray, ctypes.Structure, ctypes._SimpleCData, np.generic))
    data = (given.tobytes() if isinstance(given, np.generic) else bytes(given)) if holds_bytes else b""
    if len(data) != size or not holds_bytes:
        raise InputError(
            f"{parameter.name} of {kernel} is {given!r:.80}; {parameter.type} takes {size} bytes: a ctypes.Structure, "
            "a NumPy record or bytes of that size"
        )
    return (ctypes.c_char * size).from_buffer_copy(data)


def merged(spans) -> list[tuple[int, int]]:
    """Joins overlapping (begin, end) spans: arguments that share memory must share it in a copy, too."""
    found: list[list[int]] = []
    for begin, end in sorted(spans):
        if found and begin < found[-1][1]:
            found[-1][1] = max(end, found[-1][1])
        else:
            found.append([begin, end])
    return [tuple(span) for span in found]


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    """The bytes at an address, as an array over the memory itself."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8) if nbytes else np.empty(0, np.uint8)
