"""Tensor maps: they tell Hopper's copy engine (TMA) where a matrix lies and which box of it one copy moves.

A map is 128 bytes that the driver encodes on the host, from plain numbers, without touching the GPU; a kernel gets it
by value. A map holds an address, which a `Call` replaces where a tensor lies elsewhere than last time."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..core import DeviceError, InputError, StackError

if TYPE_CHECKING:
    from .launch import Buffer

MAP_WORDS = 16  # of 8 bytes
_TYPE = {
    torch.uint8: 0,
    torch.int32: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}  # CUtensorMapDataType of cuda.h
_NO_INTERLEAVE, _FILL_WITH_ZEROS, _PROMOTE_TO_128_BYTES = 0, 0, 2
_SWIZZLE = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes: CUtensorMapSwizzle
_ENCODED_AT = 64  # bytes: the alignment that the driver wants for what it writes


class Map(NamedTuple):
    """A tensor map of a buffer, as an argument of a launch."""

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


def tensor_map(address: int, dtype: torch.dtype, dims: tuple, strides: tuple, box: tuple, swizzle: int = 128) -> bytes:
    """Return the map of the matrix at `address`: 128 bytes that a launch passes by value.

    dims: elements along each dimension, innermost first, 1 to 5 dimensions. strides: bytes from one element to the next
    along each dimension but the innermost, whose elements are contiguous; in any order of size. box: elements of one
    copy along each dimension. swizzle: 0, 32, 64 or 128 bytes. Elements of a box outside of the matrix are copied as
    zeros. Raises InputError for what the engine does not take, StackError without a driver, DeviceError if the driver
    refuses."""
    _check(address, dtype, dims, strides, box, swizzle)
    encode, rank = _encode(), len(dims)
    room = (ctypes.c_char * (8 * MAP_WORDS + _ENCODED_AT))()
    start = -ctypes.addressof(room) % _ENCODED_AT
    error = encode(
        ctypes.c_void_p(ctypes.addressof(room) + start),
        _TYPE[dtype],
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
            f"the driver refused a tensor map (error {error}): {dtype} at {address:#x}, dims {dims}, strides "
            f"{strides}, box {box}, swizzle {swizzle}"
        )
    return ctypes.string_at(ctypes.addressof(room) + start, 8 * MAP_WORDS)


def _check(address, dtype, dims, strides, box, swizzle) -> None:
    rank = len(dims)
    if dtype not in _TYPE or swizzle not in _SWIZZLE:
        raise InputError(
            f"a tensor map of {dtype} with a swizzle of {swizzle} bytes; {[*_TYPE]} and {[*_SWIZZLE]} are accepted"
        )
    if not 1 <= rank <= 5 or len(box) != rank or len(strides) != rank - 1:
        raise InputError(
            f"a tensor map has 1 to 5 dims, as many box sizes and one stride fewer, not {rank}, {len(box)} and "
            f"{len(strides)}"
        )
    if address % 16 or any(s % 16 or not 0 < s < 2**40 for s in strides):
        raise InputError(
            f"address {address:#x} and strides {strides} must be multiples of 16 bytes, strides below 2^40"
        )
    if any(not 0 < d <= 2**32 for d in dims) or any(not 0 < b <= 256 for b in box):
        raise InputError(f"dims {dims} must be 1 to 2^32, box sizes {box} 1 to 256")
    inner = box[0] * dtype.itemsize
    if inner % 16 or (swizzle and inner > swizzle):
        raise InputError(
            f"a box of {inner} bytes along the innermost dimension; a multiple of 16, at most the swizzle ({swizzle})"
        )


def matrix_map(matrix: Buffer, rows: int, columns: int = 64) -> Map:
    """Return the map of a matrix [n, d] in boxes of `rows` x `columns` values. Each row must be contiguous."""
    n, d = matrix.shape
    row = matrix.strides[0] if n > 1 else d  # with a single row, torch's stride may be any number
    return Map(matrix, (d, n), (row * matrix.dtype.itemsize,), (columns, rows))
