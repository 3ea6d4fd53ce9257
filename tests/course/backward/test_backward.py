"""What notebook 11 computes of the backward pass: every way to the same gradients, sizes and times that add up."""

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.course.backward import data as backward
from twell_lab.course.backward.live import small_layer
from twell_lab.course.roofline.data import Rates

CASE = backward.drawn()
FIRED = CASE.x @ CASE.gate.T > 0
RATES = Rates(tensor=800e12, memory=3e12, l2=8e12, source="a test")


def test_the_drawn_layer_is_sparse_uneven_and_has_neurons_that_never_fire():
    counts = FIRED.sum(1)
    assert 0.05 < FIRED.double().mean() < 0.25 and counts.max() > 3 * counts.double().mean()
    assert (FIRED.sum(0) == 0).sum() >= 2
    assert torch.equal(backward.drawn().x, CASE.x) and not torch.equal(backward.drawn(seed=1).x, CASE.x)


@pytest.mark.parametrize("coefficient", [0.0, 0.05])
def test_the_kept_places_are_enough(coefficient):
    got = backward.kept_gradients(CASE, coefficient, FIRED)
    assert backward.worst(got, backward.exact(CASE, coefficient)) < 1e-14


def test_a_wrong_gradient_is_seen():
    want = backward.exact(CASE, 0.05)
    assert backward.worst(backward.exact(CASE, 0.0), want) > 1e-3
    assert backward.worst(backward.kept_gradients(CASE, 0.05, FIRED & (torch.arange(24) != 3)[:, None]), want) > 1e-2


@pytest.mark.parametrize("capacity", [0, 1, 40, 128, 129, 10_000])
def test_whatever_fits_the_gradients_are_the_same(capacity):
    got, lost = backward.hybrid(CASE, 0.05, capacity)
    assert backward.worst(got, backward.exact(CASE, 0.05)) < 1e-14
    assert lost == list(range(len(CASE.x) - len(lost), len(CASE.x)))  # all rows behind the first that does not fit
    assert (not lost) == (capacity >= FIRED.sum())


def test_the_sweep_loses_fewer_rows_with_more_room():
    sweep = backward.capacity_sweep(CASE, 0.05, [0, 60, 140])
    assert [len(row["lost"]) for row in sweep] == [24, 13, 0]
    assert all(row["error"] < 1e-14 for row in sweep) and sweep[1]["bytes"] == 480
    assert sweep[2]["stored_rows"] == 7 * int(FIRED.sum()) and sweep[2]["lost_rows"] == 0
    with pytest.raises(InputError, match="-1"):
        backward.capacity_sweep(CASE, 0.05, [-1])


def test_what_torch_saves_of_a_dense_layer_is_what_the_formula_says():
    layer = small_layer(16, 48)
    with backward.saved_tensors(layer) as saved:
        y = layer(torch.randn(10, 16))
    assert [tensor["shape"] for tensor in saved] == [[10, 16], [10, 48], [10, 48], [10, 48]]
    assert [tensor["bytes"] for tensor in saved] == list(backward.dense_saved(10, 16, 48, value=4).values())
    y.sum().backward()  # the hooks hand back what they were given
    assert layer.up_proj.weight.grad.abs().sum() > 0


def test_seven_rows_for_each_kept_value():
    parts = backward.parts(tokens=10, d_model=8, d_ff=100, nnz=3)
    assert sum(part["l2"] for part in parts) == backward.ROWS_A_VALUE * 10 * 3 * 16
    assert sum(part["operations"] for part in parts) == 2 * 10 * 8 * 100  # the gate alone stays a dense product


def test_every_sparse_part_is_limited_by_the_l2_cache():
    floors = backward.floors(backward.parts(nnz=29), RATES)
    assert floors[0]["limit"] == "tensor cores" and {part["limit"] for part in floors[1:]} == {"L2 cache"}
    assert backward.dense_floor(RATES) == pytest.approx(9 * floors[0]["ms"])
