"""spmm: a sparse matrix as COO, CSR or ELL times a dense one, C = A B (kernels/smxx_spmm.cu, kernels/smxx_spmm_coo.cu).

    left = SparseOperand(CSR.from_dense(a))    # a [rows, columns]; checked and prepared once
    c = left(b)                                # b [columns, n] -> c [rows, n], for many products

A linear layer's y = x W^T with a sparse W is C^T = W x^T: there x has to be turned, which a product of blocks
(ops.blocks) does not need. Zeros that A does not store are skipped, as in torch's sparse products: 0 times an infinity
in B adds nothing. CPU tensors are computed by torch, or, where a version is named, by the simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda.launch import Buffer, Call, Entry, Source, aligned, each_type, layout, run, value
from ..formats import COO, CSR, ELL
from ..formats.matrix import row_pointers, rows_of
from . import checks

VERSIONS = (1, 2, 3, 4)
_ANY_WIDTH = (1, 2)  # the versions that take any n and any alignment
_HEAVY, _TIMES = 256, 4  # a row is heavy that has more entries, and so many times the mean
_MOST = 2**31 - 1  # rows, columns
_WARP, _BLOCK_WARPS, _SHARE = 32, 8, 256  # _SHARE: entries of a warp, of COO
_THREADS = _BLOCK_WARPS * _WARP
_WIDEST = 65535 * _WARP * 4  # columns of B: blocks along y of a grid, and the fewest columns of one
_CHUNK = 2**22  # values that the product on a CPU makes at a time
SPMM = Source(
    "smxx_spmm",
    {
        f"{form}_v{version}": Entry(_THREADS, letters + "pi" * (version == 4))
        for form, letters in (("csr", "pppppii"), ("ell", "pippppii"))
        for version in VERSIONS
    },
    each_type,
    (("BLOCK_WARPS", _BLOCK_WARPS),),
)
SPMM_COO = Source(
    "smxx_spmm_coo",
    {f"coo_v{version}": Entry(_THREADS, "pppppqii" + "p" * (version == 4)) for version in VERSIONS}
    | {"coo_v4_carry": Entry(_THREADS, "pppqi")},
    each_type,
    (("BLOCK_WARPS", _BLOCK_WARPS), ("SHARE", _SHARE)),
)
TOLERANCE = 1.0  # of what a dense product may be off


def by_rows(call: Call, where, column, values, b, order, heavy: int, version: int) -> Buffer:
    """Multiply CSR or ELL with b [columns, n]: c [rows, n].

    CSR: where int64 [rows + 1], column int32 and values [nnz]; ELL: where int32 [rows], how many slots are used, column
    int32 and values [rows, slots]. order: int32 [rows], rows by their number of entries, the most first; heavy: how
    many of them a whole block computes in version 4."""
    rows, n, ell = len(order), b.shape[1], len(values.shape) == 2
    c = call.empty(rows, n, dtype=b.dtype)
    if version in _ANY_WIDTH:
        grid = _blocks(rows * n, _THREADS), 1
    else:
        shared = heavy if version == 4 else 0
        grid = shared + _blocks(rows - shared, _BLOCK_WARPS), _slabs(b)
    given = (where, *((values.shape[1],) if ell else ()), column, values, b, c, rows, n)
    kernel = SPMM.kernel(f"{'ell' if ell else 'csr'}_v{version}", value(b.dtype))
    if c.numel():
        call.launch(kernel, grid, *given, *((order, heavy) if version == 4 else ()))
    return c


def coo(call: Call, row: Buffer, column: Buffer, values: Buffer, b: Buffer, c: Buffer, version: int) -> Buffer:
    """Multiply COO, its entries row by row, with b [columns, n], into c [rows, n], zeros: row and column int32
    [nnz]."""
    nnz, (rows, n) = len(values), c.shape
    given = (row, column, values, b, c, nnz, rows, n)
    kernel = lambda name: SPMM_COO.kernel(name, value(b.dtype))
    parts = _blocks(nnz, _SHARE)
    grid = _blocks(parts, _BLOCK_WARPS), _slabs(b)
    if not c.numel() or not nnz:
        pass
    elif version in _ANY_WIDTH:
        call.launch(kernel(f"coo_v{version}"), (_blocks(rows * n, _THREADS), 1), *given)
    elif version == 3:
        call.launch(kernel("coo_v3"), grid, *given)
    else:
        sums = torch.float64 if b.dtype == torch.float32 else torch.float32
        carry = call.empty(parts, 2, n, dtype=sums)
        call.launch(kernel("coo_v4"), grid, *given, carry)
        call.launch(kernel("coo_v4_carry"), grid, row, carry, c, nnz, n)
    return c


def reference(row: Tensor, column: Tensor, values: Tensor, b: Tensor, rows: int) -> Tensor:
    """Return what both compute, by torch's operations in a wider type, rounded once."""
    wide = torch.float64 if b.dtype.itemsize > 2 else torch.float32
    c = b.new_zeros(rows, b.shape[1], dtype=wide)
    many = max(1, _CHUNK // max(1, b.shape[1]))
    for part in (slice(first, first + many) for first in range(0, len(row), many)):
        c.index_add_(0, row[part], values[part].to(wide)[:, None] * b[column[part].long()].to(wide))
    return c.to(b.dtype)


def _blocks(many: int, size: int) -> int:
    return -(-many // size)


def _slabs(b: Buffer) -> int:
    return _blocks(b.shape[1], _WARP * 16 // b.dtype.itemsize)


class SparseOperand:
    """A sparse matrix, checked and prepared once for any number of products. That waits for the device; a product does
    not. The tensors of `a` are not to be changed afterwards, and no gradient goes to them.

    a: COO, its entries in any order; CSR or ELL, columns ascending within a row. Raises InputError for anything else,
    values that are not bfloat16, float16 or float32, and entries that lie outside, twice at one place or, of CSR and
    ELL, not in order."""

    def __init__(self, a: COO | CSR | ELL) -> None:
        if not isinstance(a, (COO, CSR, ELL)):
            raise InputError(f"a is a {type(a).__name__}; a COO, CSR or ELL of twell_lab.formats is accepted")
        checks.check_tensor("a.value", a.value, dims=2 if isinstance(a, ELL) else 1)
        rows, columns = self.shape = tuple(map(int, a.shape))
        if not 0 <= rows <= _MOST or not 1 <= columns <= _MOST:
            raise InputError(f"a has shape {[rows, columns]}; up to {_MOST:,} rows and columns, one at least, accepted")
        self.dtype, self.device, self.format = a.value.dtype, a.value.device, type(a)
        row, column, values = _entries(a, rows)
        places = row * columns + column
        if isinstance(a, COO):
            places, order = places.sort()
            row, column, values = row[order], column[order], values[order]
        inside = ((row >= 0) & (row < rows) & (column >= 0) & (column < columns)).all()
        if len(row) and not (inside and (places.diff() > 0).all()):
            raise InputError(
                f"a has entries outside of {[rows, columns]}, twice at one place or out of order; each place once is "
                "accepted, and in CSR and ELL columns that ascend within a row"
            )
        counts = row.bincount(minlength=rows)
        self.heavy = int((counts > max(_HEAVY, _TIMES * len(row) / max(1, rows))).sum())
        self._list = row, column, values
        if isinstance(a, COO):
            self._parts: tuple = row.int(), column.int(), values.contiguous()
            return
        where = a.pointer.long() if isinstance(a, CSR) else counts.int()
        order = counts.argsort(descending=True, stable=True).int()
        self._parts = where.contiguous(), a.column.int().contiguous(), a.value.detach().contiguous(), order

    def versions(self, b: Tensor) -> tuple[int, ...]:
        """Return the versions of the kernel that take this B: from 3 on n has to be a whole number of 16 bytes, and B
        to lie on a 16-byte boundary."""
        return VERSIONS if b.shape[1] * b.itemsize % 16 == 0 and aligned(layout(b)) else _ANY_WIDTH

    def __call__(self, b: Tensor, version: int | None = None) -> Tensor:
        """Return C [rows, n] = A B, of B's dtype; sums are a step wider (float32 for 16 bits).

        version: None for 2 where it has to be, 4 where a row is heavy (more than 256 entries and four times the mean),
        else 3. Raises InputError for a B of another shape, dtype or device or that needs a gradient, and for a version
        that does not take it."""
        checks.check_tensor("b", b, shape=(self.shape[1], None), dtype=self.dtype, device=self.device)
        if b.shape[1] > _WIDEST or checks.needs_gradient(b):
            raise InputError(
                f"b has {b.shape[1]:,} columns, or needs a gradient; up to {_WIDEST:,} without are accepted"
            )
        b, rows = b.detach().contiguous(), self.shape[0]
        taken = self.versions(b)
        if version not in (None, *taken):
            raise InputError(f"version is {version}; for n = {b.shape[1]} at this address {taken} are accepted")
        if b.device.type == "cpu" and version is None:
            return reference(*self._list, b, rows)
        version = version or (2 if taken == _ANY_WIDTH else 4 if self.heavy else 3)
        if self.format is COO:
            return run(coo, *self._parts, b, b.new_zeros(rows, b.shape[1]), version)
        where, column, values, order = self._parts
        return run(by_rows, where, column, values, b, order, self.heavy, version)


def _entries(a: COO | CSR | ELL, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column (both int64) and value of each entry, as they are stored. InputError for counts that do not fit."""
    values = a.value.detach()
    if isinstance(a, COO):
        parts: tuple = a.row, a.column, values
    elif isinstance(a, CSR):
        counts = a.pointer.diff()
        if len(counts) != rows or a.pointer[0] != 0 or a.pointer[-1] != len(values) or (counts < 0).any():
            raise InputError(f"a.pointer does not rise from 0 to {len(values)} in {rows} steps, which is accepted")
        parts = rows_of(a.pointer, len(values)), a.column, values
    else:
        if len(a.count) != rows or (a.count < 0).any() or (a.count > a.slots).any():
            raise InputError(f"a.count is not {rows} numbers from 0 to {a.slots}, which are accepted")
        used = torch.arange(a.slots, device=values.device) < a.count[:, None]
        parts = rows_of(row_pointers(a.count)), a.column[used], values[used]
    if any(part.shape != parts[2].shape or part.is_floating_point() for part in parts[:2]):
        raise InputError("the rows and columns of a are no integers, one for each value, which are accepted")
    return parts[0].long(), parts[1].long(), parts[2]
