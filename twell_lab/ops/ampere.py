"""How the mma.sync kernels are launched: any GPU from compute capability 7.5, fp16; bf16 from 8.0.

As in twell_lab.ops.portable, tensors come checked, everything runs on torch's current stream and nothing waits for the
GPU."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..core.errors import InputError
from ..cuda import launcher, registry, sources
from ..cuda.macros import TENSOR_CORES_OF_BF16 as _AMPERE
from ..cuda.macros import Setup, setup_for
from ..formats.twell import POOL_ROWS, POOL_WORDS, TILE, WORDS

VECTOR = 8  # values in 16 bytes
_WIDEST = 2**22  # d_model: offsets within a tile's rows are 32-bit numbers of bytes
_DTYPES = (torch.bfloat16, torch.float16)
_FILE = "sm80_gate_pack.cu"
ROWS, COLUMNS = (sources.number(_FILE, name) for name in ("BM", "BN"))  # of a block's tile


@lru_cache
def _device(index: int) -> tuple[tuple[int, int], int]:
    """Compute capability of a GPU, and its multiprocessors."""
    found = torch.cuda.get_device_properties(index)
    return (found.major, found.minor), found.multi_processor_count


def takes(x: Tensor, gate: Tensor) -> bool:
    """Whether gate_pack takes x [tokens, d_model] and gate [d_ff, d_model]: contiguous, on 16-byte boundaries."""
    if not (x.is_cuda and x.dtype in _DTYPES and x.dtype == gate.dtype and x.device == gate.device):
        return False
    if x.dim() != 2 or gate.dim() != 2 or x.shape[1] != gate.shape[1] or not gate.numel():
        return False
    if x.shape[1] % VECTOR or gate.shape[0] % VECTOR or not (x.is_contiguous() and gate.is_contiguous()):
        return False
    capability, _ = _device(x.device.index)
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
    return _run(x, gate, gate_bias, lost, setup_for(_device(x.device.index)[0], version))


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
    packed = torch.empty(tokens, tiles, WORDS, dtype=torch.int32, device=x.device)
    pool = torch.empty(-(-tokens // POOL_ROWS), tiles, POOL_WORDS, dtype=torch.int32, device=x.device)
    if tokens == 0:
        if lost is not None:
            lost[:1].zero_()
        return packed, pool
    bias = None if bias is None else bias.contiguous()
    GatePack(tokens, d_model, gate, bias, setup).launch(x, packed, pool, lost)
    return packed, pool


class GatePack:
    """The launch for one gate [d_ff, d_model] and so many tokens, as hopper_pack.GatePack is.

    row: values from one row of x to the next, d_model here: x is contiguous."""

    def __init__(self, tokens: int, row: int, gate: Tensor, bias: Tensor | None, setup: Setup | None = None):
        (d_ff, d_model), self.device = gate.shape, gate.device
        setup = setup or setup_for(_device(self.device.index)[0])
        blocks = _tiles(tokens, d_ff)
        if setup.version > 3:  # each block takes one tile after the other
            blocks = min(blocks, _device(self.device.index)[1])
        name, defines = f"gate_pack_v{setup.version}", setup.defines(gate.dtype)
        self.kernel = launcher.kernel(_FILE, name, defines, setup.shared)
        self.grid, self.sizes = (blocks, 1), (tokens, d_model, d_ff)
        self.gate, self.bias = launcher.address(gate), launcher.address(bias)

    def launch(self, x, packed, pool, lost) -> None:
        """All addresses, tensors or None."""
        self.kernel.launch(self.device, self.grid, (x, self.gate, self.bias, packed, pool, lost, *self.sizes))
