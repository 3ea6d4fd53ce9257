"""Products of a sparse matrix A, as COO, CSR or ELL, with a dense one, C = A B (SpMM), and how their kernels are
launched (kernels/smxx_spmm.cu, kernels/smxx_spmm_coo.cu).

    c = spmm(CSR.from_dense(a), b)          # a [rows, columns], b [columns, n] -> c [rows, n]
    left = SparseOperand(CSR.from_dense(a))    # checked and prepared once,
    c = left(b)                                # for many products

A linear layer's y = x W^T with a sparse W is C^T = W x^T: here the activations x are to be turned, which a product of
blocks (`ops.block_linear`) does not need.

Zeros that A does not store are skipped, as in torch's sparse products: 0 times an infinity in B adds nothing. CUDA
tensors run on torch's current stream and nothing waits for the GPU. CPU tensors are computed by torch, or, where a
version is asked for, by the kernels in twell_lab.simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import VALUE, value
from ..formats import COO, CSR, ELL
from ..formats.matrix import dtype_names, row_pointers, rows_of
from .checks import needs_gradient

FILE, COO_FILE = "smxx_spmm.cu", "smxx_spmm_coo.cu"
VERSIONS = (1, 2, 3, 4)
_ANY_WIDTH = (1, 2)  # the versions that take any n and any alignment
_HEAVY, _TIMES = 256, 4  # a row is heavy that has more entries, and so many times the mean
_MOST = 2**31 - 1  # rows, columns
_BLOCK_WARPS, _WARP = sources.number("spmm.cuh", "BLOCK_WARPS"), sources.number("twell.cuh", "WARP")
_THREADS = _BLOCK_WARPS * _WARP
_SHARE = sources.number(COO_FILE, "SHARE")
_WIDEST = 65535 * _WARP * 4  # columns of B: blocks along y of a grid, and the fewest columns of one
_CHUNK = 2**22  # values that the product on a CPU makes at a time


def spmm(a: COO | CSR | ELL | SparseOperand, b: Tensor, version: int | None = None) -> Tensor:
    """C [rows, n] = A [rows, columns] x B [columns, n], of B's dtype; sums are a step wider (float32 for 16 bits).

    Args:
        a: a sparse matrix, which is checked and prepared anew in each call, or a SparseOperand, which is not.
        b: bfloat16, float16 or float32 as A, on its device; one that is not contiguous is copied.
        version: of the kernel, 1 to 4 as its source lists them; from 3 on n has to be a whole number of 16 bytes, and B
            to lie on a 16-byte boundary (`SparseOperand.versions`). None: 2 where it has to be, 4 where a row is heavy
            (more than 256 entries and four times the mean), else 3.

    Raises:
        InputError: for an A that `SparseOperand` does not take, for another B or version, and for a B that needs a
            gradient, which this product does not have.
    """
    return (a if isinstance(a, SparseOperand) else SparseOperand(a))(b, version)


def every_version(a: Tensor, b: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The product A B by each format's kernels in each version that takes B, for those who compare or time them.

    Returns:
        By the kernel's name ("csr_v3"), rising within a format, a function without arguments that returns C. What is
        prepared for a format is prepared once, before.

    Raises:
        InputError: for an A [rows, columns] that is no dense matrix of bfloat16, float16 or float32, and for another B.
    """
    if not isinstance(b, Tensor) or b.dim() != 2:
        shown = list(b.shape) if isinstance(b, Tensor) else type(b).__name__
        raise InputError(f"b is {shown}; a dense tensor [columns, n] is accepted")
    b = b.contiguous()
    made = {each: SparseOperand(each.from_dense(a)) for each in (COO, CSR, ELL)}
    return {
        f"{each.__name__.lower()}_v{version}": partial(left, b, version)
        for each, left in made.items()
        for version in left.versions(b)
    }


