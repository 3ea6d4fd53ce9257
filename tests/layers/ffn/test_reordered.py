"""A layer on the hot/cold path holds no copy where its own neurons were put in the order that the path reads: an
equivalent layer, which is saved and loaded as the one that it was. What a GPU does is asked of a CPU here."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from tests.layers.ffn.follows import assert_follows, assert_threads_agree
from tests.layers.ffn.test_paths import layer as drawn
from tests.layers.ffn.test_paths import plan_for
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import turned

D_MODEL, D_FF = 16, 300
COUNTERS = 32
HOT, TWELL, DENSE = Choice("hot_cold", 256), Choice("twell"), Choice("dense")
CHANGED = r"changed or replaced while the neurons of its SparseFFN were reordered.*accept_changes\(\).*densify"


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(turned, "DEVICES", ["cuda", "cpu"])


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def pair(request):
    """(dense, sparse): the same weights, in memory of their own, those of the sparse layer reordered."""
    return made(request.param), swapped(made(request.param))


def made(gated=True, seed=0):
    return drawn(gated, bias=True, seed=seed).eval()


def swapped(dense, *choices):
    """The layer swapped, with its neurons in the order of a plan."""
    sparse = SparseFFN(dense, plan=DENSE, _turns=True, _reorders=True)
    sparse.follow(plan_for(dense, *(choices or [HOT])))
    return sparse


def whole(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


def assert_same_state(one, other):
    assert [*one] == [*other] and all(torch.equal(t, other[name]) and t.is_contiguous() for name, t in one.items())


# ---- an equivalent layer ----


def test_the_parameters_are_the_same_objects_in_the_plans_order(pair, x):
    dense, sparse = pair
    order = torch.tensor(sparse.neurons)
    assert sparse.reordered and sparse.layout.state == "reordered" and order.tolist() != sorted(order.tolist())
    assert [*map(id, sparse.parameters())] == [*map(id, sparse.source.parameters())]
    own = dict(sparse.named_parameters())
    for name, p in dense.named_parameters():
        wanted = p if name == "down_proj.bias" else p[:, order] if name == "down_proj.weight" else p[order]
        assert torch.equal(own[name], wanted) and p.shape == own[name].shape
    assert turned.is_turned(sparse.down.weight)
    for rows in (1, 5):
        assert_follows(sparse, dense, x[:rows])
    assert sparse.extra_bytes == COUNTERS and "order" not in dict(sparse.named_buffers())


@pytest.mark.parametrize("choices", [[DENSE, HOT], [TWELL, HOT], [HOT, TWELL, DENSE]], ids=str)
def test_every_path_reads_reordered_weights(choices, pair, x):
    dense, _ = pair
    sparse = swapped(copy.deepcopy(dense), *choices)
    for rows in (1, 4, 5, 8, 9, 40):
        assert_follows(sparse, dense, torch.randn(rows, D_MODEL))
    assert sparse.reordered and sparse.extra_bytes == COUNTERS * len(choices)


def test_what_is_saved_has_the_neurons_own_order(pair):
    dense, sparse = pair
    assert_same_state(sparse.state_dict(), dense.state_dict())
    assert_same_state(sparse.source.state_dict(), dense.state_dict())
    with pytest.raises(InputError, match="keep_vars=True"):
        sparse.state_dict(keep_vars=True)


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_has_the_neurons_own_order(assign, pair, x):
    dense, sparse = pair
    for seed in (3, 4):
        dense = made(sparse.gate is not None, seed=seed)
        sparse.load_state_dict(copy.deepcopy(dense.state_dict()), assign=assign)
        assert_same_state(sparse.state_dict(), dense.state_dict())
        assert_follows(sparse, dense, x)
        assert_follows(sparse.eval(), dense, x)
        assert sparse.reordered and sparse.extra_bytes == COUNTERS  # `eval` turned what was assigned
    some = {"up_proj.bias": torch.randn(D_FF)}
    sparse.load_state_dict(some, strict=False), dense.load_state_dict(some, strict=False)
    assert_follows(sparse, dense, x)
    with pytest.raises(RuntimeError, match="size mismatch"):
        sparse.load_state_dict({"up_proj.weight": torch.randn(D_FF + 1, D_MODEL)}, strict=False)
    assert_follows(sparse, dense, x)


@pytest.mark.parametrize("back", ["densify", "train", "follow", "gradient", "to"])
def test_the_own_order_is_given_back(back, pair, x):
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    if back == "densify":
        assert densify(sparse) is sparse.source
        found = sparse.source
    elif back == "train":
        found = sparse.train()
    elif back == "follow":
        sparse.follow(DENSE)
        found = sparse
    elif back == "gradient":
        for each in (dense, sparse):
            each.requires_grad_(True)
            each(x).square().sum().backward()
        for name, p in sparse.named_parameters():
            wanted = dict(dense.named_parameters())[name].grad
            torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
        found = sparse
    else:
        found = sparse.to(torch.bfloat16).train()
        dense.to(torch.bfloat16)
        x = x.to(torch.bfloat16)
    assert all(torch.equal(p, q) and p.is_contiguous() for p, q in zip(found.parameters(), dense.parameters()))
    assert not any(part._state_dict_hooks or part._load_state_dict_pre_hooks for part in found.children())
    assert_follows(found, dense, x)


def test_after_training_mode_it_is_reordered_again(pair, x):
    dense, sparse = pair
    for _ in range(2):
        assert not sparse.train().reordered
        with torch.no_grad():
            for each in (sparse.up, dense.up_proj):
                each.weight.mul_(0.5)
        assert sparse.eval().reordered
        assert_follows(sparse, dense, x)
        assert sparse.extra_bytes == COUNTERS


def test_weights_that_have_a_gradient_keep_their_order(pair, x):
    """An optimizer would take it for one of the order that there is now."""
    dense, sparse = pair
    sparse.requires_grad_(True)(x).sum().backward()
    assert not sparse.eval().reordered and "has a gradient" in sparse.layout.why
    sparse.zero_grad()
    assert sparse.eval().reordered and sparse.layout.why is None
    assert_follows(sparse, dense, x)


def test_another_plan_has_another_order(pair, x):
    dense, sparse = pair
    first = sparse.neurons
    sparse.follow(plan_for(dense, HOT, counts=range(D_FF)))
    assert sparse.reordered and sparse.neurons != first and sparse.layout.neurons == sparse.neurons
    assert_same_state(sparse.state_dict(), dense.state_dict())
    assert_follows(sparse, dense, x)
    sparse.follow(plan_for(dense, TWELL))
    assert sparse.layout.state == "turned" and torch.equal(sparse.down.weight, dense.down_proj.weight)
    assert_follows(sparse, dense, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_layer_that_is_cast(dtype, pair, x):
    dense, sparse = (each.to(dtype) for each in pair)
    assert sparse.reordered and sparse.extra_bytes == COUNTERS
    assert_same_state(sparse.state_dict(), dense.state_dict())
    assert_follows(sparse, dense, x.to(dtype))


@pytest.mark.parametrize("twin_of", ["deepcopy", "pickle", "torch"])
def test_a_copied_and_a_pickled_layer(twin_of, pair, x):
    dense, sparse = pair
    assert_follows(sparse, dense, x)
    if twin_of == "torch":
        torch.save(sparse, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = copy.deepcopy(sparse) if twin_of == "deepcopy" else pickle.loads(pickle.dumps(sparse))
    assert twin.reordered and twin.extra_bytes == COUNTERS
    assert_same_state(twin.state_dict(), dense.state_dict())
    assert_follows(twin, dense, x)
    other = made(twin.gate is not None, seed=7)
    twin.load_state_dict(other.state_dict())
    assert_follows(twin, other, x)
    assert_same_state(copy.deepcopy(twin).train().state_dict(), other.state_dict())
    with torch.no_grad():
        twin.up.weight.add_(1)
    with pytest.raises(InputError, match=CHANGED):
        twin(x)
    assert_follows(sparse, dense, x)
    assert_same_state(densify(sparse).state_dict(), dense.state_dict())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_reads_the_order_that_there_is(backend, pair, x):
    torch._dynamo.reset()
    dense, sparse = pair
    run = torch.compile(sparse, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_follows(run, dense, x)
        sparse.follow(TWELL)
        assert_follows(run, dense, x)
        sparse.train().eval()
        sparse.follow(plan_for(dense, HOT))
        assert sparse.layout.why is None
    assert sparse.extra_bytes == COUNTERS
    torch._dynamo.reset()


def test_compiled_code_takes_no_gradient_of_reordered_weights(x):
    torch._dynamo.reset()
    sparse = swapped(made()).requires_grad_(True)
    with pytest.raises(Exception, match="reordered"):
        torch.compile(sparse, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()


# ---- who else writes to the weights ----


def add_in_place(sparse):
    sparse.up.weight.add_(1)


def add_to_bias(sparse):
    sparse.up.bias.add_(1)


def average(sparse):
    torch._foreach_lerp_([sparse.down.weight], [torch.ones(D_MODEL, D_FF)], 0.1)


def replace_data(sparse):
    sparse.up.weight.data = torch.randn(D_FF, D_MODEL)


def replace_data_twice(sparse):
    for _ in range(2):
        replace_data(sparse)


def replace_parameter(sparse):
    sparse.up.weight = nn.Parameter(torch.randn(D_FF, D_MODEL))


def another_width(sparse):
    sparse.up.weight = nn.Parameter(torch.randn(D_FF + 1, D_MODEL))


def without_bias(sparse):
    sparse.up.bias = None


def tie(sparse):
    sparse.down.weight = nn.Parameter(sparse.up.weight.t())


def share(sparse):
    sparse.up.share_memory()


def tell(sparse):
    sparse.up.weight.data += 1
    sparse.refresh()


def step(sparse):
    weight = sparse.up.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    weight.grad = None


WRITES = [
    add_in_place,
    add_to_bias,
    average,
    replace_data,
    replace_data_twice,
    replace_parameter,
    another_width,
    without_bias,
    tie,
    share,
    tell,
    step,
]


@pytest.mark.parametrize("asked", ["forward", "state_dict", "densify", "train", "follow", "deepcopy", "half"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_change_is_refused_until_the_weights_are_loaded(write, asked, x):
    dense, sparse = made(), swapped(made())
    assert_follows(sparse, dense, x)
    with torch.no_grad():
        write(sparse)
    asked = {
        "forward": lambda: sparse(x),
        "state_dict": sparse.state_dict,
        "densify": lambda: densify(nn.Sequential(sparse)),
        "train": sparse.train,
        "follow": lambda: sparse.follow(DENSE),
        "deepcopy": lambda: copy.deepcopy(sparse),
        "half": sparse.half,
    }[asked]
    before = [p.clone() for p in sparse.parameters()]
    for _ in range(2):
        with pytest.raises(InputError, match=CHANGED):
            asked()
    assert all(map(torch.equal, before, sparse.parameters()))  # and nothing is lost
    if write in (another_width, without_bias, tie):
        return
    sparse.eval().load_state_dict(dense.state_dict())
    assert_follows(sparse, dense, x)
    assert_same_state(densify(sparse).state_dict(), dense.state_dict())


def test_an_accepted_change_counts_as_one_in_the_order_that_there_is(pair, x):
    dense, sparse = pair
    with torch.no_grad():
        sparse.up.weight.mul_(2), dense.up_proj.weight.mul_(2)
        sparse.up.bias.data = sparse.up.bias * 3
        dense.up_proj.bias.mul_(3)
    sparse.accept_changes()
    assert_follows(sparse, dense, x)
    assert_same_state(sparse.state_dict(), dense.state_dict())
    assert_same_state(densify(sparse).state_dict(), dense.state_dict())
    sparse = swapped(made())
    another_width(sparse)
    with pytest.raises(InputError, match="accepted: 300 neurons"):
        sparse.accept_changes()


@example(["copy", "write", "call"])
@given(st.lists(st.sampled_from(["write", "load", "train", "eval", "hot", "twell", "copy", "call", "gradient"])))
@settings(max_examples=40, deadline=None)
def test_in_any_order(steps):
    """Whatever is done, the layer computes what its saved state says, or says that it cannot know."""
    dense, sparse = made(), swapped(made())
    x, left = torch.randn(3, D_MODEL), False
    for seed, step in enumerate(steps):
        try:
            if step == "write":
                with torch.no_grad():
                    sparse.up.weight.add_(1)
                if sparse.reordered:
                    left = True
                else:
                    dense.up_proj.weight.add_(1)
            elif step == "load":
                dense = made(seed=seed)
                sparse.load_state_dict(dense.state_dict())
                left = False
            elif step in ("train", "eval"):
                getattr(sparse, step)()
            elif step in ("hot", "twell"):
                sparse.follow(plan_for(dense, HOT if step == "hot" else TWELL))
            elif step == "copy":
                sparse = copy.deepcopy(sparse)
            elif step == "gradient":
                torch.autograd.grad(sparse.requires_grad_(True)(x).sum(), [*sparse.parameters()])
            else:
                assert_follows(sparse.requires_grad_(False), dense, x)
        except InputError as error:
            assert left and "reordered" in str(error)
    if not left:
        assert_same_state(sparse.state_dict(), dense.state_dict())
        assert_follows(sparse, dense, x)


class Adapter(nn.Module):
    """What LoRA libraries put in the place of a projection."""

    def __init__(self, base, seed=0):
        super().__init__()
        self.base_layer = base
        self.delta = torch.randn(base.weight.shape, generator=torch.Generator().manual_seed(seed))

    def merge(self):
        self.base_layer.weight.data += self.delta
        return self.base_layer


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_an_adapter_that_is_merged_sees_the_neurons_own_order(name, x):
    dense, sparse = made(), swapped(made())
    assert_follows(sparse, dense, x)
    setattr(sparse, name, Adapter(getattr(sparse, name)))
    with pytest.raises(InputError, match="densify first"):
        sparse(x)
    setattr(sparse, name, getattr(sparse, name).merge())
    Adapter(getattr(dense, name)).merge()
    sparse.refresh()
    assert_follows(sparse, dense, x)
    assert_follows(sparse.eval(), dense, x)
    assert sparse.reordered
    assert_same_state(sparse.state_dict(), dense.state_dict())


def test_an_average_of_densified_and_of_like_ordered_models(x):
    """One of models in different orders would be of different neurons: it is refused where it writes."""
    dense, sparse = made(), swapped(made())
    averaged = AveragedModel(sparse)
    assert_follows(averaged.module, dense, x)
    averaged.update_parameters(sparse)
    with pytest.raises(InputError, match=CHANGED):
        averaged(x)
    averaged.module.accept_changes()  # both have the same order
    assert_follows(averaged, dense, x)
    plain, other = AveragedModel(dense), densify(nn.Sequential(sparse))[0]
    plain.update_parameters(other)
    with torch.no_grad():
        other.up_proj.weight.add_(2)
    plain.update_parameters(other)
    assert torch.allclose(plain.module.up_proj.weight, dense.up_proj.weight + 1, atol=1e-5)


# ---- weights that others have ----


def another_tensor(layer):
    return layer.up_proj.weight.data


def another_parameter(layer):
    return nn.Parameter(layer.up_proj.weight, requires_grad=False)


def another_model(layer):
    other = made(seed=5)
    other.up_proj.weight = layer.up_proj.weight
    return other


def another_models_projection(layer):
    other = made(seed=5)
    other.up_proj = layer.up_proj
    return other


def tied_within(layer):
    layer.up_proj.weight = nn.Parameter(layer.down_proj.weight.detach().t(), requires_grad=False)


def parametrized(layer):
    parametrizations.weight_norm(layer.up_proj)


def in_shared_memory(layer):
    layer.share_memory()


def as_columns(layer):
    layer.up_proj.weight = nn.Parameter(torch.randn(D_MODEL, D_FF).t(), requires_grad=False)


SHARED = [another_tensor, another_parameter, another_model, another_models_projection, tied_within, parametrized]
SHARED += [in_shared_memory, as_columns]


@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_what_others_see_is_copied_and_reported(share, x):
    layer = made()
    kept = share(layer)
    before = None if kept is None else copy.deepcopy(kept)
    sparse = swapped(layer)
    assert not sparse.reordered and sparse.layout.why
    assert_follows(sparse, layer, x)
    assert sparse.extra_bytes > 3 * 4 * D_MODEL * D_FF
    if isinstance(kept, nn.Module):
        assert_follows(kept, before, x)
    elif kept is not None:
        assert torch.equal(kept, before)
    del kept
    gc.collect()
    assert_follows(sparse.eval(), layer, x)


def test_two_models_that_share_all_of_a_layer(x):
    """Each computes with all of its weights, in whatever order they are."""
    layer, dense = made(), made()
    other = copy.copy(layer)
    sparse = swapped(layer)
    assert sparse.reordered
    for each in (sparse, other, SparseFFN.from_module(layer, plan=plan_for(layer, HOT))):
        assert_follows(each, dense, x)
        assert_same_state(each.state_dict(), dense.state_dict())


def test_a_decoder_layer_keeps_its_weights(models, tokens, logits):
    opt = models["opt"](ffn_dim=300).eval()
    expected = logits(opt, tokens)
    sparsify(opt, HOT, reorder=True)
    torch.testing.assert_close(logits(opt, tokens), expected, rtol=1e-3, atol=1e-3)
    layers = [each for each in opt.modules() if isinstance(each, SparseFFN)]
    assert len(layers) == 2 and not any(each.reordered for each in layers)
    assert all("stay in the block" in each.layout.why for each in layers)


def test_elsewhere_nothing_is_moved(monkeypatch, x):
    monkeypatch.setattr(turned, "DEVICES", ["cuda"])
    sparse = swapped(made())
    assert not sparse.reordered and "weights are moved on cuda alone" in sparse.layout.why
    assert_follows(sparse, made(), x)


# ---- threads ----


class Decided:
    """A watch that decides on the input of this number."""

    def __init__(self, plan, at):
        self.plan, self.left = plan, at

    def see(self, layer, x):
        self.left -= 1
        return None if self.left else self.plan


def test_who_is_in_a_forward_while_another_thread_decides_reads_what_stays(x, monkeypatch):
    """The own order throughout, and not the Parameters, which are moved meanwhile."""
    dense, sparse = made(), swapped(made(), DENSE)
    sparse.watch(Decided(plan_for(dense, HOT), at=2))
    linear, read = torch.nn.functional.linear, []

    def late(values, weight, bias=None):
        y = linear(values, weight, bias)
        if not read:
            read.append(weight)
            other = threading.Thread(target=sparse, args=(x,))
            other.start(), other.join()
            assert sparse.reordered
        return y

    monkeypatch.setattr("twell_lab.layers.paths.dense.linear", late)
    assert torch.equal(sparse(x), dense(x)) and read[0] is not sparse.gate.weight
    read.clear()
    assert_follows(sparse, dense, x)
    assert sparse.extra_bytes == COUNTERS and not sparse.train().reordered


def test_threads_while_a_layer_decides():
    for seed in range(10):
        dense, sparse = made(seed=seed), swapped(made(seed=seed), DENSE)
        x = torch.randn(9, D_MODEL)
        sparse.watch(Decided(plan_for(dense, HOT), at=1))
        assert_threads_agree(sparse, x, dense(x))
        assert sparse.status()["plan"] == "planned"
        assert sparse.eval().reordered and sparse.extra_bytes == COUNTERS
