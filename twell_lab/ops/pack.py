"""pack: a dense gate becomes TwELL words (kernels/smxx_pack.cu).

A tile with more values than it has room for says how many, in word 0, and holds the first of them. Who reads the tile
gets the others from the gate itself (ops.down, ops.gated). Where no gate is written, they are in a pool that rows
share, and a row that the pool cannot hold is computed anew (ops.gate_pack, ops.dispatch)."""

from __future__ import annotations

from torch import Tensor

from ..core import InputError
from ..cuda.launch import Buffer, Call, Entry, Macros, Source, aligned, value
from ..formats.twell import TwELL, check_geometry, word_dtype

_TILES = {1: 128, 2: 8, 3: 8, 4: 32}  # tiles of a block, by version


def signs(signed: bool) -> Macros:
    """Return the macros of what is packed: all that is not zero, or what is positive."""
    return (("SIGNED", True),) if signed else ()


PACK = Source(
    "smxx_pack",
    {f"pack_v{version}": Entry(128 if version == 1 else 256, "ppqiii") for version in _TILES},
    builds=lambda dtype, widths, capability: [(*value(dtype), *signs(signed)) for signed in (False, True)],
)


def pack(call: Call, gate: Buffer, tile: int, words: int, version=None, *, signed: bool = False) -> Buffer:
    """Pack a gate [rows, d_ff], contiguous: int32 (float32: int64) [rows, tiles, words].

    Words past a tile's count are not written. version: 1 or 2 for any gate; 3 or 4 where d_ff and tile are whole
    numbers of 16 bytes and the gate is aligned to 16 bytes; None: the fastest that takes this gate. signed: keep all
    that is not zero. Raises InputError for a geometry or version that no kernel takes."""
    check_geometry(tile, words)
    (rows, columns), vector = gate.shape, 16 // gate.dtype.itemsize
    tiles = -(-columns // tile)
    if rows * tiles >= 2**31:
        raise InputError(f"gate has {rows} x {tiles} tiles; fewer than 2^31 tiles are accepted at once")
    vectors = columns % vector == 0 and tile % vector == 0 and aligned(gate)
    if version not in (None, *_TILES) or (version or 0) > 2 and not vectors:
        raise InputError(
            f"version is {version}; 1 and 2 are accepted, and 3 and 4 where d_ff and tile are multiples of {vector} "
            f"and the gate lies on a 16-byte boundary (d_ff is {columns}, tile {tile})"
        )
    version = version or (4 if vectors else 2)
    packed = call.empty(rows, tiles, words, dtype=word_dtype(gate.dtype))
    if rows:
        kernel = PACK.kernel(f"pack_v{version}", (*value(gate.dtype), *signs(signed)))
        call.launch(kernel, (-(-rows * tiles // _TILES[version]), 1), gate, packed, rows, columns, tile, words)
    return packed


def reference(gate: Tensor, tile: int, words: int, *, signed: bool = False) -> Tensor:
    """Return what `pack` computes, from torch's operations; words past a count are 0."""
    made = TwELL.from_dense(gate, tile, words) if signed else TwELL.from_gate(gate, tile, words)
    return made.packed


TOLERANCE = 0.0
