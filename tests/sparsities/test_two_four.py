"""2:4: what is kept, what torch's kernels are given, what they can gain, and training with an operand made 2:4."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from twell_lab.core import DeviceError, InputError
from twell_lab.layers.paths.cost import Rates
from twell_lab.sparsities import two_four as pattern
from twell_lab.sparsities import two_four_training
from twell_lab.sparsities.two_four import (
    bound,
    check_two_four,
    is_two_four,
    packed,
    prune_two_four,
    searched,
    tensor_kind,
    two_four_mask,
)
from twell_lab.sparsities.two_four_training import TwoFourDropout, TwoFourLinear, two_four_dropout

SEMI = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")


@st.composite
def matrices(draw, tall=False):
    """A matrix of whole groups with few different values: ties and zeros of both signs."""
    rows, columns = draw(st.integers(1, 3)) * (4 if tall else 1), 4 * draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -3.0])
    flat = draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    return torch.tensor(flat, dtype=dtype).view(rows, columns)


@given(matrices())
def test_the_two_largest_of_four_are_kept_the_first_of_equal_ones(weight):
    mask = two_four_mask(weight)
    for row, kept in zip(weight.tolist(), mask.tolist(), strict=True):
        for at in range(0, len(row), 4):
            order = sorted(range(at, at + 4), key=lambda place: (-abs(row[place]), place))
            assert [place for place in range(at, at + 4) if kept[place]] == sorted(order[:2])
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    assert prune_two_four(layer) is layer and torch.equal(layer.weight, weight.masked_fill(~mask, 0))
    assert is_two_four(layer.weight) and check_two_four(layer.weight) is None


@given(matrices(tall=True))
def test_transposable_masks_are_two_four_both_ways_and_full(weight):
    mask = two_four_mask(weight, transposable=True)
    assert is_two_four(mask.float()) and is_two_four(mask.t().float())
    for top in range(0, len(weight), 4):
        for left in range(0, weight.shape[1], 4):
            kept, sizes = mask[top : top + 4, left : left + 4], weight[top : top + 4, left : left + 4].abs()
            for row, column in (~kept).nonzero().tolist():
                # It had no room: two of its row, or of its column, are at least as large.
                larger = (kept[row] & (sizes[row] >= sizes[row, column])).sum() == 2
                assert larger or (kept[:, column] & (sizes[:, column] >= sizes[row, column])).sum() == 2
            assert kept.sum() >= 6


@pytest.mark.parametrize("zeros, legal", [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_how_many_values_a_group_may_hold(zeros, legal):
    weight = torch.ones(3, 8)
    weight[:, ::2] = 0
    weight[1, 4:] = torch.tensor([0.0] * zeros + [2.0] * (4 - zeros))
    assert is_two_four(weight) is legal
    if not legal:
        with pytest.raises(InputError, match="row 1, columns 4 to 7"):
            check_two_four(weight)


@pytest.mark.parametrize(
    "shape, dtype, capability, backend, error",
    [
        ((32, 64), torch.float16, None, "cutlass", DeviceError),
        ((32, 64), torch.float16, (7, 5), "cutlass", DeviceError),
        ((32, 64), torch.float16, (8, 0), "magma", InputError),
        ((32, 64), torch.float32, (8, 0), "cutlass", InputError),
        ((16, 64), torch.float16, (8, 0), "cutlass", InputError),
        ((1, 2, 3), torch.float16, (8, 0), "cutlass", InputError),
        ((32, 64), torch.bfloat16, (8, 0), "cutlass", None),
    ],
)
def test_what_the_backends_take(shape, dtype, capability, backend, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 0) if capability else torch.device("cpu")
    if error is None:
        assert tensor_kind(shape, dtype, device, backend) is torch.sparse.SparseSemiStructuredTensorCUTLASS
        return
    with pytest.raises(error):
        tensor_kind(shape, dtype, device, backend)


@pytest.fixture
def cslt(monkeypatch):
    """A stand-in for cuSPARSELt's product, which holds its operands to what torch's C++ reads."""
    calls = []

    def product(packed, dense, bias=None, transpose_result=False, alg_id=0):
        assert type(packed) is type(dense) is torch.Tensor and packed.dim() == dense.dim() == 2
        # torch's C++ takes what is not contiguous for the transpose of whole rows, and reads 16 bytes at once.
        assert dense.t().is_contiguous() and dense.shape[1] % 8 == 0 and dense.data_ptr() % 16 == 0
        calls.append((tuple(dense.shape), transpose_result, alg_id))
        y = packed @ dense if bias is None else torch.addmm(bias[:, None], packed, dense)
        return y.t().contiguous() if transpose_result else y

    monkeypatch.setattr(torch, "_cslt_sparse_mm", product)
    return calls


def of_torch(weight, alg_id=0):
    kind = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
    return kind(weight.shape, weight, None, None, None, None, True, alg_id)


@SEMI
@pytest.mark.parametrize("shape", [(1,), (), (8,), (13,), (2, 5), (0,)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_is_one_call_with_whole_rows(cslt, shape, with_bias):
    weight = torch.randn(32, 64).half()
    bias, x = torch.randn(32).half() if with_bias else None, torch.randn(*shape, 64).half()
    y = pattern.product(x, of_torch(weight, 5), bias)
    tokens = x.numel() // 64
    assert cslt == [((64, tokens + -tokens % 8), True, 5)][: tokens > 0]
    assert y.shape == (*shape, 32) and y.is_contiguous()
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    wide = torch.randn(16, 130).half()
    for rows in (wide[:, :64], wide[:, 1:65], wide.t()[:64].t(), wide.view(-1)[1 : 1 + 8 * 64].view(8, 64)):
        torch.testing.assert_close(pattern.product(rows, of_torch(weight)), F.linear(rows, weight))


@SEMI
@torch.no_grad()
def test_modes_and_other_inputs_of_the_product(cslt):
    weight, bias, x = torch.randn(32, 64).half(), torch.randn(32).half(), torch.randn(3, 64).half()
    sparse = of_torch(weight)
    call = lambda x: pattern.product(x, sparse, bias)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(x), call(x))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast is to torch.bfloat16"):
        call(x)
    for wrong in (lambda: call(x[:, 1:]), lambda: call(x.float()), lambda: pattern.product(x, weight)):
        with pytest.raises(InputError):
            wrong()
    with torch.enable_grad(), pytest.raises(InputError, match="gradient"):
        call(x.clone().requires_grad_())
    with pytest.raises(InputError, match="of cuSPARSELt"):
        searched(weight, 3)
    with pytest.raises(DeviceError, match="on a CPU"):
        packed(weight)


UNIT = Rates("a GPU", "bfloat16", bandwidth=1.0, l2=1.0, matmul=1.0, launch=0.0)


def test_the_bound_is_what_takes_longest():
    def limited_by(tokens=256, d_in=256, d_out=256, **rates):
        slow = dict(bandwidth=1e30, l2=1e30, matmul=1e30) | rates
        gain, *others = bound(tokens, d_in, d_out, replace(UNIT, **slow)).values()
        assert others == [1, 1]
        return gain

    assert limited_by(matmul=1.0) == pytest.approx(2)  # half of the operations
    assert limited_by(l2=1.0) == pytest.approx(2 / (1 + 9 / 16))  # x is fetched whole
    assert limited_by(bandwidth=1.0) == pytest.approx(3 / (2 + 9 / 16))  # and y is written whole
    assert limited_by(tokens=1, bandwidth=1.0) == pytest.approx(16 / 9, rel=0.02)
    weight, x = 600 * 16 * 2, 16 * 300 * 2  # y^T: 600 x 300, in 3 x 2 tiles
    assert limited_by(300, 16, 600, l2=1.0) == pytest.approx((2 * weight + 3 * x) / (2 * weight * 9 / 16 + 3 * x))
    with pytest.raises(InputError, match="a whole number from 1 up"):
        bound(4, 4.0, 4, UNIT)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 5, 8), (0, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operand", ["weight", "input"])
def test_a_layer_is_the_dense_one_with_one_operand_kept(operand, bias, shape):
    torch.manual_seed(0)
    dense = nn.Linear(8, 12, bias)
    layer = TwoFourLinear(dense, operand)
    assert layer.weight is dense.weight and layer.bias is dense.bias and f"2:4 {operand}" in repr(layer)
    x = torch.randn(*shape).requires_grad_()
    rows = x.reshape(-1, 8)
    filled = F.pad(rows, (0, 0, 0, -len(rows) % 4))
    mask = two_four_mask(filled, transposable=True)[: len(rows)] if operand == "input" else torch.ones(len(rows), 8) > 0
    weight = dense.weight * two_four_mask(dense.weight, transposable=True) if operand == "weight" else dense.weight
    kept = rows * mask
    y, right = layer(x), F.linear(kept, weight, dense.bias)
    torch.testing.assert_close(y, right.view(*shape[:-1], 12))
    dy = torch.randn(y.shape)
    y.backward(dy)
    flat = dy.reshape(-1, 12)
    torch.testing.assert_close(x.grad.reshape(-1, 8), flat @ weight)  # of an input as if all had stayed
    torch.testing.assert_close(dense.weight.grad, flat.t() @ kept)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_torch_is_asked_for_the_largest_magnitudes_and_what_it_cannot_pack_is_said(monkeypatch):
    asked = []

    class Kind:
        @staticmethod
        def prune_dense_static_sort(values, algorithm):
            asked.append(algorithm)
            raise RuntimeError("no such kernel\nmore")

    monkeypatch.setattr(two_four_training, "tensor_kind", lambda *given: Kind)
    with pytest.raises(DeviceError, match="cutlass does not run here: no such kernel;"):
        two_four_training._packed(torch.ones(64, 64), "cutlass")
    assert asked == [two_four_training.ALGORITHM]
    with pytest.raises(InputError, match="multiples of 64"):
        two_four_training._packed(torch.ones(64, 60), "cutlass")


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
