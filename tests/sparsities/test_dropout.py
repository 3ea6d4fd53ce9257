"""Dropout as 2:4: what stays, how much noise that is, and what the experiment says of its own numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import DeviceError, InputError
from twell_lab.sparsities.dropout import (
    BERNOULLI,
    BOTH,
    DENSE,
    KINDS,
    PRODUCT,
    TWO_FOUR,
    TwoFourDropout,
    loss_effect,
    product_times,
    two_four_dropout,
    verdict,
)
from twell_lab.training.config import TrainConfig

CONFIG = TrainConfig(d_model=32, layers=2, heads=2, d_ff=64, context=32, batch=4, steps=8, warmup=2, device="cpu")


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


def test_a_training_is_measured_with_each_kind():
    rows = loss_effect(CONFIG, seeds=(0, 1))
    assert [(row["seed"], row["kind"]) for row in rows] == [(seed, kind) for seed in (0, 1) for kind in KINDS]
    assert loss_effect(CONFIG, seeds=(1,)) == rows[3:]
    assert len({row["bits_per_byte"] for row in rows}) == 6 and all(0 < row["bits_per_byte"] < 9 for row in rows)
    found = verdict(rows)
    assert found["loss_differs"] == (abs(found["loss_change"]) > found["loss_spread"]) and "pays" not in found


def rows_of(bernoulli, two_four):
    return [
        {"kind": kind, "seed": seed, "bits_per_byte": bits}
        for kind, values in ((BERNOULLI, bernoulli), (TWO_FOUR, two_four))
        for seed, bits in enumerate(values)
    ]


@pytest.mark.parametrize(
    "two_four, together, pays",
    [([2.0, 2.2], 0.9, True), ([2.0, 2.2], 1.1, False), ([2.5, 2.71], 0.9, False), ([1.5, 1.71], 0.9, True)],
)
def test_the_verdict_is_computed(two_four, together, pays):
    times = [{"path": DENSE, "ms": 1.0}, {"path": PRODUCT, "ms": 0.5}, {"path": BOTH, "ms": together}]
    found = verdict(rows_of([2.0, 2.2], two_four), times)
    assert found["pays"] is pays and found["product_x"] == 2 and found["with_compress_x"] == pytest.approx(1 / together)
    assert found["loss_differs"] == (two_four != [2.0, 2.2])


def test_bad_input_is_named():
    wrong = torch.zeros(3, 6), torch.tensor(1.0), torch.zeros(4, dtype=torch.int64), "h"
    calls = [lambda h=h: two_four_dropout(h) for h in wrong]
    for call in (*calls, lambda: verdict(rows_of([2.0], [2.0]))):
        with pytest.raises(InputError, match="accepted"):
            call()
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="on a CPU"):
            product_times(64, 60, 64)
