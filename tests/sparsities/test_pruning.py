"""Weights pruned by magnitude: which go, how the rest trains, is stored, and is put back."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from twell_lab.core import InputError
from twell_lab.sparsities.magnitude import magnitude_mask, proximal_step, prune, threshold_mask, to_linears
from twell_lab.sparsities.weights import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def linear(rows=6, columns=9, bias=True, dtype=None):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias, dtype=dtype)


def pruned(sparsity=0.5, **how):
    dense = linear()
    return SparseLinear.from_linear(dense, magnitude_mask(dense.weight, sparsity), **how)


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8, bias=False), nn.LayerNorm(8))


@st.composite
def matrices(draw):
    """A matrix with few different values, so that there are ties, zeros of both signs among them; and a sparsity."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0])
    flat = draw(st.lists(value, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from(DTYPES))
    return torch.tensor(flat, dtype=dtype).view(rows, columns), draw(st.floats(0, 1, exclude_max=True))


@given(matrices(), st.floats(0, 3))
def test_exactly_the_largest_are_kept_and_the_first_of_equal_ones(case, threshold):
    weight, sparsity = case
    sizes = weight.abs().flatten().tolist()
    kept = len(sizes) - round(sparsity * len(sizes))
    order = sorted(range(len(sizes)), key=lambda at: (-sizes[at], at))  # Python's sort is stable
    mask = magnitude_mask(weight, sparsity)
    assert mask.shape == weight.shape and mask.flatten().nonzero().flatten().tolist() == sorted(order[:kept])
    above = threshold_mask(weight, threshold)
    assert above.tolist() == [[abs(value) > threshold for value in row] for row in weight.tolist()]


def test_a_threshold_between_two_values_of_the_dtype_is_not_rounded_to_either():
    one = torch.ones(1, 1, dtype=torch.bfloat16)  # 0.999 and 1.001 are both 1 in bfloat16
    assert threshold_mask(one, 0.999) and not threshold_mask(one, 1.001) and not threshold_mask(one, 1)
    assert not threshold_mask(one.half(), 1e6)


@given(matrices(), st.sampled_from(["masked", "dense"]))
def test_a_layer_is_the_dense_layer_with_its_mask(case, gradient):
    weight, sparsity = case
    dense = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    dense.weight = nn.Parameter(weight.clone())
    mask = magnitude_mask(weight, sparsity)
    layer = SparseLinear.from_linear(dense, mask, gradient=gradient)
    assert layer.nnz == int(mask.sum())
    x, kept = torch.randn(2, 3, weight.shape[1], dtype=weight.dtype), weight.masked_fill(~mask, 0)
    assert torch.equal(layer.mask, mask) and torch.equal(layer.weight, kept)
    assert torch.equal(layer(x), nn.functional.linear(x, kept, dense.bias))
    back = layer.to_linear()
    assert torch.equal(back.weight, kept) and torch.equal(back.bias, dense.bias)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_sparse_product_gives_the_same_and_its_gradients(sparsity, bias):
    dense = linear(bias=bias, dtype=torch.float64)
    mask = magnitude_mask(dense.weight, sparsity)
    results = []
    for product in ("dense", "csr"):
        layer = SparseLinear.from_linear(dense, mask, product=product)
        for shape in ((9,), (0, 9)):
            assert layer(torch.zeros(shape, dtype=torch.float64)).shape == (*shape[:-1], 6)
        x = torch.linspace(-1, 1, 4 * 9, dtype=torch.float64).view(2, 2, 9).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_masked_training_moves_the_kept_weights_alone_and_stores_no_other():
    layer = pruned(0.75)
    assert {name: p.numel() for name, p in layer.named_parameters()} == {"stored": layer.nnz, "bias": 6}
    before, mask = layer.weight.detach().clone(), layer.mask
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.1)
    for _ in range(3):
        layer(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight != 0, mask) and (layer.weight != before)[mask].all()
    assert layer.update(torch.ones(6, 9, dtype=torch.bool)).nnz == int(mask.sum())  # what is gone stays gone
    assert layer.update(magnitude_mask(layer.every(), 0.9)).nnz == 5 and layer.stored.shape == (5,)


def test_the_dense_gradient_reaches_all_weights_and_lets_them_come_back():
    layer = pruned(0.75, gradient="dense")
    used, x = layer.to_linear(), torch.randn(4, 9)
    for module in (layer, used):
        module(x).square().sum().backward()
    assert torch.equal(layer.stored.grad, used.weight.grad) and (layer.stored.grad != 0)[~layer.mask].any()
    before = layer.mask
    with torch.no_grad():
        layer.stored[~before] = 9.0
    layer.update(magnitude_mask(layer.every(), 0.75))
    assert layer.nnz == int(before.sum()) and not (layer.mask & before).any()


