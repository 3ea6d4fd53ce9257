"""How the Hopper kernel that packs the gate inside its GEMM is launched: compute capability 9.0 only, bf16 and fp16.

Everything runs on torch's current stream and nothing waits for the GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources, tma
from ..cuda.macros import PACK_VERSIONS, value
from .portable import new_packed

_number = partial(sources.number, "sm90_gate_pack.cu")
CLUSTER, BM, BN, BK = map(_number, ("CLUSTER", "BM", "BN", "BK"))  # for all but version 1
VECTOR = 8  # values in 16 bytes: the copy engine moves rows in pieces of 16 bytes
_MOST_TOKENS = 2**31 - 256  # rows are counted in 32 bits, in tiles of 256
_DTYPES = (torch.bfloat16, torch.float16)
_PACK_SHARED = _number("SHARED_BYTES")


def fits(*matrices: Tensor) -> bool:
    """Whether the copy engine can read these matrices [n, d]: 16-bit values of one dtype on one Hopper GPU, each row
    contiguous and aligned to 16 bytes."""
    first = matrices[0]
    if not (first.is_cuda and first.dtype in _DTYPES and launcher.capability(first.device.index) == (9, 0)):
        return False
    return all(m.dtype == first.dtype and m.device == first.device and _rows_fit(m) for m in matrices)


def _rows_fit(m: Tensor) -> bool:
    rows, d = m.shape
    row = m.stride(0) if rows > 1 else d
    return d > 0 and m.stride(1) == 1 and row >= d and row % VECTOR == 0 and m.data_ptr() % 16 == 0


def takes(x: Tensor, gate: Tensor) -> bool:
    """Whether gate_pack takes x [tokens, d_model] and gate [d_ff, d_model]; each row must be contiguous, there may be
    gaps between rows."""
    d_ff, d_model = gate.shape
    sizes = (
        x.shape[1] == d_model
        and d_model % VECTOR == 0
        and d_ff % VECTOR == 0
        and d_ff > 0
        and x.shape[0] < _MOST_TOKENS
    )
    return sizes and fits(x, gate)


def gate_pack(
    x: Tensor, gate: Tensor, gate_bias: Tensor | None = None, lost: Tensor | None = None, version: int | None = None
) -> tuple[Tensor, Tensor]:
    """x [tokens, d_model] x gate [d_ff, d_model]^T + gate_bias, packed: (packed, pool), as
    twell_lab.formats.packed_and_pool describes them.

    Unused words of both are not written. lost: int32 [1 or more] or None; lost[0] is set to 0 for the kernels that
    follow. version: 1 to 3, None the fastest. Raises InputError unless takes(x, gate)."""
    check(x, gate)
    if version not in (None, *PACK_VERSIONS):
        raise InputError(f"version is {version}; {PACK_VERSIONS[0]} to {PACK_VERSIONS[-1]} are accepted")
    packed, pool = new_packed(len(x), gate.shape[0], x.device)
    if len(x):
        _launch(x, gate, gate_bias, packed, pool, lost, version or PACK_VERSIONS[-1])
    elif lost is not None:
        lost[:1].zero_()
    return packed, pool


def dense_gate(x: Tensor, gate: Tensor, gate_bias: Tensor | None = None, store: bool = True) -> Tensor:
    """The gate [tokens, d_ff] by the same main loop, not packed, for checks. store: False to time the main loop alone;
    the result is then not written."""
    check(x, gate)
    out = torch.empty(x.shape[0], gate.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _launch(x, gate, gate_bias, out.view(torch.int32) if store else None, None, None, 0)
    return out


def check(x: Tensor, gate: Tensor) -> None:
    """Raise InputError unless takes(x, gate)."""
    if not takes(x, gate):
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} on {x.device} and gate is {list(gate.shape)}; the Hopper gate kernel "
            "takes bfloat16 or float16 on a GPU of compute capability 9.0, d_model and d_ff multiples of "
            f"{VECTOR}, rows aligned to 16 bytes"
        )


def _launch(x, gate, bias, packed, pool, lost, version) -> None:
    (tokens, d_model), d_ff, cluster = x.shape, gate.shape[0], 1 if version == 1 else CLUSTER
    defines = (*value(x.dtype), ("BIAS", int(bias is not None)), ("VERSION", version))
    made = launcher.kernel("sm90_gate_pack.cu", f"gate_pack_v{version}", defines, _PACK_SHARED)
    tiles = -(-tokens // (BM * cluster)) * -(-d_ff // BN)
    grid = min(launcher.multiprocessors(x.device.index) // cluster, tiles) * cluster, 1
    maps = tma.matrix_map(x, BM), *_gate_maps(gate, cluster)
    made.launch(x.device, grid, (*maps, packed, bias, pool, lost, tokens, d_model, d_ff))


def _gate_maps(gate: Tensor, cluster: int) -> tuple[launcher.Structure, launcher.Structure]:
    """Two tensor maps of the gate's rows, in the order in which the packing epilogue wants the columns: of the whole
    tiles, and of the narrow last tile.

    After wgmma, lane q of a group of four lanes holds columns 8 j + 2 q + e of a tile. Row `span q + 2 j + e` of the
    weights is put there, so that a lane holds `span` neighbouring columns in order. The map is of a view [tile, j, q,
    e, k] of the weights, so no data are moved. span is 64, and a quarter of the width in a narrow last tile. Where
    there are only whole tiles, or only a narrow one, both maps are the same."""
    (d_ff, d_model), row = gate.shape, gate.stride(0) * gate.dtype.itemsize
    box = (BK, 2, 4, 32 // cluster, 1)

    def view(first, tiles, span):
        dims, strides = (d_model, 2, 4, span // 2, tiles), (row, span * row, 2 * row, BN * row)
        return tma.map_at(gate.data_ptr() + first * row, gate.dtype, dims, strides, box)

    tiles, width = divmod(d_ff, BN)
    last = view(tiles * BN, 1, width // 4) if width else None
    whole = view(0, tiles, BN // 4) if tiles else last
    return whole, last or whole
