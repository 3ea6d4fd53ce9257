"""Blocks: which are kept, what is refused, torch's block-sparse tensor and back, and columns put in order."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.core import InputError
from twell_lab.ops.block_linear import block_linear
from twell_lab.sparsities.blocks import (
    block_mask,
    empty_share,
    group_columns,
    nested_mask,
    to_bsr,
    to_bsr_linear,
)
from twell_lab.sparsities.two_four import is_two_four, two_four_mask
from twell_lab.sparsities.weights import prune, to_linears

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
SIZES = (16, 32, (16, 48), (32, 16))


def high_and_wide(size):
    return size if isinstance(size, tuple) else (size, size)


@st.composite
def matrices(draw):
    """(matrix, size): blocks of which each is zero, has one value, or many; few values, so that norms tie."""
    size = draw(st.sampled_from(SIZES))
    high, wide = high_and_wide(size)
    down, across = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    matrix = torch.zeros(down * high, across * wide, dtype=dtype)
    for top in range(down):
        for left in range(across):
            block = matrix[top * high : (top + 1) * high, left * wide : (left + 1) * wide]
            kind = draw(st.sampled_from(["zero", "one", "all", "negative zero"]))
            if kind == "one":
                block[draw(st.integers(0, high - 1)), draw(st.integers(0, wide - 1))] = draw(
                    st.sampled_from([1.0, -2.0])
                )
            elif kind != "zero":
                block.fill_(-0.5 if kind == "all" else -0.0)
    return matrix, size


def norms_of(matrix, size, norm):
    """By block, in row order, with Python's numbers."""
    high, wide = high_and_wide(size)
    found = []
    for top in range(0, matrix.shape[0], high):
        for left in range(0, matrix.shape[1], wide):
            values = [abs(each) for each in matrix[top : top + high, left : left + wide].flatten().tolist()]
            found.append({1: sum(values), 2: math.sqrt(sum(v * v for v in values)), math.inf: max(values)}[norm])
    return found


@settings(deadline=None)
@given(matrices(), st.floats(0, 1, exclude_max=True), st.sampled_from([1, 2, math.inf]))
def test_whole_blocks_of_the_largest_norms_are_kept_the_first_of_equal_ones(case, sparsity, norm):
    matrix, size = case
    norms = norms_of(matrix, size, norm)
    order = sorted(range(len(norms)), key=lambda at: (-norms[at], at))
    wanted = order[: len(norms) - round(sparsity * len(norms))]
    mask = block_mask(matrix, sparsity, size, norm=norm)
    high, wide = high_and_wide(size)
    by_block = [
        mask[top : top + high, left : left + wide].unique().tolist()
        for top in range(0, matrix.shape[0], high)
        for left in range(0, matrix.shape[1], wide)
    ]
    assert by_block == [[at in wanted] for at in range(len(norms))]


def test_norms_do_not_overflow():
    matrix = torch.full((32, 16), 1e30)
    matrix[16:] *= 1.5
    assert block_mask(matrix, 0.5, 16)[16:].all()


@settings(deadline=None)
@given(matrices())
def test_torchs_blocks_hold_what_is_not_empty_and_give_it_back(case):
    matrix, size = case
    held = to_bsr(matrix, size)
    assert held.layout == torch.sparse_bsr and tuple(held.values().shape[1:]) == high_and_wide(size)
    back, wanted = held.to_dense(), torch.where(matrix == 0, torch.zeros_like(matrix), matrix)
    assert back.dtype == matrix.dtype and torch.equal(back.view(torch.uint8), wanted.view(torch.uint8))
    norms = norms_of(matrix, size, 1)
    assert held.values().shape[0] == sum(each > 0 for each in norms)
    assert empty_share(matrix, size) == pytest.approx(1 - held.values().shape[0] / len(norms))
    assert empty_share(matrix != 0, size) == empty_share(matrix, size)


def test_values_of_every_kind_come_back():
    matrix = torch.randn(32, 32)
    matrix[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-45])
    matrix[16:] = 0
    matrix[31, 31] = float("nan")
    back = to_bsr(matrix, 16).to_dense()
    assert torch.equal(back.view(torch.int32), matrix.view(torch.int32))
    assert empty_share(matrix, 16) == 0.25


