"""COO, CSR, ELL and hybrid ELL as data classes over torch tensors, exact both ways.

Each keeps the values that are not zero, of either sign; zeros of either sign come back as +0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import InputError
from .matrix import Format, as_matrix, row_pointers, rows_of


@dataclass(frozen=True, eq=False)
class COO(Format):
    """Coordinates: one (row, column, value) triple for each entry, row by row, columns ascending.

    Attributes:
        row, column: int32 [nnz].
        value: [nnz], in the matrix's dtype.
        shape: (rows, columns) of the matrix.
    """

    row: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> COO:
        """Of a matrix [rows, columns]: a tensor of 16, 32 or 64-bit floating-point values, or an array that shares its
        memory (`twell_lab.formats.as_tensor`). Raises InputError for anything else."""
        x = as_matrix(x)
        row, column = (x != 0).nonzero(as_tuple=True)
        return cls(row.to(torch.int32), column.to(torch.int32), x[row, column], tuple(x.shape))

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns], every value bit for bit (zeros as +0); entries may come in any order. Waits for
        the device. Raises InputError for an entry outside of the matrix, and for a place that is stored twice."""
        for name, index, size in zip(("row", "column"), (self.row, self.column), self.shape):
            wrong = index[(index < 0) | (index >= size)]
            if len(wrong):
                raise InputError(f"an entry has {name} {int(wrong[0])}; 0 to {size - 1} are accepted")
        place = self.row.long() * self.shape[1] + self.column
        ordered = place.sort().values
        twice = ordered[1:][ordered.diff() == 0]
        if len(twice):
            row, column = divmod(int(twice[0]), self.shape[1])
            raise InputError(f"row {row}, column {column} is stored twice; each place once is accepted")
        out = self.value.new_zeros(self.shape)
        out.view(-1)[place] = self.value
        return out

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return self.value.numel()


@dataclass(frozen=True, eq=False)
class CSR(Format):
    """Compressed sparse rows: COO, but with one offset for each row instead of one row number for each entry.

    Attributes:
        pointer: int64 [rows + 1]; the entries of row i are pointer[i]:pointer[i + 1] of the next two.
        column: int32 [nnz], ascending within a row.
        value: [nnz], in the matrix's dtype.
        shape: (rows, columns) of the matrix.
    """

    pointer: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> CSR:
        """Of a matrix [rows, columns]: a tensor of 16, 32 or 64-bit floating-point values, or an array that shares its
        memory (`twell_lab.formats.as_tensor`). Raises InputError for anything else."""
        x = as_matrix(x)
        coo = COO.from_dense(x)
        return cls(row_pointers((x != 0).sum(1)), coo.column, coo.value, coo.shape)

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns], every value bit for bit (zeros as +0)."""
        return COO(rows_of(self.pointer), self.column, self.value, self.shape).to_dense()

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return self.value.numel()


@dataclass(frozen=True, eq=False)
class ELL(Format):
    """ELLPACK: every row gets as many slots as the fullest row needs.

    One heavy row widens all of them: that is the weakness that TwELL and Hybrid answer.

    Attributes:
        count: int32 [rows], how many slots each row uses; the slots after them are never read.
        column: int32 [rows, slots], ascending within a row.
        value: [rows, slots], in the matrix's dtype.
        shape: (rows, columns) of the matrix.
    """

    count: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> ELL:
        """Of a matrix [rows, columns]: a tensor of 16, 32 or 64-bit floating-point values, or an array that shares its
        memory (`twell_lab.formats.as_tensor`). Raises InputError for anything else."""
        x = as_matrix(x)
        coo = COO.from_dense(x)
        count = (x != 0).sum(1)
        slots = int(count.max()) if count.numel() else 0
        row = coo.row.long()
        slot = torch.arange(coo.nnz, device=x.device) - row_pointers(count)[row]
        column = coo.column.new_zeros(x.shape[0], slots)
        value = x.new_zeros(x.shape[0], slots)
        column[row, slot], value[row, slot] = coo.column, coo.value
        return cls(count.to(torch.int32), column, value, coo.shape)

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns], every value bit for bit (zeros as +0)."""
        used = torch.arange(self.slots, device=self.count.device) < self.count[:, None]
        row, _ = used.nonzero(as_tuple=True)
        return COO(row, self.column[used], self.value[used], self.shape).to_dense()

    def geometry(self) -> tuple:
        return (*super().geometry(), self.slots)

    @property
    def slots(self) -> int:
        """Slots of each row: the entries of the fullest one."""
        return self.column.shape[1]

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return int(self.count.sum())


@dataclass(frozen=True, eq=False)
class Hybrid(Format):
    """ELL for the rows with at most `limit` entries, dense storage for the heavy rest.

    The format of the paper's training kernels (there limit = 128), without their bound on how many heavy
    rows there may be.

    Attributes:
        light, heavy: int64, the numbers of the light rows and of the heavy ones.
        ell: the light rows.
        dense: [heavy rows, columns], the heavy rows as they were given.
        shape: (rows, columns) of the matrix.
        limit: the most entries that a light row has.
    """

    light: Tensor
    heavy: Tensor
    ell: ELL
    dense: Tensor
    shape: tuple[int, int]
    limit: int

    @classmethod
    def from_dense(cls, x: Tensor, limit: int = 128) -> Hybrid:
        """Of a matrix [rows, columns]: a tensor of 16, 32 or 64-bit floating-point values, or an array that shares its
        memory (`twell_lab.formats.as_tensor`). Raises InputError for anything else, and for a
        limit that is not a whole number from 0 up."""
        x = as_matrix(x)
        if not isinstance(limit, int) or limit < 0:
            raise InputError(f"limit is {limit!r}; a number of entries a row, 0 or more, is accepted")
        is_heavy = (x != 0).sum(1) > limit
        light, heavy = (~is_heavy).nonzero()[:, 0], is_heavy.nonzero()[:, 0]
        return cls(light, heavy, ELL.from_dense(x[light]), x[heavy], tuple(x.shape), limit)

    def to_dense(self) -> Tensor:
        """The matrix, [rows, columns], every value bit for bit (zeros as +0)."""
        out = self.dense.new_zeros(self.shape)
        out[self.light] = self.ell.to_dense()
        # A heavy row is stored as it was given; its negative zeros become +0, as in the other formats.
        out[self.heavy] = torch.where(self.dense == 0, torch.zeros_like(self.dense), self.dense)
        return out

    @property
    def nnz(self) -> int:
        """How many entries are stored."""
        return self.ell.nnz + int((self.dense != 0).sum())
