"""Odd inputs for the element-wise kernels of a dense training step, and their results, for tests on CPU and GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from twell_lab import formats
from twell_lab.ops import train_dense

ODD = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 6e-8, -6e-8, 3e4, -3e4]


def draw(
    rows: int,
    d_ff: int,
    dtype: torch.dtype,
    *,
    gated: bool = True,
    odd: bool = False,
    device: str = "cpu",
    seed: int = 0,
):
    """(g, u or None, dh, dl1); odd: infinities, NaN, zeros and denormals in every array, and values that overflow
    float16."""
    generator = torch.Generator().manual_seed(rows * 31 + d_ff + seed)

    def normal(*shape: int) -> Tensor:
        value = torch.randn(*shape, generator=generator)
        if odd:
            pick = torch.randint(0, 40, shape, generator=generator)
            value = torch.where(pick < len(ODD), torch.tensor(ODD)[pick.clamp(max=len(ODD) - 1)], value)
        return value

    g, u, dh = (normal(rows, d_ff).to(dtype).to(device) for _ in range(3))
    return g, u if gated else None, dh, normal(rows).to(device)


def check_hidden(g: Tensor, u: Tensor | None, version: int | None) -> None:
    h, l1, kept = train_dense.dense_hidden(g, u, version)
    expected = torch.relu(g) if u is None else torch.relu(g) * u  # torch's own bits
    assert h.dtype == g.dtype and l1.dtype == torch.float32 and kept.dtype == torch.int32
    assert torch.equal(h.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(h.isnan(), expected.isnan())
    assert torch.equal(kept, formats.fires(g).sum(1, dtype=torch.int32))
    torch.testing.assert_close(l1.double(), expected.double().abs().sum(1), rtol=1e-5, atol=1e-30, equal_nan=True)


def check_gradients(g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None, version: int | None) -> None:
    given = dh.clone()
    h, dg, du = train_dense.dense_gradients(g, u, given, dl1, version)
    assert dg is given
    active = torch.relu(g)
    hidden = active if u is None else active * u
    assert torch.equal(h.nan_to_num(7), hidden.nan_to_num(7)) and torch.equal(h.isnan(), hidden.isnan())
    whole = dh.float() if dl1 is None else dh.float() + dl1[:, None] * hidden.float().sign()
    sides = whole if u is None else whole * u.float()
    expected = torch.where(formats.fires(g), sides, 0).to(g.dtype)
    assert torch.equal(dg.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(dg.isnan(), expected.isnan())
    if u is None:
        assert du is None
    else:
        expected = (whole * active.float()).to(g.dtype)
        assert torch.equal(du.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(du.isnan(), expected.isnan())


def autograd(g: Tensor, u: Tensor | None, dh: Tensor, dl1: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gradients of g and u in float64, as torch derives them."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (g, u)]
    h = torch.relu(leaves[0]) if u is None else torch.relu(leaves[0]) * leaves[1]
    loss = (h * dh.double()).sum()
    if dl1 is not None:
        loss = loss + (h.abs().sum(1) * dl1.double()).sum()
    loss.backward()
    return leaves[0].grad, None if u is None else leaves[1].grad
