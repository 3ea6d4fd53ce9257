"""How the kernel that rounds rows to few bits is launched (kernels/smxx_quantise_rows.cu).

CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors run in twell_lab.simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import launcher
from ..cuda.macros import VALUE, few_bits
from ..cuda.tape import empty

FILE = "smxx_quantise_rows.cu"
KINDS = (torch.int8, torch.float8_e4m3fn)


def quantise_rows(x: Tensor, kind: torch.dtype, padded: int = 0, version: int | None = None) -> tuple[Tensor, Tensor]:
    """x [rows, columns] as values [n, columns] of `kind`, and float32 scales [n], n the larger of rows and `padded`;
    values and scales of rows past x's are zero. The values of a row that is not finite are zero, and its scale is not
    finite.

    kind: torch.int8 or torch.float8_e4m3fn. version: 1 or 2, None the newest that takes x; 2 takes widths that are
    multiples of 16 bytes, aligned. Raises InputError for what is no matrix of bfloat16, float16 or float32."""
    if x.dim() != 2 or x.dtype not in VALUE or kind not in KINDS:
        raise InputError(
            f"x is {x.dtype} {list(x.shape)} and kind {kind}; bfloat16, float16 or float32 [rows, columns] and int8 or "
            "float8_e4m3fn are accepted"
        )
    x = x.contiguous()
    (rows, columns), vector = x.shape, 16 // x.itemsize
    versions = (1, 2) if columns % vector == 0 and launcher.aligned(x) else (1,)
    if version not in (None, *versions):
        raise InputError(f"version is {version}; of {list(x.shape)} at this address {versions} are accepted")
    n = max(rows, padded)
    values = empty(n, columns, dtype=torch.int8, device=x.device)
    scales = empty(n, dtype=torch.float32, device=x.device)
    if n:
        made = launcher.kernel(FILE, f"quantise_rows_v{version or versions[-1]}", few_bits(x.dtype, kind))
        made.launch(x.device, (n, 1), (x, values, scales, rows, columns))
    return values.view(kind), scales
