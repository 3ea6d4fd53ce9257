"""What all formats share: which tensors they accept, row pointers, and their base class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..core import InputError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def as_tensor(name: str, array: Any) -> Tensor:
    """Return a torch tensor over the memory of an array; a tensor is returned as it is, nothing is ever copied.

    Accepted are objects with `__dlpack__` (CuPy, NumPy, JAX, ...), whose library makes torch's current stream wait for
    what is still being computed, and those with `__cuda_array_interface__` alone (Numba). InputError, which calls the
    argument by `name`, for anything else, and for an array that torch cannot share: of a dtype it does not have, with
    a step backwards in memory (`a[::-1]`), or on a device that this build of torch does not use."""
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


def check_tensor(name: str, tensor: Any, dim: int | None = None, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Raise InputError unless `tensor` is a dense tensor that has its values, of `dim` dimensions (None: any) and of
    one of these dtypes (none: any)."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}; a torch.Tensor is accepted")
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "meta": tensor.is_meta}
    kinds[str(tensor.layout).removeprefix("torch.")] = tensor.layout != torch.strided
    if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
        raise InputError(f"{name} is a {kind} tensor; a dense one that holds its values is accepted")
    if dim is not None and tensor.dim() != dim:
        raise InputError(f"{name} has shape {list(tensor.shape)}; {dim} dimensions are accepted")
    if dtypes and tensor.dtype not in dtypes:
        raise InputError(f"{name} holds {tensor.dtype}; {dtype_names(dtypes)} are accepted")


def as_matrix(x: Any) -> Tensor:
    """Return a matrix, a tensor or another library's array (see `as_tensor`), as a tensor [rows, columns].

    Raises InputError unless it is dense, has its values, two dimensions and at least one column, and holds
    floating-point numbers of 16 bits or more."""
    x = as_tensor("the matrix", x)
    check_tensor("the matrix", x, dtypes=FLOATS)
    if x.dim() != 2 or x.shape[1] == 0:
        raise InputError(f"the matrix has shape {list(x.shape)}; [rows, columns] with at least one column is accepted")
    return x


def dtype_names(dtypes) -> str:
    """Return several dtypes for a message: "bfloat16, float16"."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def row_pointers(counts: Tensor) -> Tensor:
    """Return where each row's entries begin and end, int64 [rows + 1], from how many each row has, [rows]."""
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def rows_of(pointers: Tensor, nnz: int | None = None) -> Tensor:
    """Return the row of each stored entry, int64 [nnz], from row pointers [rows + 1]: the inverse of `row_pointers`.
    Who says how many entries there are spares a wait for the device."""
    rows = torch.arange(pointers.numel() - 1, device=pointers.device)
    return rows.repeat_interleave(pointers.diff(), output_size=nnz)


class Format(ABC):
    """Base class of all formats: `entries` says what is stored, and the rest follows. Two objects are equal if they are
    of one kind and geometry (shape, tile, ...) and hold the same matrix, bit for bit; on whatever devices."""

    shape: tuple[int, int]

    @abstractmethod
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the columns and the values of all stored entries, each [nnz], in any order."""

    def to_dense(self) -> Tensor:
        """Return the matrix, [rows, columns], every stored value bit for bit, the others +0. Waits for the device.

        Raises InputError for an object that was altered: fields without values or of other lengths, an entry outside
        of the matrix, a place that is stored twice."""
        for field in fields(self):
            if "Tensor" in str(field.type):
                check_tensor(field.name, getattr(self, field.name))
        try:
            row, column, value = self.entries()
        except (RuntimeError, IndexError) as error:
            raise InputError(f"the fields of this {type(self).__name__} do not fit together: {error}") from error
        for name, index, size in zip(("row", "column"), (row, column), self.shape):
            if index.is_floating_point() or len(index) != len(value):
                raise InputError(f"{len(value)} values have {len(index)} {name}s of {index.dtype}; as many integers")
            for wrong in index[(index < 0) | (index >= size)][:1].tolist():
                raise InputError(f"an entry has {name} {wrong}; 0 to {size - 1} are accepted")
        place = row.long() * self.shape[1] + column.long()
        ordered = place.sort().values
        for twice in ordered[1:][ordered.diff() == 0][:1].tolist():
            where = "row {}, column {}".format(*divmod(twice, self.shape[1]))
            raise InputError(f"{where} is stored twice; each place once is accepted")
        out = value.new_zeros(self.shape)
        out.view(-1)[place] = value
        return out

    @property
    def nnz(self) -> int:
        """Return how many entries are stored."""
        return len(self.entries()[2])

    def __eq__(self, other) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self.geometry() != other.geometry():
            return False
        mine, theirs = (matrix.to_dense().detach().cpu() for matrix in (self, other))
        bits = (matrix.clone(memory_format=torch.contiguous_format).view(torch.uint8) for matrix in (mine, theirs))
        return mine.dtype == theirs.dtype and torch.equal(*bits)

    __hash__ = None  # tensors can be written to

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(value.nbytes for value in self._values() if isinstance(value, (Tensor, Format)))

    def geometry(self) -> tuple:
        """Return what describes the matrix beside its values: every field that holds no tensor."""
        return tuple(value for value in self._values() if not isinstance(value, (Tensor, Format)))

    def _values(self) -> list:
        return [getattr(self, field.name) for field in fields(self)]