@pytest.mark.parametrize("gradient", ["masked", "dense"])
def test_a_state_of_as_many_weights_loads(gradient):
    layer, fresh = pruned(0.9, gradient=gradient), pruned(0.9, gradient=gradient)
    layer.update(layer.mask & magnitude_mask(layer.weight, 0.5)), fresh.update(fresh.mask)
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(fresh.weight, layer.weight)
    with pytest.raises(RuntimeError, match="size mismatch for column"):
        pruned(0.2, gradient=gradient).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("gradient", ["masked", "dense"])
def test_a_layer_is_one_graph_in_compiled_code(gradient):
    layer, x = pruned(0.5, gradient=gradient), torch.randn(4, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


def test_a_model_is_pruned_updated_and_put_back():
    model, dense, x = stack(), stack(), torch.randn(3, 8)
    assert prune(model, 0.75) is model
    assert [type(layer) for layer in model] == [SparseLinear, nn.ReLU, SparseLinear, nn.LayerNorm]
    assert all(torch.equal(model[at].mask, magnitude_mask(dense[at].weight, 0.75)) for at in (0, 2))
    prune(model, 0.9)
    assert model[0].nnz == model[2].nnz == 10
    y = model(x)
    assert to_linears(model) is model and type(model[0]) is nn.Linear and torch.equal(model(x), y)
    chosen = prune(stack(), mask=lambda weight: weight > 0, only=lambda name, module: name == "2")
    assert type(chosen[0]) is nn.Linear and torch.equal(chosen[2].mask, stack()[2].weight > 0)
    shared = nn.Linear(4, 4)
    twice = prune(nn.Sequential(shared, nn.ReLU(), shared), 0.5)
    assert twice[0] is twice[2] and isinstance(twice[0], SparseLinear)
    alone = prune(linear(), 0.9, gradient="dense")
    assert prune(alone, mask=lambda weight: weight != 0).nnz == 54  # all are asked again


def test_a_model_that_cannot_be_pruned_is_left_as_it_was():
    tied = nn.ModuleDict(dict(embedding=nn.Embedding(5, 4), head=nn.Linear(4, 5), other=nn.Linear(4, 4)))
    broken = stack()
    tied.head.weight, broken[2].weight.data[0, 0] = tied.embedding.weight, float("nan")
    for model, how, words in (
        (tied, dict(sparsity=0.5), r"head \(Linear\): its weight is another module's"),
        (broken, dict(sparsity=0.5), r"2 \(Linear\): the weight holds"),
        (nn.Sequential(nn.ReLU()), dict(sparsity=0.5), "no nn.Linear"),
        (stack(), dict(sparsity=1.0), "accepted"),
        (stack(), dict(sparsity=0.5, mask=abs), "accepted"),
        (stack(), dict(mask=torch.abs), "torch.bool"),
    ):
        with pytest.raises(InputError, match=words):
            prune(model, **how)
        assert not any(isinstance(module, SparseLinear) for module in model.modules())
    prune(tied, 0.5, only=lambda name, module: name == "other")
    assert tied.head.weight is tied.embedding.weight and tied.other.nnz == 8


@pytest.mark.parametrize("l1", [0.0, 0.3, 10.0])
def test_training_with_it_finds_the_closed_form_of_the_lasso_with_exact_zeros(l1):
    """Half the squared distance to a target is least at the target's soft threshold, for inputs that are orthonormal."""
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    target = torch.randn(8, 8, dtype=torch.float64)
    layer = nn.Linear(8, 8, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (layer(x) - x @ target.t()).square().sum() / 2
        loss.backward()
        proximal_step(optimizer, l1, [layer.weight])
    wanted = target.sign() * (target.abs() - l1).clamp(min=0)
    torch.testing.assert_close(layer.weight.detach(), wanted)
    assert torch.equal(layer.weight == 0, wanted == 0)


def test_it_shrinks_the_named_weights_alone_by_their_groups_rate_or_none():
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.Adam(
        [{"params": [first], "lr": 0.5}, {"params": [second, third], "lr": torch.tensor(0.25)}]
    )
    with pytest.raises(InputError, match=r"1 of 2 weights.*\[2\]"):
        proximal_step(optimizer, 0.1, [first, nn.Parameter(torch.ones(2))])
    proximal_step(optimizer, 1.0, iter([first, second]))
    assert [p.tolist() for p in (first, second, third)] == [[0.5] * 3, [0.75] * 3, [1.0] * 3]