class SparseOperand:
    """A sparse matrix, checked and prepared once for any number of products. That waits for the device; a product does
    not. Its entries are those of `a` then, without their history: no gradient goes to them. The tensors of `a` are not
    to be changed afterwards.

    Args:
        a: COO, its entries in any order; CSR or ELL, columns ascending within a row.

    Raises:
        InputError: for anything else, values that are not bfloat16, float16 or float32, indices out of range, and a
            place of the matrix that is stored twice.
    """

    def __init__(self, a: COO | CSR | ELL) -> None:
        if not isinstance(a, (COO, CSR, ELL)):
            raise InputError(f"a is a {type(a).__name__}; a COO, CSR or ELL of twell_lab.formats is accepted")
        self.shape = _checked_shape(a.shape)
        _check_values(a.value, 2 if isinstance(a, ELL) else 1)
        self.format = type(a)
        self.dtype, self.device = a.value.dtype, a.value.device
        if isinstance(a, COO):
            self.row, self.column, self.value = _sorted_coo(a, self.shape)
            counts = self.row.bincount(minlength=self.shape[0])
        else:
            counts = _check_csr(a, self.shape) if isinstance(a, CSR) else _check_ell(a, self.shape)
        self.heavy = int((counts > max(_HEAVY, _TIMES * int(counts.sum()) / max(1, self.shape[0]))).sum())
        if isinstance(a, COO):
            return
        self.where = a.pointer.long().contiguous() if isinstance(a, CSR) else counts.to(torch.int32).contiguous()
        self.column, self.value = a.column.to(torch.int32).contiguous(), a.value.detach().contiguous()
        self.order = counts.argsort(descending=True, stable=True).to(torch.int32)

    @property
    def nnz(self) -> int:
        """How many entries are stored; of ELL with the slots that are not used."""
        return self.value.numel()

    def versions(self, b: Tensor) -> tuple[int, ...]:
        """The versions of the kernel that take this B."""
        vectors = b.shape[1] * b.itemsize % 16 == 0 and launcher.aligned(b)
        return VERSIONS if vectors else _ANY_WIDTH

    def __call__(self, b: Tensor, version: int | None = None) -> Tensor:
        """C = A B, as `spmm`."""
        if not isinstance(b, Tensor) or b.layout != torch.strided or b.dim() != 2 or b.shape[0] != self.shape[1]:
            shown = f"{b.layout} {list(b.shape)}" if isinstance(b, Tensor) else type(b).__name__
            raise InputError(f"b is {shown}; a dense tensor [{self.shape[1]}, n] is accepted")
        if b.shape[1] > _WIDEST:
            raise InputError(f"b has {b.shape[1]:,} columns; up to {_WIDEST:,} are accepted")
        if b.dtype != self.dtype or b.device != self.device:
            raise InputError(f"b is {b.dtype} on {b.device}; {self.dtype} on {self.device}, as a, is accepted")
        if needs_gradient(b):
            raise InputError("b needs a gradient, which this product does not have; b.detach() is accepted")
        b = b.contiguous()
        taken = self.versions(b)
        if version not in (None, *taken):
            raise InputError(
                f"version is {version}; {taken[0]} to {taken[-1]} are accepted for n = {b.shape[1]} at this address"
            )
        if not (self.shape[0] and b.shape[1]):
            return b.new_zeros(self.shape[0], b.shape[1])
        if b.device.type == "cpu" and version is None:
            return self._on_cpu(b)
        return (coo_product if self.format is COO else rows_product)(
            self, b, version or (2 if taken == _ANY_WIDTH else 4 if self.heavy else 3)
        )

    def _on_cpu(self, b: Tensor) -> Tensor:
        row, column, entry = self._entries()
        wide = torch.float64 if b.dtype == torch.float32 else torch.float32
        c = b.new_zeros(self.shape[0], b.shape[1], dtype=wide)
        many = max(1, _CHUNK // b.shape[1])
        for part in (slice(first, first + many) for first in range(0, len(row), many)):
            c.index_add_(0, row[part], entry[part].to(wide)[:, None] * b[column[part].long()].to(wide))
        return c.to(b.dtype)

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and value of each entry, row by row."""
        if self.format is COO:
            return self.row, self.column, self.value
        if self.format is CSR:
            return rows_of(self.where, self.nnz), self.column, self.value
        used = _used(self.where, self.value.shape[1])
        return rows_of(row_pointers(self.where)), self.column[used], self.value[used]


# ---- launches ----


def rows_product(a: SparseOperand, b: Tensor, version: int) -> Tensor:
    """C = A B for CSR and ELL by smxx_spmm.cu."""
    rows, n = a.shape[0], b.shape[1]
    c = b.new_empty(rows, n)
    if version in _ANY_WIDTH:
        grid = _blocks(rows * n, _THREADS), 1
    else:
        heavy = 0 if version == 3 else a.heavy
        grid = heavy + _blocks(rows - heavy, _BLOCK_WARPS), _slabs(b)
    where = (a.where,) if a.format is CSR else (a.where, a.value.shape[1])
    arguments = (*where, a.column, a.value, b, c, rows, n, *((a.order, a.heavy) if version > 3 else ()))
    name = f"{'csr' if a.format is CSR else 'ell'}_v{version}"
    launcher.kernel(FILE, name, value(b.dtype)).launch(b.device, grid, arguments)
    return c


def coo_product(a: SparseOperand, b: Tensor, version: int) -> Tensor:
    """C = A B for COO by smxx_spmm_coo.cu."""
    rows, n = a.shape[0], b.shape[1]
    c = b.new_empty(rows, n) if version in _ANY_WIDTH else b.new_zeros(rows, n)
    arguments = (a.row, a.column, a.value, b, c, a.nnz, rows, n)
    launch = lambda name, *given: launcher.kernel(COO_FILE, name, value(b.dtype)).launch(b.device, *given)  # noqa: E731
    if version in _ANY_WIDTH:
        launch(f"coo_v{version}", (_blocks(rows * n, _THREADS), 1), arguments)
    elif a.nnz:
        parts = _blocks(a.nnz, _SHARE)
        grid = _blocks(parts, _BLOCK_WARPS), _slabs(b)
        if version == 3:
            launch("coo_v3", grid, arguments)
        else:
            sums = torch.float64 if b.dtype == torch.float32 else torch.float32
            carry = b.new_empty(parts, 2, n, dtype=sums)
            launch("coo_v4", grid, (*arguments, carry))
            launch("coo_v4_carry", grid, (a.row, carry, c, a.nnz, n))
    return c


def _blocks(many: int, each: int) -> int:
    return -(-many // each)


def _slabs(b: Tensor) -> int:
    return _blocks(b.shape[1], _WARP * 16 // b.itemsize)


# ---- what A may be ----


def _checked_shape(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or not 0 <= shape[0] <= _MOST or not 1 <= shape[1] <= _MOST:
        raise InputError(
            f"a has shape {list(shape)}; [rows, columns] of up to {_MOST:,}, one column at least, accepted"
        )
    return int(shape[0]), int(shape[1])


def _check_values(values: Tensor, dimensions: int) -> None:
    if values.dtype not in VALUE or values.dim() != dimensions:
        raise InputError(
            f"the values of a are {values.dtype} {list(values.shape)}; {dtype_names(VALUE)} are accepted, in one "
            "dimension for COO and CSR and in two for ELL"
        )


def _check_indices(name: str, indices: Tensor, like: Tensor, end: int) -> None:
    """InputError unless these are whole numbers from 0 up to, but not, `end`, one for each of `like`."""
    if indices.dtype not in (torch.int32, torch.int64) or indices.shape != like.shape or indices.device != like.device:
        raise InputError(
            f"the {name}s of a are {indices.dtype} {list(indices.shape)} on {indices.device}; int32 or int64 "
            f"{list(like.shape)} on {like.device} are accepted"
        )
    wrong = indices[(indices < 0) | (indices >= end)]
    if len(wrong):
        raise InputError(f"a has an entry of {name} {int(wrong[0])}; 0 to {end - 1} are accepted")


def _sorted_coo(a: COO, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of the entries, row by row, columns ascending."""
    _check_indices("row", a.row, a.value, shape[0])
    _check_indices("column", a.column, a.value, shape[1])
    places, order = (a.row.long() * shape[1] + a.column).sort()
    twice = (places.diff() == 0).nonzero()
    if len(twice):
        row, column = divmod(int(places[twice[0, 0]]), shape[1])
        raise InputError(f"a stores row {row}, column {column} twice; each place once is accepted")
    return a.row[order].to(torch.int32), a.column[order].to(torch.int32), a.value.detach()[order]


def _check_csr(a: CSR, shape: tuple[int, int]) -> Tensor:
    """The number of entries of each row."""
    pointer = a.pointer
    if pointer.dtype not in (torch.int32, torch.int64) or pointer.shape != (shape[0] + 1,):
        raise InputError(
            f"the pointers of a are {pointer.dtype} {list(pointer.shape)}; int32 or int64 [{shape[0] + 1}] are accepted"
        )
    counts = pointer.diff()
    if int(pointer[0]) or int(pointer[-1]) != len(a.value) or bool((counts < 0).any()):
        raise InputError(
            f"the pointers of a are not an ascent from 0 to {len(a.value)}, its entries, which is accepted"
        )
    _check_indices("column", a.column, a.value, shape[1])
    _check_ascending(rows_of(pointer, len(a.value)), a.column)
    return counts


def _check_ell(a: ELL, shape: tuple[int, int]) -> Tensor:
    """The number of entries of each row."""
    if len(a.value) != shape[0]:
        raise InputError(f"the values of a are {list(a.value.shape)}; [{shape[0]}, slots] are accepted")
    _check_indices("count", a.count, a.value[:, :1].reshape(-1) if a.slots else a.value.sum(1), a.slots + 1)
    used = _used(a.count, a.slots)
    if a.column.shape != a.value.shape:
        raise InputError(f"the columns of a are {list(a.column.shape)}; {list(a.value.shape)} are accepted")
    _check_indices("column", a.column[used], a.value[used], shape[1])
    _check_ascending(rows_of(row_pointers(a.count)), a.column[used])
    return a.count


def _used(count: Tensor, slots: int) -> Tensor:
    """Which slots of ELL hold an entry, bool [rows, slots]."""
    return torch.arange(slots, device=count.device) < count[:, None]


def _check_ascending(row: Tensor, column: Tensor) -> None:
    wrong = ((row.diff() == 0) & (column.diff() <= 0)).nonzero()
    if len(wrong):
        at = int(wrong[0, 0])
        raise InputError(
            f"row {int(row[at])} of a has column {int(column[at + 1])} after column {int(column[at])}; columns that "
            "ascend within a row are accepted"
        )
