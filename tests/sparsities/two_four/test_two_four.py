"""2:4: what is kept, what is refused, and what its products can gain."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.sparse import _semi_structured_conversions as conversions

from twell_lab.analysis.costs import Rates
from twell_lab.core import DeviceError, InputError
from twell_lab.sparsities import two_four
from twell_lab.sparsities.two_four import (
    bound,
    check_convertible,
    check_two_four,
    is_two_four,
    linear_products,
    prune_two_four,
    to_semi_structured,
    two_four_mask,
)
from twell_lab.sparsities.weights import prune, to_linears

RATES = Rates("a GPU", "bfloat16", bandwidth=2.0, l2=5.0, matmul=1000.0, launch=0.0)


@st.composite
def matrices(draw, tall=False):
    """A matrix of whole groups with few different values: ties and zeros of both signs."""
    rows, columns = draw(st.integers(1, 3)) * (4 if tall else 1), 4 * draw(st.integers(1, 4))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -3.0])
    flat = draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    return torch.tensor(flat, dtype=dtype).view(rows, columns)


def linear_of(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone())
    return layer


# The pattern


@given(matrices())
def test_the_two_largest_of_four_are_kept_the_first_of_equal_ones(weight):
    mask = two_four_mask(weight)
    for row, kept in zip(weight.tolist(), mask.tolist(), strict=True):
        for at in range(0, len(row), 4):
            order = sorted(range(at, at + 4), key=lambda place: (-abs(row[place]), place))
            assert [place for place in range(at, at + 4) if kept[place]] == sorted(order[:2])


@given(matrices())
def test_a_pruned_layer_is_the_dense_one_with_its_mask(weight):
    layer, mask = linear_of(weight), two_four_mask(weight)
    assert prune_two_four(layer) is layer
    assert is_two_four(layer.weight) and check_two_four(layer.weight) is None
    assert torch.equal(layer.weight, weight.masked_fill(~mask, 0))
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
    assert torch.equal(layer(x), nn.functional.linear(x, weight * mask, layer.bias))
    again = layer.weight.detach().clone()
    assert torch.equal(prune_two_four(layer).weight, again)  # what is 2:4 loses nothing more


@given(matrices(tall=True))
def test_transposable_masks_are_two_four_both_ways_and_full(weight):
    mask = two_four_mask(weight, transposable=True)
    assert is_two_four(mask.float()) and is_two_four(mask.t().float())
    for top in range(0, len(weight), 4):
        for left in range(0, weight.shape[1], 4):
            kept, sizes = mask[top : top + 4, left : left + 4], weight[top : top + 4, left : left + 4].abs()
            rows, columns = kept.sum(1), kept.sum(0)
            for row in range(4):
                for column in range(4):
                    if kept[row, column]:
                        continue
                    # It had no room: two of its row, or of its column, are at least as large.
                    larger = (kept[row] & (sizes[row] >= sizes[row, column])).sum() == 2
                    assert larger or (kept[:, column] & (sizes[:, column] >= sizes[row, column])).sum() == 2
            assert rows.max() <= 2 and columns.max() <= 2 and kept.sum() >= 6


def test_a_plain_mask_need_not_be_transposable():
    weight = torch.tensor([[4.0, 3, 1, 0]] * 4)
    assert two_four_mask(weight).sum(0).tolist() == [4, 4, 0, 0]
    assert two_four_mask(weight, transposable=True).sum(0).tolist() == [2, 2, 2, 2]
    prune_two_four(layer := linear_of(weight), transposable=True)
    assert is_two_four(layer.weight.t())


@pytest.mark.parametrize("zeros, legal", [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_how_many_values_a_group_may_hold(zeros, legal):
    weight = torch.ones(3, 8)
    weight[:, ::2] = 0
    weight[1, 4:] = torch.tensor([0.0] * zeros + [2.0] * (4 - zeros))
    assert is_two_four(weight) is legal
    if not legal:
        with pytest.raises(InputError, match=r"row 1, columns 4 to 7 hold \[.*2.0\].*1 of 6 groups"):
            check_two_four(weight)


@pytest.mark.parametrize(
    "weight, words",
    [
        (torch.ones(2, 6), "multiple of 4 columns"),
        (torch.ones(2, 1), "multiple of 4 columns"),
        (torch.ones(8), "shape"),
        (torch.ones(2, 4, device="meta"), "meta"),
        (torch.tensor([[1.0, 2.0, float("nan"), 0.0]]), "finite"),
    ],
)
def test_other_weights_are_refused(weight, words):
    for function in (two_four_mask, is_two_four, check_two_four):
        with pytest.raises(InputError, match=words):
            function(weight)


def test_other_modules_are_refused_and_left_as_they_were():
    with pytest.raises(InputError, match="multiple of 4 rows"):
        two_four_mask(torch.ones(6, 4), transposable=True)
    with pytest.raises(InputError, match="Conv1d"):
        prune_two_four(nn.Conv1d(4, 4, 1))
    layer = nn.Linear(6, 4)
    before = layer.weight.detach().clone()
    with pytest.raises(InputError, match="multiple of 4"):
        prune_two_four(layer)
    assert torch.equal(layer.weight, before)


# Training with the zeros


@pytest.mark.parametrize("gradient", ["masked", "dense"])
def test_a_model_trains_and_stays_two_four(gradient):
    torch.manual_seed(0)
    model = prune(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)), mask=two_four_mask, gradient=gradient)
    assert [model[at].sparsity for at in (0, 2)] == [0.5, 0.5]
    first = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).sub(1).square().mean().backward()
        optimizer.step()
        if gradient == "dense":
            prune(model, mask=two_four_mask)
    linears = to_linears(model)
    assert is_two_four(linears[0].weight) and is_two_four(linears[2].weight)
    moved = ((linears[0].weight != 0) != (first != 0)).any()
    assert bool(moved) is (gradient == "dense")  # there others become the largest


def test_a_width_that_four_does_not_divide_is_named():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    with pytest.raises(InputError, match=r"1 \(Linear\).*multiple of 4"):
        prune(model, mask=two_four_mask)


# torch's 2:4 tensors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torchs_packing_of_a_pruned_weight_gives_it_back(dtype):
    """The packing for CUTLASS is torch's own Python, which runs without a GPU; the products do not."""
    weight = prune_two_four(nn.Linear(128, 64, dtype=dtype)).weight.detach()
    weight[0, :8] = 0  # fewer than two in a group
    packed, where = conversions.sparse_semi_structured_from_dense_cutlass(weight)
    assert torch.equal(conversions.sparse_semi_structured_to_dense_cutlass(packed, where), weight)
    counted = linear_products(1, 128, 64)[0].first_bytes(True)
    assert packed.nbytes + where.nbytes == counted