@pytest.mark.parametrize("size", [8, 15, 129, 16.0, True, (16,), (16, 0), "16", None])
def test_other_sizes_are_refused(size):
    for function in (to_bsr, empty_share, group_columns):
        with pytest.raises(InputError, match="from 16 to 128"):
            function(torch.ones(64, 64), size)
    with pytest.raises(InputError, match="from 16 to 128"):
        block_mask(torch.ones(64, 64), 0.5, size)


@pytest.mark.parametrize(
    "shape, size", [((64, 60), 16), ((60, 64), 16), ((64, 64), (16, 48)), ((1, 64), 16), ((0, 64), 16)]
)
def test_sizes_that_do_not_divide_are_refused(shape, size):
    for function in (to_bsr, empty_share, group_columns):
        with pytest.raises(InputError, match="do not divide a matrix of shape"):
            function(torch.ones(shape), size)


def test_other_arguments_are_refused():
    for arguments, words in (
        ((torch.ones(16, 16), 1.0, 16), "but not, 1"),
        ((torch.full((16, 16), math.nan), 0.5, 16), "finite"),
        ((torch.ones(16, 16, device="meta"), 0.5, 16), "meta"),
        ((torch.ones(16), 0.5, 16), "shape"),
    ):
        with pytest.raises(InputError, match=words):
            block_mask(*arguments)
    with pytest.raises(InputError, match="norm is 3"):
        block_mask(torch.ones(16, 16), 0.5, 16, norm=3)


# Layers and models


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_a_layer_of_blocks_gives_what_the_dense_one_gives(dtype, sparsity):
    torch.manual_seed(0)
    layer = prune(nn.Linear(64, 48, dtype=dtype), mask=lambda weight: block_mask(weight, sparsity, 16))
    dense = to_linears(layer)
    assert empty_share(dense.weight, 16) == pytest.approx(round(sparsity * 12) / 12)
    fast = to_bsr_linear(dense, 16)
    for shape in ((1, 64), (2, 5, 64), (64,), (0, 64)):
        x = torch.randn(shape, dtype=dtype)
        torch.testing.assert_close(fast(x), dense(x))
    assert fast.bias is dense.bias and not fast.weight.requires_grad


def test_the_bias_has_a_gradient_and_an_input_that_needs_one_is_refused():
    dense = nested(sparsity=0.5).requires_grad_(False)
    dense.bias.requires_grad_()
    fast, x = to_bsr_linear(dense, 32), torch.randn(5, 128)
    fast(x).square().sum().backward()
    torch.testing.assert_close(dense.bias.grad, 2 * dense(x).detach().sum(0))
    with pytest.raises(InputError, match="x needs a gradient"):
        fast(x.requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(fast(x), dense(x), rtol=1e-4, atol=1e-5)


def test_layers_that_torchs_product_does_not_take_are_refused():
    with pytest.raises(InputError, match="blocks of 16 x 32 of torch.float32 on cpu"):
        to_bsr_linear(nn.Linear(64, 64), (16, 32))
    with pytest.raises(InputError, match="float32 and float64"):
        to_bsr_linear(nn.Linear(64, 64, dtype=torch.bfloat16), 16)
    with pytest.raises(InputError, match="Conv1d"):
        to_bsr_linear(nn.Conv1d(16, 16, 1), 16)
    with pytest.raises(InputError, match=r"1 \(Linear\): blocks of 32 x 32 do not divide"):
        prune(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 33)), mask=lambda weight: block_mask(weight, 0.5))


def test_blocks_may_be_two_four_besides_and_train():
    torch.manual_seed(0)
    model = prune(nn.Linear(64, 64), mask=lambda weight: block_mask(weight, 0.5, 16) & two_four_mask(weight))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    weight = to_linears(model).weight
    assert is_two_four(weight) and empty_share(weight, 16) == 0.5 and model.nnz == 64 * 64 // 4


# Columns in order


@given(st.integers(0, 2**20), st.sampled_from([16, (16, 32)]))
@settings(deadline=None, max_examples=20)
def test_blocks_whose_columns_were_shuffled_are_found_again(seed, size):
    draw = torch.Generator().manual_seed(seed)
    pattern = torch.zeros(64, 128)
    for at in range(4):  # each 32 columns need one block of rows
        pattern[16 * at : 16 * at + 16, 32 * at : 32 * at + 32] = 1
    shuffled = pattern[:, torch.randperm(128, generator=draw)]
    order = group_columns(shuffled, size)
    assert order.sort().values.tolist() == list(range(128))
    assert empty_share(shuffled[:, order], size) == 0.75 > empty_share(shuffled, size)


