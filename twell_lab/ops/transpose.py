"""How the transpose of a training step's matrices is launched (kernels/smxx_transpose.cu).

CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors run in twell_lab.simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher, sources
from ..cuda.macros import value
from ..cuda.tape import empty
from .checks import plain

FILE = "smxx_transpose.cu"
SIDE = sources.number(FILE, "SIDE")
VECTOR = 8


def transposed(m: Tensor) -> Tensor:
    """m^T, contiguous. m: [rows, columns] of 16-bit values, both multiples of 8. Raises InputError for others."""
    if m.dim() != 2 or m.dtype not in (torch.bfloat16, torch.float16) or m.shape[0] % VECTOR or m.shape[1] % VECTOR:
        raise InputError(
            f"the matrix is {m.dtype} {list(m.shape)}; bfloat16 or float16, rows and columns multiples of {VECTOR} "
            "are accepted"
        )
    m = plain(m)
    rows, columns = m.shape
    out = empty(columns, rows, dtype=m.dtype, device=m.device)
    if m.numel():
        grid = (-(-columns // SIDE), -(-rows // SIDE))
        launcher.kernel(FILE, "transpose_v1", value(m.dtype)).launch(m.device, grid, (m, out, rows, columns))
    return out
