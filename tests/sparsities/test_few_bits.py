"""Rows of few bits: within half a step of the weights, and products exactly those of the rounded values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import InputError
from twell_lab.sparsities.int8 import MOST_COLUMNS, int8_linear, rows_product
from twell_lab.sparsities.quantised import fp8_linear, output_error, quantise

INT8, FP8 = torch.int8, torch.float8_e4m3fn
WEIGHTS = [torch.float32, torch.bfloat16, torch.float16]
PRODUCTS = [(int8_linear, INT8), (fp8_linear, FP8)]


@st.composite
def matrices(draw, most=9):
    """Rows of ordinary values, of zeros, of one value, of the largest and the smallest of their type."""
    rows, columns = draw(st.integers(0, most)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(WEIGHTS))
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
    finite = torch.finfo(dtype)
    for row, kind in enumerate(draw(st.lists(st.sampled_from("nnz1Lst"), min_size=rows, max_size=rows))):
        if kind in "z1t":
            matrix[row] = {"z": 0.0, "1": -3.0, "t": 0.0}[kind]
            matrix[row, -1] = 7.0 if kind == "t" else matrix[row, -1]
        elif kind in "Ls":
            matrix[row] = matrix[row].sign() * finite.max if kind == "L" else matrix[row] * finite.tiny
    return matrix.clamp(-finite.max, finite.max).to(dtype)


def assert_near(y, exact, dtype):
    largest = exact.abs().amax() if exact.numel() else 0
    most = torch.finfo(dtype).eps * exact.abs() + 1e-5 * largest
    assert y.dtype == dtype and ((y.double() - exact).abs() <= most).all()


@given(matrices())
@settings(max_examples=60, deadline=None)
def test_values_are_within_their_precision(matrix):
    exact = matrix.double()
    for kind in (INT8, FP8):
        rows = quantise(matrix, kind)
        assert rows.values.dtype == kind and rows.scale.dtype == torch.float32 and rows.values.is_contiguous()
        assert rows.nbytes == matrix.numel() + 4 * len(matrix) and (rows.scale > 0).all()
        step, values = rows.scale.double()[:, None], rows.values.double()
        assert (values[matrix == 0] == 0).all()
        off = (values * step - exact).abs()
        if kind == INT8:
            assert (off <= step * 0.5001).all() and (values.abs() <= 127).all()
        else:  # three bits of mantissa; below 2^-6 of the scale steps of 2^-9
            assert (off <= torch.maximum(exact.abs() / 15.9, step * 2.0**-9.9)).all()
    turned = quantise(matrix.t().contiguous().t())
    assert turned.values.is_contiguous() and turned.values.equal(quantise(matrix).values)


@pytest.mark.parametrize("product, kind", PRODUCTS)
@given(
    shape=st.sampled_from([(1,), (5,), (2, 3), (0,), ()]),
    columns=st.sampled_from([1, 16, 37, 300]),
    out=st.sampled_from([1, 24]),
    dtype=st.sampled_from(WEIGHTS),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_product_is_that_of_the_rounded_values(product, kind, shape, columns, out, dtype, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, columns, generator=generator).to(dtype)
    weight = torch.randn(out, columns, generator=generator).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype) if with_bias else None
    rows, short = quantise(weight, kind), quantise(x.reshape(-1, columns), kind)
    y = product(x, rows, bias)
    exact = short.dense(torch.float64) @ rows.dense(torch.float64).t()
    assert_near(y, (exact if bias is None else exact + bias.double()).view(*shape, out), dtype)


@pytest.mark.parametrize("product, kind", PRODUCTS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_alone(product, kind, odd):
    x, rows = torch.randn(4, 16), quantise(torch.randn(8, 16), kind)
    bad = x.clone()
    bad[1, 3] = odd
    y = product(bad, rows)
    assert y[1].isnan().all() and torch.equal(y[[0, 2, 3]], product(x, rows)[[0, 2, 3]])


def test_sums_that_int32_cannot_hold():
    wide = torch.ones(1, MOST_COLUMNS + 1)
    most = wide[:, 1:]
    assert int8_linear(most, quantise(most)).item() == pytest.approx(MOST_COLUMNS, rel=1e-6)
    with pytest.raises(InputError, match="whose sum int32 holds"):
        int8_linear(wide, quantise(wide))


@given(
    tokens=st.integers(0, 6),
    d_ff=st.integers(1, 40),
    gated=st.booleans(),
    biases=st.booleans(),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from(WEIGHTS),
)
@settings(max_examples=40, deadline=None)
def test_what_fires_times_its_rows(tokens, d_ff, gated, biases, density, dtype):
    generator = torch.Generator().manual_seed(d_ff)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    x, first = normal(tokens, 24), normal(tokens, d_ff) * (torch.rand(tokens, d_ff, generator=generator) < density)
    up, down = quantise(normal(d_ff, 24)) if gated else None, quantise(normal(d_ff, 24))
    up_bias, down_bias = (normal(d_ff), normal(24)) if biases else (None, None)
    y = rows_product(x, first, up, down, up_bias, down_bias)
    hidden = first.double()
    if up is not None:
        dots = x.double() @ up.dense(torch.float64).t()
        hidden = hidden * (dots if up_bias is None else dots + up_bias.double())
    exact = hidden @ down.dense(torch.float64) + (0 if down_bias is None else down_bias.double())
    assert_near(y, exact, dtype)


def test_output_error():
    assert output_error(torch.tensor([3.0, 0]), torch.tensor([3.0, 4])) == pytest.approx(0.8)
    assert output_error(torch.zeros(2), torch.zeros(2)) == 0 and output_error(torch.ones(2), torch.zeros(2)) == math.inf