def test_what_the_backends_take():
    for backend, shape in (("cutlass", (32, 64)), ("cusparselt", (16, 16)), ("cutlass", (4096, 11008))):
        for capability in ((8, 0), (9, 0), (12, 0)):
            assert check_convertible(shape, torch.bfloat16, backend, capability) is None


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (((32, 64), torch.bfloat16, "cutlass", (7, 5)), DeviceError, r"7\.5; GPUs of 8\.0 and newer"),
        (((32, 64), torch.bfloat16, "cutlass", None), DeviceError, "on a CPU"),
        (((32, 60), torch.float32, "cutlass", None), DeviceError, "on a CPU"),  # which no other weight mends
        (((32, 64), torch.float32, "cutlass", (9, 0)), InputError, "float16, bfloat16"),
        (((32, 32), torch.float16, "cutlass", (9, 0)), InputError, "32 rows and 64 columns"),
        (((24, 64), torch.float16, "cusparselt", (9, 0)), InputError, "16 rows and 16 columns"),
        (((0, 64), torch.float16, "cusparselt", (9, 0)), InputError, r"\[0, 64\]"),
        (((32, 64), torch.float16, "triton", (9, 0)), InputError, "'cutlass', 'cusparselt'"),
    ],
)
def test_what_the_backends_refuse(arguments, error, words):
    with pytest.raises(error, match=words):
        check_convertible(*arguments)


