"""What notebook 11 computes of the backward pass: every way to the same gradients, sizes and times that add up."""

import pytest
import torch

from twell_lab.course.backward import data as backward
from twell_lab.course.roofline.data import Rates
from twell_lab.ops.reference import GatedFeedForward

CASE = backward.drawn()
FIRED = CASE.x @ CASE.gate.T > 0
RATES = Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")


def test_the_drawn_layer_is_sparse_uneven_and_has_neurons_that_never_fire():
    counts = FIRED.sum(1)
    assert 0.05 < FIRED.double().mean() < 0.25 and counts.max() > 3 * counts.double().mean()
    assert (FIRED.sum(0) == 0).sum() >= 2
    assert torch.equal(backward.drawn().x, CASE.x) and not torch.equal(backward.drawn(seed=1).x, CASE.x)


def test_a_wrong_gradient_is_seen():
    want = backward.exact(*CASE, 0.05)
    assert backward.worst(want, want) == 0 and backward.worst(backward.exact(*CASE, 0.0), want) > 1e-3


def test_what_torch_saves_of_a_dense_layer_is_what_the_formula_says():
    layer = GatedFeedForward(16, 48)
    with backward.saved_tensors(layer) as saved:
        y = layer(torch.randn(10, 16))
    assert [tensor["shape"] for tensor in saved] == [[10, 16], [10, 48], [10, 48], [10, 48]]
    assert [tensor["bytes"] for tensor in saved] == list(backward.dense_saved(10, 16, 48, value=4).values())
    y.sum().backward()  # the hooks hand back what they were given
    assert layer.up_proj.weight.grad.abs().sum() > 0


def test_the_least_time_of_each_part():
    gate, *rest = backward.floors(RATES, nnz=29)
    assert backward.dense_floor(RATES) == pytest.approx(9 * gate["ms"])  # one of nine products, on the tensor cores
    reads = 16384 * 29 * 2048 * 2 / RATES.l2 * 1e3
    assert [part["ms"] for part in rest] == pytest.approx([reads * rows for rows in backward.READS.values()])
    assert sum(backward.READS.values()) == 7
