"""Tensor maps: they tell Hopper's copy engine (TMA) where a matrix lies and which box of it one copy moves.

A map is 128 bytes that the driver encodes on the host, from plain numbers, without touching the GPU; a kernel gets it
by value. A map holds an address, which a `Call` replaces where a tensor lies elsewhere than last time."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core import DeviceError, StackError

if TYPE_CHECKING:
    from .launch import Buffer

_BYTES, _BOUNDARY = 128, 64  # of a map, and where the driver and kernels want it
# CUtensorMapDataType of cuda.h
_TYPE = {torch.uint8: 0, torch.int32: 4, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_NO_INTERLEAVE, _FILL_WITH_ZEROS, _PROMOTE_TO_128_BYTES = 0, 0, 2
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes: CUtensorMapSwizzle


class Map(NamedTuple):
    """A tensor map of a buffer, as an argument of a launch.

    dims: elements along each dimension, innermost first, 1 to 5 dimensions. strides: bytes from one element to the next
    along each dimension but the innermost, whose elements are contiguous; multiples of 16, in any order of size. box:
    elements of one copy along each dimension, at most 256. swizzle: 0, 32, 64 or 128 bytes. Elements of a box outside
    of the matrix are copied as zeros."""

    of: Buffer
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


@cache
def _encode():
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise StackError(f"tensor maps need an NVIDIA driver of CUDA 12 or newer ({error})") from error
    encode.restype = ctypes.c_int
    return encode


def encoded(given: Map, address: int) -> tuple[Any, int]:
    """Return memory that holds the map of a matrix at `address`, a multiple of 16, and where the map starts.

    Raises StackError without a driver, DeviceError if the driver refuses."""
    of, dims, strides, box, swizzle = given
    encode, rank, room = _encode(), len(dims), ctypes.create_string_buffer(_BYTES + _BOUNDARY)
    start = ctypes.addressof(room) + -ctypes.addressof(room) % _BOUNDARY
    error = encode(
        ctypes.c_void_p(start),
        _TYPE[of.dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLE[swizzle],
        _PROMOTE_TO_128_BYTES,
        _FILL_WITH_ZEROS,
    )
    if error:
        raise DeviceError(
            f"the driver refused a tensor map (error {error}): {of.dtype} at {address:#x}, dims {dims}, strides "
            f"{strides}, box {box}, swizzle {swizzle}"
        )
    return room, start


def matrix_map(matrix: Buffer, rows: int, columns: int = 64) -> Map:
    """Return the map of a matrix [n, d] in boxes of `rows` x `columns` values. Each row must be contiguous."""
    n, d = matrix.shape
    row = matrix.strides[0] if n > 1 else d  # with a single row, torch's stride may be any number
    return Map(matrix, (d, n), (row * matrix.dtype.itemsize,), (columns, rows))
