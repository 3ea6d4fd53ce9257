"""How the element-wise kernels of a dense training step are launched (kernels/smxx_train_dense.cu): one forward, one
backward.

In eager torch a ReLU, a product, an absolute value and a sum lie between a gated layer's matrix products, and as many
operations again in the backward pass; each reads and writes whole [tokens, d_ff] arrays. Here each direction is one
pass. bfloat16, float16, float32; CUDA tensors run on torch's current stream, CPU tensors in twell_lab.simulator.
Nothing waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import InputError
from ..cuda import sources
from ..cuda.launcher import aligned, kernel
from ..cuda.macros import VALUE, value
from ..cuda.tape import empty

FILE = "smxx_train_dense.cu"
_ROWS_A_BLOCK = sources.number(FILE, "THREADS") // 32  # a warp a row


def dense_hidden(g: Tensor, u: Tensor | None, version: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(h, l1, kept) of g and u [tokens, d_ff] before the ReLU; u None for a plain layer.

    h = relu(g) * u, or relu(g), in g's dtype, rounded once, as torch computes it, NaN included; l1 float32 [tokens]:
    the sum of |h| of each row, of the rounded h, added in float32 (float64 where g is float32); kept int32 [tokens]:
    how many neurons of each row fire (twell_lab.formats.twell.fires). version: 1 (any d_ff) or 2 (16 bytes at a time);
    None: the fastest that takes these tensors. Raises InputError for what the kernels do not take."""
    rows, _ = _check("dense_hidden", g, u)
    h = empty(*g.shape, dtype=g.dtype, device=g.device)
    l1 = empty(rows, dtype=torch.float32, device=g.device)
    kept = empty(rows, dtype=torch.int32, device=g.device)
    _rows("dense_hidden", version, g, (g, u, h, l1, kept), (g, u, h))
    return h, l1, kept


def dense_gradients(
    g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None, version: int | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(h, dg, du) from the gradient dh [tokens, d_ff] of h, and dl1 float32 [tokens] or None, that of dense_hidden's
    l1.

    With d = dh + dl1 * sign(h), not rounded: dg = d * u (plain: d) where g fires, else 0; du = d * relu(g), None for a
    plain layer. h is that of dense_hidden, for the gradient of the down weight. dg overwrites dh, and the tensor dh is
    returned for it. Raises InputError for what the kernels do not take."""
    rows, _ = _check("dense_gradients", g, u, dh)
    if dl1 is not None and (
        dl1.dtype != torch.float32 or dl1.shape != (rows,) or dl1.device != g.device or not dl1.is_contiguous()
    ):
        raise InputError(
            f"dl1 is {dl1.dtype} {list(dl1.shape)} on {dl1.device}; contiguous float32 [{rows}] on {g.device} is "
            f"accepted"
        )
    h = empty(*g.shape, dtype=g.dtype, device=g.device)
    du = None if u is None else empty(*g.shape, dtype=g.dtype, device=g.device)
    _rows("dense_gradients", version, g, (g, u, dl1, dh, h, du), (g, u, dh, h, du))
    return h, dh, du


def _check(name: str, g: Tensor, *others: Tensor | None) -> torch.Size:
    if g.dim() != 2 or g.dtype not in VALUE or g.shape[1] >= 2**30:
        raise InputError(
            f"g of {name} is {g.dtype} {list(g.shape)}; bfloat16, float16 or float32 [tokens, d_ff] is accepted"
        )
    for t in (g, *others):
        if t is not None and (
            t.shape != g.shape or t.dtype != g.dtype or t.device != g.device or not t.is_contiguous()
        ):
            raise InputError(
                f"{name} got a tensor {t.dtype} {list(t.shape)} on {t.device}, strides {t.stride()}; "
                f"contiguous {g.dtype} {list(g.shape)} on {g.device}, as g is, is accepted"
            )
    return g.shape


def _rows(name: str, version: int | None, g: Tensor, arguments: tuple, vectors: tuple) -> None:
    rows, d_ff = g.shape
    if not rows:
        return
    wide = d_ff % (16 // g.element_size()) == 0 and aligned(*vectors)
    if version not in (None, 1, 2) or (version == 2 and not wide):
        raise InputError(
            f"version is {version}; 1, and 2 where rows start on 16-byte boundaries, are accepted (d_ff is {d_ff})"
        )
    version = version or 1 + wide
    made = kernel(FILE, f"{name}_v{version}", value(g.dtype))
    made.launch(g.device, (-(-rows // _ROWS_A_BLOCK), 1), (*arguments, rows, d_ff))
