"""TwELL: tile-wise ELLPACK, its geometry, its words, and the pool beside them. Exact both ways, on every input.

The packing kernels of the tensor-core GEMMs keep no dense gate, so what a tile's words cannot hold goes into the pool,
a bounded piece of memory in which every value has its place without threads racing for a counter. Each POOL_ROWS
neighbouring rows share POOL_WORDS words for each tile. A tile of a row with more values than slots keeps the first in
its words, and the rest, columns ascending, in the pool after those of the earlier rows of its group. Where a row's part
would end beyond the pool, that row is lost: it has to be computed from the dense weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import InputError
from .matrix import Format, as_matrix, check_tensor, dtype_names, row_pointers, rows_of

TILE, WORDS = 256, 32
POOL_ROWS, POOL_WORDS = 16, 64
VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype of one TwELL word: 32 bits for 16-bit values, 64 for float32. InputError for others."""
    if dtype not in VALUE_DTYPES:
        raise InputError(f"TwELL holds {dtype_names(VALUE_DTYPES)}, not {dtype}")
    return torch.int64 if dtype == torch.float32 else torch.int32


def check_geometry(tile: int, words: int) -> None:
    """Raise InputError unless a tile of `tile` columns may be packed into `words` words."""
    if isinstance(tile, bool) or not isinstance(tile, int) or not 1 <= tile <= 65536:
        raise InputError(f"tile is {tile!r}; a column index within a tile has 16 bits: 1 to 65536 accepted")
    if not isinstance(words, int) or not 2 <= words <= tile + 1:
        raise InputError(f"words is {words!r}; a tile of {tile} takes 2 (a count and one slot) to {tile + 1}")


@dataclass(frozen=True, eq=False)
class TwELL(Format):
    """Tile-wise ELLPACK: each row is cut into tiles, each tile packed into a fixed number of words. What a tile cannot
    hold lives beside it in the tail, so that `to_dense` is exact whatever the counts. Packing detaches.

    Attributes:
        packed: [rows, tiles, words], int32 holding uint32 bits for 16-bit values (int64 holding uint64 bits for
            float32). Word 0 is the true count of kept values, also when it exceeds words - 1. Each other word is
            `value bits << 16 | column within the tile` (`<< 32` for float32), columns ascending. Words past the
            count are never read.
        tail_pointer: int64 [rows + 1]; row i has tail_pointer[i]:tail_pointer[i + 1] of the next two.
        tail_column: int32, columns within the matrix, ascending within a row and tile by tile.
        tail_value: the values, in the matrix's dtype.
        shape: (rows, columns) of the matrix; the last tile may be narrower than the others.
        dtype: of the values: bfloat16, float16 or float32.
        tile: columns of a tile.
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
        """Return TwELL of relu(gate): keeps `not (g <= 0)`, so positives and NaN. InputError for other arguments.

        Args:
            gate: [rows, d_ff], bfloat16, float16 or float32, before the ReLU: a tensor, or an array that shares its
                memory (`twell_lab.formats.as_tensor`).
            tile: columns of a tile, 1 to 65,536.
            words: words of a tile, 2 to tile + 1: the count, and one for each value that it can hold.
        """
        gate = as_matrix(gate)
        return _pack(gate, fires(gate), tile, words)

    @classmethod
    def from_dense(cls, x: Tensor, tile: int = TILE, words: int = WORDS) -> TwELL:
        """Return TwELL of a matrix that already is sparse: keeps every value that is not zero, of either sign; else
        as `from_gate`."""
        x = as_matrix(x)
        return _pack(x, x != 0, tile, words)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        words = self.packed[..., 1:]
        used = torch.arange(self.slots, device=words.device) < self.counts[..., None]
        row, tile, _ = used.nonzero(as_tuple=True)
        value, column = split_words(words[used], self.dtype)
        rows = torch.cat([row, rows_of(self.tail_pointer)])
        columns = torch.cat([tile * self.tile + column, self.tail_column])
        return rows, columns, torch.cat([value, self.tail_value])

    def __repr__(self) -> str:
        rows, columns = self.shape
        return (
            f"TwELL({rows} x {columns}, {self.dtype}, {self.packed.device}: {self.nnz} values kept, "
            f"{len(self.tail_value)} of them in the tail; tile={self.tile}, words={self.words})"
        )

    def geometry(self) -> tuple:
        return (*super().geometry(), self.words)

    @property
    def words(self) -> int:
        """Words of a tile."""
        return self.packed.shape[2]

    @property
    def slots(self) -> int:
        """Values that a tile can hold."""
        return self.words - 1

    @property
    def counts(self) -> Tensor:
        """True number of kept values of each row and tile, integer [rows, tiles]."""
        return self.packed[..., 0]

    @property
    def overflow_rows(self) -> Tensor:
        """Numbers of the rows in which at least one tile had more values than slots, int64."""
        return self.tail_pointer.diff().nonzero()[:, 0]


def join_words(value: Tensor, column: Tensor) -> Tensor:
    """Return values and their columns within the tile, of one shape, as words of that shape (their bits: see TwELL)."""
    word = word_dtype(value.dtype)
    shift = 16 if word == torch.int32 else 32
    bits = value.contiguous().view(_BITS[value.dtype]).to(word)
    return (bits << shift) | column.to(word)


def split_words(words: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values of `dtype` and the int64 columns within the tile that words hold: the inverse of join_words."""
    shift = 16 if word_dtype(dtype) == torch.int32 else 32
    bits = (words >> shift).to(_BITS[dtype]).contiguous()
    return bits.view(dtype), (words & ((1 << shift) - 1)).long()


