"""Rows of few bits: within half a step of the weights, products exactly those of the rounded values, and bytes
counted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from twell_lab.core import DeviceError, InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import int8_products
from twell_lab.ops.reference import GatedFeedForward
from twell_lab.sparsities import quantised
from twell_lab.sparsities.quantised import (
    Bitmap,
    Rows,
    fp8_linear,
    int8_linear,
    output_error,
    quantise,
    rows_product,
    traffic,
    two_four_int8,
)
from twell_lab.sparsities.two_four import is_two_four, two_four_mask

INT8, FP8 = torch.int8, torch.float8_e4m3fn
WEIGHTS = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def matrices(draw, most=9):
    """Rows of ordinary values, of zeros, of one value, of the largest and the smallest of their type."""
    rows, columns = draw(st.integers(0, most)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(WEIGHTS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    matrix = torch.randn(rows, columns, generator=generator)
    for row, kind in enumerate(draw(st.lists(st.sampled_from("nnz1Lst"), min_size=rows, max_size=rows))):
        largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        if kind == "z":
            matrix[row] = 0
        elif kind == "1":
            matrix[row] = -3.0
        elif kind == "L":
            matrix[row] = matrix[row].sign() * largest
        elif kind == "s":
            matrix[row] *= tiny
        elif kind == "t" and columns:
            matrix[row], matrix[row, -1] = 0.0, 7.0
    return matrix.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


@given(matrices())
@settings(max_examples=60, deadline=None)
def test_int8_is_at_most_half_a_step_off(matrix):
    rows = quantise(matrix)
    assert rows.values.dtype == INT8 and rows.scale.dtype == torch.float32 and rows.values.is_contiguous()
    assert rows.nbytes == matrix.numel() + 4 * len(matrix)
    assert (rows.scale > 0).all() and (rows.values.abs() <= 127).all()
    assert (rows.values[matrix == 0] == 0).all()
    exact, wide = matrix.double(), rows.values.double() * rows.scale.double()[:, None]
    assert ((wide - exact).abs() <= rows.scale.double()[:, None] * 0.5001).all()
    if matrix.shape[1]:
        largest = exact.abs().amax(1)
        held = rows.values.abs().amax(1)
        assert (held[largest > 1e-30] == 127).all() and (held[largest == 0] == 0).all()


def test_rows_of_a_turned_weight_are_contiguous():
    weight = torch.randn(5, 8)
    rows, turned = quantise(weight), quantise(weight.t().contiguous().t())
    assert turned.values.is_contiguous() and turned.values.equal(rows.values) and turned.scale.equal(rows.scale)


@given(matrices())
@settings(max_examples=40, deadline=None)
def test_e4m3_is_within_its_precision(matrix):
    rows = quantise(matrix, FP8)
    exact = matrix.double()
    off = (rows.values.double() * rows.scale.double()[:, None] - exact).abs()
    # Three bits of mantissa; below 2^-6 of the scale steps of 2^-9.
    assert (off <= torch.maximum(exact.abs() / 15.9, rows.scale.double()[:, None] * 2.0**-9.9)).all()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 2).double(), torch.tensor([[1.0, math.nan]]), "x"])
def test_what_is_no_weight(wrong):
    with pytest.raises(InputError, match="accepted"):
        quantise(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int4 if hasattr(torch, "int4") else torch.int32, None, "int8"])
def test_what_is_no_type_of_few_bits(dtype):
    with pytest.raises(InputError, match="int8, float8_e4m3fn|torch.int8"):
        quantise(torch.ones(2, 2), dtype)


# ---- products ----


@pytest.mark.parametrize("product, kind", [(int8_linear, INT8), (fp8_linear, FP8)])
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
    exact = (exact if bias is None else exact + bias.double()).view(*shape, out)
    largest = exact.abs().amax() if exact.numel() else 0
    assert (
        y.dtype == dtype and ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5 * largest).all()
    )


@pytest.mark.parametrize("product, kind", [(int8_linear, INT8), (fp8_linear, FP8)])
def test_a_row_that_is_not_finite_is_nan_alone(product, kind):
    x, rows = torch.randn(4, 16), quantise(torch.randn(8, 16), kind)
    expected = product(x, rows)
    for odd in (math.nan, math.inf, -math.inf):
        bad = x.clone()
        bad[1, 3] = odd
        y = product(bad, rows)
        assert y[1].isnan().all() and torch.equal(y[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize("product, other", [(int8_linear, FP8), (fp8_linear, INT8), (two_four_int8, FP8)])
def test_products_refuse_what_does_not_fit(product, other):
    kind = FP8 if other == INT8 else INT8
    rows = quantise(torch.eye(32), kind)
    with pytest.raises(InputError, match="the rows hold"):
        product(torch.zeros(2, 32), quantise(torch.eye(32), other))
    for wrong in (torch.zeros(2, 31), torch.zeros(2, 32, dtype=torch.long), torch.tensor(1.0), [1.0]):
        with pytest.raises(InputError, match=r"x is .*\[..., 32\] is accepted"):
            product(wrong, rows)


@pytest.mark.parametrize("product, kind", [(int8_linear, INT8), (fp8_linear, FP8), (two_four_int8, INT8)])
def test_products_have_no_gradient_and_say_so(product, kind):
    weight = torch.eye(32)
    rows, x = quantise(weight, kind), torch.ones(2, 32, requires_grad=True)
    with pytest.raises(InputError, match="needs a gradient, which this product does not have; .*detach"):
        product(x, rows)
    if product is two_four_int8:
        return
    bias = nn.Parameter(torch.ones(32))
    with pytest.raises(InputError, match="x or bias needs a gradient"):
        product(x.detach(), rows, bias)
    assert not product(x.detach(), rows, bias.detach()).requires_grad
    with torch.no_grad():
        assert torch.equal(product(x, rows, bias), product(x.detach(), rows, bias.detach()))


def test_sums_that_int32_cannot_hold():
    wide = torch.ones(1, quantised.MOST_COLUMNS)
    assert int8_linear(wide, quantise(wide)).item() == pytest.approx(quantised.MOST_COLUMNS, rel=1e-6)
    wide = torch.ones(1, quantised.MOST_COLUMNS + 1)
    with pytest.raises(InputError, match="whose sum int32 holds"):
        int8_linear(wide, quantise(wide))
    with pytest.raises(InputError, match=f"up to {quantised.MOST_COLUMNS} are accepted"):
        quantised.Int8().weigh(wide)


def test_in_compiled_code_the_layer_asks_for_its_kernel_as_in_eager_code(monkeypatch):
    """The kernel is left out of what torch.compile traces; a layer is one operator there, behind which nothing is."""
    asked, takes = [], int8_products.takes

    def told(*given):
        asked.append(torch.compiler.is_compiling())
        return takes(*given)

    monkeypatch.setattr(int8_products, "takes", told)
    torch.manual_seed(0)
    sparse, x = SparseFFN(GatedFeedForward(32, 64).requires_grad_(False), plan=Choice("int8")), torch.randn(5, 32)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(sparse, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), sparse(x))
        asked.clear()
        compiled(x)
    torch._dynamo.reset()
    assert asked == [False] * 3  # for gate, up and down


def test_two_four_stays_two_four_and_needs_a_gpu():
    weight = torch.randn(32, 64)
    rows = quantise(weight * two_four_mask(weight))
    assert is_two_four(rows.values.half())
    with pytest.raises(DeviceError, match="accepted: a GPU of 8.0 or newer"):
        two_four_int8(torch.randn(3, 64), rows)
    with pytest.raises(InputError, match="at most two values"):
        two_four_int8(torch.randn(3, 64), quantise(weight))
    with pytest.raises(InputError, match="multiples of 32"):
        two_four_int8(torch.randn(3, 8), quantise(torch.zeros(32, 8)))


# ---- the rows that fire ----


@given(
    tokens=st.integers(0, 6),
    d_ff=st.integers(1, 40),
    gated=st.booleans(),
    biases=st.booleans(),
    density=st.sampled_from([0.0, 0.1, 1.0]),
    dtype=st.sampled_from(WEIGHTS),
    chunk=st.sampled_from([3, 4096]),
)
@settings(max_examples=40, deadline=None)
def test_what_fires_times_its_rows(tokens, d_ff, gated, biases, density, dtype, chunk):
    generator = torch.Generator().manual_seed(d_ff)
    normal = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    x, first = normal(tokens, 24), normal(tokens, d_ff) * (torch.rand(tokens, d_ff, generator=generator) < density)
    up, down = quantise(normal(d_ff, 24)) if gated else None, quantise(normal(d_ff, 24))
    up_bias, down_bias = (normal(d_ff), normal(24)) if biases else (None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "_ENTRIES_AT_ONCE", chunk)
        y = rows_product(x, first, up, down, up_bias, down_bias)
    hidden = first.double()
    if up is not None:
        dots = x.double() @ up.dense(torch.float64).t()
        hidden = hidden * (dots if up_bias is None else dots + up_bias.double())
    exact = hidden @ down.dense(torch.float64) + (0 if down_bias is None else down_bias.double())
    largest = exact.abs().amax() if exact.numel() else 0
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5 * largest).all()


def test_rows_of_another_shape_are_refused():
    x, first, rows = torch.zeros(2, 8), torch.zeros(2, 5), quantise(torch.zeros(5, 8))
    for up, down in ((rows, quantise(torch.zeros(4, 8))), (quantise(torch.zeros(5, 7)), rows)):
        with pytest.raises(InputError, match=r"torch.int8 \[5, 8\] on cpu is accepted"):
            rows_product(x, first, up, down)
    with pytest.raises(InputError, match="down is torch.float8_e4m3fn"):
        rows_product(x, first, rows, quantise(torch.zeros(5, 8), FP8))


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"x": torch.zeros(3, 8)}, r"first has shape \[2, 5\]; \[3, 'any'\] is accepted"),
        ({"first": torch.zeros(3, 5)}, r"first has shape \[3, 5\]; \[2, 'any'\] is accepted"),
        ({"first": torch.zeros(5)}, r"first has shape \[5\]"),
        ({"first": torch.zeros(2, 5).half()}, "first is torch.float16 but the input is torch.float32"),
        ({"first": torch.zeros(2, 5, device="meta")}, "first is on meta"),
        ({"x": torch.zeros(8)}, "x has shape"),
        ({"x": None}, "x is a NoneType"),
        ({"up_bias": torch.zeros(4)}, r"up_bias has shape \[4\]; \[5\] is accepted"),
        ({"down_bias": torch.zeros(1)}, r"down_bias has shape \[1\]; \[8\] is accepted"),
        ({"down": Rows(torch.zeros(5, 8, dtype=INT8), torch.zeros(4))}, r"down.scale has shape \[4\]; \[5\]"),
        ({"up": Rows(torch.zeros(5, 8, dtype=INT8, device="meta"), torch.zeros(5))}, "on meta; .* on cpu"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed, said):
    rows = quantise(torch.zeros(5, 8))
    with pytest.raises(InputError, match=said):
        rows_product(**{"x": torch.zeros(2, 8), "first": torch.zeros(2, 5), "up": rows, "down": rows, **changed})


def test_output_error():
    assert output_error(torch.tensor([3.0, 0]), torch.tensor([3.0, 4])) == pytest.approx(0.8)
    assert output_error(torch.zeros(2), torch.zeros(2)) == 0 and output_error(torch.ones(2), torch.zeros(2)) == math.inf
    with pytest.raises(InputError, match="one shape is accepted"):
        output_error(torch.zeros(2), torch.zeros(3))


# ---- bytes ----


def test_bytes_counted_by_hand():
    found = traffic(2, 8, 4)
    assert found["dense"] == 2 * (16 + 8) + 2 * 32
    assert found["int8, fused"] == 2 * (16 + 8) + 32 + 16
    assert found["int8, apart"] - found["int8, fused"] == 4 * 32 > found["dense"] - found["int8, fused"]
    assert found["int8 product, apart"] - found["int8, fused"] == 2 * 16 + 8 * 8
    assert traffic(1, 64, 64, density=0.25)["bitmap, fused"] == 2 * 128 + 64 * 64 * (0.5 + 0.125)
    for wrong in (dict(tokens=0), dict(density=1.5), dict(density=math.nan), dict(itemsize=0)):
        with pytest.raises(InputError, match="are accepted"):
            traffic(**{"tokens": 1, "d_in": 1, "d_out": 1, **wrong})


@given(matrices())
@settings(max_examples=40, deadline=None)
def test_a_bitmap_gives_every_value_back(matrix):
    matrix = matrix.where(torch.rand(matrix.shape, generator=torch.Generator().manual_seed(1)) < 0.3, -0.0)
    held = Bitmap.of(matrix)
    dense = held.dense()
    assert dense.dtype == matrix.dtype and dense.shape == matrix.shape and torch.equal(dense, matrix)
    assert not torch.signbit(dense[dense == 0]).any()
    assert held.nbytes == int((matrix != 0).sum()) * matrix.itemsize + math.ceil(matrix.numel() / 8)
    with pytest.raises(InputError, match="accepted"):
        Bitmap.of(torch.zeros(3))


def test_rows_are_a_pair():
    rows = Rows(torch.tensor([[1, -2]], dtype=INT8), torch.tensor([0.5]))
    assert rows.dense().tolist() == [[0.5, -1.0]] and rows.dense(torch.bfloat16).dtype == torch.bfloat16
