"""How exact a feed-forward result has to be, as one function that tests and benchmarks share.

Row by row, the norm of the error against float64 may be at most twice that of torch's dense layer in the same
dtype, plus one unit in the last place of the row's largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor


def worst_row(y: Tensor, dense: Tensor, exact: Tensor) -> tuple[float, int]:
    """(error over what is allowed, row) of the worst row; at most 1.0 keeps the promise.

    y, dense: [rows, d_model] in the working dtype; exact: the float64 result. Where exact is not finite, y must
    be exactly what it is converted to y's dtype (NaN for NaN, the same infinity), otherwise the ratio is inf.
    A row that overflows y's dtype only is judged the same way.
    """
    if not y.shape == dense.shape == exact.shape:
        shapes = f"{list(y.shape)}, the dense one {list(dense.shape)}, the exact one {list(exact.shape)}"
        raise ValueError(f"the result has shape {shapes}; one shape for all is accepted")
    if y.numel() == 0:
        return 0.0, -1
    expected = exact.to(y.dtype)
    finite = expected.isfinite()
    same = (y == expected) | (y.isnan() & expected.isnan())
    broken = (~finite & ~same) | (finite & ~y.isfinite())

    def norm(value: Tensor) -> Tensor:
        return torch.where(finite & value.isfinite(), value.double() - exact, 0.0).norm(dim=1)

    largest = torch.where(finite, expected, 0).abs().amax(1)
    ulp = torch.nextafter(largest, torch.full_like(largest, torch.inf)).double() - largest.double()
    ulp = torch.where(ulp.isfinite(), ulp, torch.finfo(y.dtype).eps * largest.double())
    ratio = norm(y) / (2 * norm(dense) + ulp)
    ratio = torch.where(broken.any(1), torch.inf, ratio)
    row = int(ratio.argmax())
    return float(ratio[row]), row