def test_a_layer_on_a_cpu_is_refused_for_what_is_wrong_with_it():
    layer = nn.Linear(64, 32, dtype=torch.bfloat16)
    with pytest.raises(DeviceError, match="on a CPU"):
        to_semi_structured(prune_two_four(layer), backend="cutlass")
    with pytest.raises(DeviceError, match="on a CPU"):
        to_semi_structured(nn.Linear(60, 32))
    with pytest.raises(InputError, match="backend"):
        to_semi_structured(layer, backend="other")
    with pytest.raises(InputError, match="tokens is 0"):
        to_semi_structured(layer, tokens=0)
    with pytest.raises(InputError, match="sparse is a Parameter; a 2:4 tensor of cuSPARSELt"):
        two_four.searched(layer.weight, 16)


def test_what_torchs_kernels_refuse_is_said(monkeypatch):
    monkeypatch.setattr(two_four, "check_convertible", lambda *_: None)  # as if a CPU were such a GPU
    with pytest.raises(DeviceError, match="torch's cutlass does not run on this device: .*cpu"):
        to_semi_structured(prune_two_four(nn.Linear(64, 32, dtype=torch.bfloat16)), backend="cutlass")


# The product without the tensor's dispatch


@pytest.fixture
def cslt(monkeypatch):
    """cuSPARSELt's product on a CPU: what is packed is the dense weight here. Returns the calls, as they were made."""
    calls = []

    def made(packed, dense, bias=None, transpose_result=False, alg_id=0):
        assert type(packed) is type(dense) is torch.Tensor and packed.dim() == dense.dim() == 2
        # torch's C++ takes what is not contiguous for the transpose of whole rows, and reads 16 bytes at once.
        assert dense.t().is_contiguous() and dense.shape[1] % 8 == 0 and dense.data_ptr() % 16 == 0
        calls.append((tuple(dense.shape), transpose_result, alg_id))
        y = packed @ dense if bias is None else torch.addmm(bias[:, None], packed, dense)
        return y.t().contiguous() if transpose_result else y

    monkeypatch.setattr(torch, "_cslt_sparse_mm", made)
    return calls


def packed(weight, alg_id=0):
    kind = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
    return kind(weight.shape, weight, None, None, None, None, True, alg_id)


def layer_of(weight, bias):
    layer = two_four.SemiStructuredLinear(weight.shape[1], weight.shape[0], False, "meta", weight.dtype)
    layer.weight, layer.bias = nn.Parameter(packed(weight), requires_grad=False), bias
    return layer


SEMI = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")


@SEMI
@pytest.mark.parametrize("shape", [(1,), (), (8,), (13,), (2, 5), (0,), (3, 0)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_product_of_a_two_four_tensor_is_one_call_with_whole_rows(cslt, shape, with_bias):
    weight = torch.randn(32, 64).half()
    bias, x = torch.randn(32).half() if with_bias else None, torch.randn(*shape, 64).half()
    y = two_four.product(x, packed(weight, 5), bias)
    tokens = x.numel() // 64
    assert cslt == [((64, tokens + -tokens % 8), True, 5)][: tokens > 0]
    assert y.shape == (*shape, 32) and y.is_contiguous()
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias))


@SEMI
def test_columns_and_odd_addresses_are_copied_to_whole_rows(cslt):
    weight, wide = torch.randn(32, 64).half(), torch.randn(16, 130).half()
    for x in (wide[:, :64], wide[:, 1:65], wide.t()[:64].t(), wide.view(-1)[1 : 1 + 8 * 64].view(8, 64)):
        torch.testing.assert_close(two_four.product(x, packed(weight)), nn.functional.linear(x, weight))
    assert len(cslt) == 4


