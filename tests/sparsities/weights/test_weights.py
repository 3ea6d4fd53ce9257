"""Weights pruned by magnitude: which go, how the rest trains, is stored, and is put back."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune as torchs

from twell_lab.core import InputError
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.sparsities import blocks
from twell_lab.sparsities.weights import (
    SparseLinear,
    magnitude_mask,
    proximal_step,
    prune,
    table,
    threshold_mask,
    to_linears,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
SMALL = dict(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=24, context=12)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def linear(rows=6, columns=9, bias=True, seed=0, dtype=None):
    torch.manual_seed(seed)
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


# Which weights are kept


@given(matrices())
def test_exactly_the_largest_are_kept_and_the_first_of_equal_ones(case):
    weight, sparsity = case
    sizes = weight.abs().flatten().tolist()
    kept = len(sizes) - round(sparsity * len(sizes))
    order = sorted(range(len(sizes)), key=lambda at: (-sizes[at], at))  # Python's sort is stable
    mask = magnitude_mask(weight, sparsity)
    assert mask.shape == weight.shape
    assert mask.flatten().nonzero().flatten().tolist() == sorted(order[:kept])


def test_where_no_two_are_equal_the_choice_is_torchs():
    ours, theirs = linear(), linear()
    torchs.l1_unstructured(theirs, "weight", 0.7)
    assert torch.equal(magnitude_mask(ours.weight, 0.7), theirs.weight_mask.bool())


@given(matrices(), st.floats(0, 3))
def test_a_threshold_keeps_what_is_above_it(case, threshold):
    weight, _ = case
    kept = threshold_mask(weight, threshold)
    assert kept.tolist() == [[abs(value) > threshold for value in row] for row in weight.tolist()]


def test_a_threshold_between_two_values_of_the_dtype_is_not_rounded_to_either():
    one = torch.ones(1, 1, dtype=torch.bfloat16)  # 0.999 and 1.001 are both 1 in bfloat16
    assert threshold_mask(one, 0.999) and not threshold_mask(one, 1.001) and not threshold_mask(one, 1)
    assert not threshold_mask(one.half(), 1e6)


@pytest.mark.parametrize("sparsity", [1, 1.5, -0.1, float("nan"), True, "0.5", None])
def test_other_sparsities_are_refused(sparsity):
    with pytest.raises(InputError, match="from 0 up to, but not, 1"):
        magnitude_mask(torch.ones(2, 2), sparsity)


@pytest.mark.parametrize(
    "weight, words",
    [
        (torch.ones(4), "shape"),
        (torch.ones(2, 2, dtype=torch.int32), "floating-point"),
        (torch.ones(2, 2, device="meta"), "meta"),
        (torch.tensor([[1.0, float("nan")]]), "finite"),
        (torch.tensor([[1.0, float("inf")]]), "finite"),
    ],
)
def test_other_weights_are_refused(weight, words):
    for mask in (magnitude_mask, threshold_mask):
        with pytest.raises(InputError, match=words):
            mask(weight, 0.5)
    for threshold in (-1, float("inf"), None, True):
        with pytest.raises(InputError, match="threshold"):
            threshold_mask(torch.ones(2, 2), threshold)


# The layer


@given(matrices(), st.sampled_from(["masked", "dense"]))
def test_a_layer_is_the_dense_layer_with_its_mask(case, gradient):
    weight, sparsity = case
    dense = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    dense.weight = nn.Parameter(weight.clone())
    mask = magnitude_mask(weight, sparsity)
    layer = SparseLinear.from_linear(dense, mask, gradient=gradient)
    assert layer.nnz == int(mask.sum()) and layer.sparsity == pytest.approx(1 - layer.nnz / weight.numel())
    assert torch.equal(layer.mask, mask)
    assert torch.equal(layer.weight, weight.masked_fill(~mask, 0))
    x = torch.randn(2, 3, weight.shape[1], dtype=weight.dtype)
    expected = nn.functional.linear(x, weight.masked_fill(~mask, 0), dense.bias)
    assert torch.equal(layer(x), expected)
    back = layer.to_linear()
    assert torch.equal(back.weight, weight.masked_fill(~mask, 0)) and torch.equal(back.bias, dense.bias)
    assert torch.equal(layer.csr().to_dense(), back.weight) and layer.csr().nnz == layer.nnz


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("bias", [True, False])
def test_torchs_sparse_product_gives_the_same_and_its_gradients(sparsity, bias):
    dense = linear(bias=bias, dtype=torch.float64)
    mask = magnitude_mask(dense.weight, sparsity)
    grads = []
    for product in ("dense", "csr"):
        layer = SparseLinear.from_linear(dense, mask, product=product)
        for shape in ((9,), (0, 9)):
            assert layer(torch.zeros(shape, dtype=torch.float64)).shape == (*shape[:-1], 6)
        x = torch.linspace(-1, 1, 4 * 9, dtype=torch.float64).view(2, 2, 9).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        grads.append([y, x.grad, *(each.grad for each in layer.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torchs_sparse_product_reads_neighbouring_tokens_side_by_side(monkeypatch):
    layer, x, read = SparseLinear(8, 4, sparsity=0.5, product="csr"), torch.randn(3, 8), []

    class Operand:
        def __init__(self, *given, **how):
            self.held = real(*given, **how)

        def __matmul__(self, other):
            read.append(other)
            return self.held @ other

    real, wanted = torch.sparse_csr_tensor, torch.nn.functional.linear(x, layer.weight, layer.bias)
    monkeypatch.setattr(torch, "sparse_csr_tensor", Operand)
    torch.testing.assert_close(layer(x), wanted)
    assert [each.shape for each in read] == [(8, 3)] and read[0].is_contiguous()


def test_masked_training_moves_the_kept_weights_alone_and_stores_no_other():
    layer = pruned(0.75)
    assert {name: each.numel() for name, each in layer.named_parameters()} == {"values": layer.nnz, "bias": 6}
    before, mask = layer.weight.detach().clone(), layer.mask
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.1)
    for _ in range(3):
        layer(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.weight != 0, mask) and (layer.weight != before)[mask].all()
    assert layer.weight.is_leaf is False and layer.values.grad.shape == (layer.nnz,)


def test_the_dense_gradient_is_that_of_a_layer_whose_weight_is_what_is_used():
    layer = pruned(0.75, gradient="dense")
    used = layer.to_linear()
    x = torch.randn(4, 9)
    for each in (layer, used):
        each(x).square().sum().backward()
    assert torch.equal(layer.dense.grad, used.weight.grad)
    assert (layer.dense.grad != 0)[~layer.mask].any()


def test_weights_come_back_with_the_dense_gradient():
    layer, kept = pruned(0.5, gradient="dense"), None
    for _ in range(60):
        kept = layer.mask
        layer(torch.eye(9)).sub(5 * (~kept).t()).square().sum().backward()  # asks for the ones that are gone
        with torch.no_grad():
            layer.dense -= 0.05 * layer.dense.grad
        layer.dense.grad = None
        layer.update(0.5)
        if (layer.mask & ~kept).any():
            break
    assert (layer.mask & ~kept).any() and layer.nnz == kept.sum()


def test_masked_layers_shrink_and_their_optimizer_goes_on():
    layer, twin = pruned(0.2), pruned(0.2)
    optimizers = [torch.optim.Adam(each.parameters(), 0.1) for each in (layer, twin)]
    x = torch.randn(4, 9)

    def step(which, each):
        optimizers[which].zero_grad()
        loss = each(x).square().sum()
        loss.backward()
        optimizers[which].step()
        return loss  # held by the caller, as a loop does

    held = [step(0, layer), step(1, twin)]
    layer.update(0.6, optimizer=optimizers[0])
    assert layer.nnz == 54 - round(0.6 * 54) and len(held) == 2
    mask = layer.mask
    assert torch.equal(mask, magnitude_mask(twin.weight, 0.6))
    with torch.no_grad():  # the twin trains all it has, with the same zeros
        twin.values[~mask[twin.mask]] = 0
    step(0, layer), step(1, twin)
    torch.testing.assert_close(layer.weight[mask], twin.weight[mask])
    state = optimizers[0].state[layer.values]
    assert state["exp_avg"].shape == (layer.nnz,) and int(state["step"]) == 2


def test_update_takes_one_thing_and_refuses_what_cannot_be():
    layer = pruned(0.5)
    for arguments in ({}, dict(sparsity=0.5, threshold=0.1)):
        with pytest.raises(InputError, match="one of"):
            layer.update(**arguments)
    with pytest.raises(InputError, match="27 are left"):
        layer.update(0.4)
    with pytest.raises(InputError, match=r"torch.bool \[6, 9\]"):
        layer.update(mask=torch.ones(6, 9))
    other = torch.optim.SGD(linear().parameters(), 0.1)
    with pytest.raises(InputError, match="optimizer"):
        layer.update(0.9, optimizer=other)
    assert layer.nnz == 27
    assert layer.update(threshold=0.0).nnz == 27
    assert layer.update(mask=torch.ones(6, 9, dtype=torch.bool)).nnz == 27  # what is gone stays gone
    assert layer.update(threshold=1e9).nnz == 0 and not layer(torch.zeros(1, 9)).sub(layer.bias).any()


@pytest.mark.parametrize(
    "how", [dict(gradient="ste"), dict(product="coo"), dict(gradient="dense", product="csr"), dict(sparsity=1.0)]
)
def test_other_ways_are_refused(how):
    with pytest.raises(InputError, match="accepted"):
        SparseLinear(4, 4, **how)


def test_what_cannot_be_sparse_is_refused():
    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
    normed = torchs.l1_unstructured(linear(), "weight", 0.5)
    for module, words in (
        (nn.Conv1d(2, 2, 1), "Conv1d is not a plain torch.nn.Linear"),
        (nn.MultiheadAttention(4, 2).out_proj, "not a plain"),
        (hooked, "hooks"),
        (normed, "hooks"),
        (nn.Linear(2, 2, device="meta"), "meta"),
    ):
        with pytest.raises(InputError, match=words):
            SparseLinear.from_linear(module)
    with pytest.raises(InputError, match="meta"):
        SparseLinear(4, 4, device="meta")
    with pytest.raises(InputError, match="mask"):
        SparseLinear.from_linear(linear(), torch.ones(9, 6, dtype=torch.bool))
    with pytest.raises(InputError, match="on a CPU"):
        SparseLinear(4, 4, product="csr", dtype=torch.bfloat16)(torch.ones(1, 4, dtype=torch.bfloat16))


def test_a_layer_of_its_own_is_drawn_as_torchs():
    torch.manual_seed(0)
    layer = SparseLinear(9, 6, sparsity=0.9)
    dense = linear()
    assert layer.nnz == 5 and torch.equal(layer.weight, dense.weight * magnitude_mask(dense.weight, 0.9))
    assert "nnz=5" in repr(layer)


# States


@pytest.mark.parametrize("gradient", ["masked", "dense"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_a_state_loads_into_a_fresh_layer(gradient, sparsity, tmp_path):
    layer = pruned(sparsity, gradient=gradient)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    fresh = SparseLinear(9, 6, gradient=gradient)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(fresh.weight, layer.weight) and fresh.nnz == layer.nnz
    fresh(torch.ones(1, 9)).sum().backward()  # and trains
    twin = copy.deepcopy(layer)
    assert torch.equal(twin.weight, layer.weight) and twin.bias is not layer.bias


def test_a_masked_state_holds_nothing_dense():
    layer = pruned(0.9)
    sizes = {name: tuple(each.shape) for name, each in layer.state_dict().items()}
    assert sizes == {"values": (5,), "column": (5,), "pointer": (7,), "bias": (6,)}


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(column=torch.full((5,), 9, dtype=torch.int32)), "accepted: 0 to 8"),
        (dict(column=torch.full((5,), -1, dtype=torch.int32)), "accepted: 0 to 8"),
        (dict(pointer=torch.tensor([0, 5, 4, 5, 5, 5, 5], dtype=torch.int32)), "rise"),
        (dict(pointer=torch.tensor([0, 1, 2, 3, 4, 4, 4], dtype=torch.int32)), "rise"),
        (dict(pointer=torch.zeros(3, dtype=torch.int32)), "shapes"),
        (dict(values=torch.zeros(4)), "shapes"),
        (
            dict(
                pointer=torch.tensor([0, 5, 5, 5, 5, 5, 5], dtype=torch.int32),
                column=torch.tensor([0, 2, 2, 3, 4], dtype=torch.int32),
            ),
            "twice",
        ),
    ],
)
def test_a_broken_state_is_refused(change, words):
    layer = pruned(0.9)
    before = layer.weight
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict({**layer.state_dict(), **change})
    assert torch.equal(layer.weight, before)


# Whole models


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_model_is_pruned_and_put_back(scope):
    model, dense = stack(), stack()
    every = torch.cat([dense[at].weight.abs().flatten() for at in (0, 2)])
    assert prune(model, 0.75, scope=scope) is model
    assert [type(each) for each in model] == [SparseLinear, nn.ReLU, SparseLinear, nn.LayerNorm]
    assert model[0].nnz + model[2].nnz == 48
    if scope == "layer":
        assert model[0].nnz == model[2].nnz == 24
    else:
        cut = every.sort().values[144]  # the smallest that stays
        assert all(torch.equal(model[at].mask, dense[at].weight.abs() >= cut) for at in (0, 2))
    x = torch.randn(3, 8)
    y = model(x)
    assert to_linears(model) is model and type(model[0]) is nn.Linear
    assert torch.equal(model(x), y) and int((model[0].weight != 0).sum() + (model[2].weight != 0).sum()) == 48


def test_global_ties_go_in_the_models_order_and_dtypes_mix():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4).double())
    for layer in model:
        nn.init.ones_(layer.weight)
    prune(model, 0.5, scope="global")
    assert [layer.nnz for layer in model] == [16, 8, 0]
    assert model[1].mask.flatten().tolist() == [True] * 8 + [False] * 8
    assert [layer.weight.dtype for layer in model] == [torch.float32, torch.bfloat16, torch.float64]


def test_pruning_again_updates_and_keeps_the_optimizer():
    model = prune(stack(), 0.5)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for sparsity in (0.75, 0.9):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        prune(model, sparsity, scope="global", optimizer=optimizer)
    assert model[0].nnz + model[2].nnz == 192 - round(0.9 * 192)
    assert {id(each) for each in optimizer.param_groups[0]["params"]} == {id(each) for each in model.parameters()}
    before = [each.clone() for each in model.state_dict().values()]
    for arguments, words in ((dict(scope="global"), "19 are left"), ({}, r"0 \(SparseLinear\): .* are left")):
        with pytest.raises(InputError, match=words):
            prune(model, 0.5, **arguments)
    with pytest.raises(InputError, match="optimizer"):
        prune(model, 0.95, scope="global", optimizer=torch.optim.SGD(stack().parameters(), 0.1))
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_only_and_a_function_choose():
    model = prune(stack(), mask=lambda weight: weight > 0, only=lambda name, module: name == "2")
    assert type(model[0]) is nn.Linear and torch.equal(model[2].mask, stack()[2].weight > 0)
    alone = prune(linear(), 0.5)
    assert isinstance(alone, SparseLinear) and alone.nnz == 27 and type(to_linears(alone)) is nn.Linear


def test_a_function_is_asked_for_all_weights_where_they_may_come_back():
    model = prune(linear(), 0.9, gradient="dense")
    assert prune(model, mask=lambda weight: weight != 0) is model and model.nnz == 54
    assert prune(prune(linear(), 0.9), mask=lambda weight: weight == weight).nnz == 5  # masked: what is gone is gone


@pytest.mark.parametrize("gradient", ["masked", "dense"])
def test_a_layer_is_one_graph_in_compiled_code(gradient):
    layer, x = pruned(0.5, gradient=gradient), torch.randn(4, 9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x).sum().backward()
    gradients = [each.grad.clone() for each in layer.parameters()]
    layer.zero_grad()
    layer(x).sum().backward()
    assert torch.equal(compiled(x), layer(x))
    assert all(torch.equal(each.grad, gradient) for each, gradient in zip(layer.parameters(), gradients, strict=True))


def test_one_layer_in_two_places_stays_one():
    layer = nn.Linear(4, 4)
    model = prune(nn.Sequential(layer, nn.ReLU(), layer), 0.5)
    assert model[0] is model[2] and isinstance(model[0], SparseLinear)


def test_a_language_model_is_pruned_trained_and_reloaded():
    config = ModelConfig(**SMALL)
    torch.manual_seed(0)

    def inner(name, module):
        return name.startswith("layers")

    model = prune(LanguageModel(config), 0.8, only=inner)
    tokens = torch.randint(0, 50, (2, 12))
    before = model(tokens).detach()
    model(tokens).logsumexp(-1).sum().backward()
    assert all(each.values.grad is not None for each in model.modules() if isinstance(each, SparseLinear))
    fresh = prune(LanguageModel(config), 0.5, only=inner)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(tokens), before)
    assert torch.equal(to_linears(fresh)(tokens), before)


def test_a_model_that_cannot_be_pruned_is_left_as_it_was():
    tied = nn.ModuleDict(dict(embedding=nn.Embedding(5, 4), head=nn.Linear(4, 5, bias=False), other=nn.Linear(4, 4)))
    tied.head.weight = tied.embedding.weight
    broken = stack()
    broken[2].weight.data[0, 0] = float("nan")
    for model, how, words in (
        (tied, dict(sparsity=0.5), r"head \(Linear\) shares its weight"),
        (broken, dict(sparsity=0.5), r"2 \(Linear\): the weight holds"),
        (nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2)), dict(sparsity=0.5), "out_proj"),
        (nn.Sequential(nn.ReLU()), dict(sparsity=0.5), "no nn.Linear"),
        (stack(), dict(sparsity=1.0), "but not, 1"),
        (stack(), {}, "one, is accepted"),
        (stack(), dict(sparsity=0.5, mask=abs), "one, is accepted"),
        (stack(), dict(sparsity=0.5, scope="row"), "scope"),
        (stack(), dict(mask=torch.signbit, scope="global"), "scope"),
        (stack(), dict(mask=torch.abs), "torch.bool"),
        (stack(), dict(sparsity=0.5, only="0"), "only"),
        (stack(), dict(sparsity=0.5, product="ell"), "product"),
        ("a name", dict(sparsity=0.5), "torch.nn.Module"),
    ):
        with pytest.raises(InputError, match=words):
            prune(model, **how)
        if isinstance(model, nn.Module):
            assert not any(isinstance(each, SparseLinear) for each in model.modules())
    prune(tied, 0.5, only=lambda name, module: name == "other")
    assert tied.head.weight is tied.embedding.weight and tied.other.nnz == 8


def test_layers_that_were_swapped_are_put_back_first():
    model = sparsify(LanguageModel(ModelConfig(**SMALL)), "twell")
    with pytest.raises(InputError, match=r"layers.0.mlp.*\(Linear\) belongs to a layer that was swapped"):
        prune(model, 0.5)
    prune(model, 0.5, only=lambda name, module: "attention" in name)
    prune(densify(model), 0.5, only=lambda name, module: "mlp" in name)
    assert sum(isinstance(each, SparseLinear) for each in model.modules()) == 10


def test_the_table_says_what_is_stored():
    model = stack()
    with torch.no_grad():
        model[2].weight[:, 3] = 0
    prune(model, 0.9, only=lambda name, module: name == "0")
    first, second = table(model)
    kept = model[0].mask.sum(1)
    assert first["layer"] == "0" and first["shape"] == [12, 8] and first["nnz"] == 10
    assert first["row_nnz"] == [int(kept.min()), int(kept.max())]
    assert first["bytes"] == 10 * 4 + 10 * 4 + 13 * 4 and first["dense_bytes"] == 96 * 4
    assert first["masked_bytes"] == 96 * 5
    assert (second["nnz"], second["empty_columns"], second["bytes"]) == (88, 1, 96 * 4)


# Training zeros in


def test_the_proximal_step_after_plain_descent_is_soft_thresholding():
    start, gradient = torch.tensor([1.0, -1.0, 0.25, -0.25, 0.0]), torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0])
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    proximal_step(torch.optim.SGD([weight], 0.5), 0.5, [weight])
    moved = start - 0.5 * gradient  # 0.75, -1.25, 0, -0.25, 0
    assert torch.equal(weight.detach(), moved.sign() * (moved.abs() - 0.25).clamp(min=0))
    assert weight.detach().tolist() == [0.5, -1.0, 0, 0, 0]


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
    assert SparseLinear.from_linear(layer).nnz == int((wanted != 0).sum())


def test_it_shrinks_the_named_weights_alone_by_their_groups_rate():
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.Adam(
        [{"params": [first], "lr": 0.5}, {"params": [second, third], "lr": torch.tensor(0.25)}]
    )
    asked = []
    assert proximal_step(optimizer, 1.0, iter([first, second]), lambda: asked.append(1) or "loss") == "loss"
    assert asked and [each.tolist() for each in (first, second, third)] == [[0.5] * 3, [0.75] * 3, [1.0] * 3]


def test_wrong_proximal_steps_are_refused_before_the_step():
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], 0.5)
    for l1, weights, words in (
        (-1, [weight], "l1 is -1"),
        (float("nan"), [weight], "l1 is nan"),
        (True, [weight], "l1"),
        (0.1, [weight, nn.Parameter(torch.ones(2))], r"1 of 2 weights.*\[2\]"),
    ):
        with pytest.raises(InputError, match=words):
            proximal_step(optimizer, l1, weights)
    assert weight.tolist() == [1.0] * 3


def test_a_sparse_product_under_autocast_is_refused_by_name_and_a_layer_of_nothing_can_be_shown():
    layer = SparseLinear(6, 4, product="csr", sparsity=0.5)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="product 'csr' of torch.bfloat16"):
        layer(torch.randn(2, 6))
    with pytest.warns(UserWarning):  # torch draws no weights
        assert "sparsity=0" in repr(SparseLinear(4, 0))


def test_a_table_of_what_has_no_values_or_none_to_count():
    for layer in (nn.LazyLinear(3), nn.Linear(4, 3, device="meta")):
        with pytest.raises(InputError, match="holds no values"):
            table(nn.Sequential(layer))
    for sizes in ((4, 0), (0, 4)):
        (row,) = table(nn.Sequential(nn.Linear(*sizes)))
        assert row["nnz"] == 0 and row["sparsity"] == 0
    with pytest.raises(InputError, match="meta"):
        prune(nn.Sequential(nn.Linear(4, 3, device="meta")), 0.5, scope="global")


def test_a_table_counts_what_blocks_hold():
    linear = nn.Linear(64, 32)
    with torch.no_grad():
        linear.weight[:, :32] = 0
    (row,) = table(nn.Sequential(blocks.to_bsr_linear(linear, 32)))
    assert row["nnz"] == 32 * 32 and row["bytes"] < row["dense_bytes"] == 64 * 32 * 4
