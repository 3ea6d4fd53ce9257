"""How the mma.sync kernels are launched: any GPU from compute capability 7.5, fp16; bf16 from 8.0.

As in twell_lab.ops.portable, tensors come checked, everything runs on torch's current stream and nothing waits for the
GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import launcher, registry, sources
from ..cuda.macros import TENSOR_CORES_OF_BF16 as _AMPERE
from ..cuda.macros import Setup, setup_for
from ..cuda.tape import empty
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS

VECTOR = 8  # values in 16 bytes
_WIDEST = 2**22  # d_model: offsets within a tile's rows are 32-bit numbers of bytes
_DTYPES = (torch.bfloat16, torch.float16)
_FILE = "sm80_gate_pack.cu"
ROWS, COLUMNS = (sources.number(_FILE, name) for name in ("BM", "BN"))  # of a block's tile


_capability = cache(torch.cuda.get_device_capability)


def takes(x: Tensor, gate: Tensor) -> bool:
    """Whether gate_pack takes x [tokens, d_model] and gate [d_ff, d_model]: contiguous, on 16-byte boundaries."""
    if not (x.is_cuda and x.dtype in _DTYPES and x.dtype == gate.dtype and x.device == gate.device):
        return False
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1] or not gate.numel():
        return False
    if x.shape[1] % VECTOR or gate.shape[0] % VECTOR or not (x.is_contiguous() and gate.is_contiguous()):
        return False
    capability = _capability(x.device.index)
    supported = capability >= (_AMPERE if x.dtype == torch.bfloat16 else registry.OLDEST)
    small = x.shape[1] <= _WIDEST and _tiles(x.shape[0], gate.shape[0]) < 2**30
    return supported and small and launcher.aligned(x, gate)


def _tiles(tokens: int, d_ff: int) -> int:
    return -(-tokens // ROWS) * -(-d_ff // COLUMNS)


def gate_pack(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None = None, lost: Tensor | None = None, version: int | None = None
) -> tuple[Tensor, Tensor]:
    """x [tokens, d_model] x gate [d_ff, d_model]^T + gate_bias, packed: (packed, pool), as pool.packed_and_pool has
    them.

    Words and pool words that are not in use are left as they were. lost: int32 [1 or more] or None; lost[0] is set to 0
    for the kernels that follow. version: as setup_for takes it. Raises InputError unless takes(x, gate)."""
    check(x, gate)
    return _run(x, gate, gate_bias, lost, setup_for(_capability(x.device.index), version))


def check(x: Tensor, gate: Tensor) -> None:
    """Raise InputError unless takes(x, gate)."""
    if not takes(x, gate):
        raise InputError(
            f"the mma.sync gate kernel takes contiguous bfloat16 (compute capability 8.0 and newer) or float16 (7.5), "
            f"d_model and "
            f"d_ff multiples of {VECTOR} and 16-byte alignment; not {x.dtype} {list(x.shape)} on {x.device} with a "
            f"gate "
            f"{list(gate.shape)}"
        )


def _run(x: Tensor, gate: Tensor, bias: Tensor | None, lost: Tensor | None, setup: Setup) -> tuple[Tensor, Tensor]:
    (tokens, d_model), d_ff = x.shape, gate.shape[0]
    tiles = -(-d_ff // TILE)
    packed = empty(tokens, tiles, WORDS, dtype=torch.int32, device=x.device)
    pool = empty(-(-tokens // POOL_ROWS), tiles, POOL_WORDS, dtype=torch.int32, device=x.device)
    if tokens:
        bias = None if bias is None else bias.contiguous()
        blocks = _tiles(tokens, d_ff)
        if setup.version > 3:  # each block takes one tile after the other
            blocks = min(blocks, launcher.multiprocessors(x.device.index))
        made = launcher.kernel(_FILE, f"gate_pack_v{setup.version}", setup.defines(gate.dtype), setup.shared)
        made.launch(x.device, (blocks, 1), (x, gate, bias, packed, pool, lost, tokens, d_model, d_ff))
    elif lost is not None:
        lost[:1].zero_()
    return packed, pool