@SEMI
def test_torchs_own_way_is_taken_where_operations_are_watched(cslt, monkeypatch):
    """torch dispatches F.linear of its tensor, which is seen here by its transpose."""
    weight, bias, x = (torch.randn(*shape).half() for shape in ((32, 64), (32,), (8, 64)))
    layer = layer_of(weight, nn.Parameter(bias))
    turned = []
    kind = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
    theirs = kind.SPARSE_DISPATCH[torch.ops.aten.t]
    monkeypatch.setitem(kind.SPARSE_DISPATCH, torch.ops.aten.t, lambda *given: (turned.append(1), theirs(*given))[1])
    with torch.no_grad():
        wanted = layer(x)
        assert not turned and len(cslt) == 1
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="bfloat16, and the weight holds"):
            layer(x)  # torch casts no 2:4 tensor
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(layer(x), wanted) and len(cslt) == 2 and turned
        turned.clear()
        traced = torch.compile(layer, fullgraph=True, backend="eager")(x)
        assert turned and torch.equal(traced, wanted)


@SEMI
def test_what_the_product_has_no_gradient_for_is_refused(cslt):
    weight, bias = torch.randn(32, 64).half(), nn.Parameter(torch.randn(32).half())
    layer, x = layer_of(weight, bias), torch.randn(3, 64).half()
    y = layer(x)
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias), rtol=0.01, atol=0.01)
    y.sum().backward()
    assert bias.grad.tolist() == [3.0] * 32
    with pytest.raises(InputError, match="x needs a gradient"):
        layer(x.requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(layer(x), y, rtol=0.01, atol=0.01)


@SEMI
@pytest.mark.parametrize(
    "x, bias, words",
    [
        (torch.ones(2, 60), None, r"x is torch.float32 \[2, 60\] on cpu; torch.float32 \[..., 64\]"),
        (torch.ones(2, 64).half(), None, "x is torch.float16"),
        (torch.ones(2, 64, device="meta"), None, "on meta"),
        (torch.ones(2, 64), torch.ones(31), r"bias is torch.float32 \[31\]"),
        (torch.ones(()), None, r"x is torch.float32 \[\]"),
    ],
)
def test_another_input_of_the_product_is_refused(cslt, x, bias, words):
    with pytest.raises(InputError, match=words):
        two_four.product(x, packed(torch.ones(32, 64)), bias)
    with pytest.raises(InputError, match="sparse is a Tensor; a 2:4 tensor of torch"):
        two_four.product(torch.ones(2, 64), torch.ones(32, 64))
    assert not cslt


# What it can gain


def test_one_of_three_products_gains_and_two_where_the_mask_is_transposable():
    for transposable, gains in ((False, [True, False, False]), (True, [True, True, False])):
        products = linear_products(16, 32, 64, transposable=transposable)
        assert [(each.m, each.n, each.k) for each in products] == [(64, 16, 32), (32, 16, 64), (64, 32, 16)]
        assert [each.sparse for each in products] == gains
        for each in products:
            halves = each.operations(True) / each.operations(False), each.memory(True) < each.memory(False)
            assert halves == ((0.5, True) if each.sparse else (1.0, False))
            assert each.operations(False) == 2 * 16 * 32 * 64
            assert (bound([each], RATES) > 1) is each.sparse


@pytest.mark.parametrize("itemsize, share", [(2, 9 / 16), (1, 10 / 16)])
def test_a_two_four_weight_is_more_than_half_of_its_bytes(itemsize, share):
    product = linear_products(3, 32, 64, itemsize=itemsize)[0]
    assert product.first_bytes(False) == 32 * 64 * itemsize
    assert product.first_bytes(True) == share * 32 * 64 * itemsize
    assert product.memory(False) == (32 * 64 + 32 * 3 + 64 * 3) * itemsize


def test_what_tiles_fetch():
    product = linear_products(5, 16, 9, tile=(4, 2))[0]  # y^T: 9 x 5, in 3 x 3 tiles
    assert product.fetched(False) == 3 * (9 * 16 * 2) + 3 * (16 * 5 * 2)
    assert product.fetched(True) == 3 * (9 * 16 * 2) * 9 / 16 + 3 * (16 * 5 * 2)


def test_the_bound_is_what_takes_longest():
    def limited_by(tokens=256, **rates):
        slow = dict(bandwidth=1e30, l2=1e30, matmul=1e30) | rates
        return bound(linear_products(tokens, 256, 256)[:1], Rates("a GPU", "bfloat16", **slow, launch=0.0))

    assert limited_by(matmul=1.0) == pytest.approx(2)  # half of the operations
    assert limited_by(l2=1.0) == pytest.approx(2 / (1 + 9 / 16))  # x is fetched whole
    assert limited_by(bandwidth=1.0) == pytest.approx(3 / (2 + 9 / 16))  # and y is written whole
    assert limited_by(tokens=1, bandwidth=1.0) == pytest.approx(16 / 9, rel=0.02)
    # Dense, the operations take longest; with half of them, what is fetched.
    operations, fetched = 2 * 256**3, 2 * 2 * 256**2
    assert limited_by(matmul=operations / 1.0, l2=fetched / 0.8) == pytest.approx(1 / (0.8 * (1 + 9 / 16) / 2))
    whole = bound(linear_products(256, 256, 256), Rates("a GPU", "bfloat16", 1e30, 1e30, 1.0, 0.0))
    assert whole == pytest.approx(3 / 2.5)


def test_turning_the_result_apart_reads_and_writes_it_once_more():
    rates = Rates("a GPU", "bfloat16", bandwidth=1e3, l2=1e30, matmul=1e30, launch=0.0)
    forward, back, weights = linear_products(16, 32, 64, transposable=True)
    took = lambda products, two_four: sum(each.memory(two_four) for each in products)  # noqa: E731
    for products, turned in (([forward], 16 * 64), ([forward, back], 16 * (64 + 32)), ([forward, weights], 16 * 64)):
        apart = bound(products, rates, fused=False)
        assert apart == pytest.approx(took(products, False) / (took(products, True) + 2 * 2 * turned))
        assert apart < bound(products, rates)
    assert bound([weights], rates, fused=False) == 1  # which is not sparse


def test_a_row_says_what_was_counted():
    row = linear_products(16, 32, 64)[0].row(RATES)
    assert row["product"] == "y = x W^T" and row["operations"] == [65536, 32768] and row["sparse"] is True
    assert row["limit"] == ["memory", "memory"] and row["bound"] == pytest.approx(7168 / (7168 - 4096 * 7 / 16))


@pytest.mark.parametrize(
    "sizes, how, words",
    [
        ((0, 4, 4), {}, "tokens is 0"),
        ((4, 4.0, 4), {}, "d_in is 4.0"),
        ((4, 4, True), {}, "d_out is True"),
        ((4, 4, 4), dict(itemsize=4), "itemsize is 4"),
        ((4, 4, 4), dict(tile=(0, 4)), "a tile is 0"),
        ((4, 4, 4), dict(tile=(4, -1)), "a tile is -1"),
    ],
)
def test_wrong_sizes_are_refused(sizes, how, words):
    with pytest.raises(InputError, match=words):
        linear_products(*sizes, **how)


def test_nothing_and_what_is_no_size():
    assert two_four.two_four_mask(torch.zeros(0, 8)).shape == (0, 8)
    for tile in (256, (1,), [1, 2], (0, 1)):
        with pytest.raises(InputError, match="tile is"):
            two_four.linear_products(1, 2, 3, tile=tile)
    with pytest.raises(InputError, match="backend is"):
        two_four.check_convertible((32, 64), torch.float16, ["cutlass"], (8, 0))
    with pytest.raises(InputError, match=r"shape \[1, 2, 3\]"):
        two_four.check_convertible((1, 2, 3), torch.float16, "cutlass", (8, 0))
