"""A layer that infers reads `down` transposed where it lies, in the storage of its transpose: nobody sees it but by the
strides. What a GPU does is asked of a CPU here."""

import copy
import io
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import _composable_state
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from tests.layers.ffn.follows import assert_follows, assert_threads_agree
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import copies, turned
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 300
COUNTERS, COPY = 32, 4 * D_MODEL * D_FF


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(turned, "DEVICES", ["cuda", "cpu"])


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


def made(kind=GatedFeedForward, seed=0):
    torch.manual_seed(seed)
    return kind(D_MODEL, D_FF).requires_grad_(False).eval()


@pytest.fixture(params=[GatedFeedForward, PlainFeedForward], ids=["gated", "plain"])
def pair(request):
    """(dense, sparse): the same weights, in memory of their own."""
    return made(request.param), sparsify(made(request.param), "twell")


def is_turned(layer):
    weight = layer.down.weight
    assert turned.is_turned(weight) == (weight.stride() == (1, D_MODEL))
    assert turned.is_turned(weight) or weight.is_contiguous()
    return turned.is_turned(weight)


def holds_no_copy(layer):
    (view,) = layer.views()
    return layer.extra_bytes == COUNTERS and view.is_set_to(layer.down.weight.t())


# ---- when ----


def test_the_parameter_is_the_same_with_other_strides(x):
    dense, layer = made(), made()
    weight, version = layer.down_proj.weight, layer.down_proj.weight._version
    sparse = sparsify(layer, "twell")
    assert sparse.down.weight is weight and weight._version == version
    assert is_turned(sparse) and holds_no_copy(sparse)
    assert torch.equal(weight, dense.down_proj.weight) and weight.shape == dense.down_proj.weight.shape
    assert_follows(sparse, dense, x)
    assert holds_no_copy(sparse) and all(view.is_contiguous() for view in sparse.views())
    assert sparse.status()["extra_bytes"] == COUNTERS


def test_no_tensor_is_an_inference_tensor(x):
    dense, layer = made(), made()
    with torch.inference_mode():
        sparse = sparsify(layer, "twell")
        assert_follows(sparse, dense, x)
    assert is_turned(sparse) and not any(t.is_inference() for t in (sparse.down.weight, *sparse.views()))
    with torch.no_grad():
        sparse.down.weight.mul_(2), dense.down_proj.weight.mul_(2)
    assert_follows(sparse, dense, x)


def test_one_that_becomes_an_inference_tensor_is_copied(x):
    sparse, dense = sparsify(made(), "twell"), made().double()
    with torch.inference_mode():
        sparse.double().float()
    for _ in range(2):
        assert_follows(sparse, dense.float(), x)
        assert sparse.extra_bytes == COPY + COUNTERS
        assert all(t.is_contiguous() for t in densify(copy.deepcopy(sparse)).state_dict().values())
        with torch.inference_mode():
            sparse.down.weight.mul_(2), dense.down_proj.weight.mul_(2)


@pytest.mark.parametrize("device", [["cuda"], []], ids=str)
def test_elsewhere_it_is_copied(device, monkeypatch, x):
    monkeypatch.setattr(turned, "DEVICES", device)
    sparse = sparsify(made(), "twell")
    assert_follows(sparse, made(), x)
    assert not is_turned(sparse) and sparse.extra_bytes == COPY + COUNTERS


def test_one_made_by_hand_leaves_its_source_as_it_is(x):
    dense = made()
    sparse = SparseFFN.from_module(dense, plan=Choice("twell"))
    assert_follows(sparse, dense, x)
    sparse.train().eval()
    assert not is_turned(sparse) and sparse.extra_bytes == COPY + COUNTERS


def test_only_paths_that_read_the_transpose_have_it_turned(pair, x):
    dense, sparse = pair
    for choice, wanted in [("dense", False), ("twell", True), ("hot_cold", False), ("twell", True), ("dense", False)]:
        sparse.follow(Choice(choice, 256 if choice == "hot_cold" else 0))
        assert is_turned(sparse) is wanted
        assert_follows(sparse, dense, x)
    assert sparse.extra_bytes == 0 and not [*sparse.buffers()]


def test_training_mode_has_the_plain_layout(pair, x):
    dense, sparse = pair
    for _ in range(3):
        assert not is_turned(sparse.train())
        assert_follows(sparse, dense, x)
        assert sparse.extra_bytes == COPY + COUNTERS
        assert is_turned(sparse.eval()) and holds_no_copy(sparse)
        assert_follows(sparse, dense, x)
    assert not sparsify(made().train(), "twell").eval().training


