"""How each kernel is launched: which version, which specialisation, grid, block and arguments.

Every function here takes checked, contiguous tensors (twell_lab.ops checks them). CUDA tensors run on torch's
current stream, are allocated with torch, and nothing waits for the GPU; CPU tensors run the same kernels, by the same
grids and arguments, in twell_lab.simulator. The only state is the cache of loaded kernels.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import sources
from ..cuda.launcher import _DEFINE, _aligned, _launch, _multiprocessors
from ..cuda.macros import TEAMS as _TEAMS
from ..cuda.macros import any_width as _any_width
from ..cuda.macros import specialisation
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS

_FEW_TOKENS = 2  # tokens a multiprocessor, up to which sharing them pays
_MANY_TOKENS = 32  # tokens a multiprocessor, from which on two passes with one weight matrix each pay
_PACK_BLOCKS = {1: (128, 128), 2: (256, 8), 3: (256, 8), 4: (256, 32)}  # version: threads, tiles a block
_TWO_PASS_ROWS = 32768  # rows whose hidden values lie between the two passes at once: a multiple of the pool's groups
_SLAB = sources.number("dense_row.cuh", "SLAB")  # columns of y a block of v1 owns


def pack(gate: Tensor, tile: int, words: int, version: int | None = None) -> Tensor:
    """gate [rows, d_ff] -> packed [rows, tiles, words]; words past a tile's count are left as they were."""
    from ..formats.twell import check_geometry, word_dtype

    if gate.dim() != 2 or gate.dtype not in _DEFINE:
        raise InputError(
            f"gate is {gate.dtype} {list(gate.shape)}; two dimensions of bfloat16, float16 or float32 are accepted"
        )
    check_geometry(tile, words)
    gate = gate.contiguous()
    rows, columns = gate.shape
    vector = 16 // gate.element_size()
    tiles = -(-columns // tile)
    if rows * tiles >= 2**31:
        raise InputError(f"gate has {rows} x {tiles} tiles; fewer than 2^31 tiles are accepted at once")
    packed = torch.empty(rows, tiles, words, dtype=word_dtype(gate.dtype), device=gate.device)
    if rows == 0:
        return packed
    vectors = columns % vector == 0 and tile % vector == 0 and _aligned(gate)
    if version is None:
        version = 4 if vectors else 2
    elif version not in _PACK_BLOCKS or (version > 2 and not vectors):
        raise InputError(
            f"version is {version}; 1 and 2 are accepted, and 3 and 4 where d_ff and tile are multiples of {vector} "
            f"and the "
            f"gate lies on a 16-byte boundary (d_ff is {columns}, tile {tile})"
        )
    block, tiles_a_block = _PACK_BLOCKS[version]
    defines = ((_DEFINE[gate.dtype], True),)
    grid = -(-rows * tiles // tiles_a_block)
    sizes = (ctypes.c_longlong(rows), *map(ctypes.c_int, (columns, tile, words)))
    _launch("smxx_pack.cu", f"pack_v{version}", defines, (grid, 1), (block, 1), gate.device, (gate, packed, *sizes))
    return packed


def down(packed, gate, tail, down_t, bias, columns: int, tile: int, version: int | None = None) -> Tensor:
    """packed [rows, tiles, words] x down_t [columns, d_model] + bias -> y [rows, d_model]."""
    y = torch.empty(packed.shape[0], down_t.shape[1], dtype=down_t.dtype, device=down_t.device)
    tensors = (packed, gate, *tail, down_t, bias)
    return _token_kernel("down", 2, tensors, (down_t, bias), y, packed.shape[2], columns, tile, version)


def gated(x, packed, gate, tail, up, down_t, up_bias, down_bias, tile: int, version: int | None = None) -> Tensor:
    """x [rows, d_model], packed gate [rows, tiles, words], up and down_t [d_ff, d_model] -> y [rows, d_model]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = (x, packed, gate, *tail, up, down_t, up_bias, down_bias)
    vectors = (x, up, down_t, down_bias)
    return _token_kernel("gated", 3, tensors, vectors, y, packed.shape[2], up.shape[0], tile, version)


def _token_kernel(name, many, tensors, vectors, y, words, columns, tile, version) -> Tensor:
    """Launch a kernel that makes one row of y from one packed row.

    many: the version for many tokens; the one after it is for few. vectors: what is read 16 bytes at a time.
    """
    rows, d_model = y.shape
    if rows == 0:
        return y
    tensors = [t if t is None else t.contiguous() for t in tensors]  # inductor may hand over other strides
    if version not in (None, *range(1, many + 2)):
        raise InputError(f"version is {version}; 1 to {many + 1} are accepted")
    if version is None:
        version = many + _few(y)
    defines = specialisation(y.dtype, d_model, _TEAMS if version == many + 1 else 1) if _aligned(*vectors) else None
    if defines is None:
        version = 1
    elif version == many + 1 and "TEAMS" not in dict(defines):
        version = many  # so wide a row that one team fills the block
    if version == 1:
        defines, block, grid = _any_width(y.dtype), (128, 1), (rows, -(-d_model // _SLAB))
    else:
        sizes = dict(defines)
        block, grid = (32 * sizes["WARPS"] * sizes.get("TEAMS", 1), 1), (rows, 1)
    sizes = map(ctypes.c_int, (d_model, columns, tile, words))
    _launch(f"smxx_{name}.cu", f"{name}_v{version}", defines, grid, block, y.device, (*tensors, y, *sizes))
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
) -> Tensor:
    """x [tokens, d_model], its gate packed with a pool, up and down_t [d_ff, d_model] -> y [tokens, d_model].

    packed: [tokens, tiles, 32], pool: [ceil(tokens / 16), tiles, 64], as kernels/twell.cuh has them. start: float32
    [tokens, d_model] or None, what the sums start from besides down_bias. Rows that the pool could not hold are lost:
    each takes the next of lost[0] slots, lost int32 [1 + tokens] and lost_x [tokens, d_model] get its number and its x
    there, and its row of y is left unwritten. stats: int64 [4] or None: += tokens, kept values, rows read from the
    pool, lost rows. version: 5 (one pass), 6 (one, with teams, for few tokens), 7 (two passes, for many). y: where to
    write, if not into a new tensor. Raises InputError for what the kernels do not take."""
    vectors = (x, up, down_t, down_bias, start, lost_x, y)
    _check_pooled(x, packed, pool, up.shape[0], vectors, lost, lost_x, version, (5, 6, 7))
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if y is None else y
    if version is None:
        version = 6 if _few(y) else 7 if not _few(y, _MANY_TOKENS) else 5
    weights = (up, down_t, up_bias, down_bias)
    if version < 7:
        _pooled("gated", version, 5, y, (x, packed, pool, *weights, start, y, lost, lost_x, stats), up.shape[0])
        return y
    hidden, beside = (
        torch.empty(t[:n].shape, dtype=torch.float32, device=x.device)
        for t, n in ((packed, _TWO_PASS_ROWS), (pool, _TWO_PASS_ROWS // POOL_ROWS))
    )
    for first in range(0, len(y), _TWO_PASS_ROWS):
        part = [
            t if t is None or len(y) <= _TWO_PASS_ROWS else t[first : first + _TWO_PASS_ROWS]
            for t in (y, x, packed, start)
        ]
        group = pool[first // POOL_ROWS :]
        _pooled("up", 1, 1, part[0], (*part[1:3], group, up, up_bias, hidden, beside, lost, lost_x), up.shape[0], first)
        rest = (part[2], group, hidden, beside, down_t, down_bias, part[3], part[0], stats)
        _pooled("down", 6, 6, part[0], rest, up.shape[0])
    return y


def down_pooled(
    x, packed, pool, down_t, bias, start, lost, lost_x, stats, version: int | None = None, y: Tensor | None = None
) -> Tensor:
    """packed [tokens, tiles, 32] with its pool x down_t [d_ff, d_model] + bias -> y [tokens, d_model]; see
    gated_pooled.

    x [tokens, d_model] is what the packed matrix was computed from; only its lost rows are read. version: 4, or 5 for
    few tokens. y: where to write, if not into a new tensor."""
    _check_pooled(x, packed, pool, down_t.shape[0], (x, down_t, bias, start, lost_x, y), lost, lost_x, version, (4, 5))
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if y is None else y
    arguments = (x, packed, pool, down_t, bias, start, y, lost, lost_x, stats)
    _pooled("down", version or 4 + _few(y), 4, y, arguments, down_t.shape[0])
    return y


def pooled_takes(dtype: torch.dtype, d_model: int) -> bool:
    """Whether the kernels with a pool take rows of this type and width."""
    return dtype.itemsize == 2 and specialisation(dtype, d_model) is not None


def _check_pooled(x, packed, pool, columns, vectors, lost, lost_x, version, versions) -> None:
    tokens, tiles = x.shape[0], -(-columns // TILE)
    if not pooled_takes(x.dtype, x.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)}; the pool is for 16-bit values and rows of a multiple of 8, up to 16384"
        )
    if packed.shape != (tokens, tiles, WORDS) or pool.shape != (-(-tokens // POOL_ROWS), tiles, POOL_WORDS):
        raise InputError(
            f"packed is {list(packed.shape)} and pool is {list(pool.shape)}; {tokens} tokens and {columns} columns "
            f"make "
            f"{[tokens, tiles, WORDS]} and {[-(-tokens // POOL_ROWS), tiles, POOL_WORDS]}"
        )
    if lost is None or lost_x is None or lost.numel() <= tokens or lost_x.numel() < x.numel():
        raise InputError(
            f"lost and lost_x are for {tokens} rows: int32 [{1 + tokens}] and {x.dtype} {list(x.shape)} are accepted"
        )
    if version not in (None, *versions):
        raise InputError(f"version is {version}; {', '.join(map(str, versions))} take a pool")
    if not _aligned(*vectors):
        raise InputError(
            "the kernels with a pool read 16 bytes at a time; a tensor does not start at a multiple of them"
        )


def _pooled(name, version, one, y, tensors, columns, *more) -> None:
    """Launch a kernel with a pool, a block a token. one: its version of one team a token; the next has several."""
    if not len(y):
        return
    defines = specialisation(y.dtype, y.shape[1], _TEAMS if version > one else 1)
    sizes = dict(defines)
    if "TEAMS" not in sizes:
        version = one  # also where one team of so wide a row fills the block
    block = (32 * sizes["WARPS"] * sizes.get("TEAMS", 1), 1)
    defines += (("POOL", True), ("HIDDEN", True)) if (name, version) == ("down", 6) else (("POOL", True),)
    arguments = [t if t is None else t.contiguous() for t in tensors]
    arguments += map(ctypes.c_int, (columns, *more))
    _launch(f"smxx_{name}.cu", f"{name}_v{version}", defines, (len(y), 1), block, y.device, arguments)


def _few(y: Tensor, most: int = _FEW_TOKENS) -> bool:
    """Whether there are at most so many tokens a multiprocessor; a CPU has none."""
    return y.is_cuda and len(y) <= most * _multiprocessors(y.device.index)