@given(st.integers(0, 2**20), st.floats(0.5, 1))
@settings(deadline=None, max_examples=20)
def test_an_order_is_never_worse_than_their_own(seed, sparsity):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(32, 64, generator=draw) >= sparsity
    order = group_columns(mask, 16)
    assert order.sort().values.tolist() == list(range(64))
    assert empty_share(mask[:, order], 16) >= empty_share(mask, 16)
    assert torch.equal(group_columns(mask, 16), order)


def test_all_zero_and_all_dense_keep_their_order_and_empty_columns_gather():
    for matrix in (torch.zeros(32, 64), torch.ones(32, 64)):
        assert group_columns(matrix, 16).tolist() == list(range(64))
    matrix = torch.zeros(32, 64)
    matrix[0, ::4] = matrix[16, 1::4] = 1  # half of the columns are empty, the others need one of two blocks
    assert empty_share(matrix, 16) == 0
    assert empty_share(matrix[:, group_columns(matrix, 16)], 16) == 0.75


def test_weights_and_inputs_in_the_same_order_give_the_same_layer():
    torch.manual_seed(0)
    weight = torch.randn(32, 64, dtype=torch.float64) * (torch.rand(32, 64) > 0.97)
    order = group_columns(weight, 16)
    x = torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(x[:, order] @ weight[:, order].t(), x @ weight.t())
    assert empty_share(weight[:, order], 16) > empty_share(weight, 16)


def test_a_block_linear_is_not_cast_and_says_what_it_takes():
    linear = nn.Linear(64, 32)
    made = to_bsr_linear(linear, 32)
    assert made.to("cpu") is made and made.float() is made and made.eval() is made
    for cast in (made.double, made.bfloat16, lambda: made.to("meta")):
        with pytest.raises(InputError, match="is not cast or moved"):
            cast()
    assert linear.bias.dtype == torch.float32
    for x in (torch.randn(2, 63), torch.randn(2, 64).double(), torch.tensor(1.0)):
        with pytest.raises(InputError, match=r"\.\.\., 64\] on cpu is accepted"):
            made(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="under autocast"):
        made(torch.randn(2, 64))


# ---- 2:4 inside blocks ----


def nested(rows=96, columns=128, sparsity=0.75, size=32, bias=True, mask=None, seed=0):
    torch.manual_seed(seed)
    made = nn.Linear(columns, rows, bias).requires_grad_(False)
    made.weight.mul_(nested_mask(made.weight, sparsity, size) if mask is None else mask)
    return made


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.75])
def test_2_4_inside_blocks_leaves_half_of_the_blocks_that_stay(size, sparsity):
    weight = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    mask = nested_mask(weight, sparsity, size)
    high, wide = high_and_wide(size)
    blocks = 96 // high * (96 // wide)
    kept = blocks - round(sparsity * blocks)
    assert int(mask.sum()) == kept * high * wide // 2 and is_two_four(mask.float())
    assert empty_share(mask, size) == 1 - kept / blocks
    norms = norms_of(torch.where(two_four_mask(weight), weight, 0), size, 2)
    stay = norms_of(torch.where(mask, weight, 0), size, 2)
    assert sorted(norms)[-kept:] == pytest.approx(sorted(stay)[-kept:])


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,)])
def test_its_products_are_the_dense_one(sparsity, shape):
    dense = nested(96, 96, sparsity)
    x = torch.randn(*shape, 96)
    torch.testing.assert_close(to_bsr_linear(dense, 32)(x), dense(x), rtol=1e-4, atol=1e-5)
    dense, x = dense.bfloat16(), x.bfloat16()
    torch.testing.assert_close(block_linear(x, to_bsr(dense.weight, 32), dense.bias), dense(x), rtol=0.02, atol=0.02)


def test_what_2_4_inside_blocks_refuses():
    with pytest.raises(InputError, match="multiple of 4 columns"):
        nested_mask(torch.ones(32, 34), 0.5)
    with pytest.raises(InputError, match="blocks of 48 x 48 do not divide"):
        nested_mask(torch.ones(96, 128), 0.5, 48)
    with pytest.raises(InputError, match="not finite"):
        nested_mask(torch.full((32, 32), math.nan), 0.5)
    with pytest.raises(InputError, match="sparsity is 1"):
        nested_mask(torch.ones(32, 32), 1)