def test_gradients_have_the_plain_layout(pair, x):
    dense, sparse = (each.requires_grad_(True) for each in pair)
    assert_follows(sparse, dense, x)
    assert is_turned(sparse)  # parameters that could have gradients
    x.requires_grad_(True)
    found, wanted = (torch.autograd.grad(each(x).square().sum(), [*each.parameters(), x]) for each in (sparse, dense))
    for one, other in zip(found, wanted):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
    assert not is_turned(sparse)
    assert_follows(sparse, dense, x)
    assert sparse.extra_bytes == COPY + COUNTERS
    assert is_turned(sparse.eval()) and holds_no_copy(sparse)
    sparse.requires_grad_(False)(x).sum().backward()  # of x alone
    assert is_turned(sparse)


def test_a_layer_that_was_trained_stays_plain_until_it_follows_a_plan(pair, x):
    dense, sparse = (each.requires_grad_(True) for each in pair)
    sparse.train()(x).sum().backward()
    place = sparse.down.weight.data_ptr()
    for _ in range(2):
        sparse.eval()
        assert_follows(sparse, dense, x)
        sparse.train()
        assert not is_turned(sparse) and sparse.down.weight.data_ptr() == place
    sparse.eval().follow(Choice("twell"))
    assert is_turned(sparse)
    assert_follows(sparse, dense, x)


def shared_with_its_data(layer):
    return layer.down_proj.weight.data


def part_of_something_larger(layer):
    whole = torch.randn(2, D_MODEL, D_FF)
    layer.down_proj.weight = nn.Parameter(whole[1], requires_grad=False)


def columns_of_something_larger(layer):
    layer.down_proj.weight = nn.Parameter(torch.randn(D_MODEL, 2 * D_FF)[:, :D_FF], requires_grad=False)


def tied_to_up(layer):
    layer.down_proj.weight = nn.Parameter(layer.up_proj.weight.detach().t(), requires_grad=False)


def parametrized(layer):
    parametrizations.weight_norm(layer.down_proj)


def in_shared_memory(layer):
    layer.share_memory()


def an_inference_tensor(layer):
    with torch.inference_mode():
        layer.down_proj.weight = nn.Parameter(torch.randn(D_MODEL, D_FF), requires_grad=False)


class Named(torch.Tensor):
    """A tensor subclass."""


def a_subclass(layer):
    layer.down_proj.weight = nn.Parameter(torch.randn(D_MODEL, D_FF).as_subclass(Named), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        shared_with_its_data,
        part_of_something_larger,
        columns_of_something_larger,
        tied_to_up,
        parametrized,
        in_shared_memory,
        an_inference_tensor,
        a_subclass,
    ],
    ids=lambda change: change.__name__,
)
def test_what_others_see_is_not_moved(change, x):
    layer = made()
    kept = change(layer)
    strides, place = layer.down_proj.weight.stride(), layer.down_proj.weight.data_ptr()
    sparse = sparsify(layer, "twell")
    for _ in range(2):
        assert_follows(sparse, layer, x)
        weight = sparse.down.weight
        assert weight.stride() == strides and (change is parametrized or weight.data_ptr() == place)
        assert sparse.extra_bytes == (0 if change is tied_to_up else COPY) + COUNTERS
        sparse.train().eval()
    if kept is not None:
        before = sparse(x)
        kept.mul_(2)
        sparse.refresh()  # the version of `data` is its own
        torch.testing.assert_close(sparse(x), 2 * before)


def test_weights_that_are_gathered_are_not_moved(monkeypatch):
    somebody = nn.Linear(1, 1)
    monkeypatch.setitem(_composable_state._module_state_mapping, somebody, weakref.ref(somebody))
    assert not is_turned(sparsify(made(), "twell"))


def test_what_is_tied_stays_tied_in_training(x):
    """A `down` that somebody else turned, over the memory of `up`."""
    layer = made(PlainFeedForward)
    tied_to_up(layer)
    sparse = sparsify(layer, "twell").train()
    sparse.up.weight.mul_(2)
    assert torch.equal(sparse.down.weight, sparse.up.weight.t())
    assert_follows(sparse, densify(copy.deepcopy(sparse)), x)


def test_not_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    weight = nn.Parameter(torch.randn(3, 5))
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    assert not turned.turn(weight) and weight.is_contiguous()


def test_the_device_is_waited_for_before_the_old_memory_is_let_go(monkeypatch):
    weight, order = nn.Parameter(torch.randn(3, 5)), []
    monkeypatch.setattr(nn.Parameter, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(weight.data_ptr()))
    before = weight.data_ptr()
    assert turned.turn(weight) and order == [before]
    between = weight.data_ptr()
    assert turned.turn_back(weight) and order == [before, between] and weight.data_ptr() != between


