"""transpose: m^T of 16-bit values (kernels/smxx_transpose.cu)."""

from __future__ import annotations

from torch import Tensor

from ..cuda.launch import Buffer, Call, Entry, Source, sixteen_bits, value

_SIDE, _THREADS = 64, 256
TRANSPOSE = Source(
    "smxx_transpose",
    {"transpose_v1": Entry(_THREADS, "ppii")},
    builds=sixteen_bits,
    constants=(("SIDE", _SIDE), ("THREADS", _THREADS)),
)


def transposed(call: Call, m: Buffer) -> Buffer:
    """Transpose m [rows, columns], contiguous, both multiples of 8."""
    rows, columns = m.shape
    out = call.empty(columns, rows, dtype=m.dtype)
    call.launch(
        TRANSPOSE.kernel("transpose_v1", value(m.dtype)),
        (-(-columns // _SIDE), -(-rows // _SIDE)),
        m,
        out,
        rows,
        columns,
    )
    return out


def reference(m: Tensor) -> Tensor:
    """Return what `transposed` computes. TOLERANCE: none, the same bits."""
    return m.t().contiguous()


TOLERANCE = 0.0
