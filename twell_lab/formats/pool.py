"""What the packing kernels of the tensor-core GEMMs produce, in a few lines of torch: words, and the pool beside them.

Those kernels keep no dense gate, so what a tile's words cannot hold has to go somewhere else: into the pool, a bounded
piece of memory in which every value has its place without threads racing for a counter. Each POOL_ROWS neighbouring
rows share POOL_WORDS words for each tile. A tile of a row with more values than slots keeps the first in its words, and
the rest, columns ascending, in the pool after those of the earlier rows of its group. Where a row's part would end
beyond the pool, that row is lost: it has to be computed from the dense weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core import InputError
from .matrix import as_matrix, dtype_names
from .twell import POOL_ROWS, POOL_WORDS, TILE, WORDS, TwELL, fires, join_words

POOL_DTYPES = (torch.bfloat16, torch.float16)


def packed_and_pool(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the packing kernels leave of relu(gate).

    Args:
        gate: [tokens, d_ff], bfloat16 or float16, before the ReLU.

    Returns:
        packed: int32 [tokens, tiles, 32], as TwELL.packed.
        pool: int32 [ceil(tokens / 16), tiles, 64]. Words of both that nobody reads are 0 here; a kernel leaves them
            as they were.
        lost: bool [tokens], the rows with a tile that reaches past the pool.

    Raises:
        InputError: for any other gate.
    """
    gate = as_matrix(gate)
    if gate.dtype not in POOL_DTYPES:
        raise InputError(f"gate is {gate.dtype}; {dtype_names(POOL_DTYPES)} are accepted")
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


def pool_used(packed: Tensor) -> Tensor:
    """How many of its 64 pool words each group of 16 rows uses in each tile.

    packed: int32 [tokens, tiles, 32], as `packed_and_pool` returns it. Returns int64 [ceil(tokens / 16), tiles].
    """
    if (
        not isinstance(packed, Tensor)
        or packed.is_nested
        or packed.dim() != 3
        or packed.dtype != torch.int32
        or packed.shape[2] != WORDS
    ):
        raise InputError(f"packed is no int32 tensor [tokens, tiles, {WORDS}]; one of packed_and_pool is accepted")
    late = (packed[..., 0].long() - (WORDS - 1)).clamp(min=0)
    late = pad(late, (0, 0, 0, -len(late) % POOL_ROWS))
    return late.view(-1, POOL_ROWS, late.shape[1]).sum(1).clamp(max=POOL_WORDS)