# ---- what becomes of the weights ----


def replace_data(layer, values):
    layer.down.weight.data = values.clone()


def replace_parameter(layer, values):
    layer.down.weight = nn.Parameter(values.clone(), requires_grad=False)


def add_in_place(layer, values):
    layer.down.weight.add_(values - layer.down.weight)


def average(layer, values):
    torch._foreach_lerp_([layer.down.weight], [values], 1.0)


def add_to_data(layer, values):
    layer.down.weight.data += values - layer.down.weight  # as a LoRA is merged
    layer.refresh()


def load(layer, values):
    layer.load_state_dict({**layer.state_dict(), "down_proj.weight": values.clone()})


def load_assigning(layer, values):
    layer.load_state_dict({**layer.state_dict(), "down_proj.weight": values.clone()}, assign=True)


def step(layer, values):
    weight = layer.down.weight
    weight.grad = weight - values
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    weight.grad = None


def away_and_back(layer, values):
    add_in_place(layer, values)
    layer.double().float()


def halves(layer, values):
    add_in_place(layer, values)
    layer.to(torch.bfloat16).float()


def train_and_evaluate(layer, values):
    layer.train()
    replace_data(layer, values)
    layer.eval()


def other_plan(layer, values):
    layer.follow(Choice("hot_cold", 256))
    add_in_place(layer, values)
    layer.follow(Choice("twell"))


def plain_for_once(layer, values):
    add_in_place(layer, values)
    layer.turn_back()


CHANGES = [
    replace_data,
    replace_parameter,
    add_in_place,
    average,
    add_to_data,
    load,
    load_assigning,
    step,
    away_and_back,
    halves,
    train_and_evaluate,
    other_plan,
    plain_for_once,
]


def changed(layer, change, seed):
    """The layer after the change, and the dense one that it should be like."""
    values = torch.randint(-8, 9, (D_MODEL, D_FF), generator=torch.Generator().manual_seed(seed)).float()
    with torch.no_grad():
        layer.down.weight.fill_(1)  # so that nothing is rounded where values are added
        change(layer, values)
        assert torch.equal(layer.down.weight, values)
    dense = made(GatedFeedForward if layer.gate is not None else PlainFeedForward)
    dense.load_state_dict(layer.state_dict())
    return dense


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_followed(change, pair, x):
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    for seed in range(3):
        assert_follows(sparse, changed(sparse, change, seed), x)
    assert is_turned(sparse.eval()) and holds_no_copy(sparse)
    assert_follows(sparse, changed(sparse, add_in_place, 7), x)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(CHANGES), max_size=6), st.booleans())
def test_changes_in_any_order(changes, called):
    x = torch.randn(3, D_MODEL, generator=torch.Generator().manual_seed(2))
    sparse = sparsify(made(PlainFeedForward), "twell")
    for seed, change in enumerate(changes):
        dense = changed(sparse, change, seed)
        if called:
            assert_follows(sparse, dense, x)
    assert_follows(sparse, changed(sparse, add_in_place, 9), x)
    assert all(t.is_contiguous() for t in sparse.state_dict().values())
    values = sparse.down.weight.clone()
    back = densify(sparse)
    assert back.down_proj.weight.is_contiguous() and torch.equal(back.down_proj.weight, values)


