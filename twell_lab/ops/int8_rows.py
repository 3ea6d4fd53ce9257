"""How the kernel of INT8 rows is launched (kernels/smxx_gated_int8.cu): what is left of a layer once its gate is
packed.

CUDA tensors run on torch's current stream and nothing waits for the GPU; CPU tensors run in twell_lab.simulator."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources
from ..cuda.launcher import aligned, kernel, multiprocessors
from ..cuda.macros import TEAMS, any_width, kept, specialisation

FILE = "smxx_gated_int8.cu"
_SLAB = sources.number("dense_row.cuh", "SLAB")  # columns of y that a block of v1 computes
_FEW_TOKENS = 2  # tokens per multiprocessor up to which it pays that several teams share each token
_VERSIONS = (1, 2, 3, 4)


def gated_int8(
    x: Tensor,
    packed: Tensor,
    gate: Tensor,
    up: tuple[Tensor, Tensor] | None,
    down: tuple[Tensor, Tensor],
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    tile: int,
    version: int | None = None,
    *,
    signed: bool = False,
) -> Tensor:
    """x [rows, d_model], packed gate [rows, tiles, words] -> y [rows, d_model]; NaN where a row of x is not finite.

    gate: the dense gate [rows, d_ff] that was packed, after the activation unless that is the ReLU; tiles that overflow
    are read from it. up, down: int8 [d_ff, d_model], the latter down transposed, and float32 [d_ff] to multiply their
    rows with; without up, the packed values are the hidden ones. signed: as `portable.pack` packed it. version: 1 to 4;
    None: the fastest. Raises InputError for shapes and dtypes that do not fit together, and for other versions."""
    if version not in (None, *_VERSIONS):
        raise InputError(f"version is {version}; 1 to 4 are accepted")
    (rows, d_model), d_ff = x.shape, gate.shape[1]
    for name, each in (("up", up), ("down", down)):
        if each is None:
            continue
        values, scale = each
        found = (values.dtype, [*values.shape], scale.dtype, [*scale.shape])
        if found != (torch.int8, [d_ff, d_model], torch.float32, [d_ff]):
            raise InputError(
                f"{name} is {found[0]} {found[1]} with {found[2]} {found[3]}; torch.int8 {[d_ff, d_model]} with "
                f"torch.float32 {[d_ff]} is accepted"
            )
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not rows or not d_model:
        return y
    of_up = (None, None) if up is None else up
    given = (x, packed, gate, *of_up, *down, up_bias, down_bias)
    tensors = [t if t is None else t.contiguous() for t in given]
    few = x.is_cuda and rows <= _FEW_TOKENS * multiprocessors(x.device.index)
    version = version or (4 if few else 3)
    read = [t for t in (tensors[0], tensors[3], tensors[5], tensors[8]) if t is not None]
    defines = specialisation(x.dtype, d_model, TEAMS if version == 4 else 1) if aligned(*read) else None
    if defines is None:
        version = 1
    elif version == 4 and "TEAMS" not in dict(defines):
        version = 3  # the row is so wide that one team fills the block
    if version == 1:
        defines = any_width(x.dtype)
    made = kernel(FILE, f"gated_int8_v{version}", (*defines, *kept(signed)))
    grid = rows, -(-d_model // _SLAB) if version == 1 else 1
    made.launch(x.device, grid, (*tensors, y, d_model, d_ff, tile, packed.shape[2]))
    return y
