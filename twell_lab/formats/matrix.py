"""What all formats share: which matrices they accept, row pointers, and their base class (bytes, equality)."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..core import InputError

# The integer type that holds the bits of a value.
BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def as_tensor(name: str, array: Any) -> Tensor:
    """A torch tensor over the memory of an array: a tensor is returned as it is, nothing is ever copied.

    Accepted are objects with `__dlpack__` (CuPy, NumPy, JAX and others) and those that offer `__cuda_array_interface__`
    alone (Numba). With `__dlpack__`, the array's library makes torch's current stream wait for what is still being
    computed.

    Args:
        name: what the argument is called, for the message of an error.
        array: a torch.Tensor, or an array of another library, of any shape, on any device that torch can use.

    Returns:
        A tensor with the array's shape, strides, dtype and device.

    Raises:
        InputError: for anything else, and for an array that torch cannot share: a dtype it does not have, a step
            backwards in memory (`a[::-1]`), or a device that this build of torch does not use.
    """
    if isinstance(array, Tensor):
        return array
    kind, accepted = type(array).__name__, "a torch.Tensor, or an array with __dlpack__ such as CuPy's, is accepted"
    by_dlpack = hasattr(array, "__dlpack__")
    if isinstance(array, type) or not (by_dlpack or hasattr(array, "__cuda_array_interface__")):
        raise InputError(f"{name} is a {kind}; {accepted}")
    # torch ends the whole process on a negative stride
    if any(step < 0 for step in getattr(array, "strides", None) or ()):
        raise InputError(f"{name} is a {kind} with strides {array.strides}; none below zero is accepted: copy it first")
    try:
        return torch.from_dlpack(array) if by_dlpack else torch.as_tensor(array, device="cuda")
    except Exception as error:  # libraries raise BufferError, TypeError, RuntimeError or AssertionError
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"{name} is a {kind} that torch cannot share: {reason:.200}; {accepted}") from error


def as_matrix(x: Any) -> Tensor:
    """`x`, a tensor or another library's array, as a tensor [rows, columns] that a format can be made of.

    Raises:
        InputError: unless it is dense, has its values, two dimensions and at least one column, and holds
            floating-point numbers of 16 bits or more.
    """
    x = as_tensor("the matrix", x)
    if x.is_nested or x.is_meta or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "meta"
        raise InputError(f"the matrix is a {kind} tensor; a dense one that holds its values is accepted")
    if x.dim() != 2 or x.shape[1] == 0:
        raise InputError(f"the matrix has shape {list(x.shape)}; [rows, columns] with at least one column is accepted")
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:  # torch compares no float8 with zero
        raise InputError(f"the matrix holds {x.dtype}; floating-point values of 16 bits or more are accepted")
    if x.layout != torch.strided:
        raise InputError(f"the matrix has layout {x.layout}; a dense (strided) tensor is accepted")
    return x


def dtype_names(dtypes) -> str:
    """Several dtypes for a message: "bfloat16, float16"."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def row_pointers(counts: Tensor) -> Tensor:
    """Where each row's entries begin and end, int64 [rows + 1], from how many each row has, [rows]."""
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def rows_of(pointers: Tensor, nnz: int | None = None) -> Tensor:
    """The row of each stored entry, int64 [nnz], from row pointers [rows + 1]: the inverse of `row_pointers`. Who says
    how many entries there are spares a wait for the device."""
    rows = torch.arange(pointers.numel() - 1, device=pointers.device)
    return rows.repeat_interleave(pointers.diff(), output_size=nnz)


class Format:
    """Base class of all formats. Two objects are equal if they are of one kind and geometry (shape, tile, words, ...)
    and hold the same matrix, bit for bit; they may lie on different devices."""

    def __eq__(self, other) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self.geometry() != other.geometry():
            return False
        mine, theirs = (each.to_dense().detach().cpu() for each in (self, other))
        bits = (each.clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (mine, theirs))
        return mine.dtype == theirs.dtype and torch.equal(*bits)

    __hash__ = None  # tensors can be written to

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(each.nbytes for each in self._fields() if isinstance(each, (Tensor, Format)))

    def geometry(self) -> tuple:
        """What describes the matrix beside its values: every field that holds no tensor."""
        return tuple(each for each in self._fields() if not isinstance(each, (Tensor, Format)))

    def _fields(self) -> list:
        return [getattr(self, field.name) for field in fields(self)]