def test_nothing_is_ever_written_to_a_weight_that_was_left_behind(pair, x):
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    kept = sparse.down.weight.data
    before = kept.clone()
    for _ in range(2):
        sparse.down.weight.data = (2 * before).contiguous()
        assert_follows(sparse, changed(sparse, add_in_place, 3), x)
        assert torch.equal(kept, before)
        sparse.down.weight.data = kept
        assert_follows(sparse, dense, x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_reads_the_view_and_writes_to_no_weight(backend, pair, x):
    torch._dynamo.reset()
    dense, sparse = pair
    run = torch.compile(sparse, backend=backend, fullgraph=True)
    kept, version = sparse.down.weight.data, sparse.down.weight._version
    before = kept.clone()
    for _ in range(3):
        assert_follows(run, dense, x)
        assert sparse.down.weight._version == version and sparse.extra_bytes == COUNTERS
    for _ in range(2):
        sparse.down.weight.data = (2 * before).contiguous()
        assert_follows(run, changed(sparse, add_in_place, 3), x)
        assert_follows(sparse, changed(sparse, add_in_place, 4), x)
        assert torch.equal(kept, before)
        sparse.down.weight.data = kept
        assert_follows(run, dense, x)
        assert_follows(sparse, dense, x)
    sparse.down.weight[3, 7] = torch.inf
    for each in (run, sparse):
        with pytest.raises(InputError, match=r"down has 1 values that are not finite, the first at \[3, 7\]"):
            each(x)
    sparse.down.weight.copy_(before)
    for each in (sparse.train(), sparse.eval()):
        assert_follows(run, dense, x)
        assert_follows(each, dense, x)
    torch._dynamo.reset()


def test_a_compiled_layer_learns_while_it_is_turned(x):
    torch._dynamo.reset()
    dense, sparse = made().requires_grad_(True), sparsify(made().requires_grad_(True), "twell")
    run = torch.compile(sparse, backend="aot_eager", fullgraph=True)
    found, wanted = (
        torch.autograd.grad(each(x).sum(), [*module.parameters()]) for each, module in ((run, sparse), (dense, dense))
    )
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
    assert_follows(run, dense, x)
    torch._dynamo.reset()


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t)), "torch"])
def test_a_copied_and_a_pickled_layer(twin_of, pair, x):
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    if twin_of == "torch":
        file = io.BytesIO()
        torch.save(sparse, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
        assert file.tell() < sum(p.nbytes for p in dense.parameters()) + COPY
    else:
        twin = twin_of(sparse)
    assert twin.extra_bytes == COUNTERS and is_turned(twin)
    assert_follows(twin, dense, x)
    assert holds_no_copy(twin) and twin.down.weight.data_ptr() != sparse.down.weight.data_ptr()
    assert_follows(twin, changed(twin, add_in_place, 3), x)
    assert_follows(sparse, dense, x)
    assert not is_turned(twin.train()) and is_turned(sparse)
    assert all(t.is_contiguous() for t in twin.eval().state_dict().values())


def test_an_average_of_models(pair, x):
    """torch.optim.swa_utils copies buffers from one model to the other, a view of a weight would not be one."""
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    averaged, wanted = AveragedModel(sparse), AveragedModel(dense)
    for seed in range(3):
        values = torch.randn(D_MODEL, D_FF, generator=torch.Generator().manual_seed(seed))
        for part, average, model in ((sparse.down, averaged, sparse), (dense.down_proj, wanted, dense)):
            part.weight.copy_(values)
            average.update_parameters(model)
        assert_follows(averaged, wanted.module, x)
        assert_follows(sparse, dense, x)
    assert holds_no_copy(averaged.module)


# ---- models: what is saved, and what densify leaves ----


def whole(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


def test_what_is_saved_is_plain(make, tmp_path):
    dense, model = make(), sparsify(make(), "twell")
    layers = [each for each in model.modules() if isinstance(each, SparseFFN)]
    assert len(layers) == 2 and all(turned.is_turned(each.down.weight) for each in layers)
    saved, wanted = model.state_dict(), dense.state_dict()
    assert [*saved] == [*wanted] and all(t.is_contiguous() and torch.equal(t, wanted[n]) for n, t in saved.items())
    parameters = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in parameters.items())
    safetensors = pytest.importorskip("safetensors.torch")
    distinct = {name: saved[name] for name in parameters}  # what is tied is saved once
    safetensors.save_file(distinct, tmp_path / "saved.safetensors")
    loaded = safetensors.load_file(tmp_path / "saved.safetensors")
    assert all(torch.equal(loaded[name], p) for name, p in dense.named_parameters())
    other = make(seed=3)
    model.load_state_dict(other.state_dict(), strict=True)
    assert all(turned.is_turned(each.down.weight) for each in layers)
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items())


def test_densify_leaves_nothing_behind(make, tokens, logits):
    model = make()
    expected, ids = logits(model, tokens), [id(p) for p in model.parameters()]
    sparsify(model, "twell")
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    densify(model)
    assert all(p.is_contiguous() for p in model.parameters()) and [id(p) for p in model.parameters()] == ids
    assert not any(each._state_dict_hooks for each in model.modules())
    assert torch.equal(logits(model, tokens), expected)


def test_a_model_holds_next_to_nothing_more(make, tokens, logits):
    model = make()
    size = sum(p.nbytes for p in model.parameters())
    sparsify(model, "twell")
    with torch.no_grad():
        logits(model, tokens)
    layers = [each for each in model.modules() if isinstance(each, SparseFFN)]
    assert sum(each.extra_bytes for each in layers) == 32 * len(layers) < 0.02 * size


# ---- two layers, threads ----


