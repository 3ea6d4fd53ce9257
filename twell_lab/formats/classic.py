"""COO, CSR, ELL and hybrid ELL as data classes over torch tensors, exact both ways.

Each keeps the values that are not zero, of either sign; zeros of either sign come back as +0. Each is made `from_dense`
of a matrix [rows, columns]: a tensor of 16, 32 or 64-bit floating-point values, or an array that shares its memory
(`twell_lab.formats.as_tensor`); anything else is an InputError. `shape` is (rows, columns) of the matrix."""

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
    """

    row: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> COO:
        x = as_matrix(x)
        row, column = (x != 0).nonzero(as_tuple=True)
        return cls(row.to(torch.int32), column.to(torch.int32), x[row, column], tuple(x.shape))

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.row, self.column, self.value


@dataclass(frozen=True, eq=False)
class CSR(Format):
    """Compressed sparse rows: COO, but with one offset for each row instead of one row number for each entry.

    Attributes:
        pointer: int64 [rows + 1]; the entries of row i are pointer[i]:pointer[i + 1] of the next two.
        column: int32 [nnz], ascending within a row.
        value: [nnz], in the matrix's dtype.
    """

    pointer: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> CSR:
        x = as_matrix(x)
        coo = COO.from_dense(x)
        return cls(row_pointers((x != 0).sum(1)), coo.column, coo.value, coo.shape)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        return rows_of(self.pointer), self.column, self.value


@dataclass(frozen=True, eq=False)
class ELL(Format):
    """ELLPACK: every row gets as many slots as the fullest row needs. One heavy row widens all of them: that is the
    weakness that TwELL and Hybrid answer.

    Attributes:
        count: int32 [rows], how many slots each row uses; the slots after them are never read.
        column: int32 [rows, slots], ascending within a row.
        value: [rows, slots], in the matrix's dtype.
    """

    count: Tensor
    column: Tensor
    value: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_dense(cls, x: Tensor) -> ELL:
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

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        used = torch.arange(self.slots, device=self.count.device) < self.count[:, None]
        return used.nonzero(as_tuple=True)[0], self.column[used], self.value[used]

    @property
    def slots(self) -> int:
        """Slots of each row: the entries of the fullest one."""
        return self.column.shape[1]


@dataclass(frozen=True, eq=False)
class Hybrid(Format):
    """ELL for the rows with at most `limit` entries, dense storage for the heavy rest: the format of the paper's
    training kernels (there limit = 128), without their bound on how many heavy rows there may be.

    Attributes:
        light, heavy: int64, the numbers of the light rows and of the heavy ones.
        ell: the light rows.
        dense: [heavy rows, columns], the heavy rows as they were given.
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
        """As of the others; InputError for a limit that is no whole number from 0 up, too."""
        x = as_matrix(x)
        if not isinstance(limit, int) or limit < 0:
            raise InputError(f"limit is {limit!r}; a number of entries a row, 0 or more, is accepted")
        is_heavy = (x != 0).sum(1) > limit
        light, heavy = (~is_heavy).nonzero()[:, 0], is_heavy.nonzero()[:, 0]
        return cls(light, heavy, ELL.from_dense(x[light]), x[heavy], tuple(x.shape), limit)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        (row, *light), heavy = self.ell.entries(), COO.from_dense(self.dense)
        rows = torch.cat([self.light[row], self.heavy[heavy.row.long()]])
        return rows, torch.cat([light[0], heavy.column]), torch.cat([light[1], heavy.value])
