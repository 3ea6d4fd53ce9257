"""How each kernel is launched: which version, which specialisation, grid, block and arguments.

Every function here takes checked, contiguous tensors (twell_lab.ops checks them). CUDA tensors run on torch's
current stream, are allocated with torch, and nothing waits for the GPU; CPU tensors run the same kernels, by the same
grids and arguments, in twell_lab.simulator. The only state is the cache of loaded kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import sources
from ..cuda.launcher import DEFINE, Kernel, aligned, kernel, multiprocessors
from ..cuda.macros import TEAMS as _TEAMS
from ..cuda.macros import any_width as _any_width
from ..cuda.macros import specialisation
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS, check_geometry, word_dtype

_FEW_TOKENS = 2  # tokens a multiprocessor, up to which sharing them pays
_MANY_TOKENS = 32  # tokens a multiprocessor, from which on two passes with one weight matrix each pay
_PACK_TILES = {1: 128, 2: 8, 3: 8, 4: 32}  # of a block, by version
_TWO_PASS_ROWS = 32768  # rows whose hidden values lie between the two passes at once: a multiple of the pool's groups
_SLAB = sources.number("dense_row.cuh", "SLAB")  # columns of y a block of v1 owns


def pack(gate: Tensor, tile: int, words: int, version: int | None = None) -> Tensor:
    """gate [rows, d_ff] -> packed [rows, tiles, words]; words past a tile's count are left as they were."""
    if gate.dim() != 2 or gate.dtype not in DEFINE:
        raise InputError(
            f"gate is {gate.dtype} {list(gate.shape)}; two dimensions of bfloat16, float16 or float32 are accepted"
        )
    gate = gate.contiguous()
    (rows, columns), tiles = gate.shape, check_tiles(*gate.shape, tile, words)
    packed = torch.empty(rows, tiles, words, dtype=word_dtype(gate.dtype), device=gate.device)
    if rows == 0:
        return packed
    vectors = in_vectors(gate.dtype, columns, tile) and aligned(gate)
    Pack(gate.dtype, rows, columns, tile, words, vectors, gate.device, version).launch(gate, packed)
    return packed


