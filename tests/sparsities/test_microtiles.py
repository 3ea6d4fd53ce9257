"""Micro-tiles: what is found, the product beside the dense one; padding removed and put back; and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.ops import accuracy
from twell_lab.sparsities.microtiles import find_microtiles, product
from twell_lab.sparsities.padding import add_padding, remove_padding, unpadded

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@st.composite
def matrices(draw):
    """(a, height): whole numbers of which columns, rows, nothing or everything is zero; sums of them are exact."""
    rows, width, height = draw(st.integers(0, 20)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 3, 8, 32]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    a = torch.randint(-4, 5, (rows, width), generator=seed).to(draw(st.sampled_from(DTYPES)))
    keep = torch.rand(*draw(st.sampled_from([(rows, width), (1, width), (rows, 1)])), generator=seed)
    return a * (keep < draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))), height


@settings(deadline=None, max_examples=60)
@given(matrices(), st.integers(0, 9))
def test_tiles_hold_the_matrix_and_their_product_is_the_dense_one(case, n):
    a, height = case
    tiles = find_microtiles(a, height)
    assert tiles.height == height and tiles.shape == tuple(a.shape)
    for stripe, rows in enumerate(a.split(height) if len(a) else ()):
        columns = tiles.columns[stripe, : tiles.counts[stripe]]
        assert columns.tolist() == (rows != 0).any(0).nonzero()[:, 0].tolist()
        values = tiles.values[stripe, : len(columns)]
        assert torch.equal(values[:, : len(rows)].t(), rows[:, columns.long()]) and not values[:, len(rows) :].any()
    if n:
        b = torch.randint(-4, 5, (a.shape[1], n)).to(a.dtype)
        c = product(tiles, b)
        assert c.dtype == a.dtype and torch.equal(c, a @ b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_real_numbers(dtype):
    a, b = torch.randn(100, 300).where(torch.rand(100, 300) < 0.05, 0).to(dtype), torch.randn(300, 33).to(dtype)
    tiles = find_microtiles(a)
    assert 0.5 < tiles.occupied < 0.9  # 1 - 0.95^32, and a last stripe of 4 rows
    assert accuracy.worst_row(product(tiles, b), a @ b, a.double() @ b.double())[0] <= 1


def test_values_that_are_not_finite():
    a = torch.zeros(40, 6)
    a[3, 1], a[4, 2], a[5, 2], a[6, 3] = math.nan, math.inf, -math.inf, 2.0
    b = torch.tensor([1.0, -1.0, 0.0])[torch.arange(18) % 3].view(6, 3)
    assert torch.equal(product(find_microtiles(a), b).nan_to_num(7, 8, 9), (a @ b).nan_to_num(7, 8, 9))
    a, b = torch.zeros(64, 4), torch.ones(4, 2)
    a[:, 0], a[40, 2], b[2] = 1.0, 1.0, math.inf  # the dense product makes a NaN of 0 * inf
    c = product(find_microtiles(a), b)
    assert torch.equal(c[:32], torch.ones(32, 2)) and (a @ b)[:32].isnan().all()
    assert torch.equal(c[32:].nan_to_num(7, 8, 9), (a @ b)[32:].nan_to_num(7, 8, 9))  # a stripe that meets it


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4), st.integers(0, 6), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**20))
def test_padding_is_removed_and_put_back(sequences, length, width, share, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, length, width, generator=draw).requires_grad_()
    real = torch.rand(sequences, length, generator=draw) < share
    rows, padding = remove_padding(x, real)
    assert torch.equal(rows, x[real]) and padding.shape == (sequences, length)
    back = add_padding(rows, padding)
    assert torch.equal(back, torch.where(real[..., None], x, 0.0))
    back.sum().backward()
    assert torch.equal(x.grad, real[..., None].expand(x.shape).float())


def test_nothing_is_moved_where_every_row_is_real():
    x, real = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    rows, padding = remove_padding(x, real)
    assert rows.data_ptr() == x.data_ptr() == add_padding(rows, padding).data_ptr()


def test_a_layer_computes_the_real_rows_alone():
    seen = []
    layer = nn.Linear(8, 5).double()
    layer.register_forward_hook(lambda module, args, y: seen.append(args[0].shape))
    x, real = torch.randn(3, 7, 8).double(), torch.arange(7) < torch.tensor([[7], [2], [0]])
    y = unpadded(layer, x, real)
    assert seen == [(9, 8)] and not y[~real].any()
    torch.testing.assert_close(y[real], layer(x)[real])
    assert not unpadded(layer, x, torch.zeros_like(real)).any() and seen[-1] == (0, 8)
