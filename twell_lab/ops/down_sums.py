"""down_sums: h down_t as float32 sums that are not rounded to the type of the values (kernels/sm90_down_sums.cu).

The hot part of a layer, to which the cold part is added before the whole is rounded. Compute capability 9.0 alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda.launch import Buffer, Call, Entry, Source, sixteen_bits, value
from ..cuda.tma import matrix_map
from .gate_pack import BK, BM, BN, CLUSTER, EPILOGUE, MAINLOOP, THREADS
from .gate_up import tile_grid

DOWN_SUMS = Source(
    "sm90_down_sums",
    {"down_sums": Entry(THREADS, "mmpiii")},
    builds=sixteen_bits,
    constants=(*MAINLOOP, ("CLUSTER", CLUSTER), ("LAUNCH_SHARED", EPILOGUE)),
    oldest=(9, 0),
    alone=True,
)
# Of what twell_lab.ops.accuracy allows: tensor cores add with fewer bits than float32. 22 was measured at d_ff 5,632.
TOLERANCE = 64.0


def down_sums(call: Call, h: Buffer, down_t: Buffer) -> Buffer:
    """Add h [rows, d_ff] down_t [d_ff, d_model] -> float32 [rows, d_model]; for what gate_up's `takes` says of both."""
    (rows, d_ff), d_model = h.shape, down_t.shape[1]
    sums = call.empty(rows, d_model, dtype=torch.float32)
    if rows:
        kernel = DOWN_SUMS.kernel("down_sums", value(h.dtype), EPILOGUE)
        maps = matrix_map(h, BM), matrix_map(down_t, BK)
        call.launch(kernel, tile_grid(call, rows, d_model, BN), *maps, sums, rows, d_ff, d_model)
    return sums


def reference(h: Tensor, down_t: Tensor) -> Tensor:
    """Return what `down_sums` computes, in float32 or, of float64, in float64."""
    wide = torch.promote_types(h.dtype, torch.float32)
    return h.to(wide) @ down_t.to(wide)
