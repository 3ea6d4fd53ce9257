"""How the kernels that run on every GPU are launched: which version, which specialisation, grid and arguments.

CUDA tensors run on torch's current stream, are allocated with torch, and nothing waits for the GPU; CPU tensors run the
same kernels, with the same grids and arguments, in twell_lab.simulator. The only state is the cache of loaded kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources
from ..cuda.launcher import Kernel, aligned, kernel, multiprocessors
from ..cuda.macros import TEAMS, VALUE, activation, any_width, kept, specialisation, value
from ..cuda.tape import empty
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS, check_geometry, word_dtype

_FEW_TOKENS = 2  # tokens per multiprocessor up to which it pays that several teams share each token
_MANY_TOKENS = 32  # tokens per multiprocessor from which on two passes, with one weight matrix each, are faster
_PACK_TILES = {1: 128, 2: 8, 3: 8, 4: 32}  # tiles per block, by version
ANY_NUMBER = 2**31 - 1  # of kept values in a row
_TWO_PASS_ROWS = 32768  # rows that the two passes take at a time; a multiple of POOL_ROWS
_SLAB = sources.number("dense_row.cuh", "SLAB")  # columns of y that a block of v1 computes


def pack(gate: Tensor, tile: int, words: int, version: int | None = None, *, signed: bool = False) -> Tensor:
    """gate [rows, d_ff] -> packed [rows, tiles, words]; words past a tile's count are not written.

    version: 1 or 2 for any gate; 3 or 4 where d_ff and tile are whole numbers of 16 bytes and the gate is aligned to
    16 bytes; None: the fastest that takes this gate. signed: keep all that is not zero. Raises InputError for what no
    kernel takes."""
    if gate.dim() != 2 or gate.dtype not in VALUE:
        raise InputError(
            f"gate is {gate.dtype} {list(gate.shape)}; two dimensions of bfloat16, float16 or float32 are accepted"
        )
    check_geometry(tile, words)
    gate = gate.contiguous()
    (rows, columns), vector = gate.shape, 16 // gate.dtype.itemsize
    tiles = -(-columns // tile)
    if rows * tiles >= 2**31:
        raise InputError(f"gate has {rows} x {tiles} tiles; fewer than 2^31 tiles are accepted at once")
    vectors = columns % vector == 0 and tile % vector == 0 and aligned(gate)
    if version not in (None, *_PACK_TILES) or (version or 0) > 2 and not vectors:
        raise InputError(
            f"version is {version}; 1 and 2 are accepted, and 3 and 4 where d_ff and tile are multiples of {vector} "
            f"and the gate lies on a 16-byte boundary (d_ff is {columns}, tile {tile})"
        )
    version = version or (4 if vectors else 2)
    packed = empty(rows, tiles, words, dtype=word_dtype(gate.dtype), device=gate.device)
    if rows:
        made = kernel("smxx_pack.cu", f"pack_v{version}", (*value(gate.dtype), *kept(signed)))
        grid = -(-rows * tiles // _PACK_TILES[version]), 1
        made.launch(gate.device, grid, (gate, packed, rows, columns, tile, words))
    return packed


def down(
    packed, gate, tail, down_t, bias, columns: int, tile: int, version: int | None = None, *, signed: bool = False
) -> Tensor:
    """packed [rows, tiles, words] x down_t [columns, d_model] + bias [d_model] -> y [rows, d_model].

    gate: the dense gate [rows, columns] that was packed, or None; tail: its CSR tail (pointer, column, value), or three
    times None. What a tile's words cannot hold is read from one of the two. version: 1 to 3; None: the fastest. signed:
    as for `pack`."""
    y = empty(packed.shape[0], down_t.shape[1], dtype=down_t.dtype, device=down_t.device)
    tensors = (packed, gate, *tail, down_t, bias)
    return _token_kernel("down", 2, tensors, (down_t, bias), y, packed.shape[2], columns, tile, version, kept(signed))


def gated(
    x,
    packed,
    gate,
    tail,
    up,
    down_t,
    up_bias,
    down_bias,
    tile: int,
    version: int | None = None,
    *,
    signed: bool = False,
    both: bool = False,
) -> Tensor:
    """x [rows, d_model], packed gate [rows, tiles, words], up and down_t [d_ff, d_model] -> y [rows, d_model].

    gate, tail, signed: as `down` takes them. both: up goes through a ReLU, which needs the dense gate. version: 1 to 4;
    None: the fastest."""
    more = (*kept(signed), *activation("relu", both))
    y = empty(*x.shape, dtype=x.dtype, device=x.device)
    tensors = (x, packed, gate, *tail, up, down_t, up_bias, down_bias)
    vectors = (x, up, down_t, down_bias)
    return _token_kernel("gated", 3, tensors, vectors, y, packed.shape[2], up.shape[0], tile, version, more)


def _token_kernel(name, many, tensors, vectors, y, words, columns, tile, version, more) -> Tensor:
    """Launch `gated` or `down`, which make one row of y from one packed row, and return y. more: further macros.

    many: the version for many tokens; the next number is the version for few. vectors: tensors that all versions but
    the first read 16 bytes at a time."""
    if version not in (None, *range(1, many + 2)):
        raise InputError(f"version is {version}; 1 to {many + 1} are accepted")
    if not len(y):
        return y
    tensors = [t if t is None else t.contiguous() for t in tensors]  # torch's compiler may pass other strides
    (rows, d_model), dtype = y.shape, y.dtype
    if version is None:
        version = many + _few(rows, y.device)
    defines = specialisation(dtype, d_model, TEAMS if version == many + 1 else 1) if aligned(*vectors) else None
    if defines is None:
        version = 1
    elif version == many + 1 and "TEAMS" not in dict(defines):
        version = many  # the row is so wide that one team fills the block
    if version == 1:
        defines = any_width(dtype)
    grid = rows, -(-d_model // _SLAB) if version == 1 else 1
    made = kernel(f"smxx_{name}.cu", f"{name}_v{version}", (*defines, *more))
    made.launch(y.device, grid, (*tensors, y, d_model, columns, tile, words))
    return y


def gated_pooled(
    x,
    packed,
    pool,
    up,
    down_t,
    up_bias,
    down_bias,
    start,
    lost,
    lost_x,
    stats,
    version: int | None = None,
    y: Tensor | None = None,
    most: int = ANY_NUMBER,
) -> Tensor:
    """x [tokens, d_model], its gate packed with a pool, up and down_t [d_ff, d_model] -> y [tokens, d_model].

    packed: int32 [tokens, tiles, 32], and pool: int32 [ceil(tokens / 16), tiles, 64], in the format of
    kernels/twell.cuh. start: float32 [tokens, d_model] or None, added to y before it is rounded.

    lost: int32 [1 + tokens], lost_x: [tokens, d_model]. A row that the pool could not hold, or that has more than
    `most` kept values, is lost: its row of y is not written, lost[0] rises by 1 (it must be 0 before), and the
    row's number (~number where the pool could not hold it) and its x are written to the next place of lost[1:] and
    lost_x. stats: int64 [4] or None; tokens, kept values, rows that use the pool, and lost rows are added to it.
    version: 5 (one pass), 6 (one pass, several teams a token, for few tokens), 7 (two passes, for many tokens). y:
    where to write; None: a new tensor. Raises InputError for what the kernels do not take."""
    vectors, (tokens, d_model), d_ff = (x, up, down_t, down_bias, start, lost_x, y), x.shape, up.shape[0]
    _check_pooled(x, packed, pool, d_ff, vectors, lost, lost_x, version, (5, 6, 7))
    y = empty(tokens, d_model, dtype=x.dtype, device=x.device) if y is None else y
    x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x = (
        t if t is None else t.contiguous()
        for t in (x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x)
    )
    if version is None:
        version = 6 if _few(tokens, y.device) else 5 if _few(tokens, y.device, _MANY_TOKENS) else 7
    if version < 7:
        if tokens:
            made = (x, packed, pool, up, down_t, up_bias, down_bias, start, y, lost, lost_x, stats, d_ff, most)
            pooled_kernel("gated", version, 5, x.dtype, d_model).launch(y.device, (tokens, 1), made)
        return y
    group_rows = min(tokens, _TWO_PASS_ROWS)
    hidden, beside = (
        empty(rows, *t.shape[1:], dtype=torch.float32, device=x.device)
        for t, rows in ((packed, group_rows), (pool, -(-group_rows // POOL_ROWS)))
    )
    of_up, of_down = pooled_kernel("up", 1, 1, x.dtype, d_model), pooled_kernel("down", 6, 6, x.dtype, d_model)
    for first in range(0, tokens, _TWO_PASS_ROWS):
        rows = slice(first, first + _TWO_PASS_ROWS)
        group, grid = pool[first // POOL_ROWS :], (min(_TWO_PASS_ROWS, tokens - first), 1)
        listed = (x[rows], packed[rows], group, up, up_bias, hidden, beside, lost, lost_x, d_ff, first, most)
        of_up.launch(y.device, grid, listed)
        begun = None if start is None else start[rows]
        of_down.launch(
            y.device, grid, (packed[rows], group, hidden, beside, down_t, down_bias, begun, y[rows], stats, d_ff)
        )
    return y


def down_pooled(
    x,
    packed,
    pool,
    down_t,
    bias,
    start,
    lost,
    lost_x,
    stats,
    version: int | None = None,
    y: Tensor | None = None,
    most: int = ANY_NUMBER,
) -> Tensor:
    """packed [tokens, tiles, 32] with its pool x down_t [d_ff, d_model] + bias -> y [tokens, d_model].

    x [tokens, d_model] is what the packed matrix was computed from; only its lost rows are read. version: 4, or 5 for
    few tokens. The other arguments: see gated_pooled."""
    (tokens, d_model), d_ff = x.shape, down_t.shape[0]
    _check_pooled(x, packed, pool, d_ff, (x, down_t, bias, start, lost_x, y), lost, lost_x, version, (4, 5))
    y = empty(tokens, d_model, dtype=x.dtype, device=x.device) if y is None else y
    if tokens:
        tensors = (t if t is None else t.contiguous() for t in (x, packed, pool, down_t, bias, start))
        made = pooled_kernel("down", version or 4 + _few(tokens, y.device), 4, y.dtype, d_model)
        made.launch(y.device, (tokens, 1), (*tensors, y, lost.contiguous(), lost_x.contiguous(), stats, d_ff, most))
    return y


def listed_rows(lost: Tensor) -> Tensor:
    """The numbers of the rows that `lost` lists after a call of gated_pooled or down_pooled, as a tensor; for checks:
    it waits for the GPU."""
    listed = lost[1 : 1 + int(lost[0])]
    return torch.where(listed < 0, ~listed, listed)


def pooled_takes(dtype: torch.dtype, d_model: int) -> bool:
    """Whether the kernels with a pool take rows of this type and width."""
    return dtype.itemsize == 2 and specialisation(dtype, d_model) is not None


def _packed_shapes(tokens: int, d_ff: int) -> tuple[list[int], list[int]]:
    """The shapes of a packed gate and of its pool, as kernels/twell.cuh describes them."""
    tiles = -(-d_ff // TILE)
    return [tokens, tiles, WORDS], [-(-tokens // POOL_ROWS), tiles, POOL_WORDS]


def new_packed(tokens: int, d_ff: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for a packed gate [tokens, tiles, 32] and its pool [ceil(tokens / 16), tiles, 64], int32, not filled."""
    packed, pool = (empty(*shape, dtype=torch.int32, device=device) for shape in _packed_shapes(tokens, d_ff))
    return packed, pool


