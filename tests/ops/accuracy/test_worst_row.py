"""The accuracy promise on rows whose errors are known by hand."""

import math

import pytest
import torch

from twell_lab.ops.accuracy import worst_row

EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}  # one ulp of 1.0
inf, nan = math.inf, math.nan


def rows(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def judge(y, dense, exact, dtype=torch.float32):
    return worst_row(rows(*y, dtype=dtype), rows(*dense, dtype=dtype), torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize("dtype", EPS)
def test_one_ulp_of_the_largest_value_is_allowed(dtype):
    exact = [[1.0, 0.25, 0.0]]
    assert judge(exact, exact, exact, dtype) == (0.0, 0)
    for ulps in (0.5, 1.0, 2.0):
        # An error in the smallest value is measured by the largest.
        y = [[1.0, 0.25, ulps * EPS[dtype]]]
        assert judge(y, exact, exact, dtype)[0] == pytest.approx(ulps)


def test_twice_the_dense_error_and_an_ulp():
    exact, dense = [[1.0, 0.0]], [[1.0, 3 * EPS[torch.float32]]]
    for ulps, ratio in ((7, 1.0), (14, 2.0), (3.5, 0.5)):
        assert judge([[1.0, ulps * EPS[torch.float32]]], dense, exact)[0] == pytest.approx(ratio)


def test_errors_are_norms_over_the_row():
    ulp = EPS[torch.float32]
    assert judge([[1.0, 3 * ulp, 4 * ulp]], [[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]])[0] == pytest.approx(5.0)


def test_the_worst_row_is_named_and_rows_do_not_excuse_each_other():
    exact = [[1.0, 0.0], [1024.0, 0.0], [1.0, 0.0]]
    ulp = EPS[torch.float32]
    y = [[1.0, ulp], [1024.0, 100 * ulp], [1.0, 3 * ulp]]
    dense = [[1.0, 0.0], [1024.0, 0.0], [1.0, 0.0]]
    assert judge(y, dense, exact) == (pytest.approx(3.0), 2)


def test_the_ulp_is_the_one_above_the_rounded_value():
    # 1.0 sits below a step twice as wide as the one beneath it; 0.999 does not.
    assert judge([[1.0 - 2.0**-24]], [[1.0]], [[1.0]])[0] == pytest.approx(0.5)
    below = 1.0 - 2.0**-24
    assert judge([[1.0]], [[below]], [[below]])[0] == pytest.approx(1.0)


def test_a_row_of_zeros_must_be_zeros():
    assert judge([[0.0, -0.0]], [[0.0, 0.0]], [[0.0, 0.0]])[0] == 0.0
    assert judge([[0.0, 1e-30]], [[0.0, 0.0]], [[0.0, 0.0]])[0] > 1e6


@pytest.mark.parametrize("wrong", [nan, inf, -inf])
def test_a_value_that_is_not_finite_where_the_exact_one_is(wrong):
    assert judge([[1.0, wrong]], [[1.0, 2.0]], [[1.0, 2.0]]) == (inf, 0)
    # The dense layer's overflow is no excuse for one's own.
    assert judge([[1.0, wrong]], [[1.0, wrong]], [[1.0, 2.0]]) == (inf, 0)


@pytest.mark.parametrize("exact", [nan, inf, -inf])
@pytest.mark.parametrize("y", [nan, inf, -inf, 3.0])
def test_where_the_exact_value_is_not_finite_it_must_be_met_exactly(exact, y):
    same = y == exact or (math.isnan(y) and math.isnan(exact))
    assert judge([[1.0, y]], [[1.0, 0.0]], [[1.0, exact]])[0] == (0.0 if same else inf)


def test_a_special_value_does_not_hide_errors_beside_it():
    assert judge([[1.0 + 8 * 2.0**-23, nan]], [[1.0, nan]], [[1.0, nan]])[0] == pytest.approx(8.0)


def test_a_dense_result_that_overflowed_allows_nothing_more():
    ulp = EPS[torch.float16]
    assert judge([[1.0, 2 * ulp]], [[1.0, inf]], [[1.0, 0.0]], torch.float16)[0] == pytest.approx(2.0)


def test_overflow_of_the_dtype():
    exact = [[70_000.0, 1.0]]  # fp16 ends at 65,504
    assert judge([[inf, 1.0]], [[inf, 1.0]], exact, torch.float16)[0] == 0.0
    assert judge([[65_504.0, 1.0]], [[inf, 1.0]], exact, torch.float16)[0] == inf
    assert judge([[-inf, 1.0]], [[inf, 1.0]], exact, torch.float16)[0] == inf
    assert judge([[inf, 1.0]], [[inf, 1.0]], exact, torch.bfloat16)[0] == inf  # 70,000 fits there
    largest = torch.finfo(torch.float16).max
    assert judge([[largest]], [[largest]], [[largest]], torch.float16)[0] == 0.0


def test_no_rows():
    empty = torch.empty(0, 4)
    assert worst_row(empty, empty, empty.double()) == (0.0, -1)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[2, 4\]"):
        worst_row(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"dense one \[1, 4\]"):  # it would broadcast
        worst_row(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2, 4))
