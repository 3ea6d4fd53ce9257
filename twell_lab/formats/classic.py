"""COO, CSR, ELL and hybrid ELL as plain data classes over torch tensors, exact both ways."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..core.errors import InputError

_BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _names(dtypes) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def _check_matrix(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"expected a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.is_meta or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else "meta"
        raise InputError(f"got a {kind} tensor; a dense one that holds its values is accepted")
    if x.dim() != 2 or x.shape[1] == 0:
        raise InputError(f"expected a matrix [rows, columns] with at least one column, got {list(x.shape)}")
    if not x.dtype.is_floating_point or x.dtype.itemsize == 1:  # torch compares no float8 with zero
        raise InputError(f"expected floating-point values of 16 bits or more, got {x.dtype}")
    if x.layout != torch.strided:
        raise InputError(f"expected a dense (strided) tensor, got layout {x.layout}")


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _row_pointers(counts: Tensor) -> Tensor:
    """[rows] counts -> [rows + 1] int64 offsets."""
    return torch.nn.functional.pad(counts.to(torch.int64).cumsum(0), (1, 0))


def _rows_of(pointers: Tensor) -> Tensor:
    """The inverse of a CSR row pointer: the row of each stored entry."""
    rows = torch.arange(pointers.numel() - 1, device=pointers.device)
    return rows.repeat_interleave(pointers.diff())


class _Format:
    """What all formats share: when two of them are equal."""

    def __eq__(self, other) -> bool:
        """Whether both are of one kind and geometry and hold the same matrix, bit for bit; where their tensors lie is
        no part of it."""
        if type(other) is not type(self):
            return NotImplemented
        plain = [
            [
                getattr(each, field.name)
                for field in fields(each)
                if not isinstance(getattr(each, field.name), (Tensor, _Format))
            ]
            for each in (self, other)
        ]
        if plain[0] != plain[1] or self._geometry() != other._geometry():
            return False
        mine, theirs = (each.to_dense().detach().cpu() for each in (self, other))
        return mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))

    __hash__ = None  # tensors can be written to

    def _geometry(self) -> tuple:
        """What its tensors' shapes say beyond the values."""
        return ()


@dataclass(frozen=True, eq=False)
class COO(_Format):
    """Coordinates: one (row, column, value) triple for each entry, in row-major order.

    row, column: int32 [nnz]; value: [nnz]; shape: (rows, columns).
    """

    row: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> COO:
        _check_matrix(x)
        row, column = (x != 0).nonzero(as_tuple=True)
        return cls(row.to(torch.int32), column.to(torch.int32), x[row, column], tuple(x.shape))

    def to_dense(self) -> Tensor:
        out = self.value.new_zeros(self.shape)
        out[self.row.long(), self.column.long()] = self.value
        return out

    @property
    def nnz(self) -> int:
        return self.value.numel()

    @property
    def nbytes(self) -> int:
        return _nbytes(self.row, self.column, self.value)


@dataclass(frozen=True, eq=False)
class CSR(_Format):
    """Compressed rows: COO with the row column replaced by one offset a row.

    pointer: int64 [rows + 1], row i occupies pointer[i]:pointer[i + 1]; column: int32 [nnz]; value: [nnz].
    """

    pointer: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> CSR:
        coo = COO.from_dense(x)
        return cls(_row_pointers((x != 0).sum(1)), coo.column, coo.value, coo.shape)

    def to_dense(self) -> Tensor:
        return COO(_rows_of(self.pointer), self.column, self.value, self.shape).to_dense()

    @property
    def nnz(self) -> int:
        return self.value.numel()

    @property
    def nbytes(self) -> int:
        return _nbytes(self.pointer, self.column, self.value)


@dataclass(frozen=True, eq=False)
class ELL(_Format):
    """ELLPACK: every row gets as many slots as the fullest row needs.

    count: int32 [rows]; column: int32 [rows, slots]; value: [rows, slots]. Slots past a row's count are
    never read. One heavy row widens all of them: that is the weakness that TwELL and Hybrid answer.
    """

    count: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> ELL:
        coo = COO.from_dense(x)
        count = (x != 0).sum(1)
        slots = int(count.max()) if count.numel() else 0
        row = coo.row.long()
        slot = torch.arange(coo.nnz, device=x.device) - _row_pointers(count)[row]
        column = coo.column.new_zeros(x.shape[0], slots)
        value = x.new_zeros(x.shape[0], slots)
        column[row, slot], value[row, slot] = coo.column, coo.value
        return cls(count.to(torch.int32), column, value, coo.shape)

    def to_dense(self) -> Tensor:
        used = torch.arange(self.slots, device=self.count.device) < self.count[:, None]
        row, _ = used.nonzero(as_tuple=True)
        return COO(row, self.column[used], self.value[used], self.shape).to_dense()

    def _geometry(self) -> tuple:
        return (self.slots,)

    @property
    def slots(self) -> int:
        return self.column.shape[1]

    @property
    def nnz(self) -> int:
        return int(self.count.sum())

    @property
    def nbytes(self) -> int:
        return _nbytes(self.count, self.column, self.value)


@dataclass(frozen=True, eq=False)
class Hybrid(_Format):
    """ELL for the rows with at most `limit` entries, dense storage for the heavy rest.

    The format of the paper's training kernels (there limit = 128), without their bound on how many heavy
    rows there may be. light, heavy: int64 row numbers; ell: the light rows; dense: [heavy rows, columns].
    """

    light: Tensor
    heavy: Tensor
    ell: ELL
    dense: Tensor
    shape: tuple[int, int]
    limit: int

    @classmethod
    def from_dense(cls, x: Tensor, limit: int = 128) -> Hybrid:
        _check_matrix(x)
        if not isinstance(limit, int) or limit < 0:
            raise InputError(f"limit is {limit!r}; a number of entries a row, 0 or more, is accepted")
        is_heavy = (x != 0).sum(1) > limit
        light, heavy = (~is_heavy).nonzero()[:, 0], is_heavy.nonzero()[:, 0]
        return cls(light, heavy, ELL.from_dense(x[light]), x[heavy], tuple(x.shape), limit)

    def to_dense(self) -> Tensor:
        out = self.dense.new_zeros(self.shape)
        out[self.light] = self.ell.to_dense()
        # A heavy row is stored as it came; adding +0 makes its negative zeros +0 like everybody's.
        out[self.heavy] = torch.where(self.dense == 0, torch.zeros_like(self.dense), self.dense)
        return out

    @property
    def nnz(self) -> int:
        return self.ell.nnz + int((self.dense != 0).sum())

    @property
    def nbytes(self) -> int:
        return self.ell.nbytes + _nbytes(self.light, self.heavy, self.dense)