def check_packed(packed: Tensor, pool: Tensor, tokens: int, d_ff: int) -> None:
    """Raise InputError unless these are a packed gate and a pool of the right shapes."""
    wanted = _packed_shapes(tokens, d_ff)
    if [[*packed.shape], [*pool.shape]] != [*wanted]:
        raise InputError(
            f"packed is {list(packed.shape)} and pool is {list(pool.shape)}; for {tokens} tokens and {d_ff} columns "
            f"{wanted[0]} and {wanted[1]} are accepted"
        )


def _check_pooled(x, packed, pool, columns, vectors, lost, lost_x, version, versions) -> None:
    tokens = len(x)
    if not pooled_takes(x.dtype, x.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)}; the pool is for 16-bit values and rows of a multiple of 8, up to 16384"
        )
    check_packed(packed, pool, tokens, columns)
    if lost is None or lost_x is None or lost.numel() <= tokens or lost_x.numel() < x.numel():
        raise InputError(
            f"lost and lost_x are for {tokens} rows: int32 [{1 + tokens}] and {x.dtype} {list(x.shape)} are accepted"
        )
    if version not in (None, *versions):
        raise InputError(f"version is {version}; {', '.join(map(str, versions))} take a pool")
    if not aligned(*vectors):
        raise InputError("a tensor does not start at a multiple of 16 bytes, and the kernels with a pool need that")


@lru_cache(maxsize=1024)
def pooled_kernel(name: str, version: int, one: int, dtype: torch.dtype, d_model: int) -> Kernel:
    """A kernel that reads a pool, with one block per token.

    version: the one wanted. one: the version in which one team computes a token; in the next one several share it."""
    defines = specialisation(dtype, d_model, TEAMS if version > one else 1)
    if "TEAMS" not in dict(defines):
        version = one  # also where the row is so wide that one team fills the block
    hidden = (name, version) == ("down", 6)
    defines += (("POOL", True), ("HIDDEN", True)) if hidden else (("POOL", True),)
    return kernel(f"smxx_{name}.cu", f"{name}_v{version}", defines)


def _few(rows: int, device: torch.device, most: int = _FEW_TOKENS) -> bool:
    """Whether there are at most `most` tokens per multiprocessor of this GPU; False for a CPU."""
    return device.type == "cuda" and rows <= most * multiprocessors(device.index)