def test_two_layers_over_the_same_weights(x):
    dense, layer = made(), made()
    by_hand = SparseFFN.from_module(layer)
    assert_follows(by_hand, dense, x)
    sparse = sparsify(layer, "twell")
    for _ in range(2):
        for each in (by_hand, sparse):
            assert_follows(each, dense, x)
        assert is_turned(sparse) and holds_no_copy(sparse) and by_hand.extra_bytes == COUNTERS
        sparse.train()
        for each in (by_hand, sparse):
            assert_follows(each, dense, x)
        sparse.eval()


class Decided:
    """A watch that decides on the input of this number."""

    def __init__(self, at=1):
        self.left = at

    def see(self, layer, x):
        self.left -= 1
        return None if self.left else Choice("twell")


def test_a_layer_that_decides_turns_its_weight(x):
    dense, sparse = made(), sparsify(made())
    sparse.watch(Decided())
    assert not is_turned(sparse)
    assert_follows(sparse, dense, x)
    assert is_turned(sparse) and holds_no_copy(sparse) and sparse.status()["plan"] == "planned"


@pytest.mark.parametrize("before", [None, load_assigning, away_and_back])
def test_who_is_in_a_forward_while_another_thread_decides_reads_what_stays(before, x, monkeypatch):
    """And not the Parameter, which is moved meanwhile."""
    sparse = sparsify(made())
    sparse.watch(Decided(at=2))
    dense = made() if before is None else changed(sparse, before, 5)
    expected, linear, read = dense(x), torch.nn.functional.linear, []

    def late(values, weight, bias=None):
        if weight.shape == (D_MODEL, D_FF) and not read:
            read.append(weight)
            other = threading.Thread(target=sparse, args=(x,))
            other.start(), other.join()
            assert is_turned(sparse)
        return linear(values, weight, bias)

    monkeypatch.setattr("twell_lab.layers.paths.dense.linear", late)
    assert torch.equal(sparse(x), expected)
    assert read[0] is not sparse.down.weight and read[0].is_contiguous()
    read.clear()
    assert holds_no_copy(sparse) and not is_turned(sparse.train())  # nobody else has a hand on it any more


def test_a_layer_that_watches_follows_its_weights(x):
    dense, sparse = made(), sparsify(made())
    sparse.watch(Decided(at=99))
    for change in (add_in_place, replace_data, replace_parameter, away_and_back):
        assert_follows(sparse, changed(sparse, change, 5), x)
    old = weakref.ref(sparse.down.weight.untyped_storage())
    assert_follows(sparse, changed(sparse, load_assigning, 6), x)
    assert old() is None  # nothing keeps the memory of the old one
    sparse.requires_grad_(True)(x).sum().backward()
    assert sparse.down.weight.grad is not None and dense.down_proj.weight.grad is None


def test_threads_while_a_layer_decides():
    for seed in range(10):
        dense, sparse = made(seed=seed), sparsify(made(seed=seed))
        x = torch.randn(9, D_MODEL)
        sparse.watch(Decided())
        assert_threads_agree(sparse, x, dense(x))
        assert sparse.status()["plan"] == "planned"
        assert is_turned(sparse.eval()) and holds_no_copy(sparse)  # at first not, if somebody was in an operation on it


# ---- copies of turned weights ----


@pytest.mark.parametrize("how", [copies.ROWS, copies.ROWS_OF_TRANSPOSE])
def test_permuted_copies_of_a_turned_weight(how):
    weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)
    assert turned.turn(weight) and weight.stride() == (1, 4)
    order = torch.randperm(4 if how == copies.ROWS else 6)
    place = copies.place(how, weight)
    copies.refresh({"weight": weight}, [place], [how], order)
    assert torch.equal(place, (weight if how == copies.ROWS else weight.t())[order]) and place.is_contiguous()


def test_hot_and_cold_beside_a_turned_weight(pair, x):
    dense, sparse = pair
    beside = SparseFFN(sparse.source, plan=Choice("hot_cold", 256), _check=False)
    assert turned.is_turned(beside.down.weight)
    assert_follows(beside, dense, x)
    sparse.down.weight.mul_(3), dense.down_proj.weight.mul_(3)
    assert_follows(beside, dense, x)


def test_a_view_is_a_place_for_its_own_weight_alone():
    weight, other = (nn.Parameter(torch.randn(3, 5), requires_grad=False) for _ in range(2))
    turned.turn(weight), turned.turn(other)
    view = copies.place(copies.TRANSPOSED, weight)
    assert copies.fits(view, copies.TRANSPOSED, weight) and not copies.fits(view, copies.TRANSPOSED, other)
    plain = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    assert not copies.fits(view, copies.TRANSPOSED, plain)
    assert not copies.fits(copies.place(copies.TRANSPOSED, plain), copies.TRANSPOSED, weight)
