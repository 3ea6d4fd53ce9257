"""Blocks: which are kept, torch's block-sparse tensor and back, columns put in order, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.sparsities.blocks import block_mask, empty_share, group_columns, nested_mask, to_bsr
from twell_lab.sparsities.two_four import is_two_four, two_four_mask

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
SIZES = (16, 32, (16, 48), (32, 16))


def high_and_wide(size):
    return size if isinstance(size, tuple) else (size, size)


def by_block(matrix, size):
    high, wide = high_and_wide(size)
    tops, lefts = range(0, matrix.shape[0], high), range(0, matrix.shape[1], wide)
    return [matrix[top : top + high, left : left + wide] for top in tops for left in lefts]


@st.composite
def matrices(draw):
    """(matrix, size): blocks of which each is zero, has one value, or many; few values, so that norms tie."""
    size = draw(st.sampled_from(SIZES))
    high, wide = high_and_wide(size)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    matrix = torch.zeros(draw(st.integers(1, 3)) * high, draw(st.integers(1, 3)) * wide, dtype=dtype)
    for block in by_block(matrix, size):
        kind = draw(st.sampled_from(["zero", "one", "all", "negative zero"]))
        if kind == "one":
            block[draw(st.integers(0, high - 1)), draw(st.integers(0, wide - 1))] = draw(st.sampled_from([1.0, -2.0]))
        elif kind != "zero":
            block.fill_(-0.5 if kind == "all" else -0.0)
    return matrix, size


def norms_of(matrix, size):
    return [math.sqrt(sum(value * value for value in block.flatten().tolist())) for block in by_block(matrix, size)]


@settings(deadline=None)
@given(matrices(), st.floats(0, 1, exclude_max=True))
def test_whole_blocks_of_the_largest_norms_are_kept_the_first_of_equal_ones(case, sparsity):
    matrix, size = case
    norms = norms_of(matrix, size)
    order = sorted(range(len(norms)), key=lambda at: (-norms[at], at))
    wanted = order[: len(norms) - round(sparsity * len(norms))]
    kept = [block.unique().tolist() for block in by_block(block_mask(matrix, sparsity, size), size)]
    assert kept == [[at in wanted] for at in range(len(norms))]


@settings(deadline=None)
@given(matrices(), st.booleans())
def test_torchs_blocks_hold_what_is_not_empty_and_give_it_back(case, odd):
    matrix, size = case
    if odd:
        matrix[0, 0], matrix[-1, -1] = math.nan, -math.inf
    blocks = to_bsr(matrix, size)
    assert blocks.layout == torch.sparse_bsr and tuple(blocks.values().shape[1:]) == high_and_wide(size)
    back, wanted = blocks.to_dense(), torch.where(matrix == 0, torch.zeros_like(matrix), matrix)
    torch.testing.assert_close(back, wanted, rtol=0, atol=0, equal_nan=True)
    assert not back[matrix == 0].signbit().any()
    filled = [bool((block != 0).any()) for block in by_block(matrix, size)]
    assert blocks.values().shape[0] == sum(filled)
    assert empty_share(matrix, size) == pytest.approx(1 - sum(filled) / len(filled))
    assert empty_share(matrix != 0, size) == empty_share(matrix, size)


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
    norms = norms_of(torch.where(two_four_mask(weight), weight, 0), size)
    stay = norms_of(torch.where(mask, weight, 0), size)
    assert sorted(norms)[-kept:] == pytest.approx(sorted(stay)[-kept:])


@given(st.integers(0, 2**20), st.sampled_from([16, (16, 32)]), st.floats(0.5, 1))
@settings(deadline=None, max_examples=20)
def test_shuffled_blocks_are_found_again_and_no_order_is_worse_than_their_own(seed, size, sparsity):
    draw = torch.Generator().manual_seed(seed)
    pattern = torch.zeros(64, 128)
    for at in range(4):  # each 32 columns need one block of rows
        pattern[16 * at : 16 * at + 16, 32 * at : 32 * at + 32] = 1
    shuffled = pattern[:, torch.randperm(128, generator=draw)]
    order = group_columns(shuffled, size)
    assert order.sort().values.tolist() == list(range(128))
    assert empty_share(shuffled[:, order], size) == 0.75 > empty_share(shuffled, size)
    mask = torch.rand(32, 64, generator=draw) >= sparsity
    order = group_columns(mask, 16)
    assert order.sort().values.tolist() == list(range(64)) and torch.equal(group_columns(mask, 16), order)
    assert empty_share(mask[:, order], 16) >= empty_share(mask, 16)
    for same in (torch.zeros(32, 64), torch.ones(32, 64)):
        assert group_columns(same, 16).tolist() == list(range(64))
