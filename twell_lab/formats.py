"""Sparse matrix formats as plain data classes over torch tensors, exact both ways.

COO, CSR and ELL are the classics; Hybrid (ELL for light rows, dense for heavy ones) is what sparse
training wants; TwELL (tile-wise ELLPACK, arXiv 2603.23198) is what a GPU can pack inside a GEMM.

Every class has `from_dense(x)`, which keeps each value that is not zero (NaN included), `to_dense()`,
which gives it back bit for bit (a negative zero comes back as +0), `nnz`, and `nbytes`, the bytes that
the stored form occupies. `==` says whether two of one class and geometry hold the same matrix, bit for bit;
none has a hash. This module needs torch alone; GPU kernels that produce the same forms are
reached through `twell_lab.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .errors import InputError

TILE, WORDS = 256, 32
POOL_ROWS, POOL_WORDS = 16, 64  # each 16 rows share 64 words for each tile, for what its words cannot hold (pool.py)
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The word that holds one (value, column) pair, and the integer type of the value's bits.
_WORD_DTYPE = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}
_BITS_DTYPE = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype of one TwELL word for values of `dtype`: 32 bits for 16-bit values, else 64."""
    if dtype not in _WORD_DTYPE:
        raise InputError(f"TwELL holds {_names(VALUE_DTYPES)}, not {dtype}")
    return _WORD_DTYPE[dtype]


def check_geometry(tile: int, words: int) -> None:
    """Raise InputError unless a tile of `tile` columns may be packed into `words` words."""
    if isinstance(tile, bool) or not isinstance(tile, int) or not 1 <= tile <= 65536:
        raise InputError(f"tile is {tile!r}; a column index within a tile has 16 bits: 1 to 65536 accepted")
    if not isinstance(words, int) or not 2 <= words <= tile + 1:
        raise InputError(f"words is {words!r}; a tile of {tile} takes 2 (a count and one slot) to {tile + 1}")


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
        """Whether both are of one kind and geometry and hold the same matrix, bit for bit; where their tensors lie is no part of it."""
        if type(other) is not type(self):
            return NotImplemented
        plain = [[getattr(each, field.name) for field in fields(each) if not isinstance(getattr(each, field.name), (Tensor, _Format))]
                 for each in (self, other)]
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


@dataclass(frozen=True, eq=False)
class TwELL(_Format):
    """Tile-wise ELLPACK: each row is cut into tiles, each tile packed into a fixed number of words.

    packed: [rows, tiles, words], int32 holding uint32 bits for 16-bit values (int64 holding uint64 bits
    for float32). Word 0 is the true count of kept values, also when it exceeds words - 1. Each other word
    is `value bits << 16 | column within the tile` (`<< 32` for float32), columns ascending. Words past the
    count are never read.
    What a tile cannot hold lives in the tail, row by row, columns ascending: row i owns
    tail_pointer[i]:tail_pointer[i + 1] of tail_column (int32, column within the matrix) and tail_value.
    Words carry no gradient, so neither does the tail: packing detaches.
    """

    packed: Tensor
    tail_pointer: Tensor
    tail_column: Tensor
    tail_value: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    tile: int = TILE

    @classmethod
    def from_gate(cls, gate: Tensor, tile: int = TILE, words: int = WORDS) -> TwELL:
        """TwELL of relu(gate): keeps `not (g <= 0)`, so positives and NaN. gate: [rows, d_ff]."""
        _check_matrix(gate)
        return _pack(gate, ~(gate <= 0), tile, words)

    @classmethod
    def from_dense(cls, x: Tensor, tile: int = TILE, words: int = WORDS) -> TwELL:
        """TwELL of a matrix that already is sparse: keeps every value that is not zero, of either sign."""
        _check_matrix(x)
        return _pack(x, x != 0, tile, words)

    def to_dense(self) -> Tensor:
        """[rows, columns], exact on every input."""
        words = self.packed[..., 1:]
        used = torch.arange(self.slots, device=words.device) < self.counts[..., None]
        row, tile, _ = used.nonzero(as_tuple=True)
        value, column = split_words(words[used], self.dtype)
        out = value.new_zeros(self.shape)
        out[row, tile * self.tile + column] = value
        out[_rows_of(self.tail_pointer), self.tail_column.long()] = self.tail_value
        return out

    def _geometry(self) -> tuple:
        return (self.words,)

    @property
    def words(self) -> int:
        return self.packed.shape[2]

    @property
    def slots(self) -> int:
        """Values a tile can hold: its words less the count."""
        return self.words - 1

    @property
    def counts(self) -> Tensor:
        """True number of kept values of each row and tile, integer [rows, tiles]."""
        return self.packed[..., 0]

    @property
    def nnz(self) -> int:
        return int(self.counts.sum())

    @property
    def overflow_rows(self) -> Tensor:
        """Numbers of the rows in which at least one tile had more values than slots, int64."""
        return self.tail_pointer.diff().nonzero()[:, 0]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.packed, self.tail_pointer, self.tail_column, self.tail_value)


def join_words(value: Tensor, column: Tensor) -> Tensor:
    """Pack values and their columns within the tile into words (see TwELL)."""
    word = word_dtype(value.dtype)
    shift = 16 if word == torch.int32 else 32
    bits = value.contiguous().view(_BITS_DTYPE[value.dtype]).to(word)
    return (bits << shift) | column.to(word)


def split_words(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Words -> (values of `dtype`, int64 columns within the tile), the inverse of join_words."""
    shift = 16 if word_dtype(dtype) == torch.int32 else 32
    bits = (words >> shift).to(_BITS_DTYPE[dtype]).contiguous()
    return bits.view(dtype), (words & ((1 << shift) - 1)).long()


def tail_of(x: Tensor, keep: Tensor, slots: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """(counts a row, columns, values) of what the tiles of x cannot hold, for [rows, columns] x and keep."""
    tiles = -(-x.shape[1] // tile)
    padded = torch.nn.functional.pad(keep, (0, tiles * tile - x.shape[1])).view(-1, tiles, tile)
    late = padded & (padded.cumsum(2, dtype=torch.int32) > slots)
    late = late.view(-1, tiles * tile)[:, : x.shape[1]]
    row, column = late.nonzero(as_tuple=True)
    return late.sum(1), column.to(torch.int32), x[row, column]


def _pack(x: Tensor, keep: Tensor, tile: int, words: int) -> TwELL:
    check_geometry(tile, words)
    x, word = x.detach(), word_dtype(x.dtype)
    rows, width = x.shape
    tiles = -(-width // tile)
    padded = torch.nn.functional.pad(keep, (0, tiles * tile - width)).view(rows, tiles, tile)
    slot = padded.cumsum(2, dtype=torch.int32)  # 1-based position among the kept: also the word's index
    row, part, column = (padded & (slot < words)).nonzero(as_tuple=True)
    packed = torch.zeros(rows, tiles, words, dtype=word, device=x.device)
    packed[..., 0] = padded.sum(2)
    packed[row, part, slot[row, part, column].long()] = join_words(x[row, part * tile + column], column)
    late, tail_column, tail_value = tail_of(x, keep, words - 1, tile)
    return TwELL(packed, _row_pointers(late), tail_column, tail_value, (rows, width), x.dtype, tile)
