"""down: a packed matrix x down_t + bias, of what is packed alone (kernels/smxx_down.cu).

Also what the kernels share that keep whole rows in registers: their specialisations, and the choice of a version. A
tile of a row may hold more values than its words: `down` reads them from the dense matrix or from the CSR tail,
`down_pooled` from the pool (ops/gate_pack.py), and it lists the rows that even that could not hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..core import InputError
from ..cuda.launch import VALUE, Buffer, Call, Entry, Kernel, Layout, Macros, Source, aligned
from .gate_pack import POOLED
from .pack import signs

# ---- whole rows in registers

TEAMS = 8  # teams of warps that share each token when there are few tokens
SLAB = 2048  # columns of y that a block of v1 computes
ANY_NUMBER = 2**31 - 1  # of kept values in a row
_CHUNKS_A_LANE = 4  # 16-byte chunks of one row that a lane keeps in registers; more would spill
_MOST_WARPS = 16  # 128 registers for each of 512 threads is all a multiprocessor has
_FEW_TOKENS = 2  # tokens per multiprocessor up to which it pays that several teams share each token


@lru_cache
def specialisation(dtype: torch.dtype, d_model: int, teams: int = 1) -> Macros | None:
    """Return the macros of the kernels that keep whole rows in registers, for this width; None where only v1 kernels
    take it. teams: how many share a token, at most; fewer where a block would have more than 512 threads."""
    vector = 16 // dtype.itemsize
    warps = -(-d_model // (32 * vector * _CHUNKS_A_LANE))
    if d_model % vector or warps > _MOST_WARPS:
        return None
    teams = min(teams, _MOST_WARPS // warps)
    return ((VALUE[dtype], True), ("D_MODEL", d_model), ("WARPS", warps), *((("TEAMS", teams),) if teams > 1 else ()))


def any_width(dtype: torch.dtype) -> Macros:
    """Return the macros of v1, which takes any width at run time; the file's other kernels still need some D_MODEL to
    compile."""
    return ((VALUE[dtype], True), ("D_MODEL", 256), ("WARPS", 1))


def row_builds(dtype: torch.dtype, widths: Sequence[int], teams: Sequence[int] = (1, TEAMS)) -> list[Macros]:
    """List the specialisations for these widths, for so many teams each (Source.builds)."""
    found = {specialisation(dtype, width, team) for width in widths for team in teams}
    return sorted((macros for macros in found if macros is not None), key=str)


def walk_builds(dtype: torch.dtype, widths: Sequence[int], more: Sequence[Macros] = ((),)) -> list[Macros]:
    """List each width and any width, with each of these further macros (Source.builds)."""
    return [(*macros, *extra) for extra in more for macros in (*row_builds(dtype, widths), any_width(dtype))]


def short_rows(dtype: torch.dtype, widths: Sequence[int], capability=(9, 0), teams=(1,)) -> list[Macros]:
    """List each width of 16-bit values (Source.builds), for so many teams each."""
    return row_builds(dtype, widths, teams) if dtype.itemsize == 2 else []


def pool_builds(dtype: torch.dtype, widths: Sequence[int], teams: Sequence[int] = (1, TEAMS)) -> list[Macros]:
    """List what `short_rows` lists, with a pool."""
    return [(*macros, ("POOL", True)) for macros in short_rows(dtype, widths, teams=teams)]


def team_threads(macros: dict) -> int:
    """Return the threads of a block that computes a token (Entry.threads)."""
    return 32 * macros["WARPS"] * macros.get("TEAMS", 1)


def row_entry(parameters: str, pool: bool, teams: bool) -> Entry:
    """Declare a kernel that computes a token. pool, teams: whether it is among the builds with a pool, with several
    teams."""
    pick = lambda macros: ("POOL" in macros, "TEAMS" in macros) == (pool, teams) and "HIDDEN" not in macros
    return Entry(team_threads, parameters, pick)


def few(call: Call, rows: int, most: int = _FEW_TOKENS) -> bool:
    """Return whether there are at most `most` tokens per multiprocessor of the GPU; False in the simulator."""
    return call.device.type == "cuda" and rows <= most * call.units


def launch_rows(call, source: Source, many: int, tensors, vectors, y, words, columns, tile, version, more: Macros):
    """Add a launch of a kernel that makes one row of y from one packed row, and return y. more: further macros.

    many: the version for many tokens; the next number is the version for few. vectors: tensors that all versions but
    the first read 16 bytes at a time."""
    if version not in (None, *range(1, many + 2)):
        raise InputError(f"version is {version}; 1 to {many + 1} are accepted")
    (rows, d_model), dtype = y.shape, y.dtype
    if not rows:
        return y
    if version is None:
        version = many + few(call, rows)
    macros = specialisation(dtype, d_model, TEAMS if version == many + 1 else 1) if aligned(*vectors) else None
    if macros is None:
        version = 1
    elif version == many + 1 and "TEAMS" not in dict(macros):
        version = many  # the row is so wide that one team fills the block
    if version == 1:
        macros = any_width(dtype)
    kernel = source.kernel(f"{source.name.removeprefix('smxx_')}_v{version}", (*macros, *more))
    grid = rows, -(-d_model // SLAB) if version == 1 else 1
    call.launch(kernel, grid, *tensors, y, d_model, columns, tile, words)
    return y


def pooled_takes(dtype: torch.dtype, d_model: int, *vectors: Buffer | Layout | None) -> bool:
    """Return whether the kernels with a pool take rows of this type and width, and these tensors, which they read 16
    bytes at a time: x, up, down_t, down_bias, start, lost_x and y."""
    return dtype.itemsize == 2 and specialisation(dtype, d_model) is not None and aligned(*vectors)


def pooled_kernel(source: Source, version: int, one: int, dtype: torch.dtype, d_model: int) -> Kernel:
    """Return a kernel that reads a pool, with one block per token.

    version: the one wanted. one: the version in which one team computes a token; in the next one several share it."""
    macros = specialisation(dtype, d_model, TEAMS if version > one else 1)
    assert macros is not None, "pooled_takes was asked"
    if "TEAMS" not in dict(macros):
        version = one  # also where the row is so wide that one team fills the block
    hidden = (("HIDDEN", True),) if (source.name, version) == ("smxx_down", 6) else ()
    return source.kernel(f"{source.name.removeprefix('smxx_')}_v{version}", (*macros, ("POOL", True), *hidden))


# ---- the operation


def _builds(dtype: torch.dtype, widths: Sequence[int], capability) -> list[Macros]:
    """List each width, for many tokens and for few, with a pool and without one; any width; and the second of the two
    passes that serve many tokens."""
    second = [(*macros, ("HIDDEN", True)) for macros in pool_builds(dtype, widths, (1,))]
    return [*walk_builds(dtype, widths, ((), signs(True))), *pool_builds(dtype, widths), *second]


DOWN = Source(
    "smxx_down",
    {
        "down_v1": Entry(128, "ppppppppiiii", lambda macros: "POOL" not in macros),
        **{f"down_v{version}": row_entry("ppppppppiiii", False, version == 3) for version in (2, 3)},
        **{f"down_v{version}": row_entry("ppppppppppii", True, version == 5) for version in (4, 5)},
        "down_v6": Entry(team_threads, "pppppppppi", lambda macros: "HIDDEN" in macros),
    },
    builds=_builds,
    constants=(*POOLED, ("SLAB", SLAB)),
)
TOLERANCE = 1.0  # of what twell_lab.ops.accuracy allows


def down(call, packed, gate, tail, down_t, bias, columns: int, tile: int, version=None, *, signed=False) -> Buffer:
    """Add packed [rows, tiles, words] x down_t [columns, d_model] + bias [d_model] -> y [rows, d_model].

    gate: the dense gate [rows, columns] that was packed, or None; tail: its CSR tail (pointer, column, value), or three
    times None. What a tile's words cannot hold is read from one of the two. version: 1 to 3; None: the fastest. signed:
    as for `pack`. All contiguous."""
    y = call.empty(packed.shape[0], down_t.shape[1], dtype=down_t.dtype)
    tensors, words = (packed, gate, *tail, down_t, bias), packed.shape[2]
    return launch_rows(call, DOWN, 2, tensors, (down_t, bias), y, words, columns, tile, version, signs(signed))


def down_pooled(call, x, packed, pool, down_t, bias, start, lost, lost_x, y, most=ANY_NUMBER, version=None) -> None:
    """Add packed [tokens, tiles, 32] with its pool x down_t [d_ff, d_model] + bias, written into y [tokens, d_model].

    x [tokens, d_model] is what the packed matrix was computed from; only its lost rows are read. version: 4, or 5 for
    few tokens. The other arguments: see ops.gated.gated_pooled."""
    if len(x):
        version = version or 4 + few(call, len(x))
        kernel = pooled_kernel(DOWN, version, 4, x.dtype, x.shape[1])
        tensors = (x, packed, pool, down_t, bias, start, y, lost, lost_x, None)  # None: nothing is counted
        call.launch(kernel, (len(x), 1), *tensors, len(down_t), most)


def reference(hidden: Tensor, down_t: Tensor, bias: Tensor | None, start: Tensor | None = None) -> Tensor:
    """Return what `down` computes of the matrix that was packed, from torch's operations."""
    y = linear(hidden, down_t.t(), bias)
    return y if start is None else (y.to(start.dtype) + start).to(y.dtype)
