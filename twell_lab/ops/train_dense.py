"""What lies between the matrix products of a dense training step, in one pass for each direction
(kernels/smxx_train_dense.cu). In eager torch a ReLU, a product, an absolute value and a sum lie there, each of which
reads and writes whole [tokens, d_ff] arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cuda.launch import Buffer, Call, Entry, Source, aligned, each_type, value
from ..formats.twell import fires

_THREADS = 256  # a warp a row
DENSE = Source(
    "smxx_train_dense",
    {
        f"dense_{name}_v{version}": Entry(_THREADS, letters)
        for version in (1, 2)
        for name, letters in (("hidden", "pppppqi"), ("gradients", "ppppppqi"))
    },
    builds=each_type,
    constants=(("THREADS", _THREADS),),
)


def dense_hidden(call: Call, g: Buffer, u: Buffer | None, version: int | None = None) -> tuple[Buffer, Buffer, Buffer]:
    """Compute (h, l1, kept) of g and u [tokens, d_ff] before the ReLU, contiguous; u None for a plain layer.

    h = relu(g) * u, or relu(g), in g's dtype, rounded once, as torch computes it, NaN included; l1 float32 [tokens]:
    the sum of |h| of each row, of the rounded h, added in float32 (float64 where g is float32); kept int32 [tokens]:
    how many neurons of each row fire (twell_lab.formats.twell.fires). version: 1 (any d_ff) or 2 (16 bytes at a time);
    None: the fastest that takes these buffers."""
    h = call.empty(*g.shape, dtype=g.dtype)
    l1, kept = call.empty(len(g), dtype=torch.float32), call.empty(len(g), dtype=torch.int32)
    _launch(call, "dense_hidden", version, g, (g, u, h, l1, kept), (g, u, h))
    return h, l1, kept


def dense_gradients(call: Call, g: Buffer, u, dh: Buffer, dl1, version: int | None = None) -> tuple:
    """Compute (h, dg, du) from the gradient dh [tokens, d_ff] of h, and dl1 float32 [tokens] or None, that of
    dense_hidden's l1.

    With d = dh + dl1 * sign(h), not rounded: dg = d * u (plain: d) where g fires, else 0; du = d * relu(g), None for a
    plain layer. h is that of dense_hidden. dg overwrites dh, which is returned for it."""
    h = call.empty(*g.shape, dtype=g.dtype)
    du = None if u is None else call.empty(*g.shape, dtype=g.dtype)
    _launch(call, "dense_gradients", version, g, (g, u, dl1, dh, h, du), (g, u, dh, h, du))
    return h, dh, du


def _launch(call: Call, name: str, version: int | None, g: Buffer, arguments: tuple, vectors: tuple) -> None:
    rows, d_ff = g.shape
    if rows:
        wide = d_ff % (16 // g.dtype.itemsize) == 0 and aligned(*vectors)
        kernel = DENSE.kernel(f"{name}_v{version or 1 + wide}", value(g.dtype))
        call.launch(kernel, (-(-rows // (_THREADS // 32)), 1), *arguments, rows, d_ff)


def wide(t: Tensor) -> torch.dtype:
    """Return the type of sums over neurons: float64 for float64, otherwise float32."""
    return torch.promote_types(t.dtype, torch.float32)


def hidden_reference(g: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `dense_hidden` computes: h bit for bit."""
    keep = fires(g)
    h = torch.relu(g) if u is None else torch.relu(g) * u
    return h, h.abs().sum(1, dtype=torch.float64).to(wide(g)), keep.sum(1, dtype=torch.int32)


def gradients_reference(g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None) -> tuple:
    """Return what `dense_gradients` computes, bit for bit."""
    active = torch.relu(g)
    h = active if u is None else active * u
    d = dh.to(wide(g)) if dl1 is None else dh.to(wide(g)) + dl1[:, None] * h.sign()
    dg = torch.where(fires(g), d if u is None else d * u, 0).to(g.dtype)
    return h, dg, None if u is None else (d * active).to(g.dtype)


TOLERANCE = 0.0