def tail_of(x: Tensor, keep: Tensor, slots: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the tiles of x cannot hold, if `keep` says which values are kept, both [rows, columns]: how many in
    each row, int64 [rows]; their columns within the matrix, int32, row by row; and their values."""
    tiled = _tiled(keep, tile)
    late = (tiled & (tiled.cumsum(2, dtype=torch.int32) > slots)).flatten(1)[:, : x.shape[1]]
    row, column = late.nonzero(as_tuple=True)
    return late.sum(1), column.to(torch.int32), x[row, column]


def _tiled(keep: Tensor, tile: int) -> Tensor:
    """Return keep, boolean [rows, columns], as [rows, tiles, tile], the last tile filled up with False."""
    return pad(keep, (0, -keep.shape[1] % tile)).unflatten(1, (-1, tile))


def _pack(x: Tensor, keep: Tensor, tile: int, words: int) -> TwELL:
    check_geometry(tile, words)
    x, word = x.detach(), word_dtype(x.dtype)
    tiled = _tiled(keep, tile)
    slot = tiled.cumsum(2, dtype=torch.int32)  # 1-based position among the kept: also the word's index
    row, part, column = (tiled & (slot < words)).nonzero(as_tuple=True)
    packed = torch.zeros(*tiled.shape[:2], words, dtype=word, device=x.device)
    packed[..., 0] = tiled.sum(2)
    packed[row, part, slot[row, part, column].long()] = join_words(x[row, part * tile + column], column)
    late, tail_column, tail_value = tail_of(x, keep, words - 1, tile)
    return TwELL(packed, row_pointers(late), tail_column, tail_value, tuple(x.shape), x.dtype, tile)


def fires(gate: Tensor) -> Tensor:
    """Return which neurons fire, and pack() keeps: positives and NaN. Boolean, in the shape of gate."""
    return ~(gate <= 0)


def packed_and_pool(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the packing kernels leave of relu(gate), given [tokens, d_ff] in bfloat16 or float16.

    Returns:
        packed: int32 [tokens, tiles, 32], as TwELL.packed.
        pool: int32 [ceil(tokens / 16), tiles, 64]. Words of both that nobody reads are 0 here; a kernel leaves them
            as they were.
        lost: bool [tokens], the rows with a tile that reaches past the pool.
    """
    gate = as_matrix(gate)
    check_tensor("gate", gate, dtypes=VALUE_DTYPES[:2])
    packed = TwELL.from_gate(gate, TILE, WORDS).packed
    tokens, tiles = packed.shape[:2]
    groups = -(-tokens // POOL_ROWS)
    padded = pad(gate.detach(), (0, tiles * TILE - gate.shape[1], 0, groups * POOL_ROWS - tokens))
    padded = padded.view(groups, POOL_ROWS, tiles, TILE).transpose(1, 2)  # [groups, tiles, rows of the group, columns]
    keep = fires(padded)
    late = (keep & (keep.cumsum(3) >= WORDS)).flatten(2)  # what the words do not hold, in the pool's order
    place = late.cumsum(2) - 1
    word = join_words(padded, torch.arange(TILE, device=gate.device)).flatten(2)
    pool = word.new_zeros(groups, tiles, POOL_WORDS + 1)  # the last takes what is dropped
    pool.scatter_(2, torch.where(late & (place < POOL_WORDS), place, POOL_WORDS), word)
    lost = (late & (place >= POOL_WORDS)).view(groups, tiles, POOL_ROWS, TILE).any(3).any(1).flatten()[:tokens]
    return packed, pool[..., :POOL_WORDS].contiguous(), lost