def check_tiles(rows: int, columns: int, tile: int, words: int) -> int:
    """How many tiles a row has. Raises InputError where pack does not take so many."""
    check_geometry(tile, words)
    tiles = -(-columns // tile)
    if rows * tiles >= 2**31:
        raise InputError(f"gate has {rows} x {tiles} tiles; fewer than 2^31 tiles are accepted at once")
    return tiles


def in_vectors(dtype: torch.dtype, columns: int, tile: int) -> bool:
    """Whether rows and tiles of a gate are made of 16-byte pieces."""
    return columns * dtype.itemsize % 16 == 0 and tile * dtype.itemsize % 16 == 0


class Pack:
    """The launch of pack for a gate of this shape. vectors: whether it can be read 16 bytes at a time."""

    def __init__(self, dtype, rows, columns, tile, words, vectors, device, version: int | None = None):
        vector = 16 // dtype.itemsize
        if version is None:
            version = 4 if vectors else 2
        elif version not in _PACK_TILES or (version > 2 and not vectors):
            raise InputError(
                f"version is {version}; 1 and 2 are accepted, and 3 and 4 where d_ff and tile are multiples of "
                f"{vector} and the gate lies on a 16-byte boundary (d_ff is {columns}, tile {tile})"
            )
        self.device, self.grid = device, (-(-rows * -(-columns // tile) // _PACK_TILES[version]), 1)
        self.sizes = rows, columns, tile, words
        self.kernel = kernel("smxx_pack.cu", f"pack_v{version}", ((DEFINE[dtype], True),))

    def launch(self, gate, packed) -> None:
        """Both tensors, contiguous, or, on a GPU, addresses."""
        self.kernel.launch(self.device, self.grid, (gate, packed, *self.sizes))


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
    """Launch a kernel that makes one row of y from one packed row, as TokenRows has it."""
    if len(y):
        tensors = [t if t is None else t.contiguous() for t in tensors]  # inductor may hand over other strides
        sizes = y.shape[1], columns, tile, words
        TokenRows(name, many, y.dtype, len(y), *sizes, aligned(*vectors), y.device, version).launch(*tensors, y)
    return y


class TokenRows:
    """The launch of gated or down for so many rows.

    many: the version for many tokens; the one after it is for few. aligned: whether what is read 16 bytes at a time
    starts at a multiple of them."""

    def __init__(
        self, name, many, dtype, rows, d_model, columns, tile, words, aligned, device, version: int | None = None
    ):
        if version not in (None, *range(1, many + 2)):
            raise InputError(f"version is {version}; 1 to {many + 1} are accepted")
        if version is None:
            version = many + _few(rows, device)
        defines = specialisation(dtype, d_model, _TEAMS if version == many + 1 else 1) if aligned else None
        if defines is None:
            version = 1
        elif version == many + 1 and "TEAMS" not in dict(defines):
            version = many  # so wide a row that one team fills the block
        if version == 1:
            defines = _any_width(dtype)
        self.grid = rows, -(-d_model // _SLAB) if version == 1 else 1
        self.device, self.sizes = device, (d_model, columns, tile, words)
        self.kernel = kernel(f"smxx_{name}.cu", f"{name}_v{version}", defines)

    def launch(self, *tensors) -> None:
        """The kernel's pointers, y the last of them: tensors, contiguous, None or, on a GPU, addresses."""
        self.kernel.launch(self.device, self.grid, (*tensors, *self.sizes))


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
    version = gated_version(len(y), y.device) if version is None else version
    x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x = (
        t if t is None else t.contiguous()
        for t in (x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x)
    )
    weights = (up, down_t, up_bias, down_bias)
    most = len(y) if version < 7 else _TWO_PASS_ROWS
    hidden, beside = (
        (None, None)
        if version < 7
        else (
            torch.empty(t[:n].shape, dtype=torch.float32, device=x.device)
            for t, n in ((packed, most), (pool, most // POOL_ROWS))
        )
    )
    for first in range(0, len(y), max(most, 1)):
        rows = slice(first, first + most)
        made = GatedPooled(x.dtype, *x[rows].shape, up.shape[0], x.device, version)
        part = y[rows], x[rows], packed[rows], None if start is None else start[rows]
        group = pool[first // POOL_ROWS :]
        made.launch(*part[:3], group, *weights, part[3], lost, lost_x, stats, hidden, beside, first)
    return y


class GatedPooled:
    """The launches of gated_pooled for so many tokens, in one pass or two.

    version: as gated_pooled takes it. room: bytes of the hidden values between two passes, and of those of the pool."""

    def __init__(self, dtype: torch.dtype, rows: int, d_model: int, d_ff: int, device, version: int | None = None):
        self.rows, self.d_ff, self.device, self.room = rows, d_ff, device, (0, 0)
        version = gated_version(rows, device) if version is None else version
        if version < 7:
            self.kernels = (pooled_kernel("gated", version, 5, dtype, d_model),)
            return
        self.kernels = pooled_kernel("up", 1, 1, dtype, d_model), pooled_kernel("down", 6, 6, dtype, d_model)
        self.room = tuple(4 * words for words in packed_sizes(rows, d_ff))

    def launch(
        self, y, x, packed, pool, up, down_t, up_bias, down_bias, start, lost, lost_x, stats, hidden, beside, first=0
    ) -> None:
        """All tensors, None or, on a GPU, addresses; contiguous. first: the number of the first of these rows."""
        grid = self.rows, 1
        if len(self.kernels) == 1:
            weights = (up, down_t, up_bias, down_bias, start)
            made = (x, packed, pool, *weights, y, lost, lost_x, stats, self.d_ff)
            return self.kernels[0].launch(self.device, grid, made)
        of_up = (x, packed, pool, up, up_bias, hidden, beside, lost, lost_x, self.d_ff, first)
        self.kernels[0].launch(self.device, grid, of_up)
        rest = (packed, pool, hidden, beside, down_t, down_bias, start, y, stats, self.d_ff)
        self.kernels[1].launch(self.device, grid, rest)


def gated_version(rows: int, device: torch.device) -> int:
    """The version of gated_pooled that is fastest for so many tokens."""
    return 6 if _few(rows, device) else 7 if not _few(rows, device, _MANY_TOKENS) else 5


class DownPooled:
    """The launch of down_pooled for so many tokens."""

    def __init__(self, dtype: torch.dtype, rows: int, d_model: int, d_ff: int, device, version: int | None = None):
        self.rows, self.d_ff, self.device = rows, d_ff, device
        self.kernel = pooled_kernel("down", version or 4 + _few(rows, device), 4, dtype, d_model)

    def launch(self, y, x, packed, pool, down_t, bias, start, lost, lost_x, stats) -> None:
        """All tensors, None or, on a GPU, addresses; contiguous."""
        made = (x, packed, pool, down_t, bias, start, y, lost, lost_x, stats, self.d_ff)
        self.kernel.launch(self.device, (self.rows, 1), made)


def down_pooled(
    x, packed, pool, down_t, bias, start, lost, lost_x, stats, version: int | None = None, y: Tensor | None = None
) -> Tensor:
    """packed [tokens, tiles, 32] with its pool x down_t [d_ff, d_model] + bias -> y [tokens, d_model]; see
    gated_pooled.

    x [tokens, d_model] is what the packed matrix was computed from; only its lost rows are read. version: 4, or 5 for
    few tokens. y: where to write, if not into a new tensor."""
    _check_pooled(x, packed, pool, down_t.shape[0], (x, down_t, bias, start, lost_x, y), lost, lost_x, version, (4, 5))
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if y is None else y
    if len(y):
        tensors = (t if t is None else t.contiguous() for t in (x, packed, pool, down_t, bias, start, lost, lost_x))
        made = DownPooled(y.dtype, *y.shape, down_t.shape[0], y.device, version)
        made.launch(y, *tensors, stats)
    return y


def pooled_takes(dtype: torch.dtype, d_model: int) -> bool:
    """Whether the kernels with a pool take rows of this type and width."""
    return dtype.itemsize == 2 and specialisation(dtype, d_model) is not None


def packed_sizes(tokens: int, d_ff: int) -> tuple[int, int]:
    """Words of a packed matrix and of its pool."""
    tiles = -(-d_ff // TILE)
    return tokens * tiles * WORDS, -(-tokens // POOL_ROWS) * tiles * POOL_WORDS


def check_rows(x: Tensor, vectors: tuple[Tensor | None, ...]) -> None:
    """Raise InputError for rows that the kernels with a pool do not take, and for what does not lie on 16 bytes."""
    if not pooled_takes(x.dtype, x.shape[1]):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)}; the pool is for 16-bit values and rows of a multiple of 8, up to 16384"
        )
    if not aligned(*vectors):
        raise InputError(
            "the kernels with a pool read 16 bytes at a time; a tensor does not start at a multiple of them"
        )


def _check_pooled(x, packed, pool, columns, vectors, lost, lost_x, version, versions) -> None:
    tokens, tiles = x.shape[0], -(-columns // TILE)
    check_rows(x, ())
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
    check_rows(x, vectors)


@lru_cache(maxsize=1024)
def pooled_kernel(name: str, version: int, one: int, dtype: torch.dtype, d_model: int) -> Kernel:
    """A kernel with a pool, a block a token. one: its version of one team a token; the next has several."""
    defines = specialisation(dtype, d_model, _TEAMS if version > one else 1)
    if "TEAMS" not in dict(defines):
        version = one  # also where one team of so wide a row fills the block
    hidden = (name, version) == ("down", 6)
    defines += (("POOL", True), ("HIDDEN", True)) if hidden else (("POOL", True),)
    return kernel(f"smxx_{name}.cu", f"{name}_v{version}", defines)


def _few(rows: int, device: torch.device, most: int = _FEW_TOKENS) -> bool:
    """Whether there are at most so many tokens a multiprocessor; a CPU has none."""
    return device.type == "cuda" and rows <= most * multiprocessors(device.index)
