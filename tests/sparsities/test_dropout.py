"""Dropout as 2:4: what stays, and how likely each pair is."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.sparsities.dropout import TwoFourDropout, two_four_dropout


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 5), groups=st.integers(1, 9), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_two_of_each_four_stay_and_are_doubled(rows, groups, dtype):
    h = torch.randn(rows, 4 * groups).to(dtype).requires_grad_()
    y = two_four_dropout(h)
    kept = y != 0
    assert y.shape == h.shape and y.dtype == dtype and torch.equal(y[kept], 2 * h[kept])
    assert not rows or (kept.view(rows, groups, 4).sum(-1) == 2).all()
    y.sum().backward()
    assert torch.equal(h.grad, 2.0 * kept.to(dtype))
    assert TwoFourDropout().eval()(h) is h and TwoFourDropout()(h).shape == h.shape


def test_each_pair_is_as_likely_and_values_that_are_not_finite_do_no_harm_where_they_go():
    y = two_four_dropout(torch.ones(60_000, 4), generator=torch.Generator().manual_seed(0))
    pairs = y.nonzero()[:, 1].view(-1, 2)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    assert (counts > 0).sum() == 6 and (counts[counts > 0] - 10_000).abs().max() < 400
    y = two_four_dropout(torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]]).expand(50, 4))
    assert ((y == 0).sum(1) == 2).all()
