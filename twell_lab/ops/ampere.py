"""How the mma.sync kernel that packs the gate inside its GEMM is launched: fp16 from compute capability 7.5, bf16 from
8.0.

Everything runs on torch's current stream and nothing waits for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, registry, sources
from ..cuda.macros import TENSOR_CORES_OF_BF16, Setup, setup_for
from .portable import new_packed

VECTOR = 8  # values in 16 bytes
_WIDEST = 2**22  # d_model: offsets within a tile's rows are 32-bit numbers of bytes
_DTYPES = (torch.bfloat16, torch.float16)
_FILE = "sm80_gate_pack.cu"
ROWS, COLUMNS = (sources.number(_FILE, name) for name in ("BM", "BN"))  # of a block's tile


def takes(x: Tensor, gate: Tensor) -> bool:
    """Whether gate_pack takes x [tokens, d_model] and gate [d_ff, d_model]: contiguous, on 16-byte boundaries."""
    if not (x.is_cuda and x.dtype in _DTYPES and x.dtype == gate.dtype and x.device == gate.device):
        return False
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1] or not gate.numel():
        return False
    if x.shape[1] % VECTOR or gate.shape[0] % VECTOR or not (x.is_contiguous() and gate.is_contiguous()):
        return False
    supported = launcher.capability(x.device.index) >= (
        TENSOR_CORES_OF_BF16 if x.dtype == torch.bfloat16 else registry.OLDEST
    )
    small = x.shape[1] <= _WIDEST and _tiles(x.shape[0], gate.shape[0]) < 2**30
    return supported and small and launcher.aligned(x, gate)


def _tiles(tokens: int, d_ff: int) -> int:
    return -(-tokens // ROWS) * -(-d_ff // COLUMNS)


def gate_pack(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None = None, lost: Tensor | None = None, version: int | None = None
) -> tuple[Tensor, Tensor]:
    """x [tokens, d_model] x gate [d_ff, d_model]^T + gate_bias, packed: (packed, pool), as
    twell_lab.formats.packed_and_pool describes them.

    Unused words of both are not written. lost: int32 [1 or more] or None; lost[0] is set to 0 for the kernels that
    follow. version: 1 to 4, None the newest that this GPU takes (`macros.setup_for`). Raises InputError unless takes(x,
    gate), and for a version that this GPU does not take."""
    check(x, gate)
    return _run(x, gate, gate_bias, lost, setup_for(launcher.capability(x.device.index), version))


def check(x: Tensor, gate: Tensor) -> None:
    """Raise InputError unless takes(x, gate)."""
    if not takes(x, gate):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} on {x.device} and gate is {list(gate.shape)}; the mma.sync gate kernel "
            "takes contiguous bfloat16 (from compute capability 8.0 on) or float16 (from 7.5 on) aligned to 16 bytes, "
            f"d_model and d_ff multiples of {VECTOR}"
        )


def _run(x: Tensor, gate: Tensor, bias: Tensor | None, lost: Tensor | None, setup: Setup) -> tuple[Tensor, Tensor]:
    (tokens, d_model), d_ff = x.shape, gate.shape[0]
    packed, pool = new_packed(tokens, d_ff, x.device)
    if tokens:
        bias = None if bias is None else bias.contiguous()
        blocks = _tiles(tokens, d_ff)
        if setup.version > 3:  # each block takes several tiles, one after another
            blocks = min(blocks, launcher.multiprocessors(x.device.index))
        made = launcher.kernel(_FILE, f"gate_pack_v{setup.version}", setup.defines(gate.dtype), setup.shared)
        made.launch(x.device, (blocks, 1), (x, gate, bias, packed, pool, lost, tokens, d_model, d_ff))
    elif lost is not None:
        lost[:1].zero_()
    return packed, pool
